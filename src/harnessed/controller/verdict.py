"""What an evaluator says, read as a reward. `judge` runs in the evaluator's process, `read_verdict` on both sides."""

import math
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from harnessed.controller.child import resolve


def judge(function: str, task: dict[str, Any], folder: str) -> dict[str, float]:
    """Call the evaluator's function; a reward that is none raises ValueError."""
    return read_verdict(resolve(function)(task, Path(folder)))


def read_verdict(value: Any) -> dict[str, float]:
    """The reward and its named parts, as `{"reward": ..., part: ...}`. Raises ValueError."""
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        raise ValueError(f"the evaluator gave a mapping without `reward`: {str(value)[:200]}")
    for name, part in parts.items():
        if not isinstance(part, Real) or not math.isfinite(part):
            raise ValueError(f"the evaluator gave {str(part)[:200]!r} as {name}, which is not a finite number")
    return {str(name): float(part) for name, part in parts.items()}
