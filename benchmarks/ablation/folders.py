"""The ablation's tasks: find the value of a key that stands in the agent's folder, or in one folder below it.

The demo's family (`examples/demo/tasks.py`) with more places to look in. The agent sees `folders`; a key that is not in
its own, the folder "", takes sub-agents to find: the more folders, the more of them, and the more can go wrong.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import FILES, KEYS, QUESTION, VALUES

Task = dict[str, Any]

FOLDERS = ("north", "south", "east", "west")
FILES_PER_FOLDER = 2
KEYS_PER_FILE = 2
EASY = 0.4
"""Share of tasks whose key is in the agent's own folder."""


def train(seed: int) -> Iterator[Task]:
    """Endless tasks to train on."""
    return _stream("train", seed)


def held_out(seed: int) -> Iterator[Task]:
    """Endless tasks that no training sees."""
    return _stream("held-out", seed)


def reward(task: Task, folder: Path) -> float:
    """1.0 if the agent submitted the task's answer, else 0.0."""
    try:
        submission = json.loads((folder / "result.json").read_text(encoding="utf-8"))["submission"]
    except (OSError, ValueError):  # it crashed
        return 0.0
    return float(submission == task["answer"])


def _stream(split: str, seed: int) -> Iterator[Task]:
    rng = random.Random(f"folders/{split}/{seed}")
    number = 0
    while True:
        yield _make(f"{split}-{seed}-{number}", rng)
        number += 1


def _make(name: str, rng: random.Random) -> Task:
    """One task: distinct keys and values dealt to the files, one of the keys asked for."""
    places = ["", *rng.sample(FOLDERS, rng.randint(1, len(FOLDERS)))]
    each = FILES_PER_FOLDER * KEYS_PER_FILE
    pairs = list(zip(rng.sample(KEYS, each * len(places)), rng.sample(VALUES, each * len(places)), strict=True))
    dealt = {place: pairs[number * each : (number + 1) * each] for number, place in enumerate(places)}
    key, answer = rng.choice(dealt[""] if rng.random() < EASY else dealt[rng.choice(places[1:])])
    folders = {place: _files(held, rng) for place, held in dealt.items()}
    return {"id": name, "prompt": QUESTION.format(key=key), "folders": folders, "answer": answer}


def _files(pairs: list[tuple[str, str]], rng: random.Random) -> dict[str, str]:
    """File name -> `key=value` lines."""
    lines = [f"{key}={value}\n" for key, value in pairs]
    names = rng.sample(FILES, FILES_PER_FOLDER)
    return {name: "".join(lines[number::FILES_PER_FOLDER]) for number, name in enumerate(names)}
