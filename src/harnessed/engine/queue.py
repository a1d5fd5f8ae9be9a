"""Requests wait here until they join the batch that generates.

`app.py` submits requests from the event loop, on which everything here runs; only the generation itself is in a worker
thread. Requests join between two tokens of the others: with 16 callers that are busy elsewhere for 0.1 s between calls,
the median call took 50 to 80 ms and 10 ms of CPU, and with one wave after the other 120 ms and 14 ms. Letting them
gather for 5, 10 or 20 ms made no difference.

Nothing starts while the engine is paused or the weights are not readable. The version is read when the batch is empty
and stamped on all tokens until it is empty again: writers pause first, so it cannot change in between. That it did not
is checked before any answer is given. What is kept of ended sequences (`prefixes.py`) is of one version too.
"""

import asyncio
import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from harnessed.engine.generate import Batch, Sequence, joinable
from harnessed.engine.prefixes import Prefixes
from harnessed.records import Version
from harnessed.weights import SharedWeights, WeightsError

WRITER_POLL_S = 0.005
QUEUE_LIMIT_S = 1800.0
"""Longest wait of a request before its generation begins."""

log = logging.getLogger(__name__)


class Unavailable(Exception):
    """No answer now; the text says why and what to do."""


class Failed(Exception):
    """The generation failed; the text gives the reason."""


class _Request:
    """A sequence from its arrival to its answer."""

    __slots__ = ("done", "grown", "id", "sequence")

    def __init__(self, sequence: Sequence, id: str, grown: asyncio.Event | None) -> None:
        self.sequence = sequence
        self.id = id
        self.grown = grown
        self.done: asyncio.Future[Version] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Queue:
    """All requests to one model, at `most` so many at once; so many bytes of what ended are kept. `run` must be
    running."""

    def __init__(self, model: Any, weights: SharedWeights | None, most: int, threads: int, kept_bytes: int = 0) -> None:
        self.paused = False
        self.sampled_tokens = 0
        """Of all sequences that ended since the start, also those whose client went away."""
        self._model = model
        self._joinable = joinable(model)
        self._prefixes = Prefixes(kept_bytes)
        self._weights = weights
        self._version = weights.version if weights else Version(0, 0)
        self._most = most
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._startable = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending = threading.Event()
        self._returned = asyncio.Event()
        """Set when the worker returns, before anybody gets the answer of what has ended by then."""
        # torch keeps the number of threads for each thread that calls it.
        self._worker = ThreadPoolExecutor(1, "generate", torch.set_num_threads, (threads,))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that an earlier sequence had computed, since the start."""
        return self._prefixes.reused_tokens

    def served(self) -> tuple[Version, str]:
        """The version, and why nothing can be generated until somebody acts: empty if all is well."""
        try:
            self._readable()
        except WeightsError as error:
            return self._version, str(error)
        return self._version, ""

    async def generate(
        self, sequence: Sequence, gone: asyncio.Future[Any], id: str = "", grown: asyncio.Event | None = None
    ) -> Version | None:
        """Returns when the sequence has ended, with the version that sampled it; sets `grown` for its tokens before.

        None: `gone` was done before it began, and it will not. Raises Unavailable or Failed.
        """
        request = _Request(sequence, id, grown)
        self._waiting.append(request)
        self._look()
        await asyncio.wait({request.done, gone}, timeout=QUEUE_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if request not in self._waiting:
            # Begun, and so it ends: each sequence has a last token. Or interrupted before.
            return await request.done
        self._waiting.remove(request)
        self._look()
        if gone.done():
            return None
        raise Unavailable(f"not begun within {QUEUE_LIMIT_S:.0f} s: {self._obstacle()}")

    async def interrupt(self, ids: set[str]) -> set[str]:
        """End the requests of these ids with the tokens that they have; those of the ids that there were. Returns when
        nothing is generated for them any more, at the next token."""
        waiting = [request for request in self._waiting if request.id in ids]
        for request in waiting:
            self._waiting.remove(request)
            request.sequence.finish = "interrupted"
        self._look()
        running = [request for request in self._running if request.id in ids]
        for request in running:
            request.sequence.interrupted = True
        try:
            while any(not (request.sequence.finish or request.done.done()) for request in running):
                await self._returned.wait()
        finally:
            # Only now: hundreds of answers would take their time from the token that is waited for.
            for request in waiting:
                request.done.set_result(self._version)
        return {request.id for request in waiting + running}

    async def pause(self) -> None:
        """Returns when nothing generates any more. Nothing will until `resume`, even if the caller is gone."""
        self.paused = True
        self._look()
        await self._idle.wait()

    def resume(self) -> None:
        self.paused = False
        self._look()

    def end(self) -> None:
        """Let the worker stop at its next token."""
        self._ending.set()
        self._worker.shutdown(wait=False)

    async def run(self) -> None:
        """Generate whatever is asked for, for ever."""
        while True:
            await self._startable.wait()
            try:
                version = self._readable()
            except WeightsError as error:
                self._refuse(Unavailable(str(error)))
                continue
            if version is None:
                await asyncio.sleep(WRITER_POLL_S)
                continue
            self._idle.clear()
            try:
                await self._generate(version)
            except (Unavailable, WeightsError) as error:
                self._discard(Unavailable(str(error)))
            except Exception as error:
                # Whatever a model raises, from memory to arithmetic, ends the running requests and not the engine.
                log.exception("the generation failed")
                self._discard(Failed(f"{type(error).__name__}: {error}"))
            finally:
                self._idle.set()

    async def _generate(self, version: Version) -> None:
        """Returns when nothing runs any more."""
        self._prefixes.serve(version)
        batch = Batch(self._model, self._prefixes)
        loop = asyncio.get_running_loop()
        while True:
            new = [self._waiting.popleft() for _ in range(self._room())]
            self._running += new
            for request in new:
                request.sequence.version = version.pack()
            if not self._running:
                # What is kept of weights that are about to be written serves nobody.
                await loop.run_in_executor(self._worker, batch.keep, lambda: self.paused)
                return
            self._look()
            await loop.run_in_executor(
                self._worker, batch.advance, [request.sequence for request in new], lambda: self._attend(loop)
            )
            self._tell_returned()
            if self._readable() != version:
                raise Unavailable("the weights were written during the generation: POST /pause before writing them")
            for request in self._running:
                if request.sequence.finish:
                    self.sampled_tokens += len(request.sequence.tokens)
                    if not request.done.done():
                        request.done.set_result(version)
            self._running = [request for request in self._running if not request.sequence.finish]

    def _room(self) -> int:
        """How many of those who wait can begin now."""
        if self.paused or (self._running and not self._joinable):
            return 0
        return min(len(self._waiting), self._most - len(self._running))

    def _attend(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Asked by the worker after each token: is it to return?"""
        for grown in [request.grown for request in self._running if request.grown]:
            loop.call_soon_threadsafe(grown.set)
        return self._room() > 0 or self._ending.is_set()

    def _readable(self) -> Version | None:
        """The version that may generate now; None while a trainer writes. Raises WeightsError."""
        if self._weights is None:
            return self._version
        version = self._weights.readable()
        self._version = version or self._version
        return version

    def _refuse(self, error: Unavailable) -> None:
        """Answer all that wait."""
        for request in self._waiting:
            request.fail(error)
        self._waiting.clear()
        self._look()

    def _discard(self, error: Exception) -> None:
        """Answer all that run. Their tokens are given to nobody, and not counted."""
        log.error("%d running requests were discarded: %s", len(self._running), error)
        for request in self._running:
            request.fail(error)
        self._running = []
        self._tell_returned()
        # Perhaps of weights that were being written.
        self._prefixes.clear()

    def _tell_returned(self) -> None:
        self._returned.set()
        self._returned = asyncio.Event()

    def _look(self) -> None:
        """To be called when `paused` or what waits has changed."""
        if self._waiting and not self.paused:
            self._startable.set()
        else:
            self._startable.clear()

    def _obstacle(self) -> str:
        if self.paused:
            return "the engine is paused; POST /resume lets it go on"
        if self._running:
            return "earlier requests are still being generated; send fewer at once or ask for fewer tokens"
        return "a trainer is still writing the weights; if it hangs, end it and resume the training"
