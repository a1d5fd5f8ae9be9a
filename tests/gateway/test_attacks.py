"""What went wrong once, each with its whole kind: odd values, odd timing, requests that are nearly the same."""

import asyncio
import time

import httpx
import openai
import pytest
from scripted_engine import Scripted
from test_exchange import USER, ask_and_leave, finish_what_runs, say, told
from texts import STOP, answer, ids

from harnessed.client import get_totals
from harnessed.gateway import intake
from harnessed.records import Dialect


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


async def post(house, key, body, headers=()):
    headers = [("authorization", f"Bearer {key}"), *headers]
    async with httpx.AsyncClient(timeout=20) as http:
        return await http.post(f"{house.url}/v1/chat/completions", json=body, headers=headers)


RETRY = [("x-stainless-retry-count", "1")]
ODD = ['{"x": 1e30}', '{"x": 123456789012345678901234}', '{"x": 1e400}', "[" * 300 + "]" * 300, "[" * 2000 + "]" * 2000]


@pytest.mark.parametrize("arguments", ODD, ids=range(len(ODD)))
async def test_odd_arguments_of_an_engine_are_kept_and_known_again(house, arguments):
    await house.make_run(speaks=Dialect.CHAT)
    function = {"name": "bash", "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    house.engine.script = lambda prompt, call: Scripted(answer("ok"), message=message)
    (attempt,) = await house.attempts()
    first = (await say(house, attempt.key, [USER])).choices[0].message.to_dict()
    await house.restart()
    await say(house, attempt.key, [USER, first, USER])
    assert [node.follows for node in await house.nodes()] == [0, 1]


@pytest.mark.parametrize("arguments", ODD, ids=range(len(ODD)))
async def test_odd_arguments_of_a_harness_are_served(house, arguments):
    (attempt,) = await house.attempts()
    call = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    for _ in range(2):
        await say(house, attempt.key, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": [USER, {"role": "assistant", "content": "hi", "extra": nested(300)}, USER]}, 400),
        ({"messages": [USER], "metadata": nested(300)}, 400),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c", "function": "x"}]}, USER]}, 200),
    ],
)
async def test_what_cannot_be_kept_is_refused_and_harms_no_neighbour(house, body, status):
    (attempt,) = await house.attempts()
    house.engine.paused, house.engine.interruptible = True, False
    neighbours = [asyncio.create_task(say(house, attempt.key, [{"role": "user", "content": str(i)}])) for i in range(3)]
    await asyncio.sleep(0.1)
    asking = asyncio.create_task(post(house, attempt.key, body))
    await asyncio.sleep(0.1)
    house.engine.paused = False
    assert (await asking).status_code == status
    await asyncio.gather(*neighbours)
    totals = await house.admin(get_totals("r"))
    assert (totals.calls, totals.sampled_tokens) == (3 + (status == 200), house.engine.sampled_tokens)


@pytest.mark.parametrize("count", [b"\xb2", b"9" * 5000, b"-1", b"x"])
async def test_a_retry_count_that_is_none_is_none(house, count):
    (attempt,) = await house.attempts()
    response = await post(house, attempt.key, {"messages": [USER]}, [(b"x-stainless-retry-count", count)])
    assert response.status_code == 200


async def test_an_engine_that_ends_in_a_way_that_nobody_knows_has_failed(house):
    house.engine.script = lambda prompt, call: Scripted(answer("ok"), finish="weird")
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError, match="no answer of the protocol"):
        await say(house, attempt.key, [USER])


async def test_another_stop_or_length_is_another_call(house):
    """The answer that was made for one is not given to the other."""
    house.engine.script = lambda prompt, call: ids("one END") if call == 1 else answer("one and more")
    (attempt,) = await house.attempts()
    house.engine.paused, house.engine.interruptible = True, False
    asking = asyncio.create_task(say(house, attempt.key, [USER], stop=["END"]))
    while not house.engine.log:
        await asyncio.sleep(0.01)
    asking.cancel()
    await house.left()
    await finish_what_runs(house)
    assert told(await say(house, attempt.key, [USER]))["content"] == "one and more"
    await house.restart()
    assert told(await say(house, attempt.key, [USER], stop=["END"]))["content"] == "one "
    assert len(house.engine.log) == 2


async def test_what_was_broken_off_is_gone_on_with_for_the_same_request_only(house):
    scripted = [Scripted(ids("0123456789"), finish="interrupted"), Scripted(status=500), answer("ab"), answer("!")]
    house.engine.script = lambda prompt, call: scripted[call - 1]
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER])
    assert told(await say(house, attempt.key, [USER], max_tokens=3))["content"] == "ab"
    assert told(await say(house, attempt.key, [USER]))["content"] == "0123456789!"


async def test_broken_off_after_its_stop_it_is_whole(house):
    house.engine.script = lambda prompt, call: Scripted(answer("done"), finish="interrupted")
    (attempt,) = await house.attempts()
    completion = await say(house, attempt.key, [USER])
    assert (told(completion)["content"], completion.choices[0].finish_reason) == ("done", "stop")
    assert len(house.engine.log) == 1


async def test_half_of_an_answer_is_no_answer_of_another_request(house):
    """One of two failed; after a restart nobody gets the other one, which was asked for together with it."""
    house.engine.script = lambda prompt, call: answer("a1") if call == 1 else Scripted(status=500)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER], n=2)
    await house.restart()
    house.engine.script = lambda prompt, call: answer("new")
    assert told(await say(house, attempt.key, [USER]))["content"] == "new"


async def test_answers_of_one_call_arrive_together(house):
    """One is repeated, so the other came as well; it is not given to somebody else after a restart."""
    house.engine.script = lambda prompt, call: answer(f"answer {call}")
    (attempt,) = await house.attempts()
    house.engine.paused, house.engine.interruptible = True, False
    asking = asyncio.create_task(say(house, attempt.key, [USER], n=2))
    while len(house.engine.log) < 2:
        await asyncio.sleep(0.01)
    asking.cancel()
    await house.left()
    await finish_what_runs(house, answers=2)
    await say(house, attempt.key, [USER, {"role": "assistant", "content": "answer 1"}, USER])
    assert [node.delivered for node in await house.nodes()] == [True, True, True]
    await house.restart()
    assert told(await say(house, attempt.key, [USER]))["content"] == "answer 4"


async def test_a_call_that_two_wait_for_is_not_given_to_a_third(house):
    """A retry joined it before the first client was seen to leave."""
    (attempt,) = await house.attempts()
    house.engine.paused, house.engine.interruptible = True, False
    first = asyncio.create_task(say(house, attempt.key, [USER]))
    while not house.engine.log:
        await asyncio.sleep(0.01)
    second = asyncio.create_task(post(house, attempt.key, {"messages": [USER]}, RETRY))
    await asyncio.sleep(0.1)
    first.cancel()
    await asyncio.sleep(0.1)
    third = asyncio.create_task(say(house, attempt.key, [USER]))
    await asyncio.sleep(0.1)
    house.engine.paused = False
    assert (await second).json()["id"] != (await third).id
    assert len(house.engine.log) == 2


async def test_a_retry_meets_its_call_also_while_the_encoder_is_busy(house):
    (attempt,) = await house.attempts(max_tokens=20)
    await house.make_run(context=100_000)
    house.engine.context = 200_000
    body = {"messages": [{"role": "user", "content": "x" * intake.ASIDE_BYTES}]}
    house.exchange._intake._encoder.submit(time.sleep, 1)
    first = asyncio.create_task(post(house, attempt.key, body))
    await asyncio.sleep(0.3)
    first.cancel()
    await asyncio.sleep(0.1)
    again = await post(house, attempt.key, body, RETRY)
    assert again.status_code == 200
    assert len(house.engine.log) == 1


async def test_a_stop_that_the_tokenizer_does_not_know_goes_on(house):
    config = house.policy / "generation_config.json"
    config.write_text(config.read_text().replace(str(STOP), f"[{STOP}, 9999]"))
    await house.restart()
    house.engine.script = lambda prompt, call: [*ids("hm"), 9999]
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, told(first), USER])
    assert [node.cut for node in await house.nodes()] == [0, 1]


async def test_a_policy_that_is_damaged_later_is_named(house):
    (attempt,) = await house.attempts()
    (house.policy / "chat_template.jinja").write_text("{% if %}")
    await house.restart()
    with pytest.raises(openai.InternalServerError, match="does not compile"):
        await say(house, attempt.key, [USER])


async def test_a_client_that_leaves_twice_gets_its_answer_the_third_time(house):
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key)
    again = asyncio.create_task(say(house, attempt.key, [USER]))
    await asyncio.sleep(0.1)
    again.cancel()
    await house.left()
    house.engine.paused = False
    assert told(await say(house, attempt.key, [USER]))["content"] == "answer 1"
