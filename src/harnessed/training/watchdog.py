"""Says who waits for whom when nothing has moved for a while. Whoever waits in the trainer calls it.

watchdog.moved()   # whenever anything changed
watchdog.look()    # about every second, while it waits
"""

import dataclasses
import time
from collections.abc import Callable

from pydantic import ValidationError

from harnessed.client import ApiError, Client, Unreachable, get_status
from harnessed.waiting import who_waits

ASK_LIMIT_S = 10.0
"""A gateway that does not say for so long who waits for whom is what is waited for."""


class Watchdog:
    """Of one run."""

    def __init__(self, gateway: Client, run: str, quiet_s: float, say: Callable[[str], None]) -> None:
        """`gateway` has no patience, or `look` has it too; `say` tells a person one line."""
        self._gateway = gateway
        self._run = run
        self._quiet_s = quiet_s
        self._say = say
        self.moved()

    def moved(self) -> None:
        """Something has changed now."""
        self._since = time.monotonic()
        self._said = 0

    def look(self) -> None:
        """Say the line once for every `quiet_s` in which nothing moved."""
        still_s = time.monotonic() - self._since
        periods = int(still_s / self._quiet_s)
        if periods > self._said:
            self._said = periods
            self._say(f"nothing moved for {still_s:.0f} s: {self.line()}")

    def line(self) -> str:
        """Who waits for whom now. Does not fail: a gateway that does not say is what is waited for."""
        try:
            status = self._gateway(dataclasses.replace(get_status(), timeout_s=ASK_LIMIT_S))
        except (ApiError, Unreachable) as error:
            return f"the gateway does not say who waits for whom: {error}"
        except ValidationError:
            return f"what answers at {self._gateway.url} is no gateway, or one of another version"
        return who_waits(status, self._run, time.time())
