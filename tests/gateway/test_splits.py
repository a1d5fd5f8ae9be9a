"""Contexts that the template or a chat engine made: where they follow the transcript, and why they leave it."""

import pytest
from policies import make_policy
from scripted_engine import Scripted
from test_exchange import USER, say, told
from texts import STOP, answer, ids, text

from harnessed.client import end_attempt, examine_template, get_rollout, get_transcripts
from harnessed.records import Dialect, Ending, Fate, History, Outcome, Split, Verdict
from harnessed.training.samples import build

STRIPPING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the reasoning of every earlier answer, as Qwen3 and DeepSeek do."""

THOUGHT = "<think>hm</think>ls"


async def follow_template(house, template=STRIPPING):
    make_policy(house.policy, template)
    await house.restart()
    await house.make_run(history=History.TEMPLATE)
    return (await house.attempts())[0]


async def end(house, attempt):
    """The nodes, and what training makes of them: each trained answer after what the engine was given."""
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    sample = build(transcript)
    given = [call.prompt + call.answer for call in house.engine.log]
    for row in sample.rows:
        last = int(row.trained.nonzero()[0][-1])
        assert row.tokens[: last + 1].tolist() in given
    assert sample.fates == {Fate.TRAINED: house.engine.sampled_tokens}
    return transcript.attempts[-1].nodes, sample


def shape(nodes):
    return [(node.parent, node.follows, node.split) for node in nodes]


async def test_history_exact_keeps_reasoning_that_the_template_would_strip(house):
    make_policy(house.policy, STRIPPING)
    await house.restart()
    house.engine.script = lambda prompt, call: answer(THOUGHT)
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, told(first), USER])
    assert THOUGHT in text(house.engine.log[1].prompt)
    nodes, sample = await end(house, attempt)
    assert shape(nodes) == [(0, 0, ""), (1, 1, "")]
    assert len(sample.rows) == 1


async def test_history_template_strips_it_and_goes_on_in_a_new_row(house):
    attempt = await follow_template(house)
    house.engine.script = lambda prompt, call: answer(THOUGHT)
    first = await say(house, attempt.key, [USER])
    second = await say(house, attempt.key, [USER, told(first), USER])
    third = [USER, told(first), USER, told(second), USER]
    await say(house, attempt.key, third)
    assert text(house.engine.log[2].prompt) == text(house.memory.policy(str(house.policy)).first_segment(third, []))
    nodes, sample = await end(house, attempt)
    assert shape(nodes) == [(0, 0, ""), (0, 1, Split.TEMPLATE), (0, 2, Split.TEMPLATE)]
    assert len(sample.rows) == 3


async def test_history_template_continues_what_the_template_keeps(house):
    """Only an answer with reasoning splits; those without go on as they were sampled."""
    attempt = await follow_template(house)
    house.engine.script = lambda prompt, call: answer("ls") if call == 1 else answer(THOUGHT)
    first = await say(house, attempt.key, [USER])
    second = await say(house, attempt.key, [USER, told(first), USER])
    await say(house, attempt.key, [USER, told(first), USER, told(second), USER])
    nodes, sample = await end(house, attempt)
    assert shape(nodes) == [(0, 0, ""), (1, 1, ""), (1, 2, Split.TEMPLATE)]
    thought = len(answer(THOUGHT))
    assert [int(row.trained.sum()) for row in sample.rows] == [len(answer("ls")) + thought, thought]


async def test_history_template_closes_an_answer_that_was_cut(house):
    attempt = await follow_template(house)
    house.engine.script = lambda prompt, call: Scripted(ids("cut"), finish="length")
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, told(first), USER])
    assert shape((await end(house, attempt))[0]) == [(0, 0, ""), (1, 1, "")]


async def test_the_tree_of_a_split_conversation_is_made_again_after_a_restart(house):
    attempt = await follow_template(house)
    house.engine.script = lambda prompt, call: answer(THOUGHT)
    messages = [USER]
    for turn in range(4):
        messages += [told(await say(house, attempt.key, messages)), {"role": "user", "content": f"turn {turn}"}]
        await house.restart()
    nodes, _ = await end(house, attempt)
    assert [node.follows for node in nodes] == [0, 1, 2, 3]
    assert [len(node.messages) for node in nodes] == [1, 1, 1, 1]


@pytest.fixture
async def chatting(house):
    await house.make_run(speaks=Dialect.CHAT)
    return house


async def test_an_engine_that_speaks_chat_gets_the_messages_and_its_tokens_are_kept(chatting):
    house = chatting
    (attempt,) = await house.attempts(temperature=0.5, top_p=0.9, max_tokens=40)
    first = await say(house, attempt.key, [USER])
    assert told(first)["content"] == "answer 1"
    assert first.usage.prompt_tokens == len(house.engine.log[0].prompt)
    await say(house, attempt.key, [USER, told(first), USER])
    call = house.engine.log[1]
    assert call.messages == [USER, told(first), USER]
    assert (call.temperature, call.top_p, call.max_tokens, call.stop) == (0.5, 0.9, 40, [STOP])
    nodes, sample = await end(house, attempt)
    assert shape(nodes) == [(0, 0, ""), (1, 1, "")]
    assert len(sample.rows) == 1
    assert set(sample.rows[0].versions.tolist()) == {-1}


async def test_its_tool_calls_get_ids_that_name_the_answer(chatting):
    house = chatting
    call = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    house.engine.script = lambda prompt, number: Scripted(answer("call"), message=message)
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    assert first.choices[0].finish_reason == "tool_calls"
    (given,) = first.choices[0].message.tool_calls
    assert given.id.isalnum() and len(given.id) == 9
    assert first.choices[0].message.reasoning_content == "hm"


async def test_a_template_that_writes_it_in_another_way_splits_the_row(chatting):
    house = chatting
    (attempt,) = await house.attempts()
    # What was sampled had the reasoning in it; the template leaves it out.
    house.engine.script = lambda prompt, call: Scripted(
        answer("<think>hm</think>ok"), message={"role": "assistant", "content": "ok", "reasoning_content": "hm"}
    )
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, told(first) | {"reasoning_content": "hm"}, USER])
    assert shape((await end(house, attempt))[0]) == [(0, 0, ""), (0, 1, Split.TEMPLATE)]


async def test_the_same_text_as_other_tokens_splits_the_row(chatting):
    """The prompt comes back with another token in the answer's place that reads the same."""
    house = chatting
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    template = house.memory.policy(str(house.policy))
    prompt = template.first_segment([USER, told(first), USER], []).tolist()
    same = ids("answer 1")
    at = next(i for i in range(len(prompt)) if prompt[i : i + len(same)] == same)
    # The byte tokenizer has one way to write a text; so the stored answer is made to be another one of equal text.
    (session,) = house.memory._sessions.values()
    node = session.tree.nodes[1]
    session.template = _Reading(template, {999: "answer 1"})
    node.answer = b"".join(number.to_bytes(4, "little") for number in (999, STOP))
    house.engine.script = lambda _, call: Scripted(answer("next"), prompt=prompt)
    await say(house, attempt.key, [USER, told(first), USER])
    assert prompt[at : at + len(same)] == same
    assert session.tree.nodes[2].split == Split.RETOKENISED
    assert (session.tree.nodes[2].parent, session.tree.nodes[2].follows) == (0, 1)


class _Reading:
    """A template whose tokenizer knows one more token."""

    def __init__(self, template, more):
        self._template = template
        self._more = more

    def __getattr__(self, name):
        return getattr(self._template, name)

    def written(self, ids):
        return "".join(self._more.get(id) or self._template.written([id]) for id in ids)


CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BROKEN = '{"command": "echo hel'


@pytest.mark.parametrize(
    ("resent", "expected"),
    [
        ('{"__unparsedToolInput": {"raw": "{\\"command\\": \\"echo hel", "len": 20}}', (0, 1, Split.EDITED)),
        ('{"_openhands_malformed_tool_call": true, "error": "..."}', (0, 1, Split.EDITED)),
        ('{"command": "echo hel"}', (1, 1, "")),  # what was sampled goes on, before its stop
        (BROKEN, (1, 1, "")),
    ],
    ids=["Claude Code", "OpenHands", "Qwen Code", "Codex"],
)
async def test_malformed_arguments_come_back_in_a_harness_own_wrapping(chatting, resent, expected):
    """The id still names the answer. The engine writes what it was sent: the row may split, and the books hold."""
    house = chatting
    make_policy(house.policy, CALLING)
    function = {"name": "bash", "arguments": BROKEN}
    call = {"id": "x", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    house.engine.script = lambda prompt, number: Scripted(answer(BROKEN), message=message)
    (attempt,) = await house.attempts()
    given = (await say(house, attempt.key, [USER])).choices[0].message.tool_calls[0]
    again = {"id": given.id, "type": "function", "function": function | {"arguments": resent}}
    history = {"role": "assistant", "content": "", "tool_calls": [again]}
    await say(house, attempt.key, [USER, history, {"role": "tool", "tool_call_id": given.id, "content": "error"}])
    nodes, _ = await end(house, attempt)
    assert shape(nodes) == [(0, 0, ""), expected]


async def test_rows_merge_with_any_branch_whose_tokens_they_repeat(chatting):
    """By its messages the request starts again (a prompt was rewritten); by its tokens it goes on."""
    house = chatting
    make_policy(
        house.policy,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    await house.restart()
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [{"role": "user", "content": "elsewhere"}])
    third = await say(house, attempt.key, [{"role": "user", "content": " hello "}, told(first), USER])
    again = [{"role": "user", "content": " hello "}, told(first), USER, told(third), USER]
    await say(house, attempt.key, again)
    nodes, sample = await end(house, attempt)
    assert [(node.parent, node.follows) for node in nodes] == [(0, 0), (0, 0), (1, 0), (3, 3)]
    assert len(sample.rows) == 2


async def test_of_equal_answers_the_one_that_is_meant_goes_on(chatting):
    house = chatting
    house.engine.script = lambda prompt, call: answer("same")
    (attempt,) = await house.attempts()
    for _ in range(3):
        last = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, told(last), USER])
    nodes, sample = await end(house, attempt)
    assert shape(nodes) == [(0, 0, "")] * 3 + [(3, 3, "")]
    assert len(sample.rows) == 3


async def test_a_context_that_the_engine_refuses_is_refused_in_words_that_harnesses_know(chatting):
    house = chatting
    house.engine.context = 10
    (attempt,) = await house.attempts()
    with pytest.raises(Exception, match="maximum context length") as refusal:
        await say(house, attempt.key, [USER])
    assert refusal.value.code == "context_length_exceeded"
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.AGENT_EXIT, reason="exit 1"), 3))
    assert (await house.admin(get_rollout(attempt.rollout))).outcome == Outcome.BUDGET


@pytest.mark.parametrize(
    "scripted",
    [
        Scripted([-1, STOP]),
        Scripted([2**31, STOP]),
        Scripted([STOP], prompt=[-5]),
        Scripted([STOP], finish="content_filter"),
        Scripted([STOP], message={"role": "assistant", "tool_calls": ["no call"]}),
        Scripted([STOP], message={"role": "assistant", "tool_calls": 3}),
    ],
)
async def test_what_is_no_answer_of_the_protocol_is_the_engines_failure(chatting, scripted):
    house = chatting
    house.engine.script = lambda prompt, call: scripted if call == 1 else answer("ok")
    (attempt,) = await house.attempts()
    with pytest.raises(Exception, match="no answer of the protocol") as refusal:
        await say(house, attempt.key, [USER])
    assert refusal.value.status_code == 503
    assert told(await say(house, attempt.key, [USER]))["content"] == "ok"


async def test_ids_that_the_tokenizer_does_not_know_are_kept(chatting):
    """A model may have more rows than its tokenizer has tokens."""
    house = chatting
    house.engine.script = lambda prompt, call: Scripted([5000, STOP], prompt=[6000, *prompt])
    (attempt,) = await house.attempts()
    first = await say(house, attempt.key, [USER])
    await say(house, attempt.key, [USER, told(first), USER])
    await end(house, attempt)


async def test_what_a_chat_engine_broke_off_is_kept_and_sampled_anew(chatting):
    """It cannot go on from tokens."""
    house = chatting
    house.engine.script = lambda prompt, call: Scripted(ids("beg"), finish="interrupted") if call == 1 else answer("ok")
    (attempt,) = await house.attempts()
    with pytest.raises(Exception, match="broke its answer off"):
        await say(house, attempt.key, [USER])
    assert told(await say(house, attempt.key, [USER]))["content"] == "ok"
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    assert build(transcript).fates == {Fate.UNDELIVERED: 3, Fate.TRAINED: len(answer("ok"))}


async def test_dates_in_prompts_are_those_of_the_runs_creation(house):
    """After a restart, when the run is created again, and whatever the clock says."""
    make_policy(house.policy, "{{ strftime_now('%S.%f') }}" + STRIPPING)
    for _ in range(2):
        await house.restart()
        await house.make_run()
        (attempt,) = await house.attempts(group=f"g{len(house.engine.log)}")
        await say(house, attempt.key, [USER])
    first, second = house.engine.log
    assert first.prompt == second.prompt


async def test_the_examination_of_a_template_is_kept_and_given(house):
    examined = await house.admin(examine_template("r"))
    assert not examined.cases(Verdict.BROKEN)
    assert "user message" in examined.cases(Verdict.EXACT)
    make_policy(house.policy, STRIPPING)
    await house.restart()
    examined = await house.admin(examine_template("r"))
    assert "reasoning in the text, then user" in examined.cases(Verdict.DIFFERS)
