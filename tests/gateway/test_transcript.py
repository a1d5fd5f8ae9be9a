"""The tree that each kind of harness leaves, written out by hand; then any mix of them, by a random harness."""

import json
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from play import Play, make_node
from policies import make_policy, make_tokenizer
from texts import STOP, ids, text

from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.transcript import Tree
from harnessed.records import Fate
from harnessed.training.samples import build

OTHER_STOP = make_tokenizer().token_to_id("<|endoftext|>")
SYSTEM = {"role": "system", "content": "be good"}


def user(content):
    return {"role": "user", "content": content}


def said(node):
    """An answer as a harness sends it back."""
    return node.message


def call(id, arguments='{"a": 1}'):
    return {"id": id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


@pytest.fixture
def play(tmp_path):
    return Play.on(tmp_path / "policy", stops=(STOP, OTHER_STOP))


def check_books(play):
    """Fates add up, nothing is trained twice, and every trained answer has in front of it what the engine was given."""
    sample = build(play.transcript())
    nodes = play.tree.nodes.values()
    assert sum(sample.fates.values()) == sum(node.sampled for node in nodes)
    delivered = {node.number: np.frombuffer(node.answer, np.int32).tolist() for node in nodes if node.delivered}
    trained = []
    for row in sample.rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.trained, [0]])))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            context, answer = row.tokens[:start].tolist(), row.tokens[start:end].tolist()
            sources = [n for n in delivered if play.prompts[n] == context and delivered[n] == answer]
            assert sources, f"no engine call had this context: {text(context)!r}"
            trained.append(next(n for n in sources if n not in trained))
    assert sorted(trained) == sorted(delivered)
    assert sample.fates[Fate.TRAINED] == sum(map(len, delivered.values()))
    return sample


def test_a_linear_harness_is_a_chain_and_one_row(play):
    messages = [SYSTEM, user("a")]
    for turn in range(4):
        node = play.ask(messages, f"  answer {turn} \n")
        messages += [said(node), user(f"result {turn}")]
    assert play.parents() == [0, 1, 2, 3]
    assert len(check_books(play).rows) == 1


def test_a_dropped_answer_is_a_leaf(play):
    """mini-swe-agent after a format error: the answer is left out, a complaint follows."""
    first = play.ask([SYSTEM, user("a")])
    play.ask([SYSTEM, user("a"), said(first), user("b")], "dropped")
    play.ask([SYSTEM, user("a"), said(first), user("b"), user("format error")])
    assert play.parents() == [0, 1, 1]
    assert len(check_books(play).rows) == 2


def test_a_message_that_changes_every_turn_makes_branches_with_known_answers_spliced_in(play):
    """OpenClaw ends every request with a message that is gone in the next one."""
    first = play.ask([SYSTEM, user("a"), user("volatile 1")], "  one ")
    second = play.ask([SYSTEM, user("a"), said(first), user("r"), user("volatile 2")], "two")
    play.ask([SYSTEM, user("a"), said(first), user("r"), said(second), user("s"), user("volatile 3")])
    assert play.parents() == [0, 0, 0]
    sampled = [*ids("  one "), STOP]
    assert text(sampled) in text(play.prompts[2])
    assert text(play.prompts[3]).count("  one <|im_end|>") == 1
    assert text(play.prompts[3]).endswith("volatile 3<|im_end|>\n<|im_start|>assistant\n")
    assert len(check_books(play).rows) == 3


def test_what_is_spliced_in_is_what_a_rendering_would_give(play):
    """With a tokenizer that has one way for each text, splicing and rendering agree."""
    first = play.ask([SYSTEM, user("a"), user("v1")], "one")
    messages = [SYSTEM, user("a"), said(first), user("r"), user("v2")]
    play.ask(messages)
    assert play.prompts[2] == play.template.first_segment(messages, []).tolist()


def test_a_rendering_would_drift_and_the_transcript_does_not(tmp_path):
    """The policy sampled `ab` as two tokens; its text, encoded again, is one."""
    policy = make_policy(tmp_path / "policy", merges=(("a", "b"),))
    template = ChatTemplate(policy)
    tree = Tree()
    tokenizer = make_tokenizer((("a", "b"),))
    a, b, stop = (tokenizer.token_to_id(text) for text in ("a", "b", "<|im_end|>"))
    place = tree.place([user("x")], [])
    segment = tree.segment(place, [], template)
    message = {"role": "assistant", "content": template.text([a, b, stop], stopped=True)}
    tree.add(make_node(1, 0, array("i", segment.ids), [a, b, stop], message=message, messages=place.new), place.prompt)

    request = [user("x"), message, user("y")]
    place = tree.place(request, [])
    ours = array("i", tree.context(place.follows) + tree.segment(place, [], template).ids).tolist()
    rendered = template.first_segment(request, [])
    assert message["content"] == "ab"
    assert ours[len(segment.ids) // 4 :][:3] == [a, b, stop]
    assert len(rendered) == len(ours) - 1
    assert tokenizer.decode(ours) == tokenizer.decode(rendered)


def test_an_edited_prompt_starts_again_and_keeps_known_answers(play):
    first = play.ask([SYSTEM, user("a")], "one")
    play.ask([SYSTEM | {"content": "be better"}, user("a"), said(first), user("b")])
    assert play.parents() == [0, 0]
    check_books(play)


def test_an_edited_answer_is_context(play):
    first = play.ask([SYSTEM, user("a")], "one")
    play.ask([SYSTEM, user("a"), said(first) | {"content": "one, edited"}, user("b")])
    assert play.parents() == [0, 0]
    assert "one, edited<|im_end|>" in text(play.prompts[2])
    check_books(play)


def test_compaction_is_a_new_conversation(play):
    """OpenCode asks for a summary and goes on from it."""
    first = play.ask([SYSTEM, user("a")], "one")
    summary = play.ask([user("summarise: a, one")], "a summary")
    play.ask([SYSTEM, user("What did we do so far?"), said(summary), user("Continue")], "on")
    assert play.parents() == [0, 0, 0]
    assert first.delivered
    assert len(check_books(play).rows) == 3


def test_a_side_call_stands_apart(play):
    """OpenCode and Claude Code ask for a title before the main call."""
    play.ask([user("title for: a")], "A title")
    first = play.ask([SYSTEM, user("a")])
    play.ask([SYSTEM, user("a"), said(first), user("b")])
    assert play.parents() == [0, 0, 2]


def test_sub_agents_in_any_interleaving_are_trees_of_their_own(play):
    main = play.ask([SYSTEM, user("main")], "delegate")
    one = play.ask([user("sub 1")], "s1")
    two = play.ask([user("sub 2")], "s2")
    play.ask([user("sub 1"), said(one), user("more")], "s1 done")
    play.ask([SYSTEM, user("main"), said(main), user("results")])
    play.ask([user("sub 2"), said(two), user("more")], "s2 done")
    assert play.parents() == [0, 0, 0, 2, 1, 3]
    assert len(check_books(play).rows) == 3


def test_parallel_calls_of_one_request_are_siblings(play):
    request = [SYSTEM, user("a")]
    first, second = play.ask(request, "one"), play.ask(request, "two")
    play.ask([*request, said(second), user("b")])
    play.ask([*request, said(first), user("b")])
    assert play.parents() == [0, 0, 2, 1]


def test_of_siblings_with_equal_text_the_last_delivered_is_meant(play):
    request = [SYSTEM, user("a")]
    play.ask(request, "same")
    play.ask(request, "same")
    third = play.ask(request, "same", delivered=False)
    play.ask([*request, said(third), user("b")])
    assert play.parents() == [0, 0, 0, 2]


def test_of_siblings_that_differ_in_white_space_the_exact_one_is_meant(play):
    request = [SYSTEM, user("a")]
    first = play.ask(request, "same")
    play.ask(request, "same ")
    play.ask([*request, said(first), user("b")])
    assert play.parents() == [0, 0, 1]


def test_an_id_names_its_answer_among_equal_ones(play):
    request = [SYSTEM, user("a")]
    first = play.ask(request, "same", calls=[call("aaaaaaaaa")])
    play.ask(request, "same", calls=[call("bbbbbbbbb")])
    play.ask([*request, said(first), user("b")])
    assert play.parents() == [0, 0, 1]


@pytest.mark.parametrize(
    "rewritten",
    [
        {"name": "invalid", "arguments": '{"tool":"bash","error":"x"}'},
        {"name": "bash", "arguments": '{"_openhands_malformed_tool_call": true, "error": "x"}'},
        {"name": "bash", "arguments": '{"command":"echo hel"}'},
    ],
    ids=["OpenCode", "OpenHands", "Qwen Code"],
)
def test_an_id_names_its_answer_whatever_a_harness_made_of_broken_arguments(play, rewritten):
    request = [SYSTEM, user("a")]
    first = play.ask(request, "", calls=[call("aaaaaaaaa", '{"command":  "echo hel')])
    resent = {"role": "assistant", "content": "", "tool_calls": [{"id": "aaaaaaaaa", "function": rewritten}]}
    second = play.ask([*request, resent, user("b")])
    play.ask([*request, resent, user("b"), said(second), user("c")])
    assert first.number == 1
    assert play.parents() == [0, 1, 2]
    play.reload()
    assert (
        play.tree.place([*request, resent, user("b")], []).prompt
        == play.tree.place([*request, said(first), user("b")], []).prompt
    )


GIVEN = {
    "role": "assistant",
    "content": "\n\nI'll write  the file.  \n\n",
    "reasoning_content": "  Think\n\nabout  it. \n",
    "tool_calls": [call("call_t3A", '{ "timeout":  20.0 ,  "command":  "echo caf\\u00e9 \\/"}')],
}
"""An awkward answer on purpose: white space, a float, escapes, keys in no order, an id that some take apart."""
MEANT = {"timeout": 20.0, "command": "echo café /"}


def again(arguments, id="call_t3A", **fields):
    """That answer as a harness writes it into its history; a field of None is left out."""
    message = GIVEN | {"tool_calls": [call(id, arguments)]} | fields
    return {name: value for name, value in message.items() if value is not None}


COMPACT = json.dumps(MEANT, ensure_ascii=False, separators=(",", ":"))
RESENT = {
    "mini-swe-agent": again(
        GIVEN["tool_calls"][0]["function"]["arguments"], provider_specific_fields={"reasoning": "  Think"}
    ),
    "OpenHands": again(json.dumps(MEANT), content=[{"type": "text", "text": GIVEN["content"]}], reasoning_content=None),
    "OpenCode": again(COMPACT),
    "Claude Code": again('{"command":"echo café /","timeout":20}'),
    "Qwen Code": again(COMPACT, reasoning_content="Think\n\nabout  it."),
    "Hermes": again(json.dumps(MEANT, sort_keys=True), content=GIVEN["content"].strip(), reasoning_content=None),
    "OpenClaw": again(COMPACT, id="callt3A", reasoning_content=None),
    "LangChain": again(json.dumps(MEANT, ensure_ascii=False), reasoning_content=None),
    "openai-python, streamed": again(COMPACT) | {"refusal": None, "annotations": None, "function_call": None},
    "moved reasoning": again(COMPACT, reasoning_content=None, reasoning=GIVEN["reasoning_content"]),
}


@pytest.mark.parametrize("harness", RESENT)
def test_an_answer_with_a_call_is_known_as_each_harness_sends_it_back(play, harness):
    """A chain, whatever the harness made of it; the sampled tokens stay."""
    request = [SYSTEM, user("a")]
    first = play.ask(request, GIVEN["content"])
    play.tree = Tree()
    play.tree.add(replace(first, message=GIVEN), Tree().place(request, []).prompt)
    resent = RESENT[harness]
    result = {"role": "tool", "tool_call_id": resent["tool_calls"][0]["id"], "content": "done"}
    second = play.ask([*request, resent, result], "next")
    play.ask([*request, resent, result, said(second), user("b")])
    assert play.parents() == [0, 1, 2]
    assert play.prompts[2][: len(play.prompts[1])] == play.prompts[1]
    assert text(play.prompts[2]).startswith(text(play.prompts[1]) + GIVEN["content"])
    assert len(check_books(play).rows) == 1


@pytest.mark.parametrize(("sent", "later"), [(None, ""), ("", None), (None, "absent"), ("", [])])
def test_no_text_is_no_text_in_any_shape(play, sent, later):
    """litellm leaves null out, OpenCode makes it empty, OpenClaw makes empty null."""
    request = [SYSTEM, user("a")]
    first = play.ask(request, "", calls=[call("aaaaaaaaa")])
    first.message["content"] = sent
    play.reload()
    resent = {"role": "assistant", "content": later, "tool_calls": [call("aaaaaaaaa")]}
    if later == "absent":
        del resent["content"]
    play.ask([*request, resent, {"role": "tool", "tool_call_id": "aaaaaaaaa", "content": "done"}])
    assert play.parents() == [0, 1]


def test_a_cache_mark_that_moves_to_the_newest_message_changes_nothing(play):
    """Claude Code marks the last message of each request."""

    def request(*messages):
        *before, last = messages
        marked = [{"type": "text", "text": last["content"], "cache_control": {"type": "ephemeral"}}]
        return [*before, last | {"content": marked}]

    first = play.ask(request(SYSTEM, user("a")))
    second = play.ask(request(SYSTEM, user("a"), said(first), user("b")))
    play.ask(request(SYSTEM, user("a"), said(first), user("b"), said(second), user("c")))
    assert play.parents() == [0, 1, 2]
    assert len(check_books(play).rows) == 1


def test_best_of_several_answers_goes_on_from_the_chosen_one(play):
    """The same request three times; the harness keeps the second answer. Each delivered token is trained."""
    answers = [play.ask([SYSTEM, user("a")], word) for word in ("one", "two", "three")]
    play.ask([SYSTEM, user("a"), said(answers[1]), user("b")])
    assert play.parents() == [0, 0, 0, 2]
    assert len(check_books(play).rows) == 3


def test_changed_tools_repeat_nothing(play):
    tools = [{"type": "function", "function": {"name": "bash"}}]
    first = play.ask([SYSTEM, user("a")], tools=tools)
    second = play.ask([SYSTEM, user("a"), said(first), user("b")], tools=tools)
    play.ask([SYSTEM, user("a"), said(first), user("b"), said(second), user("c")], tools=[])
    assert play.parents() == [0, 1, 0]


def test_system_messages_in_the_middle_are_prompt(play):
    """Claude Code sends notifications as system messages, as a block list first and as a string later."""
    notice = {"role": "system", "content": [{"type": "text", "text": "n", "cache_control": {"type": "ephemeral"}}]}
    first = play.ask([SYSTEM, user("a")])
    second = play.ask([SYSTEM, user("a"), said(first), user("b"), notice])
    play.ask([SYSTEM, user("a"), said(first), user("b"), {"role": "system", "content": "n"}, said(second), user("c")])
    assert play.parents() == [0, 1, 2]


def test_part_of_an_answer_is_context(play):
    """Codex keeps the items of a stream that broke."""
    play.ask([SYSTEM, user("a")], "a whole answer", delivered=False)
    play.ask([SYSTEM, user("a"), {"role": "assistant", "content": "a whole"}, user("go on")])
    assert play.parents() == [0, 0]
    sample = check_books(play)
    assert sample.fates[Fate.UNDELIVERED] == len(ids("a whole answer")) + 1


def test_an_answer_that_ends_without_its_stop_gets_the_templates(play):
    for ending in (None, OTHER_STOP):
        first = play.ask([user(f"a{ending}")], "cut", stop=ending)
        second = play.ask([user(f"a{ending}"), said(first), user("b")])
        assert text(play.prompts[second.number]).endswith("cut<|im_end|>\n" + "<|im_start|>user\nb<|im_end|>\n" + GEN)
    check_books(play)


GEN = "<|im_start|>assistant\n"


def test_a_stop_that_history_writes_differently_is_trained_in_its_own_leaf(play):
    first = play.ask([user("a")], "one", stop=OTHER_STOP)
    second = play.ask([user("a"), said(first), user("b")], "two")
    play.ask([user("a"), said(first), user("b"), said(second), user("c")], "three")
    assert [node.cut for node in play.tree.nodes.values()] == [0, 1, 0]
    own, rest = check_books(play).rows
    assert own.tokens[-1] == OTHER_STOP
    assert OTHER_STOP not in rest.tokens


def test_a_request_that_ends_in_an_answer_goes_on_after_it(play):
    first = play.ask([user("a")], "one")
    play.ask([user("a"), said(first)], "two")
    assert play.parents() == [0, 1]
    assert text(play.prompts[2]).endswith("one<|im_end|>\n" + GEN)
    check_books(play)


def test_a_conversation_can_begin_with_an_answer_of_another(play):
    first = play.ask([user("a")], "one")
    play.ask([said(first), user("b")])
    assert play.parents() == [0, 0]
    check_books(play)


class RandomHarness:
    """Does to its history what harnesses do; each thread is a conversation that goes on by itself."""

    def __init__(self, play, draw) -> None:
        self.play = play
        self.draw = draw
        self.threads = [[SYSTEM, user("task")]]

    def step(self) -> None:
        thread = self.draw(st.sampled_from(self.threads))
        change = self.draw(
            st.sampled_from(
                ["go on"] * 6 + ["drop", "fork", "compact", "edit", "volatile", "side call", "twice", "cut"]
            )
        )
        request = list(thread)
        if change == "volatile":
            request.append(user(f"volatile {len(self.play.tree.nodes)}"))
        elif change == "edit":
            place = self.draw(st.integers(0, len(thread) - 1))
            thread[place] = request[place] = thread[place] | {"content": f"edited {len(thread)}"}
        elif change == "side call":
            self.ask([user("a title, please")])
        elif change == "compact":
            summary = self.ask([*request, user("summarise")])
            thread[:] = [SYSTEM, user("so far:"), self.resend(summary), user("continue")]
            return
        node = self.ask(request, cut=change == "cut")
        if change == "twice":
            self.ask(request)
        if change == "fork":
            self.threads.append([*thread, self.resend(node), user("the other way")])
        if change == "drop" or not node.delivered:
            thread.append(user("what?"))
        else:
            thread += [self.resend(node), user(f"result {self.draw(st.integers(0, 2))}")]

    def ask(self, request, cut=False):
        sampled = self.draw(st.sampled_from(["yes", " yes ", "no", "", "<|im_start|>", "é\n\n"]))
        stop = None if cut else self.draw(st.sampled_from([STOP, STOP, STOP, OTHER_STOP]))
        if stop is None and not sampled:
            sampled = "x"  # an answer has at least one token
        return self.play.ask(request, sampled, stop=stop, delivered=self.draw(st.integers(0, 6)) > 0)

    def resend(self, node):
        message = node.message
        shape = self.draw(st.sampled_from(["as it is", "block", "stripped", "nulls"]))
        if shape == "block":
            return message | {"content": [{"type": "text", "text": message["content"]}]}
        if shape == "stripped":
            return message | {"content": message["content"].strip()}
        return message | ({"tool_calls": None, "refusal": None} if shape == "nulls" else {})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_of_what_harnesses_do_keeps_the_books(data):
    with tempfile.TemporaryDirectory() as folder:
        play = Play.on(Path(folder) / "policy", stops=(STOP, OTHER_STOP))
    harness = RandomHarness(play, data.draw)
    for _ in range(data.draw(st.integers(1, 12))):
        harness.step()
        if data.draw(st.integers(0, 9)) == 0:
            play.reload()
    check_books(play)
