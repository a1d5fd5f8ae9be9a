"""Where a run's tasks come from: a JSONL file, or a Python function that yields them. Called by the command line."""

import importlib
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pydantic_core

from harnessed.config import ConfigError
from harnessed.records import Task

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def stream(source: str, base: Path, seed: int, *, shuffle: bool) -> Iterator[Task]:
    """Tasks of `module:function` (called with the seed), or of a JSONL file, read again and again.

    `shuffle`: a file's tasks come in a new order each time, which the seed decides. Raises ConfigError.
    """
    if _FUNCTION.fullmatch(source):
        return _call(source, seed)
    return _repeat(_read(base / source), seed, shuffle)


def take(tasks: Iterator[Task], n: int, setting: str, *, least: int | None = None) -> list[Task]:
    """The next n tasks, or `least` where the source ends. Raises ConfigError when it ends before that, or yields
    something else."""
    taken, needed = list(itertools.islice(tasks, n)), n if least is None else least
    if len(taken) < needed:
        raise ConfigError(f"{setting} gives {len(taken)} tasks where {needed} are needed")
    for task in taken:
        if not isinstance(task, dict):
            raise ConfigError(f"{setting} gives {type(task).__name__} {str(task)[:60]!r}; a task is a mapping")
        try:
            orjson.dumps(task)
        except orjson.JSONEncodeError as error:
            hint = "; write larger integers as text" if "64-bit" in str(error) else ""
            raise ConfigError(f"{setting} gives a task that is not JSON: {error}{hint}") from None
    return taken


def check_hidden(hidden: list[str], tasks: list[Task]) -> None:
    """A field that no task has is a misspelt one, and what it should hide is not hidden. Raises ConfigError."""
    for field in hidden:
        if not any(field in task for task in tasks):
            known = ", ".join(sorted({name for task in tasks for name in task}))
            raise ConfigError(f"tasks.hidden: no task has a field {field!r}; they have {known}")


def _call(source: str, seed: int) -> Iterator[Task]:
    function = _function(source)
    try:
        yield from function(seed)
    except Exception as error:  # whatever the user's function raises, its message is what the user needs
        raise ConfigError(f"tasks: {source} failed: {type(error).__name__}: {error}") from error


def _function(source: str) -> Any:
    module, _, name = source.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks: no module {error.name} for {source}; put it beside the configuration") from None
    except AttributeError:
        raise ConfigError(f"tasks: module {module} has no function {name}") from None
    except Exception as error:  # noqa: BLE001  # whatever the user's module raises, its message is needed
        raise ConfigError(f"tasks: {source}: {type(error).__name__}: {error}") from None


def _read(path: Path) -> list[Task]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"tasks: cannot read {path}: {error.strerror}; name a file or module:function") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                # It keeps integers of any size, which `take` refuses; orjson would round them.
                tasks.append(pydantic_core.from_json(line, allow_inf_nan=False))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
    if not tasks:
        raise ConfigError(f"tasks: {path} holds no task")
    return tasks


def _repeat(tasks: list[Task], seed: int, shuffle: bool) -> Iterator[Task]:
    order = random.Random(seed)
    while True:
        yield from order.sample(tasks, len(tasks)) if shuffle else tasks
