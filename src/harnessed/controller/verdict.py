"""What an evaluator says, read as a reward. `judge` runs in the evaluator's process, `read_verdict` on both sides."""

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from harnessed.controller.child import resolve
from harnessed.records import MOST_REWARD


def judge(function: str, task: dict[str, Any], folder: str) -> dict[str, float]:
    """Call the evaluator's function; a reward that is none raises ValueError."""
    return read_verdict(resolve(function)(task, Path(folder)))


def read_verdict(value: Any) -> dict[str, float]:
    """The reward and its named parts, as `{"reward": ..., part: ...}`. Raises ValueError."""
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        raise ValueError(f"the evaluator gave a mapping without `reward`: {sorted(map(str, parts))[:10]}")
    for name, part in parts.items():
        # The comparison is false for NaN, and exact for integers of any size.
        if not isinstance(part, Real) or not -MOST_REWARD <= part <= MOST_REWARD:  # type: ignore[operator]
            raise ValueError(
                f"the evaluator gave {_shown(part)} as {name}, which is not a number within ±{MOST_REWARD:g}"
            )
    return {str(name): float(part) for name, part in parts.items()}


def _shown(part: Any) -> str:
    try:
        return repr(part)[:200]
    except ValueError:  # Python refuses to write integers of thousands of digits
        return "a huge integer"
