"""A harness of a few lines, its tasks and its judge, for tests of whole runs. Each task says how the agent fails."""

import itertools
import os
import time
from pathlib import Path

import httpx


def run(task):
    """Two calls, then whatever the task says."""
    messages = [{"role": "user", "content": task["prompt"]}]
    with httpx.Client(trust_env=False, timeout=60) as http:
        for _ in range(2):
            response = http.post(
                f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
                headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
                json={"model": "m", "messages": messages},
            )
            response.raise_for_status()
            messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
    match task["then"]:
        case "raise":
            raise RuntimeError("the agent broke")
        case "hang":
            time.sleep(600)
        case "garbage":
            os.write(1, os.urandom(2000))
    return {"said": [message["content"] for message in messages if message["role"] == "assistant"]}


ENDINGS = ["finish", "raise", "hang", "garbage", "break the judge"]


def tasks(seed):
    for number in itertools.count():
        yield {"prompt": f"task {seed}.{number}", "then": ENDINGS[number % len(ENDINGS)], "answer": "hidden"}


def easy_tasks(seed):
    for number in itertools.count():
        yield {"prompt": f"task {seed}.{number}", "then": "finish", "answer": "hidden"}


def reward(task, folder: Path):
    """Any signal will do that differs between rollouts: the parity of what the agent said."""
    if task["then"] == "break the judge":
        raise ValueError("the judge broke")
    result = folder / "result.json"
    said = sum(result.read_bytes()) if result.exists() else 0
    return {"reward": float(said % 2), "sum": float(said)}
