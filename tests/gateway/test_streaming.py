"""Answers that are sent while they are sampled: what arrives, when, and what becomes of streams that break."""

import asyncio
import json
import time

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policies import make_policy
from scripted_engine import Scripted
from test_exchange import USER, say
from texts import STOP, answer, ids
from tokenizers import Tokenizer, decoders, models

from harnessed.client import end_attempt, get_totals
from harnessed.gateway import sampling
from harnessed.gateway.preview import Broken, Preview, Unfolding
from harnessed.gateway.reading import Piece
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.wire.turn import Turn, Wanted
from harnessed.records import Dialect, Ending, Outcome

SLOW = Scripted(answer("one two three"), pace_s=0.15)
"""Two seconds."""


async def streamed(house, key, messages=(USER,), **options):
    return await say(house, key, list(messages), stream=True, **options)


async def gathered(stream, n=1):
    """The texts of a whole stream, how each ended, and its usage."""
    texts, finishes, usage = [""] * n, [None] * n, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    return texts, finishes, usage


def unfolding(template, stops=()):
    return Unfolding(template, Turn([USER], [], "m", Wanted(stop=stops)))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return ChatTemplate(make_policy(tmp_path_factory.mktemp("policy")))


WORDS = ["▁one", "▁two", "three", "▁", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Tokens are words with a space in front, which the first one loses, and bytes for the rest (Llama 2, Mistral)."""
    folder = make_policy(tmp_path_factory.mktemp("policy"))
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS[:-2])}, unk_token="▁"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(WORDS[-2:])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTemplate(folder)


@pytest.fixture(scope="module", params=["policy", "words"])
def template(request):
    return request.getfixturevalue(request.param)


PIECES = st.lists(st.sampled_from(["a", "b", "é☃", "🎈", " ", "\n", "ST", "OP", "STOP"]), max_size=8)
ENDINGS = ["stop", "length", "stop string"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PIECES, st.integers(0, 3), st.sampled_from(ENDINGS), st.sampled_from([(), ("STOP",), ("TOP", "a"), ("OPST",)]))
async def test_a_stream_holds_what_the_unstreamed_answer_holds(house, pieces, cut, ending, stops):
    """For any tokens, characters cut in two and stop strings among them."""
    said = "".join(pieces)
    sampled = ids(said)[: -cut or None] + ([STOP] if ending == "stop" else ids("x"))
    if ending == "stop string" and stops:
        sampled = ids(said + stops[-1])
    finish = "length" if ending == "length" else "stop"
    house.engine.script = lambda prompt, call: Scripted(sampled, finish=finish)
    (one, other) = await house.attempts(2, group=f"g{len(house.engine.log)}")
    options = {"stop": list(stops)} if stops else {}
    whole = await say(house, one.key, [USER], **options)
    texts, finishes, usage = await gathered(
        await streamed(house, other.key, stream_options={"include_usage": True}, **options)
    )
    assert texts == [whole.choices[0].message.content]
    assert finishes == [whole.choices[0].finish_reason]
    assert usage == whole.usage


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(0, 30), max_size=8))
def test_text_goes_out_as_soon_as_more_tokens_cannot_change_it(template, data, cuts):
    tokens = data.draw(st.lists(st.integers(0, template.size - 1).filter(lambda id: id != STOP), max_size=30))
    text, preview, sent = unfolding(template), Preview(), ""
    for cut in [*sorted(cuts), len(tokens)]:
        preview.add(tokens[len(preview.tokens) : cut])
        sent += text.more(preview).text
    whole = template.text(tokens, stopped=False)
    held = whole[len(sent) :]
    assert sent + text.end({"content": whole}).text == whole
    shown = [id for id in tokens if not template.is_silent(id)]
    assert held == "" or template.said(tokens).endswith("\ufffd") or template.is_byte(shown[-1])


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        ("<0xC3> <0xA9> <|im_start|> <0xC3>", ""),
        ("<0xC3> <0xA9> <|im_start|> ▁one", "é one"),
        ("▁one" + " <|im_start|>" * 9 + " ▁two three", "one twothree"),
    ],
)
def test_tokens_without_a_text_change_nothing(words, said, whole):
    preview, text = Preview(), unfolding(words)
    for word in said.split():
        preview.add([WORDS.index(word)])
        text.more(preview)
    assert text.sent.text == whole


@settings(max_examples=200, deadline=None)
@given(PIECES, st.sampled_from([("STOP",), ("TOP", "a"), ("é☃", "OPST")]))
def test_no_part_of_a_stop_string_goes_out(policy, pieces, stops):
    """Every token is looked at by itself; the engine ends the answer at the first stop string."""
    preview, text = Preview(), unfolding(policy, stops)
    for token in ids("".join(pieces) + stops[0]):
        preview.add([token])
        text.more(preview)
        if any(stop in policy.said(preview.tokens) for stop in stops):
            break
    whole = policy.said(preview.tokens)
    cut = whole[: min(whole.find(stop) for stop in stops if stop in whole)]
    assert text.sent + text.end({"content": cut}) == Piece(text=cut)
    assert len(cut) - len(text.sent.text) < max(map(len, stops))


def test_an_answer_that_begins_again_with_other_tokens_is_broken_once_something_was_sent(policy):
    text, preview = unfolding(policy), Preview()

    def again(said: str) -> str:
        preview.begin([])
        preview.add(ids(said))
        return text.more(preview).text

    assert [again("ab"), again("a"), again("abc")] == ["ab", "", "c"]
    with pytest.raises(Broken):
        again("ax")
    with pytest.raises(Broken):
        text.end({"content": "ab"})


def test_what_was_not_sent_yet_may_begin_again_otherwise(policy):
    text, preview = unfolding(policy, ("long stop",)), Preview()
    for said in ("one", "two and more"):
        preview.begin([])
        preview.add(ids(said))
        text.more(preview)
    assert text.sent.text == "two "


async def test_tokens_go_out_as_the_engine_makes_them(house):
    house.engine.script = lambda prompt, call: SLOW
    (attempt,) = await house.attempts()
    stream = await streamed(house, attempt.key)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert await house.nodes() == []
    assert "one two three".startswith(chunk.choices[0].delta.content)
    assert (await gathered(stream))[1] == ["stop"]
    (node,) = await house.nodes()
    assert node.delivered


async def test_the_end_of_a_stream_goes_out_after_the_answer_was_stored(house, monkeypatch):
    record, order = sampling.record_answers, []

    def recorded(connection, *rest):
        time.sleep(0.2)
        record(connection, *rest)
        order.append("stored")

    monkeypatch.setattr(sampling, "record_answers", recorded)
    (attempt,) = await house.attempts()
    async for chunk in await streamed(house, attempt.key):
        order.append(chunk.choices[0].finish_reason or chunk.choices[0].delta.content)
    *pieces, stored, end = order
    assert ("".join(pieces), stored, end) == ("answer 1", "stored", "stop")


async def test_several_answers_are_told_apart(house):
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), pace_s=0.01)
    (attempt,) = await house.attempts()
    texts, finishes, _ = await gathered(await streamed(house, attempt.key, n=2), n=2)
    assert (texts, finishes) == (["answer 1", "answer 2"], ["stop", "stop"])


async def test_a_client_that_leaves_in_the_middle_gets_the_same_answer_when_it_comes_back(house):
    house.engine.interruptible = False
    house.engine.script = lambda prompt, call: SLOW
    (attempt,) = await house.attempts()
    stream = await streamed(house, attempt.key)
    await anext(aiter(stream))
    await stream.close()
    await house.left()
    assert (await gathered(await streamed(house, attempt.key)))[0] == ["one two three"]
    assert (await say(house, attempt.key, [USER, {"role": "user", "content": "other"}])).choices
    assert len(house.engine.log) == 2
    totals = await house.admin(get_totals("r"))
    assert (totals.calls, totals.answers, totals.undelivered) == (2, 2, 0)


async def test_a_generation_that_nobody_waits_for_ends_and_the_retry_goes_on_from_its_tokens(house):
    said = answer("one two three")
    house.engine.script = lambda prompt, call: (
        Scripted(said, pace_s=0.1) if call == 1 else said[len(house.engine.log[0].answer) :]
    )
    (attempt,) = await house.attempts()
    stream = await streamed(house, attempt.key)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await house.left()
    assert (await gathered(await streamed(house, attempt.key)))[0] == ["one two three"]
    first, second = house.engine.log
    assert first.finish == "interrupted"
    assert 0 < len(first.answer) < len(said)
    assert second.prompt == first.prompt + first.answer
    (node,) = await house.nodes()
    assert node.sampled == house.engine.sampled_tokens == len(said)
    totals = await house.admin(get_totals("r"))
    assert (totals.calls, totals.answers, totals.lost, totals.undelivered) == (2, 1, 0, 0)


async def test_a_client_that_left_before_the_first_token_asks_anew(house):
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=20 if call == 1 else 0)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APITimeoutError):
        await say(house, attempt.key, [USER], timeout=0.2)
    assert (await say(house, attempt.key, [USER])).choices[0].message.content == "answer 2"
    assert (await house.admin(get_totals("r"))).lost == 0


async def test_a_generation_that_somebody_else_waits_for_goes_on(house):
    house.engine.script = lambda prompt, call: Scripted(answer("one two"), pace_s=0.05)
    (attempt,) = await house.attempts()
    stream = await streamed(house, attempt.key)
    await anext(aiter(stream))
    waiting = asyncio.create_task(say(house, attempt.key, [USER], extra_headers={"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.1)
    await stream.close()
    assert (await waiting).choices[0].message.content == "one two"
    assert len(house.engine.log) == 1


async def test_the_end_of_an_attempt_ends_its_generations_and_keeps_their_tokens(house):
    house.engine.script = lambda prompt, call: Scripted(answer("x" * 500), pace_s=0.1)
    (attempt,) = await house.attempts()
    stream = await streamed(house, attempt.key, max_tokens=1000)
    await anext(aiter(stream))
    began = time.monotonic()
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    assert time.monotonic() - began < 5
    (node,) = await house.nodes()
    assert 0 < node.sampled == house.engine.sampled_tokens < 500
    with pytest.raises(openai.APIConnectionError):
        await gathered(stream)


@pytest.mark.parametrize("first", [True, False], ids=["streamed first", "unstreamed first"])
async def test_the_retry_may_be_streamed_where_the_first_request_was_not(house, first):
    house.engine.script = lambda prompt, call: Scripted(answer("one two"), pace_s=0.02, delay_s=1)
    house.engine.interruptible = False
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APITimeoutError):
        await say(house, attempt.key, [USER], stream=first, timeout=0.1)
    await house.left()
    again = await say(house, attempt.key, [USER], stream=not first)
    text = again.choices[0].message.content if first else (await gathered(again))[0][0]
    assert (text, len(house.engine.log)) == ("one two", 1)


async def test_an_engine_that_hangs_up_and_says_the_same_again_breaks_nothing(house):
    house.engine.script = lambda prompt, call: Scripted(answer("one two"), pace_s=0.01, hang_up=call == 1)
    (attempt,) = await house.attempts()
    assert (await gathered(await streamed(house, attempt.key)))[0] == ["one two"]
    assert len(house.engine.log) == 2


async def test_a_stream_whose_engine_begins_again_otherwise_has_no_end_and_the_retry_gets_what_was_recorded(house):
    house.engine.script = lambda prompt, call: Scripted(answer(f"{call} two"), pace_s=0.01, hang_up=call == 1)
    house.engine.interruptible = False
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APIConnectionError):
        await gathered(await streamed(house, attempt.key))
    assert (await gathered(await streamed(house, attempt.key)))[0] == ["2 two"]
    (node,) = await house.nodes()
    assert (node.message["content"], node.delivered) == ("2 two", True)


async def test_a_stream_that_breaks_ends_by_a_reset(house):
    """So that nobody takes it for whole: HTTP/1.0 and careless clients know no other sign."""
    house.engine.script = lambda prompt, call: Scripted(answer(f"{call} two"), pace_s=0.05, hang_up=call == 1)
    (attempt,) = await house.attempts()
    body = json.dumps({"messages": [USER], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {attempt.key}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rpartition(":")[2]))
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    with pytest.raises(ConnectionResetError):
        while await asyncio.wait_for(reader.read(1000), 20):
            pass
    writer.close()


async def test_an_answer_that_is_broken_off_goes_on_in_the_same_stream(house):
    house.engine.script = lambda prompt, call: [
        Scripted(ids("one "), finish="interrupted", pace_s=0.01),
        Scripted(answer("two"), pace_s=0.01),
    ][call - 1]
    (attempt,) = await house.attempts()
    assert (await gathered(await streamed(house, attempt.key)))[0] == ["one two"]


async def test_an_engine_that_fails_before_the_first_token_gives_a_status(house):
    house.engine.script = lambda prompt, call: Scripted(status=500)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError, match="scripted failure"):
        await streamed(house, attempt.key)


async def test_an_attempt_that_ends_during_a_stream_gives_no_end_to_it(house, monkeypatch):
    monkeypatch.setattr("harnessed.gateway.api.SETTLE_LIMIT_S", 0.1)
    house.engine.script = lambda prompt, call: SLOW
    (attempt,) = await house.attempts()
    stream = await streamed(house, attempt.key)
    await anext(aiter(stream))
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    with pytest.raises(openai.APIConnectionError):
        await gathered(stream)


async def test_calls_that_an_engine_parsed_come_whole(house):
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]}
    house.engine.script = lambda prompt, number: Scripted(answer("so {look}"), message=message)
    await house.make_run(speaks=Dialect.CHAT)
    (attempt,) = await house.attempts()
    deltas = [chunk.choices[0] async for chunk in await streamed(house, attempt.key)]
    (called,) = [choice.delta.tool_calls[0] for choice in deltas if choice.delta.tool_calls]
    (node,) = await house.nodes()
    assert (called.index, called.id) == (0, node.message["tool_calls"][0]["id"])
    assert (called.function.name, called.function.arguments) == ("look", "{}")
    assert [choice.delta.reasoning_content for choice in deltas if hasattr(choice.delta, "reasoning_content")] == ["hm"]
    assert deltas[-1].finish_reason == "tool_calls"


async def test_models_are_listed_under_any_name(house):
    (attempt,) = await house.attempts()
    client = house.openai(attempt.key)
    assert [model.id async for model in await client.models.list()] == ["policy"]
    assert (await client.models.retrieve("org/any-name")).id == "org/any-name"
    with pytest.raises(openai.AuthenticationError):
        await house.openai("nonsense").models.list()
