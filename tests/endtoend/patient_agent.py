"""A harness that asks again, as all on an SDK do; its tasks and its judge."""

import itertools
from pathlib import Path

import openai


def run(task):
    """Three calls of one conversation."""
    client = openai.OpenAI(max_retries=6)
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(3):
        message = client.chat.completions.create(model="m", messages=messages).choices[0].message
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "again"}]
    return {"said": [message["content"] for message in messages if message["role"] == "assistant"]}


def tasks(seed):
    for number in itertools.count():
        yield {"prompt": f"task {seed}.{number}"}


def reward(task, folder: Path):
    return float(sum((folder / "result.json").read_bytes()) % 2)
