"""Checkpoint folders: weights that transformers loads, and beside them what training needs to go on. For `local.py`,
and for `cli.py`, which looks at one before anything starts.

    config.json, model.safetensors, tokenizer.json, ...   the policy; with LoRA, merged
    adapter/                                              with LoRA: the adapter, as peft reads it
    critic.pt                                             with a critic: its weights and moments
    training.pt                                           moments of the optimiser, counters, torch's random state
    harnessed.json                                        its step and version, tasks and groups used

A folder appears under its name when it is whole.
"""

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harnessed.config import ConfigError, Trainer
from harnessed.records import Version

ADAPTER_FOLDER = "adapter"
CRITIC_FILE = "critic.pt"
NOTES_FILE = "harnessed.json"
TRAINING_FILE = "training.pt"
UNREADABLE = (OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError, pickle.UnpicklingError)
"""What reading one that is damaged or of another making raises."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that training goes on from."""

    folder: Path
    step: int
    tasks: int
    """Training tasks that were used up to it, over all runs."""
    version: Version
    training: dict[str, Any]
    """What `write_training` was given."""


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill; it gets its name at the end, and none if the body raises."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for path in unfinished.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors makes its file private
    if folder.exists():  # damaged, or of steps that are taken again
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.old")))
    unfinished.rename(folder)


def write_training(folder: Path, notes: dict[str, Any], training: dict[str, Any]) -> None:
    """`training` holds tensors, numbers, strings, lists and mappings only: reading it runs no code."""
    (folder / NOTES_FILE).write_text(json.dumps(notes, indent=1), encoding="utf-8")
    torch.save(training, folder / TRAINING_FILE)


def read(folder: Path, settings: Trainer, named_by: str = "trainer.resume_from") -> Checkpoint:
    """`named_by`: what the user is told to look at. Raises ConfigError, also where the settings are not those to go on
    with."""
    found = _read(folder, named_by)
    _check(found, settings, named_by)
    return found


def _check(found: Checkpoint, settings: Trainer, named_by: str) -> None:
    folder, kind = found.folder, found.training["kind"]
    has_adapter = (folder / ADAPTER_FOLDER).is_dir()
    if has_adapter != (settings.lora is not None):
        raise ConfigError(
            f"{named_by}: {folder} was trained {'with' if has_adapter else 'without'} LoRA: set trainer.lora "
            "as it was, or set policy.model to the checkpoint and begin anew"
        )
    if kind != settings.optimiser.kind:
        raise ConfigError(f"{named_by}: {folder} holds the moments of {kind}: set trainer.optimiser.kind to it")
    if settings.advantage.kind == "gae" and not (folder / CRITIC_FILE).is_file():
        raise ConfigError(
            f"{named_by}: {folder} was trained without a critic: set trainer.advantage.kind as it was, or set "
            "policy.model to the checkpoint and begin anew"
        )


def _read(folder: Path, named_by: str) -> Checkpoint:
    try:
        notes = json.loads((folder / NOTES_FILE).read_bytes())
        training = torch.load(folder / TRAINING_FILE, weights_only=True)
        if missing := {"kind", "optimiser", "updates", "random"} - set(training):
            raise ValueError(f"{TRAINING_FILE} lacks {', '.join(sorted(missing))}")
        return Checkpoint(folder, int(notes["step"]), int(notes["tasks"]), Version(*notes["version"]), training)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{named_by}: {error.filename} is missing: name a folder below `checkpoints` of a run; to start "
            "anew from weights alone, set policy.model to them"
        ) from error
    except UNREADABLE as error:
        raise ConfigError(f"{named_by}: cannot read {folder}: {' '.join(str(error).split())}") from error
