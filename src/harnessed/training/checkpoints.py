"""The checkpoints of a run: which there are, which stay, and which is the best. `trainer.py` keeps them through here.

    checkpoints/step-00010/    one of step 10, whole under its name; `backends/checkpoint.py` says what is in it
    checkpoints/scores.json    held-out success by step, and the best of those that are there:
                               {"best": "step-00010", "scores": {"10": 0.95}}

A process may be killed at any moment: what is whole stays, and what it left half done is removed when the next one
opens the folder.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import torch
from safetensors import SafetensorError, safe_open

from harnessed.training.backends.checkpoint import NOTES_FILE, TRAINING_FILE, UNREADABLE
from harnessed.training.failures import CannotWrite

FOLDER = "checkpoints"
SCORES_FILE = "scores.json"
_NAME = re.compile(r"step-(\d{5,})")
_LEFT_OVER = re.compile(r"\.(step-|scores\.)")
"""Names of what is being written or removed."""


class Checkpoints:
    """One process at a time has them open."""

    def __init__(self, run_folder: Path, *, keep: int, keep_best: int, note: Callable[[str], None]) -> None:
        """`keep`: how many of the last ones stay, at least 1; `keep_best`: how many of the best do beside them. `note`
        tells a person of damaged ones. Raises failures.CannotWrite."""
        self._folder = run_folder / FOLDER
        self._keep = keep
        self._keep_best = keep_best
        self._note = note
        self._damaged: set[int] = set()
        """Those that could not be read. They count for nothing and stay until another of their step is saved."""
        self._awaited: set[int] = set()
        self._remove_left_overs()
        self._scores = self._read_scores()

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:05d}"

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` make the checkpoint of a step at the path that it is given, then remove those that need not stay.

        `write` gives the folder its name when it is whole (`backends.checkpoint.appearing`). Raises CannotWrite; the
        others are there then.
        """
        path = self.path(step)
        if step in self._scores:  # of another policy: training went back behind this step
            del self._scores[step]
            self._write_scores(self._whole())
        if path.exists():
            self._remove(path)
        try:
            write(path)
        except (OSError, RuntimeError, SafetensorError) as error:  # each library tells of a full disk in its own way
            raise CannotWrite(f"cannot write the checkpoint {path} (is the disk full?): {error}") from error
        self._damaged.discard(step)
        self._prune()
        return path

    def await_score(self, step: int) -> None:
        """The held-out tasks are being run with the policy of this step: its checkpoint stays until it is scored."""
        self._awaited.add(step)

    def scored(self, step: int, success: float | None) -> None:
        """Held-out success of a step, whether or not there is a checkpoint of it; None: it will not be known after all.
        Raises CannotWrite."""
        self._awaited.discard(step)
        if success is not None:
            self._scores[step] = success
        self._prune()

    def newest(self) -> Path | None:
        """The last one that is whole. Damaged ones are passed over with a line for a person."""
        for step in sorted(self._whole(), reverse=True):
            damage = _damage(self.path(step))
            if not damage:
                return self.path(step)
            self._damaged.add(step)
            self._note(f"warning: the checkpoint {self.path(step)} is damaged and passed over: {damage}")
        return None

    def best(self) -> Path | None:
        """The one with the highest held-out success, the later one of equals."""
        best = self._best(self._whole())
        return self.path(best[0]) if best else None

    def _whole(self) -> set[int]:
        """Steps of all that are there."""
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        return {int(found[1]) for name in names if (found := _NAME.fullmatch(name))} - self._damaged

    def _best(self, steps: set[int]) -> list[int]:
        """Those of the steps that have a score, best first."""
        return sorted(steps & self._scores.keys(), key=lambda step: (self._scores[step], step), reverse=True)

    def _prune(self) -> None:
        steps = self._whole()
        kept = {*sorted(steps)[-self._keep :], *self._best(steps)[: self._keep_best], *(steps & self._awaited)}
        self._write_scores(kept)  # first: the best that it names has to be there whenever somebody looks
        for step in sorted(steps - kept):
            self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        try:
            # Under its name a checkpoint is whole, also when this is interrupted.
            rmtree(path.rename(path.with_name(f".{path.name}.old")))
        except OSError as error:
            raise CannotWrite(f"cannot remove the checkpoint {path}: {error.strerror}") from error

    def _remove_left_overs(self) -> None:
        left = [path for path in self._folder.glob(".*") if _LEFT_OVER.match(path.name)]
        try:
            for path in left:
                rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise CannotWrite(f"cannot remove {error.filename}: {error.strerror}") from error

    def _read_scores(self) -> dict[int, float]:
        path = self._folder / SCORES_FILE
        if not path.exists():
            return {}
        try:
            return {int(step): float(success) for step, success in json.loads(path.read_bytes())["scores"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._note(f"warning: {path} cannot be read, so that no checkpoint counts as the best: {error}")
            return {}

    def _write_scores(self, steps: set[int]) -> None:
        """`steps`: of the checkpoints that the best may be."""
        path = self._folder / SCORES_FILE
        if not self._scores and not path.exists():
            return
        best = [self.path(step).name for step in self._best(steps)]
        found = {"best": best[0] if best else None, "scores": dict(sorted(self._scores.items()))}
        unfinished = path.with_name(f".{path.name}.new")
        try:
            self._folder.mkdir(exist_ok=True)
            unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            raise CannotWrite(f"cannot write {path} (is the disk full?): {error.strerror}") from error


def _damage(folder: Path) -> str:
    """What is wrong with a checkpoint, as far as can be seen without reading all of it; empty: nothing."""
    try:
        json.loads((folder / NOTES_FILE).read_bytes())
        torch.load(folder / TRAINING_FILE, weights_only=True, mmap=True)
        weights = list(folder.glob("*.safetensors"))
        if not weights:
            raise ValueError("it holds no weights")
        for file in weights:
            safe_open(file, "pt")  # compares the header with the size
    except (*UNREADABLE, SafetensorError) as error:
        return " ".join(str(error).split())[:300]
    return ""
