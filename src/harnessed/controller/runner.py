"""What the reconciling loop asks of a runner, which is a place where attempts run: this machine, or a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from harnessed.records import Assignment, Ending


@dataclass(frozen=True)
class Ended:
    """The end of an attempt, of which nothing runs any more."""

    ending: Ending
    final: bool = False
    """Another attempt would end in the same way (a broken task or evaluator): none is made."""


class Runner(Protocol):
    """Sets the `wake` event that it was made with whenever an attempt ends. Attempts are named `rollout/attempt`."""

    async def open(self) -> None:
        """Get ready; afterwards a start takes milliseconds. Raises if that fails."""

    def start(self, assignment: Assignment) -> None:
        """Begin an attempt. Whatever goes wrong becomes its end."""

    def attempts(self) -> Mapping[str, Ended | None]:
        """Every attempt that was started and not forgotten: how it ended, or None while anything of it runs."""

    def judging(self) -> int:
        """Attempts whose agent has ended, and whose evaluator runs."""

    def stop(self, attempt: str) -> None:
        """Begin to end an attempt; its end is then `cancelled`, unless it came first. May be repeated."""

    def forget(self, attempt: str) -> None:
        """Its end was dealt with."""

    async def close(self) -> None:
        """Stop everything; nothing runs any more when this returns."""
