"""OpenAI Completions, by the official SDK: bare prompts, as text or token ids, go to the policy as they stand."""

import json
from array import array

import openai
import pytest
from policies import make_policy, make_tokenizer
from scripted_engine import Scripted
from sqlalchemy import update
from test_exchange import USER, ask_and_leave, say
from test_splits import end, shape
from texts import STOP, TOKENIZER, answer, ids, text

from harnessed.client import end_attempt, get_totals
from harnessed.gateway.tables import nodes
from harnessed.gateway.wire import completions
from harnessed.gateway.wire.turn import WireError
from harnessed.records import Dialect, Ending, History, Outcome

PROMPT = "<|im_start|>user\nhello"
"""With a special token, and no template around it."""


async def ask(house, key, prompt, **options):
    return await house.openai(key).completions.create(model="any-name", prompt=prompt, **options)


async def gathered(house, key, prompt, **options):
    """Texts and finishes by index, and the usage."""
    texts, finishes, usage = {}, {}, None
    stream = await ask(house, key, prompt, stream=True, stream_options={"include_usage": True}, **options)
    async for chunk in stream:
        assert chunk.id.startswith("cmpl-")
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            finishes[choice.index] = choice.finish_reason
    return texts, finishes, usage


def turn(**request):
    return completions.parse(json.dumps({"prompt": "hello"} | request).encode(), {})


@pytest.mark.parametrize(
    "prompt", [PROMPT, [PROMPT], ids(PROMPT), [ids(PROMPT)]], ids=["text", "texts", "ids", "lists"]
)
async def test_a_prompt_goes_to_the_engine_as_it_stands(house, prompt):
    (attempt,) = await house.attempts()
    first = await ask(house, attempt.key, prompt)
    assert (first.object, first.model, first.id[:5]) == ("text_completion", "any-name", "cmpl-")
    assert [(each.index, each.text, each.finish_reason) for each in first.choices] == [(0, "answer 1", "stop")]
    assert house.engine.log[0].prompt == ids(PROMPT)
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(ids(PROMPT)), len(answer("answer 1")))
    (node,) = await house.nodes()
    assert (node.parent, node.message["content"]) == (0, "answer 1")
    assert len(node.segment) == 4 * len(ids(PROMPT))


@pytest.mark.parametrize("history", History)
@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
async def test_a_prompt_that_repeats_an_answer_goes_on_from_it(house, history, as_ids):
    await house.make_run(history=history)
    (attempt,) = await house.attempts()
    said = ids(PROMPT)
    for number in range(3):
        await ask(house, attempt.key, said if as_ids else text(said))
        assert house.engine.log[number].prompt == said
        said += house.engine.log[number].answer + ids(f" turn {number}")
    nodes, sample = await end(house, attempt)
    assert shape(nodes) == [(0, 0, ""), (1, 0, ""), (2, 0, "")]
    assert len(sample.rows) == 1


@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
async def test_a_prompt_that_repeats_an_answer_proves_that_it_arrived(house, as_ids):
    """The gateway died before it had noted that."""
    (attempt,) = await house.attempts()
    await ask(house, attempt.key, PROMPT)
    await house.store.write(lambda connection: connection.execute(update(nodes).values(delivered=False)))
    await house.restart()
    said = PROMPT + "answer 1<|im_end|>\nmore"
    await ask(house, attempt.key, ids(said) if as_ids else said)
    stored, sample = await end(house, attempt)
    assert shape(stored) == [(0, 0, ""), (1, 0, "")]
    assert [node.delivered for node in stored] == [True, True]
    assert len(sample.rows) == 1


async def test_an_equal_answer_that_nobody_got_is_not_meant_by_a_prompt(house):
    house.engine.script = lambda prompt, call: answer("same") if call == 1 else Scripted(ids("same"), finish="length")
    (attempt,) = await house.attempts()
    await ask(house, attempt.key, PROMPT)
    await ask(house, attempt.key, PROMPT)
    await house.store.write(lambda c: c.execute(update(nodes).where(nodes.c.number == 1).values(delivered=False)))
    await house.restart()
    await ask(house, attempt.key, PROMPT + "same<|im_end|>\nmore")
    stored = await house.nodes()
    assert shape(stored) == [(0, 0, ""), (0, 0, ""), (2, 0, "")]
    assert [node.delivered for node in stored] == [False, True, True]


async def test_what_was_sampled_is_not_encoded_again(house):
    """The text `an` is one token of this policy, and was sampled as two."""
    merges = (("a", "n"),)
    make_policy(house.policy, merges=merges)
    tokenizer = make_tokenizer(merges)
    sampled = [*ids("an"), tokenizer.token_to_id("<|im_end|>")]
    house.engine.script = lambda prompt, call: sampled
    await house.restart()
    (attempt,) = await house.attempts()
    await ask(house, attempt.key, "an:")
    await ask(house, attempt.key, "an:an<|im_end|> an")
    merged = tokenizer.token_to_id("an")
    assert house.engine.log[0].prompt == [merged, *ids(":")]
    assert house.engine.log[1].prompt == [merged, *ids(":"), *sampled, *ids(" "), merged]
    assert shape((await end(house, attempt))[0]) == [(0, 0, ""), (1, 0, "")]


@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
async def test_an_answer_that_was_cut_is_gone_on_with(house, as_ids):
    """The next prompt is the last one with its answer, and nothing else."""
    house.engine.script = lambda prompt, call: ids("once upon a time ") * 4
    (attempt,) = await house.attempts()
    first = await ask(house, attempt.key, ids("so: ") if as_ids else "so: ")
    assert (first.choices[0].finish_reason, first.choices[0].text) == ("length", "once upon a time")
    await ask(house, attempt.key, ids("so: once upon a time") if as_ids else "so: once upon a time", max_tokens=5)
    assert house.engine.log[1].prompt == ids("so: once upon a time")
    nodes, sample = await end(house, attempt)
    assert [(node.parent, len(node.segment) // 4, node.sampled) for node in nodes] == [(0, 4, 16), (1, 0, 5)]
    assert [text(row.tokens.tolist()) for row in sample.rows] == ["so: once upon a timeonce "]


async def test_a_prompt_that_leaves_out_the_stop_goes_on_before_it(house):
    (attempt,) = await house.attempts()
    first = await ask(house, attempt.key, "Q: hello\nA:")
    await ask(house, attempt.key, f"Q: hello\nA:{first.choices[0].text}\nQ: more\nA:")
    assert STOP not in house.engine.log[1].prompt
    assert [(node.parent, node.cut) for node in await house.nodes()] == [(0, 0), (1, 1)]


async def test_markers_stay_in_the_text(house):
    said = "<think>hm</think><tool_call>\n{}\n</tool_call>"
    house.engine.script = lambda prompt, call: answer(said)
    one, other = await house.attempts(2)
    assert (await ask(house, one.key, PROMPT, max_tokens=100)).choices[0].text == said
    texts, _, _ = await gathered(house, other.key, PROMPT, max_tokens=100)
    assert texts == {0: said}


@pytest.mark.parametrize(
    ("scripted", "options"),
    [
        (Scripted(answer("one é☃ two")), {}),
        (Scripted(answer("")), {}),
        (Scripted(answer("two answers")), {"n": 2}),
        (Scripted(ids("cut"), finish="length"), {}),
        (Scripted(ids("one STOP"), finish="stop"), {"stop": ["STOP"]}),
    ],
    ids=["plain", "empty", "two", "length", "stop string"],
)
async def test_a_stream_holds_what_the_whole_answer_holds(house, scripted, options):
    house.engine.script = lambda prompt, call: scripted
    one, other = await house.attempts(2)
    whole = await ask(house, one.key, PROMPT, **options)
    texts, finishes, usage = await gathered(house, other.key, PROMPT, **options)
    assert texts == {each.index: each.text for each in whole.choices}
    assert finishes == {each.index: each.finish_reason for each in whole.choices}
    assert usage == whole.usage


async def test_sixteen_tokens_unless_it_says_otherwise(house):
    (attempt,) = await house.attempts()
    await ask(house, attempt.key, PROMPT)
    await ask(house, attempt.key, PROMPT, max_tokens=40)
    assert [call.max_tokens for call in house.engine.log] == [16, 40]


async def test_a_chat_that_says_the_same_is_another_request(house):
    """Neither its retry nor its beginning."""
    (attempt,) = await house.attempts()
    await ask_and_leave(house, attempt.key, [USER])
    house.engine.paused = False
    await ask(house, attempt.key, "hello", max_tokens=2000)
    said = await ask(house, attempt.key, "hello")
    await say(house, attempt.key, [USER, {"role": "assistant", "content": said.choices[0].text}, USER])
    assert [text(call.prompt)[:8] for call in house.engine.log] == ["<|im_sta", "hello", "hello", "<|im_sta"]


@pytest.mark.parametrize("prompt", [PROMPT, ids(PROMPT)], ids=["text", "ids"])
async def test_a_prompt_whose_client_left_gets_the_answer_that_was_made(house, prompt):
    house.engine.interruptible = False
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), delay_s=0.5)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APITimeoutError):
        await house.openai(attempt.key, timeout=0.1).completions.create(model="m", prompt=prompt)
    house.engine.script = lambda prompt, call: answer(f"answer {call}")
    client = house.openai(attempt.key)
    again = await client.completions.create(model="m", prompt=prompt, extra_headers={"x-stainless-retry-count": "1"})
    assert again.choices[0].text == "answer 1"
    assert (await house.admin(get_totals("r"))).calls == 1


@pytest.mark.parametrize("prompt", [PROMPT, ids(PROMPT)], ids=["text", "ids"])
async def test_what_an_engine_broke_off_is_gone_on_with(house, prompt):
    scripts = [Scripted(ids("one "), finish="interrupted"), Scripted(status=500), Scripted(answer("two"))]
    house.engine.script = lambda prompt, call: scripts[min(call, 3) - 1]
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APIError):
        await gathered(house, attempt.key, prompt)
    await house.restart()
    assert (await ask(house, attempt.key, prompt)).choices[0].text == "one two"
    assert house.engine.log[2].prompt == ids(PROMPT) + ids("one ")
    assert [(node.parent, text(array("i", node.segment).tolist())) for node in await house.nodes()] == [(0, PROMPT)]


async def test_prompts_survive_a_restart(house):
    (attempt,) = await house.attempts()
    await ask(house, attempt.key, ids(PROMPT))
    await house.restart()
    await ask(house, attempt.key, ids(PROMPT) + answer("answer 1") + ids("more"))
    assert [node.parent for node in await house.nodes()] == [0, 1]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"n": 0}, "`n`"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": 3}, "stream_options"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(request_, says):
    with pytest.raises(WireError, match=says) as refusal:
        turn(**request_)
    assert refusal.value.status == 400


def test_what_asks_for_nothing_is_no_refusal():
    request = turn(echo=False, suffix=None, logprobs=0, best_of=1, user="me", stream=True)
    assert (request.stream, request.wanted.calls, request.types, request.asked["user"]) == (True, True, None, "me")


@pytest.mark.parametrize("id", [TOKENIZER.get_vocab_size(), 2**40])
async def test_refusals_have_the_protocols_shape(house, id):
    (attempt,) = await house.attempts()
    with pytest.raises(openai.BadRequestError, match=f"not below {TOKENIZER.get_vocab_size()}") as refusal:
        await ask(house, attempt.key, [1, id])
    assert refusal.value.body["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2000"):
        await ask(house, attempt.key, "long " * 500)
    with pytest.raises(openai.AuthenticationError):
        await ask(house, "nonsense", PROMPT)
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    with pytest.raises(openai.PermissionDeniedError, match="has ended"):
        await ask(house, attempt.key, PROMPT)
    assert (await house.admin(get_totals("r"))).calls == 0


async def test_an_engine_that_only_speaks_chat_takes_no_bare_prompt(house):
    await house.make_run(speaks=Dialect.CHAT)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.BadRequestError, match="only speaks chat"):
        await ask(house, attempt.key, PROMPT)
    assert (await house.admin(get_totals("r"))).calls == 0
