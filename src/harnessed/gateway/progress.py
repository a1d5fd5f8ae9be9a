"""Calls in progress: what each waits for and since when, and how it ended.

`routes.py` opens one for every call. Whatever is done for the call finds it in the context of its task: `exchange.py`,
`sampling.py` and `engines.py` say with `waits_for` what comes next. `status.py` lists who waits, `metrics.py` counts,
and the end of a call that got no answer is a line in the log.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from starlette.types import Message, Send

from harnessed.gateway.wire.turn import WireError

log = logging.getLogger("harnessed.gateway.calls")

MOST_SAID = 500
"""Characters of a reason in the log: it may repeat what the agent sent."""
ITS_CLIENT = "its client"
STORE = "the store"
TURNSTILE = "the turnstile"
"""The beginning of what a held call waits for; who closed it follows."""
ENCODER = "the encoder"
"""The thread in which large requests are read and encoded, one after the other."""


class Outcome(StrEnum):
    """How a call ended, as its client saw it."""

    OK = "ok"
    """The answer was handed over whole."""
    REFUSED = "refused"
    """Status 4xx."""
    FAILED = "failed"
    """Status 5xx."""
    INTERRUPTED = "interrupted"
    """It broke after its first byte: the connection was reset."""
    LEFT = "left"
    """The client went away."""


@dataclass(slots=True, eq=False)
class Stage:
    """What somebody waits for. Shared by a call and the generation that outlives it, and by all who repeat the call."""

    what: str = ITS_CLIENT
    since: float = field(default_factory=time.time)
    """Seconds since the epoch."""


@dataclass(slots=True, eq=False)
class Progress:
    """One request of a harness, from its arrival to the end of its answer."""

    protocol: str
    arrived: float = field(default_factory=time.perf_counter)
    """Seconds of the monotonic clock."""
    run: str = ""
    """Empty, as what follows, until it is known."""
    rollout: str = ""
    attempt: int = 0
    call: str = ""
    streamed: bool = False
    stage: Stage = field(default_factory=Stage)
    sending_since: float = 0.0
    """Seconds since the epoch, while a piece of the answer is being handed over; else 0."""
    first_s: float | None = None
    """From its arrival to the first text of a streamed answer."""
    whole: bool = False
    """The last byte was handed over."""
    error: WireError | None = None
    """Why it was refused, or failed before its first byte."""
    broken: str = ""
    """Why its connection was reset."""

    @property
    def waits(self) -> tuple[str, float]:
        """For what, and since when."""
        return (ITS_CLIENT, self.sending_since) if self.sending_since else (self.stage.what, self.stage.since)

    @property
    def held(self) -> bool:
        return self.stage.what.startswith(TURNSTILE)

    def of(self, run: str, attempt: tuple[str, int]) -> None:
        """Whose call it is."""
        self.run, (self.rollout, self.attempt) = run, attempt

    def joins(self, call: str, stage: Stage) -> None:
        """It waits for the answer of a call, which may have been begun for an earlier request."""
        self.call, self.stage = call, stage

    def breaks(self, answers: "asyncio.Future[Any]") -> None:
        """Its connection is reset: these did not become what was begun to be told."""
        failure = answers.exception() if answers.done() else None
        self.broken = str(failure or "its text did not go on from what had been shown")

    def shows(self) -> None:
        """Text of the answer goes out."""
        if self.first_s is None:
            self.first_s = time.perf_counter() - self.arrived

    def sending(self, send: Send) -> Send:
        async def noted(message: Message) -> None:
            self.sending_since = time.time()
            await send(message)
            self.sending_since = 0.0
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self.whole = True

        return noted

    @property
    def outcome(self) -> Outcome:
        """Once it has ended."""
        if self.error is not None:
            return Outcome.REFUSED if self.error.status < 500 else Outcome.FAILED
        if self.broken:
            return Outcome.INTERRUPTED
        return Outcome.OK if self.whole else Outcome.LEFT

    def fields(self) -> dict[str, Any]:
        """What a line in the log says of it."""
        return {"run": self.run, "rollout": self.rollout, "attempt": self.attempt, "call": self.call}


_current: ContextVar[Progress | None] = ContextVar("call", default=None)


def current() -> Progress:
    """Of the call that this task works for. Outside of one: of none that anybody looks at."""
    return _current.get() or Progress("")


def stage() -> Stage:
    return current().stage


def waits_for(what: str) -> None:
    """The call of this task waits for this from now on."""
    progress = _current.get()
    if progress is not None:
        progress.stage.what, progress.stage.since = what, time.time()


class Calls:
    """All calls of one gateway that are in progress."""

    def __init__(self, ended: Callable[[Progress, float], None]) -> None:
        """`ended` is told of every call and the seconds that it took."""
        self._ended = ended
        self._open: set[Progress] = set()

    def __iter__(self) -> Iterator[Progress]:
        return iter(self._open)

    @contextmanager
    def open(self, protocol: str) -> Iterator[Progress]:
        """Around all that is done for a call."""
        progress = Progress(protocol)
        self._open.add(progress)
        token = _current.set(progress)
        try:
            yield progress
        except Exception as error:
            progress.error = WireError(500, "internal", f"{type(error).__name__}: {error}")
            raise
        finally:
            _current.reset(token)
            self._open.discard(progress)
            self._ended(progress, time.perf_counter() - progress.arrived)
            _tell(progress)
            # A connection to an engine that was opened for the call keeps this, and an error all that its frames held.
            progress.error = None


def _tell(progress: Progress) -> None:
    error = progress.error
    match progress.outcome:
        case Outcome.REFUSED if error:
            log.info("refused with %s: %s", error.status, error.message[:MOST_SAID], extra=progress.fields())
        case Outcome.FAILED if error:
            log.warning("failed with %s: %s", error.status, error.message[:MOST_SAID], extra=progress.fields())
        case Outcome.INTERRUPTED:
            log.warning("broke after its first byte: %s", progress.broken, extra=progress.fields())
        case Outcome.LEFT:
            log.debug("the client left", extra=progress.fields())
