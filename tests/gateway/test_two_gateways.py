"""Two gateways on one PostgreSQL database: whichever a call comes to, both behave as one."""

import asyncio
import time
from random import Random

import openai
import postgres
import pytest
from house import open_house
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import Scripted
from test_random_harness import ACTS, EXAMPLES, play_attempts
from texts import answer

from harnessed.client import (
    AsyncClient,
    cancel_rollout,
    claim,
    close_turnstile,
    create_groups,
    end_attempt,
    get_rollout,
    get_status,
    get_totals,
    get_transcripts,
    get_turnstile,
    list_changes,
    open_turnstile,
)
from harnessed.gateway.keys import ADMIN
from harnessed.records import CloseMode, Ending, GroupSpec, Outcome, TurnstileState
from harnessed.training.samples import build

QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def house(tmp_path, database):
    async with open_house(tmp_path, database=database) as house:
        await house.engine_known()
        yield house


def client(house, which, key, **settings):
    return house.openai(key, **settings).with_options(base_url=f"{house.urls[which]}/v1")


async def ask(house, which, key, messages=QUESTION, *, retry=0, **settings):
    """The text of the answer; `retry`: how often the request was sent before."""
    headers = {"x-stainless-retry-count": str(retry)} if retry else {}
    completions = client(house, which, key).chat.completions
    made = await completions.create(model="m", messages=list(messages), extra_headers=headers, **settings)
    return made.choices[0].message.content


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_conversation_that_alternates_is_one_row(house):
    (attempt,) = await house.attempts()
    messages = list(QUESTION)
    for turn in range(6):
        text = await ask(house, turn % 2, attempt.key, messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn}"}]
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    nodes = await house.nodes()
    assert [node.parent for node in nodes] == [0, 1, 2, 3, 4, 5]
    assert all(node.delivered for node in nodes)


async def test_parallel_calls_at_both_are_all_recorded(house):
    (attempt,) = await house.attempts()
    asked = [
        ask(house, number % 2, attempt.key, [{"role": "user", "content": f"question {number}"}]) for number in range(40)
    ]
    texts = await asyncio.gather(*asked)
    nodes = await house.nodes()
    assert [node.number for node in nodes] == list(range(1, 41))
    assert {node.message["content"] for node in nodes} == set(texts)
    assert len(set(texts)) == 40


async def test_the_same_request_at_both_at_once_is_two_samples(house):
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=0.3)
    texts = await asyncio.gather(ask(house, 0, attempt.key), ask(house, 1, attempt.key))
    assert len(set(texts)) == 2


async def test_a_retry_at_the_other_gets_the_answer_that_is_being_made(house):
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=0.5)
    first = asyncio.create_task(ask(house, 0, attempt.key))
    await until(lambda: house.engine.log)
    await asyncio.sleep(0.1)  # its row is committed
    assert await ask(house, 1, attempt.key, retry=1) == "answer 1"
    assert await first == "answer 1"
    assert len(house.engine.log) == 1


async def test_a_retry_at_the_other_goes_on_with_what_a_client_left(house):
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: (
        Scripted(answer("one two"), stall_at=4) if call == 1 else answer(" and on")
    )
    first = asyncio.create_task(ask(house, 0, attempt.key))
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 4)
    first.cancel()
    await until(lambda: house.engine.log[0].finish)
    await asyncio.sleep(0.2)
    assert await ask(house, 1, attempt.key) == "one  and on"
    (node,) = await house.nodes()
    assert house.engine.log[1].prompt == house.engine.log[0].prompt + house.engine.log[0].answer
    assert (await house.admin(get_totals("r"))).sampled_tokens == node.sampled == house.engine.sampled_tokens


async def test_an_answer_whose_client_left_is_replayed_by_the_other(house):
    (attempt,) = await house.attempts()
    house.engine.interruptible = False
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=0.3)
    first = asyncio.create_task(ask(house, 0, attempt.key))
    await until(lambda: house.engine.log)
    first.cancel()
    await until(lambda: house.engine.log[0].finish)
    await asyncio.sleep(0.2)
    assert await ask(house, 1, attempt.key) == "answer 1"
    assert len(house.engine.log) == 1


async def test_limits_count_the_calls_of_both(house):
    await house.make_run(calls=3)
    (attempt,) = await house.attempts()
    for number in range(3):
        await ask(house, number % 2, attempt.key, [{"role": "user", "content": f"{number}"}])
    for which in (0, 1):
        with pytest.raises(openai.PermissionDeniedError, match="3 calls"):
            await ask(house, which, attempt.key)


async def test_an_attempt_that_one_ends_is_ended_at_the_other(house):
    (attempt,) = await house.attempts()
    await ask(house, 1, attempt.key)
    await house.admin(cancel_rollout(attempt.rollout))
    with pytest.raises(openai.PermissionDeniedError, match="has ended"):
        await ask(house, 1, attempt.key)


async def test_what_the_other_generates_is_recorded_before_an_attempt_ends(house):
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: Scripted(answer("long answer"), stall_at=4)
    asking = asyncio.create_task(ask(house, 1, attempt.key))
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 4)
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.AGENT_TIMEOUT, reward=0.0), 3))
    await asyncio.gather(asking, return_exceptions=True)
    totals = await house.admin(get_totals("r"))
    assert totals.sampled_tokens == house.engine.sampled_tokens == 4
    assert totals.lost == 0


@pytest.mark.parametrize("mode", CloseMode)
async def test_a_turnstile_is_closed_at_both(house, mode):
    (attempt,) = await house.attempts()
    stalls = {"stall_at": 4, "stall_s": 3 if mode == CloseMode.FINISH else 30}
    house.engine.script = lambda prompt, call: Scripted(answer("long answer"), **stalls) if call == 1 else answer(".")
    running = asyncio.create_task(ask(house, 1, attempt.key))
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 4)
    closing = await house.admin(close_turnstile("r", "trainer", mode, drain_s=0))
    assert closing.state == TurnstileState.CLOSING or mode == CloseMode.INTERRUPT
    closed = await house.admin(close_turnstile("r", "trainer", mode, drain_s=10))
    assert (closed.state, house.engine.running) == (TurnstileState.CLOSED, 0)
    async with AsyncClient(house.urls[1], house.keys.sign(ADMIN)) as other:
        assert (await other(get_turnstile("r"))).state == TurnstileState.CLOSED
        held = [
            asyncio.create_task(ask(house, which, attempt.key, [{"role": "user", "content": "x"}])) for which in (0, 1)
        ]
        await asyncio.sleep(0.5)
        assert len(house.engine.log) == 1
        assert not any(each.done() for each in held)
        await other(open_turnstile("r", "trainer"))
    await asyncio.gather(running, *held)
    assert (await house.admin(get_totals("r"))).sampled_tokens == house.engine.sampled_tokens


async def test_each_wakes_those_who_wait_for_changes_at_the_other(house):
    async with AsyncClient(house.urls[1], house.keys.sign(ADMIN)) as other:
        waiting = asyncio.create_task(other(list_changes("r", 0, wait_s=20)))
        claiming = asyncio.create_task(other(claim("r", "waits", 1, 3, wait_s=20)))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await house.admin(create_groups([GroupSpec(id="new", run="r", task={}, n=1)]))
        assert (await waiting)[0].id == "new.0"
        (claimed,) = await claiming
        assert time.monotonic() - began < 10
    assert (await house.admin(get_rollout(claimed.rollout))).attempt == 1


async def test_a_gateway_that_is_taken_for_dead_records_no_more(house, monkeypatch):
    """It stood still for longer than its lease, say. What it had admitted is lost, and its clients ask again."""
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=1 if call == 1 else 0)
    asking = asyncio.create_task(ask(house, 1, attempt.key))
    await until(lambda: house.engine.log)
    await asyncio.sleep(0.1)
    await house.bury("second")
    with pytest.raises(openai.InternalServerError, match=r"lost|again"):
        await asking
    assert await ask(house, 1, attempt.key) == "answer 2"
    totals = await house.admin(get_totals("r"))
    assert (totals.lost, totals.answers) == (1, 1)
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    assert sum(build(transcript).fates.values()) == totals.sampled_tokens


@settings(max_examples=max(EXAMPLES // 3, 1), deadline=None, suppress_health_check=list(HealthCheck))
@given(acts=st.lists(st.sampled_from(ACTS), max_size=8), seed=st.integers(0, 2**32))
async def test_any_mix_of_what_harnesses_do_keeps_the_books(house, acts, seed):
    """Each call goes to either of them."""
    await play_attempts(house, [acts], Random(seed), chats=False)


async def test_both_tell_of_both_and_each_of_its_own_calls(house):
    house.engine.script = lambda prompt, number: Scripted(answer("late"), delay_s=30)
    (attempt,) = await house.attempts()
    closed = await house.admin(close_turnstile("r", "trainer", CloseMode.FINISH, drain_s=10))
    assert closed.state == TurnstileState.CLOSED  # at both
    call = asyncio.create_task(ask(house, 1, attempt.key))
    async with AsyncClient(house.urls[1], house.keys.sign(ADMIN)) as second:
        async with asyncio.timeout(10):
            held = ["the turnstile, closed by trainer"]  # after it has waited for the store
            theirs = await second(get_status())
            while [each.what for each in theirs.waiting] != held:
                await asyncio.sleep(0.01)
                theirs = await second(get_status())
        ours = await house.admin(get_status())
    assert ours.waiting == [] and ours.turnstiles == theirs.turnstiles != []
    assert [each.id.partition("-")[0] for each in ours.gateways] == ["first", "second"]
    assert ours.gateways == theirs.gateways and ours.controllers == theirs.controllers
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_request_that_waits_at_a_gateway_that_is_taken_for_dead_is_asked_again(house):
    """Its attempt goes on: only what this gateway has of it in memory is of no use any more."""
    (attempt,) = await house.attempts()
    house.engine.interruptible = False
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=2 if call == 1 else 0)
    first = asyncio.create_task(ask(house, 1, attempt.key))
    await until(lambda: house.engine.log)
    first.cancel()
    await asyncio.sleep(0.2)  # it is being interrupted
    again = asyncio.create_task(
        client(house, 1, attempt.key, max_retries=5).chat.completions.create(model="m", messages=QUESTION)
    )
    await asyncio.sleep(0.2)  # it waits for that
    await house.bury("second")
    assert (await again).choices[0].message.content == "answer 2"


async def test_a_server_that_is_killed_and_started_again_is_waited_for(tmp_path):
    """Calls in progress, and calls that come meanwhile, see no error, and no token is lost."""
    with postgres.server() as server:
        async with open_house(tmp_path, database=server.url) as house:
            await house.engine_known()
            attempts = await house.attempts(4)
            house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=1)
            begun = [asyncio.create_task(ask(house, i % 2, attempts[i].key)) for i in range(2)]
            await until(lambda: len(house.engine.log) == 2)
            await asyncio.to_thread(server.kill)
            come = [asyncio.create_task(ask(house, i % 2, attempts[i].key)) for i in (2, 3)]
            await asyncio.sleep(2)
            assert not any(each.done() for each in come)
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(30):
                assert len(set(await asyncio.gather(*begun, *come))) == 4
            totals = await house.admin(get_totals("r"))
            assert (totals.lost, totals.answers, totals.sampled_tokens) == (0, 4, house.engine.sampled_tokens)


async def test_an_attempt_that_one_ends_has_the_marks_of_the_other(house, monkeypatch):
    """The other's write that an answer was delivered comes late."""
    (attempt,) = await house.attempts()
    other = house.exchanges[1]
    marking = other._delivered

    def late(session, pending):
        asyncio.get_running_loop().call_later(0.3, marking, session, pending)

    monkeypatch.setattr(other, "_delivered", late)
    await ask(house, 1, attempt.key)
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (node,) = await house.nodes()
    assert node.delivered
