"""How answers end: by their stop, by length, by a stop string, broken off; and what the next context makes of it."""

import asyncio

import numpy as np
import openai
import pytest
from scripted_engine import Scripted
from test_exchange import USER, arrays, say, told
from texts import STOP, answer, ids, text

from harnessed.client import end_attempt, get_totals, get_transcripts
from harnessed.records import Ending, Fate, Outcome
from harnessed.training.samples import build

CLOSED = "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def go_on(house, key, first):
    """The next call; the tokens that the gateway put between both answers."""
    await say(house, key, [USER, told(first), USER])
    before, after = house.engine.log[-2:]
    context = before.prompt + before.answer
    assert after.prompt[: len(context)] == context
    return text(after.prompt[len(context) :])


async def end(house, attempt):
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    return build(transcript)


async def test_a_sampled_stop_is_not_written_twice(house):
    (attempt,) = await house.attempts()
    assert await go_on(house, attempt.key, await say(house, attempt.key, [USER])) == CLOSED.removeprefix("<|im_end|>")


async def test_an_answer_cut_by_length_gets_the_templates_stop_masked(house):
    house.engine.script = lambda prompt, call: Scripted(ids("cut off"), finish="length")
    (attempt,) = await house.attempts()
    assert await go_on(house, attempt.key, await say(house, attempt.key, [USER])) == CLOSED
    (row,) = (await end(house, attempt)).rows
    assert text(row.tokens[row.trained].tolist()) == "cut off" * 2


async def test_a_stop_string_ends_the_text_and_its_tokens_stay(house):
    house.engine.script = lambda prompt, call: ids("ls\nObservation:")
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER], stop=["Observation:", "never"])
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("ls\n", "stop")
    assert house.engine.log[0].stop_strings == ["Observation:", "never"]
    assert await go_on(house, attempt.key, first) == CLOSED
    assert [node.parent for node in await house.nodes()] == [0, 1]


async def test_a_stop_string_that_the_engine_has_missed_ends_the_text(house):
    """It broke off in the middle of it, say, and went on without knowing how it had begun."""
    house.engine.script = lambda prompt, call: [answer("a STOP b"), Scripted(ids("a STOP b"), finish="length")][
        call - 1
    ]
    (attempt,) = await house.attempts()
    for _ in range(2):
        assert told(await say(house, attempt.key, [USER], stop="STOP"))["content"] == "a "


async def test_half_a_character_is_not_delivered_and_its_token_is_trained(house):
    whole = ids("né")
    house.engine.script = lambda prompt, call: Scripted(whole[:-1], finish="length")
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    assert told(first)["content"] == "n"
    await go_on(house, attempt.key, first)
    (row,) = (await end(house, attempt)).rows
    assert row.tokens[row.trained].tolist() == whole[:-1] * 2


async def test_an_answer_that_the_engine_breaks_off_goes_on_from_its_tokens(house):
    """The harness sees one answer; each token has the version that sampled it."""

    def script(prompt, call):
        house.engine.version = house.engine.version._replace(number=call)
        return Scripted(ids("one "), finish="interrupted") if call == 1 else answer("two")

    house.engine.script = script
    (attempt,) = await house.attempts(max_tokens=30)
    assert told(await say(house, attempt.key, [USER]))["content"] == "one two"
    first, second = house.engine.log
    assert second.prompt == first.prompt + ids("one ")
    assert (first.max_tokens, second.max_tokens) == (30, 26)
    assert (second.seed, first.begun, second.begun) == (first.seed, 0, 4), "the numbers that come next"
    (node,) = await house.nodes()
    assert arrays(node)[1] == ids("one ") + answer("two")
    assert np.frombuffer(node.versions, np.int32).tolist() == [0] * 4 + [1] * 4
    expected = house.engine.logprobs(1, 4) + house.engine.logprobs(2, 4)
    assert np.array_equal(np.frombuffer(node.logprobs, np.float32), np.float32(expected))


async def test_broken_off_at_its_last_token_it_ends_by_length(house):
    house.engine.script = lambda prompt, call: Scripted(ids("abc"), finish="interrupted")
    (attempt,) = await house.attempts(max_tokens=3)
    assert (await say(house, attempt.key, [USER])).choices[0].finish_reason == "length"
    assert len(house.engine.log) == 1


@pytest.mark.parametrize("restart", [False, True], ids=["same process", "after a restart"])
async def test_what_was_sampled_before_an_engine_failed_is_kept_for_the_retry(house, restart):
    scripted = [Scripted(ids("begun "), finish="interrupted"), Scripted(status=500), answer("and done")]
    house.engine.script = lambda prompt, call: scripted[call - 1]
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER])
    (begun,) = await house.nodes()
    assert (begun.finish, begun.delivered, arrays(begun)[1]) == ("interrupted", False, ids("begun "))
    if restart:
        await house.restart()
    first = await say(house, attempt.key, [USER])
    assert told(first)["content"] == "begun and done"
    (whole,) = await house.nodes()
    assert (whole.number, whole.delivered) == (2, True)
    assert (await house.admin(get_totals("r"))).sampled_tokens == house.engine.sampled_tokens
    house.engine.script = lambda prompt, call: answer("next")
    await go_on(house, attempt.key, first)
    assert [node.parent for node in await house.nodes()] == [0, 2]
    assert (await end(house, attempt)).fates == {Fate.TRAINED: house.engine.sampled_tokens}


async def test_what_nobody_comes_back_for_stays_in_the_books(house):
    scripted = [Scripted(ids("begun "), finish="interrupted"), Scripted(status=500), answer("other")]
    house.engine.script = lambda prompt, call: scripted[call - 1]
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER])
    await say(house, attempt.key, [{"role": "user", "content": "something else"}])
    # The agent never got what it asked for: the attempt is not its fault.
    assert (await end(house, attempt)).fates == {Fate.INFRASTRUCTURE: house.engine.sampled_tokens}


async def test_each_of_several_answers_goes_on_by_itself(house):
    """One of three breaks off and its engine fails: the retry gets its rest, and two new ones."""
    state = {"failing": True}

    def script(prompt, call):
        if len(prompt) > len(house.engine.log[0].prompt):
            return Scripted(status=500) if state["failing"] else answer("rest")
        return Scripted(ids("b"), finish="interrupted") if call == 1 else answer(f"whole {call}")

    house.engine.script = script
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER], n=3)
    state["failing"] = False
    completion = await say(house, attempt.key, [USER], n=3)
    texts = sorted(choice.message.content for choice in completion.choices)
    assert texts[0] == "brest" and all(each.startswith("whole") for each in texts[1:])
    sample = await end(house, attempt)
    assert sum(sample.fates.values()) == house.engine.sampled_tokens


async def test_a_stop_that_history_writes_in_another_way_is_trained_in_its_own_leaf(house):
    """gpt-oss samples `<|return|>`, and its template writes `<|end|>` for it."""
    other = ids("<|endoftext|>")[0]
    config = house.policy / "generation_config.json"
    config.write_text(config.read_text().replace(str(STOP), f"[{STOP}, {other}]"))
    await house.restart()
    house.engine.script = lambda prompt, call: [*ids("hm"), other]
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, told(first), USER])
    first_call, second_call = house.engine.log
    assert second_call.prompt == first_call.prompt + ids("hm") + ids(CLOSED)
    sample = await end(house, attempt)
    assert sample.fates == {Fate.TRAINED: house.engine.sampled_tokens}
    assert [row.tokens[row.trained].tolist() for row in sample.rows] == [[*ids("hm"), other]] * 2


async def test_calls_at_once_that_break_off_do_not_mix(house):
    """Equal requests at the same time, each broken off once."""
    house.engine.script = lambda prompt, call: (
        Scripted(ids(f"{call}"), finish="interrupted") if not text(prompt).endswith(("1", "2", "3")) else answer("!")
    )
    (attempt,) = await house.attempts()
    completions = await asyncio.gather(*(say(house, attempt.key, [USER]) for _ in range(3)))
    assert sorted(told(each)["content"] for each in completions) == ["1!", "2!", "3!"]
