"""What an evaluator says, read as a reward. `judge` runs in the evaluator's process, `read_verdict` on both sides."""

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from harnessed.controller.child import resolve
from harnessed.records import MOST_REWARD, Reward


def judge(function: str, task: dict[str, Any], folder: str) -> dict[str, Any]:
    """Call the evaluator's function: its verdict as JSON has it. A reward that is none raises ValueError."""
    verdict = read_verdict(resolve(function)(task, Path(folder)))
    return {"reward": verdict.reward, "call_rewards": verdict.call_rewards, **verdict.parts}


def read_verdict(value: Any) -> Reward:
    """From a number, or from a mapping with `reward`, a list `call_rewards` if it likes, and named parts. Raises
    ValueError."""
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        raise ValueError(f"the evaluator gave a mapping without `reward`: {sorted(map(str, parts))[:10]}")
    calls = parts.pop("call_rewards", [])
    if not isinstance(calls, list | tuple):
        raise ValueError(f"the evaluator gave {_shown(calls)} as call_rewards, which is not a list")
    found = {str(name): _number(str(name), part) for name, part in parts.items()}
    rewards = [_number(f"call_rewards[{place}]", each) for place, each in enumerate(calls)]
    return Reward(reward=found.pop("reward"), parts=found, call_rewards=rewards)


def _number(name: str, part: Any) -> float:
    # The comparison is false for NaN, and exact for integers of any size.
    if not isinstance(part, Real) or not -MOST_REWARD <= part <= MOST_REWARD:  # type: ignore[operator]
        raise ValueError(f"the evaluator gave {_shown(part)} as {name}, which is not a number within ±{MOST_REWARD:g}")
    return float(part)


def _shown(part: Any) -> str:
    try:
        return repr(part)[:200]
    except ValueError:  # Python refuses to write integers of thousands of digits
        return "a huge integer"
