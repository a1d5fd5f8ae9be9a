"""Waits for groups by the gateway's one long-poll, and counts what the rollouts of the run are doing meanwhile."""

import time
from collections import Counter
from collections.abc import Callable

from harnessed.client import Client, get_turnstile, list_changes
from harnessed.records import ChangeKind, State, TurnstileState
from harnessed.training.failures import Stalled
from harnessed.training.watchdog import Watchdog

POLL_S = 1.0
"""Longest single wait; between two of them the display is refreshed and the services are looked after."""


class Watch:
    """Follows the changes of one run from its beginning."""

    def __init__(self, gateway: Client, run: str, watchdog: Watchdog, *, stall_limit_s: float) -> None:
        self._gateway = gateway
        self._run = run
        self._watchdog = watchdog
        self._stall_limit_s = stall_limit_s
        self._cursor = 0
        self._moved = time.monotonic()
        self._states: dict[str, str] = {}
        self.started: set[str] = set()
        """Groups of which a rollout has begun."""
        self.complete: set[str] = set()

    @property
    def counts(self) -> Counter[str]:
        """Rollouts by state, or by outcome once finished."""
        return Counter(self._states.values())

    def moved(self) -> None:
        """Nothing was expected of the rollouts up to now."""
        self._watchdog.moved()
        self._moved = time.monotonic()

    def until_complete(self, groups: list[str], tick: Callable[[], None]) -> None:
        """Return when all groups are complete; `tick` is called at least every POLL_S. Raises Stalled."""
        self.moved()
        while missing := set(groups) - self.complete:
            tick()
            self.wait(f"{len(missing)} of {len(groups)} groups")
        tick()

    def wait(self, what: str) -> None:
        """Until something changes, but at most POLL_S.

        Raises Stalled after a long time without any change. While somebody has closed the run's turnstile, nothing is
        expected to move.
        """
        if self._follow(POLL_S):
            self.moved()
            return
        self._watchdog.look()
        if self._is_held():
            self._moved = time.monotonic()
        elif time.monotonic() - self._moved > self._stall_limit_s:
            raise Stalled(
                f"nothing moved for {self._stall_limit_s:.0f} s while waiting for {what}: {self._watchdog.line()}"
            )

    def catch_up(self) -> None:
        """Read all changes that there are."""
        while self._follow(0):
            pass

    def _is_held(self) -> bool:
        return self._gateway(get_turnstile(self._run)).state != TurnstileState.OPEN

    def _follow(self, wait_s: float) -> bool:
        changes = self._gateway(list_changes(self._run, self._cursor, wait_s))
        for change in changes:
            self._cursor = change.cursor
            if change.kind == ChangeKind.GROUP:
                self.complete.add(change.id)
                continue
            self._states[change.id] = change.state
            if change.state != State.QUEUED:
                self.started.add(change.id.rpartition(".")[0])
        return bool(changes)
