"""Calls that are held while the policy of their run is updated."""

import asyncio
import time

import pytest
from scripted_engine import Scripted
from texts import answer, ids

from harnessed.client import (
    ApiError,
    close_turnstile,
    end_attempt,
    get_held_seconds,
    get_totals,
    get_turnstile,
    open_turnstile,
    renew_turnstile,
)
from harnessed.gateway import peers
from harnessed.records import CloseMode, Ending, Outcome, TurnstileState, Version

QUESTION = [{"role": "user", "content": "hello"}]


def ask(house, key, messages=QUESTION, **settings):
    return asyncio.create_task(house.openai(key).chat.completions.create(model="m", messages=messages, **settings))


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def held(house):
    return house.turnstiles.held("r")


async def close(house, mode=CloseMode.FINISH, owner="trainer", **settings):
    return await house.admin(close_turnstile("r", owner, mode, **{"drain_s": 5} | settings))


async def test_calls_wait_while_it_is_closed_and_go_on_when_it_opens(house):
    (attempt,) = await house.attempts()
    closed = await close(house)
    assert (closed.state, closed.owner, closed.in_flight) == (TurnstileState.CLOSED, "trainer", 0)
    asking = ask(house, attempt.key)
    await until(lambda: held(house) == 1)
    assert house.engine.log == []
    assert (await house.admin(open_turnstile("r", "trainer"))).state == TurnstileState.OPEN
    assert (await asking).choices[0].message.content == "answer 1"


async def test_generations_that_run_are_waited_for(house):
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: Scripted(answer("slow"), stall_at=2, stall_s=0.5)
    asking = ask(house, attempt.key)
    await until(lambda: house.engine.log and house.engine.log[0].answer)
    closing = await close(house, drain_s=0)
    assert (closing.state, closing.in_flight) == (TurnstileState.CLOSING, 1)
    closed = await close(house)
    assert (closed.state, house.engine.log[0].finish) == (TurnstileState.CLOSED, "stop")
    assert (await asking).choices[0].message.content == "slow"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_interrupted_generation_goes_on_from_its_tokens_with_the_new_version(house, stream):
    (attempt,) = await house.attempts()
    whole = answer("one two three")

    def script(prompt, call):
        return Scripted(whole, stall_at=5) if call == 1 else Scripted(whole[len(house.engine.log[0].answer) :])

    house.engine.script = script
    asking = ask(house, attempt.key, stream=stream)
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 5)
    closed = await close(house, CloseMode.INTERRUPT)
    assert (closed.state, closed.in_flight) == (TurnstileState.CLOSED, 0)
    await until(lambda: held(house) == 1)
    house.engine.version = Version(0, 1)
    await house.admin(open_turnstile("r", "trainer"))
    if stream:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in await asking if chunk.choices])
    else:
        text = (await asking).choices[0].message.content
    assert text == "one two three"
    (node,) = await house.nodes()
    versions = [Version(0, 0).pack()] * 5 + [Version(0, 1).pack()] * (len(whole) - 5)
    assert list(memoryview(node.versions).cast("i")) == versions
    assert list(memoryview(node.answer).cast("i")) == whole
    assert house.engine.log[1].prompt == house.engine.log[0].prompt + whole[:5]
    assert (await house.admin(get_totals("r"))).sampled_tokens == house.engine.sampled_tokens == len(whole)


async def test_a_restarted_gateway_keeps_it_closed(house):
    (attempt,) = await house.attempts()
    await close(house)
    await house.restart()
    asking = ask(house, attempt.key)
    await until(lambda: held(house) == 1)
    await house.admin(open_turnstile("r", "trainer"))
    assert (await asking).choices[0].message.content == "answer 1"


async def test_only_its_owner_opens_renews_or_closes_it_again(house):
    first = await close(house)
    for request in (
        close_turnstile("r", "another", CloseMode.FINISH),
        renew_turnstile("r", "another"),
        open_turnstile("r", "another"),
    ):
        with pytest.raises(ApiError, match="closed by trainer") as refused:
            await house.admin(request)
        assert refused.value.status == 409
    renewed = await house.admin(renew_turnstile("r", "trainer"))
    assert renewed.lease_until > first.lease_until
    assert renewed.since == (await close(house)).since == first.since
    await house.admin(open_turnstile("r", "trainer"))
    await house.admin(open_turnstile("r", "whoever"))
    with pytest.raises(ApiError, match="is open"):
        await house.admin(renew_turnstile("r", "trainer"))
    with pytest.raises(ApiError, match="no run x"):
        await house.admin(close_turnstile("x", "trainer", CloseMode.FINISH))


async def test_another_owner_takes_over_when_the_first_is_gone(house):
    first = await close(house, lease_s=0.1)
    await asyncio.sleep(0.2)
    assert (await house.admin(get_turnstile("r"))).lease_until < time.time()
    taken = await close(house, owner="another")
    assert (taken.owner, taken.since) == ("another", first.since)


async def test_a_turnstile_whose_owner_is_gone_opens_in_the_end(house, monkeypatch):
    monkeypatch.setattr(peers, "OWNER_GRACE_S", 0.1)
    monkeypatch.setattr(peers, "BEAT_S", 0.1)
    await house.restart()
    (attempt,) = await house.attempts()
    await close(house, lease_s=0.1)
    assert (await ask(house, attempt.key)).choices[0].message.content == "answer 1"
    assert (await house.admin(get_turnstile("r"))).state == TurnstileState.OPEN


async def test_a_client_that_leaves_while_it_is_held_asks_no_engine(house):
    (attempt,) = await house.attempts()
    await close(house)
    asking = ask(house, attempt.key)
    await until(lambda: held(house) == 1)
    asking.cancel()
    await until(lambda: held(house) == 0)
    await house.admin(open_turnstile("r", "trainer"))
    assert (await ask(house, attempt.key)).choices[0].message.content == "answer 1"
    totals = await house.admin(get_totals("r"))
    assert (totals.calls, totals.interrupted, totals.answers, len(house.engine.log)) == (2, 1, 1, 1)


async def test_an_interrupted_generation_whose_client_leaves_keeps_its_tokens(house):
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: (
        Scripted(answer("one two"), stall_at=3) if call == 1 else answer(" go on")
    )
    asking = ask(house, attempt.key)
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 3)
    await close(house, CloseMode.INTERRUPT)
    asking.cancel()
    await until(lambda: held(house) == 0)
    await house.admin(open_turnstile("r", "trainer"))
    assert (await ask(house, attempt.key)).choices[0].message.content == "one go on"
    (node,) = await house.nodes()
    assert list(memoryview(node.answer).cast("i"))[:3] == ids("one")


async def test_an_attempt_can_end_while_its_call_is_held(house):
    (attempt,) = await house.attempts()
    await close(house)
    asking = ask(house, attempt.key)
    await until(lambda: held(house) == 1)
    began = time.monotonic()
    ended = await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.AGENT_TIMEOUT), 3))
    assert (ended.outcome, time.monotonic() - began < 10) == (Outcome.AGENT_TIMEOUT, True)
    await asyncio.gather(asking, return_exceptions=True)
    assert held(house) == 0


async def test_held_time_is_told(house):
    (attempt,) = await house.attempts()
    assert await house.admin(get_held_seconds(attempt.rollout, 1)) == 0
    await close(house)
    await asyncio.sleep(0.2)
    assert 0.2 <= await house.admin(get_held_seconds(attempt.rollout, 1)) < 10
    await house.admin(open_turnstile("r", "trainer"))
    told = await house.admin(get_held_seconds(attempt.rollout, 1))
    assert 0.2 <= told < 10
    (late,) = await house.attempts(group="late")
    assert await house.admin(get_held_seconds(late.rollout, 1)) == 0
    await asyncio.sleep(0.1)
    assert await house.admin(get_held_seconds(attempt.rollout, 1)) == told


async def test_what_was_opened_while_it_was_drained_stays_open(house):
    """Its owner was interrupted, say: its request to close still waits when it opens."""
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: (
        Scripted(answer("slow"), stall_at=2, stall_s=1) if call == 1 else answer(".")
    )
    asking = ask(house, attempt.key)
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 2)
    closing = asyncio.create_task(close(house))
    await until(lambda: house.turnstiles.is_closed("r"))
    await house.admin(open_turnstile("r", "trainer"))
    assert (await closing).state == TurnstileState.OPEN
    assert (await house.admin(get_turnstile("r"))).state == TurnstileState.OPEN
    await asking
