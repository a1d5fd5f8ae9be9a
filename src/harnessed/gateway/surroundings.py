"""What the store says, remembered for some seconds: for pages that anybody may ask for as often as he likes.

`instruments.py` and `status.py` look here.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from harnessed.gateway.lifecycle import count_unfinished
from harnessed.gateway.store import Store

T = TypeVar("T")
Answer = TypeVar("Answer", covariant=True)
FRESH_S = 3.0
"""How old an answer may be."""
STORE_LIMIT_S = 5.0
"""A store that answers nothing for so long is out of reach."""


class Surroundings:
    """Of one gateway."""

    def __init__(self, store: Store) -> None:
        self.unfinished: Fresh[dict[str, Counter[str]]] = Fresh(lambda: store.read(count_unfinished), STORE_LIMIT_S)
        """Run -> its queued and running rollouts, of runs that have any."""


class _Question(Protocol[Answer]):
    def __call__(self) -> Coroutine[Any, Any, Answer]: ...


class Fresh(Generic[T]):
    """Asks at most every few seconds, and once at a time; a failure is remembered too."""

    def __init__(self, question: _Question[T], limit_s: float) -> None:
        self._question = question
        self._limit_s = limit_s
        self._answer: asyncio.Task[T] | None = None
        self._asked = 0.0

    async def __call__(self) -> T:
        """Raises what the question raises, or TimeoutError after `limit_s` seconds."""
        if self._answer is None or (self._answer.done() and time.monotonic() > self._asked + FRESH_S):
            self._asked = time.monotonic()
            self._answer = asyncio.create_task(asyncio.wait_for(self._question(), self._limit_s))
        return await asyncio.shield(self._answer)
