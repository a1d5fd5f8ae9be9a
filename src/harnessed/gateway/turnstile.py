"""Holds calls while the policy of their run is updated: closed by an owner, drained, opened again.

What is closed is in the store (`closings.py`), so that it outlives the gateway and all gateways of one store agree.
Here is what a gateway does about it: generations enter before their engine is asked and leave when it has answered;
while the turnstile of their run is closed they wait at it, however long that takes. `sampling.py` enters, `api.py`
closes and opens, `peers.py` tells what the store says.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from harnessed.gateway.progress import STORE, TURNSTILE, waits_for
from harnessed.records import Turnstile


class Left(Exception):
    """Nobody waits for the answer of this generation any more."""


class Turnstiles:
    """Those of all runs, as one gateway sees them."""

    def __init__(self) -> None:
        self.good_until = math.inf
        """What is known here holds until then, in seconds of `time.monotonic`; after it nothing passes."""
        self._closed: dict[str, Turnstile] = {}
        self._held: dict[str, dict[str, asyncio.Future[None]]] = {}
        """Run -> the generations that wait."""
        self._in_flight: Counter[str] = Counter()
        self.held_s = 0.0
        """What generations have waited here, in seconds, all together."""
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def passing(self, run: str, generation: str) -> AsyncIterator[None]:
        """Around asking an engine. Raises Left if the generation is dismissed while it waits."""
        while self.is_closed(run):
            await self._wait(run, generation)
        self._in_flight[run] += 1
        try:
            yield
        finally:
            self._in_flight[run] -= 1
            self._tell()

    async def _wait(self, run: str, generation: str) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.setdefault(run, {})[generation] = waiting
        since, closed = time.monotonic(), self._closed.get(run)
        waits_for(f"{TURNSTILE}, closed by {closed.owner}" if closed else STORE)
        self._tell()
        try:
            await waiting
        finally:
            self.held_s += time.monotonic() - since
            del self._held[run][generation]

    def dismiss(self, run: str, generations: Iterable[str]) -> None:
        """Let generations that wait end, because nobody wants them any more."""
        for generation in generations:
            waiting = self._held.get(run, {}).get(generation)
            if waiting and not waiting.done():
                waiting.set_exception(Left)

    def set_closed(self, closed: Iterable[Turnstile]) -> None:
        """These are closed and no others."""
        self._closed = {turnstile.run: turnstile for turnstile in closed}
        self._look()

    def _look(self) -> None:
        """Let pass who may."""
        for run in list(self._held):
            if not self.is_closed(run):
                for waiting in self._held[run].values():
                    if not waiting.done():
                        waiting.set_result(None)
        self._tell()

    def is_closed(self, run: str) -> bool:
        return run in self._closed or time.monotonic() > self.good_until

    def quiet(self) -> dict[str, float]:
        """The closed ones at which nothing is generated any more, and since when they are closed."""
        return {run: each.since or 0.0 for run, each in self._closed.items() if not self._in_flight[run]}

    def in_flight(self, run: str) -> int:
        """Generations that an engine was asked for."""
        return self._in_flight[run]

    def held(self, run: str) -> int:
        """Generations that wait."""
        return len(self._held.get(run, ()))

    async def change(self, deadline: float) -> bool:
        """Returns at the next change of what waits, runs or is closed here; False: none came before the deadline, in
        seconds of `time.monotonic`."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
