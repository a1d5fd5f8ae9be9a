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
        self._in_flight: dict[str, set[str]] = {}
        """Run -> the generations that engines were asked for and have not ended."""
        self.held_s = 0.0
        """What generations have waited here, in seconds, all together."""
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def passing(self, run: str, generation: str) -> AsyncIterator[None]:
        """Around asking an engine. Raises Left if the generation is dismissed while it waits."""
        while self.is_closed(run):
            await self._wait(run, generation)
        here = self._in_flight.setdefault(run, set())
        here.add(generation)
        try:
            yield
        finally:
            here.discard(generation)
            self.wake()

    async def _wait(self, run: str, generation: str) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.setdefault(run, {})[generation] = waiting
        since, closed = time.monotonic(), self._closed.get(run)
        waits_for(f"{TURNSTILE}, closed by {closed.owner}" if closed else STORE)
        self.wake()
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

    def ended(self, closed: Turnstile, generations: Iterable[str]) -> None:
        """Their engines, told of this closing, have said that they generate nothing of these any more. What they have
        sampled is still on its way, and takes its time if it is long."""
        now = self._closed.get(closed.run)
        if now and now.since == closed.since:  # else it may have opened, and some of them may run again
            self._in_flight[closed.run].difference_update(generations)
            self.wake()

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
        self.wake()

    def is_closed(self, run: str) -> bool:
        return run in self._closed or time.monotonic() > self.good_until

    def quiet(self) -> dict[str, float]:
        """The closed ones at which nothing is generated any more, and since when they are closed."""
        return {run: each.since or 0.0 for run, each in self._closed.items() if not self.in_flight(run)}

    def in_flight(self, run: str) -> int:
        """Generations that run at an engine, or may."""
        return len(self._in_flight.get(run, ()))

    def generations(self, run: str) -> list[str]:
        """Those that are in flight."""
        return list(self._in_flight.get(run, ()))

    def closed(self, run: str) -> Turnstile | None:
        return self._closed.get(run)

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

    def wake(self) -> None:
        """Let who waits for a change look again."""
        self._changed.set()
        self._changed = asyncio.Event()
