"""Model calls through a real gateway: exact tokens, durable answers, retries, limits. The engine is scripted."""

import asyncio
import json
import threading
import time

import httpx
import numpy as np
import openai
import pytest
from policies import make_policy
from scripted_engine import Scripted
from texts import answer, ids, text

from harnessed.client import (
    ApiError,
    append_event,
    cancel_group,
    claim,
    create_run,
    end_attempt,
    get_rollout,
    get_totals,
    get_transcripts,
    post_reward,
)
from harnessed.gateway import api, catchup, delivery, intake, lifecycle, sampling
from harnessed.gateway.keys import Key, Scope
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.wire.turn import WireError
from harnessed.records import Dialect, Ending, Event, Fate, Outcome, Reward, RunSpec, SideCall, Version
from harnessed.training.samples import build

USER = {"role": "user", "content": "hello"}


async def say(house, key, messages, **options):
    return await house.openai(key).chat.completions.create(model="any-name", messages=messages, **options)


def told(completion):
    """The assistant message as a harness sends it back."""
    message = completion.choices[0].message
    thought = {"reasoning_content": message.reasoning_content} if hasattr(message, "reasoning_content") else {}
    return {"role": "assistant", "content": message.content} | thought


async def talk(house, key, turns: int):
    """A linear conversation; returns the last request's messages."""
    messages = [USER]
    for turn in range(turns):
        messages.append(told(await say(house, key, messages)))
        messages.append({"role": "user", "content": f"turn {turn}"})
    return messages[:-1]


async def ask_and_leave(house, key, messages=None):
    """A client that goes away while its answer is being generated. The engine stays paused in the middle of it, and
    nobody can interrupt it there."""
    house.engine.paused, house.engine.interruptible = True, False
    before, still = len(house.engine.log), house.clients
    asking = asyncio.create_task(say(house, key, messages or [USER]))
    while len(house.engine.log) == before:
        await asyncio.sleep(0.01)
    asking.cancel()
    await house.left(still)


async def finish_what_runs(house, answers=1):
    house.engine.paused = False
    while (await house.admin(get_totals("r"))).answers < answers:
        await asyncio.sleep(0.01)


def arrays(node):
    return np.frombuffer(node.segment, np.int32).tolist(), np.frombuffer(node.answer, np.int32).tolist()


async def test_an_answer_carries_text_usage_and_the_name_that_was_asked_for(house):
    (attempt,) = await house.attempts()
    completion = await say(house, attempt.key, [USER], user="kept", extra_body={"foo": [1]})
    assert completion.model == "any-name"
    assert completion.choices[0].message.content == "answer 1"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.prompt_tokens == len(house.engine.log[0].prompt)
    assert completion.usage.completion_tokens == len(answer("answer 1"))


async def test_each_turn_continues_from_the_sampled_tokens(house):
    """The engine's prompt is its earlier prompt, its own answer token for token, and the new segment."""
    house.engine.script = lambda prompt, call: answer(f"  spaced  {call}\n")
    (attempt,) = await house.attempts()
    await talk(house, attempt.key, 3)
    first, second, third = house.engine.log
    between = "\n<|im_start|>user\nturn {}<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt == first.prompt + first.answer + ids(between.format(0))
    assert third.prompt == second.prompt + second.answer + ids(between.format(1))


async def test_an_odd_tokenisation_survives_the_harness(house):
    """A sampled text can be tokenised in several ways; what was sampled is continued, not what encoding would give."""
    special = house.engine.log  # the byte tokenizer has one way; a token that decodes to nothing makes a second one
    house.engine.script = lambda prompt, call: [ids("a")[0], ids("<|im_start|>")[0], ids("b")[0], *answer("")]
    (attempt,) = await house.attempts()
    await talk(house, attempt.key, 2)
    assert special[1].prompt[len(special[0].prompt) :][:4] == special[0].answer


async def test_a_linear_conversation_is_stored_as_a_chain_and_gives_one_row(house):
    (attempt,) = await house.attempts()
    await talk(house, attempt.key, 3)
    nodes = await house.nodes()
    assert [(node.number, node.parent, node.delivered) for node in nodes] == [(1, 0, True), (2, 1, True), (3, 2, True)]
    context = []
    for node, call in zip(nodes, house.engine.log, strict=True):
        segment, sampled = arrays(node)
        assert context + segment == call.prompt
        assert sampled == call.answer
        expected = np.float32(house.engine.logprobs(node.number, len(sampled)))
        assert np.array_equal(np.frombuffer(node.logprobs, np.float32), expected)
        context = call.prompt + call.answer
    assert [message["content"] for message in nodes[1].messages] == ["turn 0"]


@pytest.mark.parametrize(
    "rewritten",
    [
        lambda m: m | {"content": [{"type": "text", "text": m["content"]}]},
        lambda m: m | {"content": m["content"].strip()},
        lambda m: m | {"reasoning_content": None, "refusal": None, "tool_calls": None},
        lambda m: m | {"content": [{"type": "text", "text": m["content"], "cache_control": {"type": "ephemeral"}}]},
    ],
    ids=["blocks", "stripped", "nulls", "cache_control"],
)
async def test_an_answer_is_recognised_in_the_shapes_that_harnesses_give_it(house, rewritten):
    house.engine.script = lambda prompt, call: answer("\n  text \n")
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, rewritten(told(first)), {"role": "user", "content": "go on"}])
    assert house.engine.log[1].prompt[: len(house.engine.log[0].prompt) + len(house.engine.log[0].answer)] == (
        house.engine.log[0].prompt + house.engine.log[0].answer
    )
    assert [node.parent for node in await house.nodes()] == [0, 1]


async def test_a_changed_prompt_message_is_another_conversation(house):
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [{"role": "user", "content": "hello "}, told(first), USER])
    assert [node.parent for node in await house.nodes()] == [0, 0]
    assert "hello <|im_end|>" in text(house.engine.log[1].prompt)


async def test_a_dropped_answer_is_a_branch_and_every_delivered_token_is_trained_once(house):
    """mini-swe-agent drops an answer that it cannot parse and sends a complaint instead."""
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, told(first), USER])
    await say(house, attempt.key, [USER, told(first), USER, {"role": "user", "content": "no action found"}])
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    assert [node.parent for node in await house.nodes()] == [0, 1, 1]
    (transcript,) = await house.admin(get_transcripts("g"))
    sample = build(transcript)
    assert len(sample.rows) == 2
    assert sample.trained_tokens == house.engine.sampled_tokens
    contexts = [call.prompt for call in house.engine.log]
    for row in sample.rows:
        for start in np.flatnonzero(np.diff(np.concatenate([[0], row.trained])) == 1):
            assert row.tokens[:start].tolist() in contexts


async def test_an_answer_that_was_cut_by_length_is_closed_in_the_next_segment(house):
    house.engine.script = lambda prompt, call: Scripted(ids("cut off"), finish="length")
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    assert first.choices[0].finish_reason == "length"
    await say(house, attempt.key, [USER, told(first), USER])
    before = house.engine.log[0].prompt + house.engine.log[0].answer
    assert text(house.engine.log[1].prompt[len(before) :]).startswith("<|im_end|>\n<|im_start|>user\n")


async def test_n_answers_are_n_siblings(house):
    house.engine.script = lambda prompt, call: answer(f"choice {call}")
    (attempt,) = await house.attempts()
    completion = await say(house, attempt.key, [USER], n=3)
    texts = [choice.message.content for choice in completion.choices]
    assert sorted(texts) == ["choice 1", "choice 2", "choice 3"]
    assert len({call.seed for call in house.engine.log}) == 3
    await say(house, attempt.key, [USER, {"role": "assistant", "content": texts[1]}, USER])
    nodes = await house.nodes()
    assert [(node.number, node.parent) for node in nodes] == [(1, 0), (2, 0), (3, 0), (4, 2)]


async def test_an_identical_request_is_a_second_sample(house):
    (attempt,) = await house.attempts()
    first, second = await asyncio.gather(say(house, attempt.key, [USER]), say(house, attempt.key, [USER]))
    assert {told(first)["content"], told(second)["content"]} == {"answer 1", "answer 2"}


async def test_a_client_that_left_gets_the_answer_that_was_made_for_it(house):
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key)
    while_it_runs = asyncio.create_task(say(house, attempt.key, [USER]))
    await asyncio.sleep(0.2)
    house.engine.paused = False
    assert told(await while_it_runs)["content"] == "answer 1"
    assert len(house.engine.log) == 1
    assert [node.delivered for node in await house.nodes()] == [True]


async def test_a_finished_answer_that_nobody_took_is_replayed(house):
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key)
    await finish_what_runs(house)
    assert [node.delivered for node in await house.nodes()] == [False]
    assert told(await say(house, attempt.key, [USER]))["content"] == "answer 1"
    assert [node.delivered for node in await house.nodes()] == [True]
    assert told(await say(house, attempt.key, [USER]))["content"] == "answer 2"


async def test_the_transcript_goes_on_after_a_restart(house):
    (attempt,) = await house.attempts()
    messages = await talk(house, attempt.key, 2)
    await house.restart()
    await say(house, attempt.key, [*messages, USER])
    nodes = await house.nodes()
    assert [node.parent for node in nodes] == [0, 1, 2]
    before = house.engine.log[1].prompt + house.engine.log[1].answer
    assert house.engine.log[2].prompt[: len(before)] == before


async def test_after_a_restart_an_answer_without_a_mark_is_replayed(house):
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key)
    await finish_what_runs(house)
    await house.restart()
    assert told(await say(house, attempt.key, [USER]))["content"] == "answer 1"
    assert len(house.engine.log) == 1


async def test_a_repeated_answer_was_delivered(house):
    """The mark can be lost; a request that repeats the answer proves that it arrived."""
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key)
    await finish_what_runs(house)
    await say(house, attempt.key, [USER, {"role": "assistant", "content": "answer 1"}, USER])
    assert [node.delivered for node in await house.nodes()] == [True, True]


async def test_versions_are_the_engines_stamp(house):
    house.engine.version = Version(1, 7)
    (attempt,) = await house.attempts()
    await say(house, attempt.key, [USER])
    (node,) = await house.nodes()
    assert set(np.frombuffer(node.versions, np.int32).tolist()) == {Version(1, 7).pack()}


async def test_the_run_decides_how_answers_are_sampled(house):
    (attempt,) = await house.attempts(temperature=0.5, top_p=0.9, max_tokens=20)
    await say(house, attempt.key, [USER], temperature=0.1, top_p=0.2, max_tokens=100)
    await say(house, attempt.key, [USER], max_completion_tokens=3)
    assert [(call.temperature, call.top_p, call.max_tokens) for call in house.engine.log] == [
        (0.5, 0.9, 20),
        (0.5, 0.9, 3),
    ]


async def test_the_same_group_seed_draws_the_same_numbers(house):
    seeds = []
    for group in ("g1", "g2"):
        (attempt,) = await house.attempts(group=group)
        await talk(house, attempt.key, 2)
        seeds.append([call.seed for call in house.engine.log[-2:]])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


async def test_a_context_too_long_is_refused_in_words_that_harnesses_know(house):
    (attempt,) = await house.attempts()
    with pytest.raises(openai.BadRequestError) as refusal:
        await say(house, attempt.key, [{"role": "user", "content": "x" * 3000}])
    assert refusal.value.code == "context_length_exceeded"
    assert "maximum context length is 2000 tokens" in refusal.value.message
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.AGENT_EXIT, reason="exit status 1"), 3))
    rollout = await house.admin(get_rollout(attempt.rollout))
    assert rollout.outcome == Outcome.BUDGET
    assert "context limit" in rollout.reason


async def test_an_answer_fits_into_what_is_left_of_the_context(house):
    (attempt,) = await house.attempts(max_tokens=1000)
    await say(house, attempt.key, [{"role": "user", "content": "x" * 1900}])
    (call,) = house.engine.log
    assert len(call.prompt) + call.max_tokens == 2000


async def test_calls_beyond_the_limit_are_refused_and_not_retried(house):
    await house.make_run(calls=2)
    (attempt,) = await house.attempts()
    await talk(house, attempt.key, 2)
    with pytest.raises(openai.PermissionDeniedError, match="2 calls"):
        await house.openai(attempt.key, max_retries=3).chat.completions.create(model="m", messages=[USER])
    assert len(house.engine.log) == 2
    assert (await house.admin(get_totals("r"))).calls == 2


async def test_an_engine_that_fails_is_not_the_agents_fault(house):
    house.engine.script = lambda prompt, call: Scripted(status=500)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError, match="scripted failure"):
        await say(house, attempt.key, [USER])
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.AGENT_EXIT, reason="exit status 1"), 1))
    rollout = await house.admin(get_rollout(attempt.rollout))
    assert rollout.outcome == Outcome.INFRASTRUCTURE
    assert "scripted failure" in rollout.reason
    totals = await house.admin(get_totals("r"))
    assert (totals.calls, totals.answers, totals.lost) == (1, 0, 1)


async def test_what_failed_and_was_overcome_does_not_decide_the_outcome(house):
    house.engine.script = lambda prompt, call: Scripted(status=500) if call == 1 else answer("fine")
    (attempt,) = await house.attempts()
    completion = await house.openai(attempt.key, max_retries=2).chat.completions.create(model="m", messages=[USER])
    assert told(completion)["content"] == "fine"
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.AGENT_EXIT, reason="exit status 1"), 1))
    assert (await house.admin(get_rollout(attempt.rollout))).outcome == Outcome.AGENT_EXIT


async def test_a_finished_attempt_is_refused_with_the_reason(house):
    (attempt,) = await house.attempts()
    await say(house, attempt.key, [USER])
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    with pytest.raises(openai.PermissionDeniedError, match="has ended"):
        await house.openai(attempt.key, max_retries=3).chat.completions.create(model="m", messages=[USER])
    assert len(await house.nodes()) == 1


async def test_an_ending_waits_for_what_is_still_being_generated(house):
    """The agent was killed in the middle of a call: its tokens were sampled, so the books must hold them."""
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key)
    ending = Ending(outcome=Outcome.AGENT_TIMEOUT, reward=0.0)
    reported = asyncio.create_task(house.admin(end_attempt(attempt.rollout, 1, ending, 3)))
    await asyncio.sleep(0.2)
    house.engine.paused = False
    await reported
    totals = await house.admin(get_totals("r"))
    assert totals.sampled_tokens == house.engine.sampled_tokens == len(answer("answer 1"))
    assert totals.undelivered == 1


async def test_a_superseded_attempt_cannot_add_to_the_transcript(house):
    (old,) = await house.attempts()
    await say(house, old.key, [USER])
    await house.admin(end_attempt(old.rollout, 1, Ending(outcome=Outcome.INFRASTRUCTURE, reason="lost"), 3))
    (new,) = await house.admin(claim("r", "controller", 1, 3))
    assert (new.rollout, new.attempt) == (old.rollout, 2)
    with pytest.raises(openai.PermissionDeniedError):
        await say(house, old.key, [USER])
    await say(house, new.key, [USER])
    (transcript,) = await house.admin(get_transcripts("g"))
    assert [len(attempt.nodes) for attempt in transcript.attempts] == [1, 1]


async def test_the_agents_key_gives_no_reward_and_reads_nothing(house):
    first, second = await house.attempts(2)
    agent = type(house.admin)(house.url, first.key)
    evaluator = type(house.admin)(house.url, first.evaluator_key)
    refused = [
        (agent, post_reward(first.rollout, Reward(reward=1.0))),
        (agent, get_rollout(first.rollout)),
        (agent, get_totals("r")),
        (agent, end_attempt(first.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3)),
        (agent, append_event(Event(rollout=second.rollout, attempt=1, type="x"))),
        (evaluator, post_reward(second.rollout, Reward(reward=1.0))),
        (evaluator, get_rollout(first.rollout)),
    ]
    for client, call in refused:
        with pytest.raises(ApiError) as error:
            await client(call)
        assert error.value.status == 403
    await agent(append_event(Event(rollout=first.rollout, attempt=1, type="note", data={"a": 1})))
    rollout = await evaluator(post_reward(first.rollout, Reward(reward=0.5, parts={"tests": 0.5})))
    assert rollout.reward == 0.5
    with pytest.raises(openai.PermissionDeniedError):
        await say(house, first.evaluator_key, [USER])


async def test_wrong_keys_are_refused(house):
    (attempt,) = await house.attempts()
    for key in ("nonsense", attempt.key[:-1] + "x", house.keys.sign(Key(Scope.ATTEMPT, "no.such", 1))):
        with pytest.raises((openai.AuthenticationError, openai.PermissionDeniedError)):
            await say(house, key, [USER])


async def test_a_key_in_the_path_or_in_another_header_serves_as_well(house):
    (attempt,) = await house.attempts()
    async with httpx.AsyncClient() as http:
        body = {"messages": [USER]}
        in_path = await http.post(f"{house.url}/a/{attempt.key}/v1/chat/completions", json=body)
        in_header = await http.post(f"{house.url}/v1/chat/completions", json=body, headers={"x-api-key": attempt.key})
    assert (in_path.status_code, in_header.status_code) == (200, 200)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b"{}", "at least one message"),
        (b'{"messages": "hi"}', "list of objects"),
        (b'{"messages": [{"content": "x"}]}', "role"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "stream_options": 1}', "stream_options"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [1]}', "stop"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', "tool_choice"),
        (b'{"messages": [{"role": "user"}], "response_format": {"type": "json_object"}}', "response_format"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', "`n`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}', "max_tokens"),
    ],
)
async def test_bad_requests_get_an_error_that_says_what_is_wrong(house, body, complaint):
    (attempt,) = await house.attempts()
    async with httpx.AsyncClient() as http:
        response = await http.post(
            f"{house.url}/v1/chat/completions", content=body, headers={"authorization": f"Bearer {attempt.key}"}
        )
    assert response.status_code == 400
    assert complaint in json.loads(response.content)["error"]["message"]
    assert house.engine.log == []


async def test_many_attempts_at_once_do_not_mix(house):
    house.engine.script = lambda prompt, call: Scripted(answer(text(prompt)[:60]), delay_s=0.01 * (call % 3))
    attempts = await house.attempts(12)

    async def converse(number, attempt):
        messages = [{"role": "user", "content": f"marker-{number:02d}"}]
        for _ in range(4):
            reply = told(await say(house, attempt.key, messages))
            assert f"marker-{number:02d}" in reply["content"]
            messages += [reply, USER]

    await asyncio.gather(*(converse(number, attempt) for number, attempt in enumerate(attempts)))
    totals = await house.admin(get_totals("r"))
    assert totals.sampled_tokens == house.engine.sampled_tokens
    assert (totals.calls, totals.answers, totals.lost, totals.undelivered) == (48, 48, 0, 0)


async def test_calls_that_come_while_a_rollout_is_cancelled_leave_nothing_open(house):
    """The agent lives on for a moment: what it asks then is refused, or recorded before the rollout ends."""
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=0.05)
    attempts = await house.attempts(6)

    async def insist(attempt):
        messages = [USER]
        while True:
            try:
                reply = await say(house, attempt.key, messages)
            except openai.PermissionDeniedError:
                return
            messages += [told(reply), USER]

    agents = [asyncio.create_task(insist(attempt)) for attempt in attempts]
    while len(house.engine.log) < 20:
        await asyncio.sleep(0.01)
    await house.admin(cancel_group("g"))
    totals = await house.admin(get_totals("r"))
    assert totals.sampled_tokens == house.engine.sampled_tokens
    assert (totals.calls, totals.lost) == (totals.answers + totals.interrupted, 0)
    await asyncio.gather(*agents)
    assert (await house.admin(get_totals("r"))).calls == totals.calls


async def outcome_of(house, attempt, ending=Outcome.AGENT_EXIT):
    await house.admin(end_attempt(attempt.rollout, attempt.attempt, Ending(outcome=ending, reward=0.0), 1))
    rollout = await house.admin(get_rollout(attempt.rollout))
    return rollout.outcome, rollout.reward


async def test_an_engine_that_failed_for_good_is_infrastructure_even_if_the_agent_ends_well(house):
    house.engine.script = lambda prompt, call: Scripted(status=500)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER])
    assert await outcome_of(house, attempt, Outcome.OK) == (Outcome.INFRASTRUCTURE, None)


async def test_another_call_that_is_answered_does_not_hide_the_one_that_failed(house):
    house.engine.script = lambda prompt, call: Scripted(status=500) if call == 1 else answer("fine")
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER])
    await say(house, attempt.key, [{"role": "user", "content": "another"}])
    assert await outcome_of(house, attempt) == (Outcome.INFRASTRUCTURE, None)


async def test_an_attempt_that_times_out_on_an_engine_out_of_reach_is_infrastructure(house, monkeypatch):
    monkeypatch.setattr(api, "SETTLE_LIMIT_S", 0.2)
    (attempt,) = await house.attempts()
    house.engine.close()
    asking = asyncio.create_task(say(house, attempt.key, [USER]))
    await asyncio.sleep(0.5)
    asking.cancel()
    assert await outcome_of(house, attempt, Outcome.AGENT_TIMEOUT) == (Outcome.INFRASTRUCTURE, None)


async def test_of_several_answers_the_good_ones_are_in_the_books_when_one_fails(house):
    house.engine.script = lambda prompt, call: Scripted(status=500) if call == 2 else answer("fine")
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER], n=3)
    totals = await house.admin(get_totals("r"))
    assert totals.sampled_tokens == house.engine.sampled_tokens > 0
    assert (totals.answers, totals.undelivered, totals.lost) == (2, 2, 1)


async def test_a_retry_takes_the_call_whose_client_left_not_the_one_somebody_waits_for(house):
    (attempt,) = await house.attempts()
    house.engine.paused, house.engine.interruptible = True, False
    waiting = asyncio.create_task(say(house, attempt.key, [USER]))
    while len(house.engine.log) < 1:
        await asyncio.sleep(0.01)
    await ask_and_leave(house, attempt.key)
    retry = asyncio.create_task(say(house, attempt.key, [USER], extra_headers={"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.2)
    house.engine.paused = False
    texts = {told(await waiting)["content"], told(await retry)["content"]}
    assert texts == {"answer 1", "answer 2"}
    assert [node.delivered for node in await house.nodes()] == [True, True]


async def test_an_answer_that_was_lost_on_its_way_is_replayed_to_the_retry_that_says_so(house):
    """The gateway has handed it over; only the client knows that it did not arrive."""
    (attempt,) = await house.attempts()
    again = {"extra_headers": {"x-stainless-retry-count": "1"}}
    said = [told(await say(house, attempt.key, [USER], **each))["content"] for each in ({}, again, {}, again, {})]
    assert said == ["answer 1", "answer 1", "answer 2", "answer 2", "answer 3"]
    await say(house, attempt.key, [USER, {"role": "assistant", "content": "answer 3"}, USER])
    assert told(await say(house, attempt.key, [USER], **again))["content"] == "answer 5", "somebody has answer 3"
    totals = await house.admin(get_totals("r"))
    assert (totals.calls, totals.answers, totals.undelivered) == (5, 5, 0)


@pytest.mark.parametrize("options", [{"n": 3}, {"max_tokens": 2}])
async def test_a_request_for_something_else_is_no_retry(house, options):
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key)
    await finish_what_runs(house)
    completion = await say(house, attempt.key, [USER], **options)
    assert len(completion.choices) == options.get("n", 1)
    assert len(house.engine.log) == 1 + options.get("n", 1)


async def test_several_answers_that_nobody_took_are_replayed_together_after_a_restart(house):
    (attempt,) = await house.attempts()
    house.engine.paused, house.engine.interruptible = True, False
    asking = asyncio.create_task(say(house, attempt.key, [USER], n=3))
    while len(house.engine.log) < 3:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.sleep(0.1)
    await finish_what_runs(house, answers=3)
    await house.restart()
    completion = await say(house, attempt.key, [USER], n=3)
    assert sorted(choice.message.content for choice in completion.choices) == ["answer 1", "answer 2", "answer 3"]
    assert len(house.engine.log) == 3


async def test_an_answer_is_stored_before_it_is_sent(house, monkeypatch):
    """A kill between the two must never lose what a client has."""
    order = []
    record, send = sampling.record_answers, delivery.send_json

    def recorded(connection, *rest):
        time.sleep(0.2)
        record(connection, *rest)
        order.append("stored")

    async def sent(*rest):
        order.append("sent")
        await send(*rest)

    monkeypatch.setattr(sampling, "record_answers", recorded)
    monkeypatch.setattr(delivery, "send_json", sent)
    (attempt,) = await house.attempts()
    await say(house, attempt.key, [USER])
    assert order == ["stored", "sent"]


async def test_the_store_keeps_no_answer_of_an_attempt_that_has_ended(house):
    """A controller that slept past its lease may still run an agent of an old attempt."""
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key)
    session = house.memory._sessions[(attempt.rollout, 1)]
    await house.store.write(lambda c: lifecycle._retire(c, attempt.rollout, 1, 0.0))
    house.engine.paused = False
    with pytest.raises(WireError, match="has ended"):
        await next(iter(session.calls_in_progress())).answers
    totals = await house.admin(get_totals("r"))
    assert (totals.answers, totals.sampled_tokens, totals.lost) == (0, 0, 1)


async def test_the_key_of_an_ended_attempt_appends_no_events(house):
    (attempt,) = await house.attempts()
    agent = type(house.admin)(house.url, attempt.key)
    with pytest.raises(ApiError, match="at most"):
        await agent(append_event(Event(rollout=attempt.rollout, attempt=1, type="x", data={"a": "b" * 70000})))
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    with pytest.raises(ApiError, match="has ended"):
        await agent(append_event(Event(rollout=attempt.rollout, attempt=1, type="x")))


@pytest.mark.parametrize(
    "message",
    [
        '{"role": "assistant", "tool_calls": "x"}',
        '{"role": "assistant", "tool_calls": [1]}',
        '{"role": "user", "content": ' + "[" * 400 + "]" * 400 + "}",
    ],
    ids=["calls that are none", "a call that is none", "deep"],
)
async def test_odd_messages_never_break_the_gateway(house, message):
    (attempt,) = await house.attempts()
    async with httpx.AsyncClient() as http:
        response = await http.post(
            f"{house.url}/v1/chat/completions",
            content=f'{{"messages": [{message}]}}',
            headers={"authorization": f"Bearer {attempt.key}"},
        )
    assert response.status_code == 400, response.text
    assert json.loads(response.content)["error"]["message"]


async def test_a_long_request_is_encoded_while_others_are_served(house, monkeypatch):
    """Its encoding takes until another call has been answered."""
    slow, quick = await house.attempts(2, max_tokens=20)
    served, encode = threading.Event(), ChatTemplate.first_segment

    def first_segment(template, messages, tools):
        if len(messages[0]["content"]) > 10:
            assert served.wait(10), "no other call was served"
        return encode(template, messages, tools)

    monkeypatch.setattr(ChatTemplate, "first_segment", first_segment)
    await house.make_run(context=100_000)
    house.engine.context = 200_000
    long = {"role": "user", "content": "x" * intake.ASIDE_BYTES}
    asking = asyncio.create_task(say(house, slow.key, [long]))
    await asyncio.sleep(0.1)
    await say(house, quick.key, [USER])
    served.set()
    assert told(await asking)["content"] == "answer 2"
    await say(house, slow.key, [long, {"role": "assistant", "content": "answer 2"}, USER])
    assert [node.parent for node in await house.nodes()] == [0, 1]


async def test_an_engine_fault_that_was_overcome_before_a_restart_is_forgotten(house):
    house.engine.script = lambda prompt, call: Scripted(status=500) if call == 1 else answer("fine")
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER])
    await house.restart()
    await say(house, attempt.key, [USER])
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 1))
    assert (await house.admin(get_rollout(attempt.rollout))).outcome == Outcome.OK


async def test_a_template_that_raises_whatever_it_likes_refuses_the_request(house):
    make_policy(house.policy, "{{ 1 // (messages[0].content | length - 5) }}")  # hello
    await house.restart()
    (attempt,) = await house.attempts()
    with pytest.raises(openai.BadRequestError, match="cannot render these messages"):
        await say(house, attempt.key, [USER])


async def test_a_first_call_that_comes_while_its_rollout_is_cancelled_is_refused(house, monkeypatch):
    """The attempt was read from the store while it lived; when the reading is done it has ended."""
    (attempt,) = await house.attempts()
    load, reading, cancelled = catchup.load_attempt, asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(connection, id):
        known = load(connection, id)
        loop.call_soon_threadsafe(reading.set)
        asyncio.run_coroutine_threadsafe(cancelled.wait(), loop).result(10)
        return known

    monkeypatch.setattr(catchup, "load_attempt", slow)
    asking = asyncio.create_task(say(house, attempt.key, [USER]))
    await reading.wait()
    await house.admin(cancel_group("g"))
    cancelled.set()
    with pytest.raises(openai.PermissionDeniedError, match="has ended"):
        await asking
    assert house.engine.log == []
    assert (await house.admin(get_totals("r"))).calls == 0


async def test_log_probabilities_are_told_to_who_asks(house):
    house.engine.script = lambda prompt, call: answer("so é")
    (attempt,) = await house.attempts()
    whole = await say(house, attempt.key, [USER], logprobs=True)
    told_ = whole.choices[0].logprobs.content
    assert b"".join(bytes(each.bytes) for each in told_).decode("utf-8", "replace").startswith("so ")
    assert [each.logprob for each in told_] == house.engine.logprobs(1, len(answer("so é")))
    assert (await say(house, attempt.key, [USER])).choices[0].logprobs is None
    chunks = [chunk async for chunk in await say(house, attempt.key, [USER], logprobs=True, stream=True)]
    assert len(chunks[-1].choices[0].logprobs.content) == len(told_)


@pytest.mark.parametrize(
    ("kind", "marked"),
    [
        (SideCall(tools=False), [2]),
        (SideCall(tools=True), [1, 3]),
        (SideCall(system="^write a [tT]itle"), [2]),
        (SideCall(system="title", tools=True), []),
    ],
)
async def test_side_calls_that_the_run_names_are_not_trained(house, kind, marked):
    await house.admin(create_run(RunSpec(id="r", policy=str(house.policy), side_calls=[kind])))
    (attempt,) = await house.attempts()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    first = await say(house, attempt.key, [USER], tools=tools)
    await say(house, attempt.key, [{"role": "system", "content": "write a title"}, USER])
    await say(house, attempt.key, [USER, told(first), {"role": "user", "content": "a title?"}], tools=tools)
    await house.restart()
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    sample = build(transcript)
    lengths = [len(call.answer) for call in house.engine.log]
    side = sum(length for number, length in enumerate(lengths, 1) if number in marked)
    assert sample.fates.get(Fate.SIDE_CALL, 0) == side
    assert sample.trained_tokens == sum(lengths) - side


async def test_an_answer_under_a_grammar_comes_from_engines_that_can_and_is_not_trained(house):
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    (attempt,) = await house.attempts()
    with pytest.raises(openai.BadRequestError, match="under no grammar"):
        await say(house, attempt.key, [USER], response_format=format)
    await house.make_run(speaks=Dialect.CHAT)
    assert (await say(house, attempt.key, [USER], response_format={"type": "text"})).choices
    await say(house, attempt.key, [USER], response_format=format)
    flat = {"format": format["json_schema"] | {"type": "json_schema"}}
    await house.openai(attempt.key).responses.create(model="m", input="hello", text=flat)
    assert [call.response_format for call in house.engine.log] == [{}, format, format]
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    first, second, third = [len(call.answer) for call in house.engine.log]
    assert build(transcript).fates == {Fate.TRAINED: first, Fate.CONSTRAINED: second + third}
