"""What the trainer did when: timeline.jsonl in the run's folder. The trainer writes it; `harnessed timeline` reads it.

    {"phase": "update", "began": 1767225600.25, "ended": 1767225603.5, "step": 7}

One line for each phase, written when it ends, in seconds since the epoch: a trainer that is killed loses the phase that
it was in. One that goes on with the run appends.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import orjson

from harnessed.training.failures import CannotWrite

FILE = "timeline.jsonl"
Name = Literal["start", "wait", "build", "drain", "update", "checkpoint", "evaluation"]
"""What a trainer does, one after the other and never two at once:

- start: loads the policy, waits for the services
- wait: for groups
- build: samples, advantages, packs
- drain: the turnstile is being closed, until nothing is generated any more
- update: the device computes, and writes the weights
- checkpoint: writes one
- evaluation: waits for held-out tasks
"""
NAMES: tuple[Name, ...] = get_args(Name)


class Timeline:
    """The writer of one trainer."""

    def __init__(self, folder: Path) -> None:
        """Raises CannotWrite."""
        self._path = folder / FILE
        if _is_torn(self._path):
            self._append(b"\n")

    @contextlib.contextmanager
    def phase(self, name: Name, step: int) -> Iterator[None]:
        """Around what the trainer does, also where that fails; `step`: which update it is for. Raises CannotWrite."""
        began = time.time()
        try:
            yield
        finally:
            line = {"phase": name, "began": began, "ended": time.time(), "step": step}
            self._append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def _append(self, data: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise CannotWrite(f"cannot write {self._path}: {error.strerror}") from error


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end: its trainer was killed, or the disk was full."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
