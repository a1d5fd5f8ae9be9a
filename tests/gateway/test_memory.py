"""Of an attempt that has ended nothing stays in a gateway's memory, even where nobody looks for cycles among objects
that have lived for long: a gateway hardly ever does, since all calls would wait for it."""

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
from scripted_engine import Scripted
from test_exchange import USER
from test_seeing import until
from texts import answer

from harnessed.client import end_attempt
from harnessed.gateway.app import Connection
from harnessed.gateway.keys import Key, Keyring
from harnessed.gateway.progress import Progress, Stage
from harnessed.records import Ending, Node, Outcome

ASKED = {
    "/v1/chat/completions": {"model": "m", "messages": [USER]},
    "/v1/messages": {"model": "m", "messages": [USER], "max_tokens": 100},
    "/v1/responses": {"model": "m", "input": "hello"},
}
ATTEMPTS, LEAVING = 5, 4
"""Of the calls of all attempts every so-many-th leaves."""
BOUNDED = (Key, Keyring, Progress, Stage)
"""Keys are remembered, up to a number; a connection to an engine knows the call that it was opened for."""


@pytest.fixture
def no_collector():
    """It runs when the test says so."""
    gc.disable()
    yield
    gc.enable()


def held() -> Counter[str]:
    """How many objects of the gateway's there are, by their class, and how many entries they have, by their field. Of
    connections those that are closed."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        ours = kind is Node or str(kind.__module__).startswith("harnessed.gateway.")
        if not ours or kind in BOUNDED or (kind is Connection and not each.gone.done()):
            continue
        found[kind.__qualname__] += 1
        for name, value in getattr(each, "__dict__", {}).items():
            if isinstance(value, dict | list | set):
                found[f"{kind.__qualname__}.{name}"] += len(value)
    return found


def grown(before: Counter[str]) -> dict[str, int]:
    """With every attempt; what belongs to none comes and goes."""
    return {name: more for name, more in (held() - before).items() if more >= ATTEMPTS}


def open_connections() -> int:
    return sum(type(each) is Connection and not each.gone.done() for each in gc.get_objects())


async def ask(house, key: str, path: str, *, stream: bool) -> int:
    """Over a connection of its own, as an agent that is a process; the status."""
    async with httpx.AsyncClient(timeout=30, headers={"authorization": f"Bearer {key}"}) as http:
        return (await http.post(house.url + path, json=ASKED[path] | {"stream": stream})).status_code


async def all_wait(house, calls: int) -> None:
    """Returns when all have got something of their answers that they do not see the end of."""

    async def begun() -> bool:
        pending = house.calls_in_progress()
        return len(pending) == calls and all(preview.tokens for each in pending for preview in each.previews)

    await until(begun, f"{calls} calls")


async def live(house, group: str, grow_old: Callable[[], object]) -> None:
    """Attempts with calls that are answered, that fail, and whose clients leave; they grow old in the midst of it."""
    idle, go_on = open_connections(), threading.Event()
    given = await house.attempts(ATTEMPTS, group)
    house.engine.script = lambda prompt, call: Scripted(status=500)
    # At once, so that connections to the engine are opened for them.
    failed = await asyncio.gather(*(ask(house, each.key, "/v1/chat/completions", stream=False) for each in given))
    assert set(failed) == {503}
    house.engine.script = lambda prompt, call: Scripted(answer("one two"), stall_at=2, stall_until=go_on.is_set)
    asked = [(each.key, path, stream) for each in given for path in ASKED for stream in (False, True)]
    calls = [asyncio.create_task(ask(house, key, path, stream=stream)) for key, path, stream in asked]
    await all_wait(house, len(calls))
    grow_old()
    for leaving in calls[::LEAVING]:
        leaving.cancel()
    await house.left(len(calls) - len(calls[::LEAVING]))
    go_on.set()
    answered = await asyncio.gather(*calls, return_exceptions=True)
    assert answered.count(200) == len(calls) - len(calls[::LEAVING])
    for each in given:
        await house.admin(end_attempt(each.rollout, each.attempt, Ending(outcome=Outcome.OK, reward=1.0), 1))

    deadline = time.monotonic() + 20
    while open_connections() > idle:
        assert time.monotonic() < deadline, "connections that their clients have closed are open"
        await asyncio.sleep(0.1)


async def test_nothing_is_left_of_attempts_that_ended(house, no_collector):
    gc.collect()
    others = held()  # of tests that ran before
    await live(house, "first", gc.collect)
    gc.collect()
    before = held()
    assert before["Session"] <= others["Session"] and before["Node"] <= others["Node"]
    during: Counter[str] = Counter()
    await live(house, "second", lambda: (during.update(held()), gc.collect()))
    assert during["Session"] - before["Session"] == ATTEMPTS and during["Reader"] and during["Pending"]
    gc.collect(1)  # what is young
    deadline = time.monotonic() + 5
    while (left := grown(before)) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not left
