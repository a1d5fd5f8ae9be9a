"""A harness whose rollouts take very different times, its tasks and its judge: for runs in which groups grow old."""

import itertools
import os
import random
import time
from pathlib import Path

import httpx


def run(task):
    """Three calls of one conversation, with a tool between them that is slow at times."""
    messages = [{"role": "user", "content": task["prompt"]}]
    dice = random.Random(f"{task['prompt']} {os.getpid()}")
    with httpx.Client(trust_env=False, timeout=60) as http:
        for _ in range(3):
            response = http.post(
                f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
                headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
                json={"model": "m", "messages": messages},
            )
            response.raise_for_status()
            messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
            time.sleep(min(1.0, 0.05 * dice.lognormvariate(0, 1.2)))
    time.sleep(task["longer_s"])
    return {"said": [message["content"] for message in messages if message["role"] == "assistant"]}


def tasks(seed):
    for number in itertools.count():
        yield {"prompt": f"task {seed}.{number}", "longer_s": 2 if number % 10 == 7 else 0}


def reward(task, folder: Path):
    """Nearly always another one for each rollout, so that each update makes a version."""
    return float(sum((folder / "result.json").read_bytes()) % 1000)
