"""The demo's tasks: find the value of one key in three small configuration files.

A task is plain JSON. The controller writes `files` into the attempt's workspace, gives the harness `prompt` and keeps
`answer` to itself; when the rollout is over it calls `reward` with the folder that holds the rollout's `result.json`.
`make_model.py` draws its demonstrations from here too. Nothing but the standard library is needed.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Task = dict[str, Any]

# No key is part of another word below, so that `grep KEY *` prints exactly one line.
KEYS = (
    "port host user mode color size level path token limit speed depth width theme owner group region zone branch stage"
).split()
VALUES = (
    "amber birch cedar delta ember flint grove heron indigo jade kelp lotus maple nova olive "
    "pearl quartz raven slate tulip umber violet willow xenon yarrow zinc cobalt coral denim ebony"
).split()
FILES = tuple(f"{name}.conf" for name in "app db web log net auth cache queue mail cron".split())
QUESTION = "What is the value of {key}?"

FILES_PER_TASK = 3
KEYS_PER_FILE = 2


def train(seed: int) -> Iterator[Task]:
    """Endless tasks to train on."""
    return _stream("train", seed)


def held_out(seed: int) -> Iterator[Task]:
    """Endless tasks that no training sees: their random numbers come from a seed of their own."""
    return _stream("held-out", seed)


def reward(task: Task, folder: Path) -> float:
    """1.0 if the rollout submitted the task's answer, else 0.0, whatever the agent left in `folder`."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        submitted = result["exit_status"] == "Submitted" and result["submission"].strip() == task["answer"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0.0
    return 1.0 if submitted else 0.0


def _stream(split: str, seed: int) -> Iterator[Task]:
    """Tasks number 0, 1, 2, ... of one split; the same for ever for the same seed."""
    rng = random.Random(f"{split}/{seed}")
    number = 0
    while True:
        yield _make(f"{split}-{seed}-{number}", rng)
        number += 1


def _make(name: str, rng: random.Random) -> Task:
    """One task: distinct keys and values dealt to the files, one of the keys asked for."""
    total = FILES_PER_TASK * KEYS_PER_FILE
    keys, values = rng.sample(KEYS, total), rng.sample(VALUES, total)
    lines = [f"{key}={value}\n" for key, value in zip(keys, values, strict=True)]
    files = {
        path: "".join(lines[place::FILES_PER_TASK]) for place, path in enumerate(rng.sample(FILES, FILES_PER_TASK))
    }
    asked = rng.randrange(total)
    return {"id": name, "prompt": QUESTION.format(key=keys[asked]), "files": files, "answer": values[asked]}
