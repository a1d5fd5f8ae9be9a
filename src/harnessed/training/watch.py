"""Waits for groups by the gateway's one long-poll, and counts what the rollouts of the run are doing meanwhile."""

import time
from collections import Counter
from collections.abc import Callable

from harnessed.client import Client, get_turnstile, list_changes
from harnessed.records import ChangeKind, State, TurnstileState
from harnessed.training.failures import Stalled

POLL_S = 1.0
"""Longest single wait; between two of them the display is refreshed and the services are looked after."""


class Watch:
    """Follows the changes of one run from its beginning."""

    def __init__(self, gateway: Client, run: str, *, stall_limit_s: float) -> None:
        self._gateway = gateway
        self._run = run
        self._stall_limit_s = stall_limit_s
        self._cursor = 0
        self._complete: set[str] = set()
        self._states: dict[str, str] = {}

    @property
    def counts(self) -> Counter[str]:
        """Rollouts by state, or by outcome once finished."""
        return Counter(self._states.values())

    def until_complete(self, groups: list[str], tick: Callable[[], None]) -> None:
        """Return when all groups are complete; `tick` is called at least every POLL_S.

        Raises Stalled. While somebody has closed the run's turnstile, nothing is expected to move.
        """
        moved = time.monotonic()
        while missing := set(groups) - self._complete:
            tick()
            if self._follow() or self._is_held():
                moved = time.monotonic()
            elif time.monotonic() - moved > self._stall_limit_s:
                counts = self.counts
                raise Stalled(
                    f"nothing moved for {self._stall_limit_s:.0f} s while waiting for {len(missing)} of {len(groups)} "
                    f"groups ({counts[State.QUEUED]} rollouts queued, {counts[State.RUNNING]} running); "
                    "is a controller running, and does the engine answer?"
                )
        tick()

    def _is_held(self) -> bool:
        return self._gateway(get_turnstile(self._run)).state != TurnstileState.OPEN

    def _follow(self) -> bool:
        changes = self._gateway(list_changes(self._run, self._cursor, POLL_S))
        for change in changes:
            self._cursor = change.cursor
            if change.kind == ChangeKind.ROLLOUT:
                self._states[change.id] = change.state
            else:
                self._complete.add(change.id)
        return bool(changes)
