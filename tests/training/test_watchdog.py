"""The line that a trainer says when nothing moves, with a real gateway in front of a scripted engine."""

import asyncio
import re
import time
from types import SimpleNamespace

import pytest
from house import house  # noqa: F401  # a fixture
from listening import listen
from scripted_engine import Scripted
from texts import answer

from harnessed.client import Client, close_turnstile, create_groups, get_status, renew
from harnessed.gateway.keys import ADMIN
from harnessed.records import CloseMode, GroupSpec, Presence
from harnessed.training.watchdog import Watchdog

QUESTION = [{"role": "user", "content": "hello"}]
LONG_S = 3600.0


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    monkeypatch.setattr("harnessed.gateway.surroundings.FRESH_S", 0)


@pytest.fixture
def gateway(house):  # noqa: F811
    with Client(house.url, house.keys.sign(ADMIN)) as client:
        yield client


async def line(gateway, expected: str) -> str:
    """The watchdog's line as soon as it fits."""
    watchdog = Watchdog(gateway, "r", LONG_S, pytest.fail)
    for _ in range(500):
        said = await asyncio.to_thread(watchdog.line)
        if re.fullmatch(expected, said):
            return said
        await asyncio.sleep(0.02)
    raise AssertionError(f"{said!r} is not {expected!r}")


async def test_a_real_wait_is_told_from_generation_to_slot(house, gateway):  # noqa: F811
    house.engine.script = lambda prompt, call: Scripted(answer("late"), delay_s=60)
    first, second, _ = await house.attempts(3)
    await house.admin(create_groups([GroupSpec(id="queued", run="r", task={}, n=4)]))
    calls = [
        asyncio.create_task(house.openai(each.key).chat.completions.create(model="m", messages=QUESTION))
        for each in (first, first, second)
    ]
    await line(
        gateway,
        r"engine: 3 generations running, longest \d+ s; controller: 4 queued, longest \d+ s, 3 attempts running; "
        r"agents: 3 running, longest \d+ s, 1 without a call",
    )
    await house.admin(renew("controller", Presence(run="r", slots=3, judging=1)))
    await line(
        gateway,
        r"engine: 3 .*; controller: 4 queued, longest \d+ s, 3 of 3 slots busy; agents: .*, evaluator: 1 at work",
    )
    await house.admin(close_turnstile("r", "trainer of r", CloseMode.INTERRUPT, lease_s=100, drain_s=10))
    await line(
        gateway,
        r"turnstile closed for \d+ s by trainer of r, 3 calls held; controller: .*; "
        r"agents: 3 running, longest \d+ s, 1 without a call, evaluator: 1 at work; engine idle",
    )
    await house.admin(close_turnstile("r", "trainer of r", CloseMode.INTERRUPT, lease_s=0.01))
    await line(gateway, r"turnstile closed for \d+ s by trainer of r, whose lease is over for \d+ s, 3 calls held; .*")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_run_without_controller_and_engine_says_what_to_start(house, gateway):  # noqa: F811
    await house.admin(create_groups([GroupSpec(id="queued", run="r", task={}, n=4)]))
    start = r"no controller claims anything for run r: start one \(4 queued, longest \d+ s\); "
    await line(gateway, f"{start}engine idle")
    await house.admin(renew("elsewhere", Presence(run="other", slots=2)))
    await line(gateway, f"{start}engine idle")
    house.engine.close()
    await line(gateway, rf"engine e not healthy for \d+ s: .*; {start[:-2]}")


async def test_a_controller_that_says_nothing_of_itself_any_more_has_gone(house, gateway):  # noqa: F811
    await house.admin(renew("c", Presence(run="r", slots=2)))
    (controller,) = (await house.admin(get_status())).controllers
    assert (controller.owner, controller.attempts, controller.presence.slots) == ("c", 0, 2)
    assert time.time() < controller.lease_until < time.time() + 60
    await house.admin(renew("c", Presence(run="r", slots=5, judging=4)))
    (controller,) = (await house.admin(get_status())).controllers
    assert controller.presence == Presence(run="r", slots=5, judging=4)
    await house.admin(renew("c"))
    assert (await house.admin(get_status())).controllers == []


async def test_the_line_comes_once_in_each_quiet_period(house, gateway, monkeypatch):  # noqa: F811
    await house.admin(create_groups([GroupSpec(id="queued", run="r", task={}, n=4)]))
    now, said = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("harnessed.training.watchdog.time", clock)
    watchdog = Watchdog(gateway, "r", 60, said.append)

    async def looks_at(*times: float) -> int:
        for now[0] in times:
            await asyncio.to_thread(watchdog.look)
        return len(said)

    assert await looks_at(101, 159) == 0
    assert await looks_at(161, 162, 219) == 1
    assert said[0].startswith("nothing moved for 61 s: no controller claims anything for run r: start one")
    assert await looks_at(221, 222) == 2
    watchdog.moved()
    assert await looks_at(230, 281) == 2
    assert await looks_at(283) == 3 and said[2].startswith("nothing moved for 61 s: ")


def test_a_gateway_that_is_away_is_what_is_waited_for():
    with listen() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    said = []
    with Client(url) as nobody:
        watchdog = Watchdog(nobody, "r", 1e-9, said.append)
        time.sleep(0.001)
        watchdog.look()
    assert re.fullmatch(
        r"nothing moved for 0 s: the gateway does not say who waits for whom: http://.* did not .*", said[0]
    )
