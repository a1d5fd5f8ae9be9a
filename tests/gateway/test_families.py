"""Real tokenizers and chat templates, compared with transformers; fetched by `make families`."""

import os

import pytest
from families import FOLDER, PACKAGES
from play import Play

from harnessed.gateway.examine import examine
from harnessed.gateway.formats import declared
from harnessed.gateway.reading import Piece, Reader
from harnessed.gateway.template import ChatTemplate
from harnessed.records import Split

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="`make families` fetches them")
MESSAGES = [{"role": "user", "content": "Where is the key?"}]
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "<Look> é", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize("family", PACKAGES)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
def test_the_first_segment_is_what_transformers_makes(family, tools, monkeypatch):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(FOLDER / family)
    expected = theirs.apply_chat_template(MESSAGES, tools=tools or None, add_generation_prompt=True, return_dict=False)
    assert ChatTemplate(FOLDER / family).first_segment(MESSAGES, tools).tolist() == expected


TAILS = ["", ", tools declared"]
FIELD = {"reasoning_content, then user", "reasoning_content, then tool result"}
RESULTS = [f"{n}{tail}" for n in ("one tool result", "several tool results") for tail in TAILS]
EXPECTED = {
    "qwen2_5": {"differs": FIELD},
    "qwen3": {"differs": {"reasoning in the text, then user", "reasoning_content, then user"}},
    "llama3_2": {
        "differs": FIELD | {"reasoning in the text, then tool result", "white space around an answer"},
        "unsupported": {f"several tool results{tail}" for tail in TAILS},
    },
    # The system prompt goes before the last user message, and so do tools.
    "mistral_nemo": {
        "differs": FIELD | {"reasoning in the text, then tool result", *RESULTS},
        "unsupported": {f"system message{tail}" for tail in TAILS},
        "broken": {f"user message{tail}" for tail in TAILS},
    },
    # All system messages are moved to the front; a single call is not closed as several are.
    "deepseek_v3": {
        "differs": FIELD | {f"system message{tail}" for tail in TAILS},
        "broken": {f"one tool result{tail}" for tail in TAILS},
    },
}


@pytest.mark.parametrize("family", PACKAGES)
def test_the_examination_finds_what_the_template_does(family):
    found = {}
    for finding in examine(ChatTemplate(FOLDER / family)).findings:
        found.setdefault(str(finding.verdict), set()).add(finding.case)
    del found["exact"]
    assert found == EXPECTED[family]


def calling(n):
    function = {"name": "look", "arguments": '{"at": "door"}'}
    calls = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(n)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def results(n):
    return [{"role": "tool", "tool_call_id": f"call0000{i}", "content": f"result {i}"} for i in range(n)]


SAYS = {"role": "assistant", "content": "I see a door."}
USER = {"role": "user", "content": "And then?"}
TURNS = [
    (calling(1), results(1)),
    (calling(2), results(2)),
    (SAYS, [USER]),
    (calling(1), results(1)),
    (SAYS, [{"role": "system", "content": "Be brief."}, USER]),
    (SAYS, [USER]),
]


@pytest.mark.parametrize("family", PACKAGES)
def test_a_long_text_is_encoded_in_pieces_that_make_the_same_tokens(family, monkeypatch):
    monkeypatch.setattr("harnessed.gateway.template.PIECE", 1)
    template = ChatTemplate(FOLDER / family)
    special = [each.content for each in template._tokenizer.get_added_tokens_decoder().values()]
    text = template.render(MESSAGES, TOOLS) + "".join(f"é {each} \n x{each}{each}  two " for each in special)
    whole = template._tokenizer.encode(text, add_special_tokens=False).ids
    assert template.encode(text).tolist() == whole
    assert len(template._separate.findall(text)) > 4


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2"])
def test_six_turns_read_as_the_template_writes_them(family):
    """Each answer is sampled as the template writes it; what follows is bridged, and never rendered again."""
    template = ChatTemplate(FOLDER / family)
    history = list(MESSAGES)
    context = template.first_segment(history, TOOLS).tolist()
    for answer, new in TURNS[:1] + TURNS[2:] if family == "llama3_2" else TURNS:  # it makes one call at a time
        prompt, whole = template.render(history, TOOLS), template.render([*history, answer, *new], TOOLS)
        said = whole.removeprefix(prompt).partition(template.written([template.stop_ids[0]]))[0]
        sampled = [*template.encode(said), template.stop_ids[0]]
        segment, cut = template.next_segment(new, TOOLS, sampled[-1])
        assert cut == 0
        history += [answer, *new]
        context += [*sampled, *segment]
        assert template.written(context) == template.render(history, TOOLS)


def test_tokens_sampled_in_another_way_stay_where_encoding_the_text_again_would_drift():
    """The policy says `hello` letter by letter."""
    template = ChatTemplate(FOLDER / "qwen3")
    play = Play(template)
    sampled = [id for letter in "hello" for id in template.encode(letter)]
    node = play.ask(MESSAGES, sampled=[*sampled, template.stop_ids[0]])
    assert node.message["content"] == "hello"
    history = [*MESSAGES, node.message, USER]
    play.ask(history)
    ours, rendered = play.prompts[2], template.first_segment(history, [])
    assert template.written(ours) == template.written(rendered)
    assert ours[: len(play.prompts[1]) + len(sampled)] == play.prompts[1] + sampled
    assert len(ours) > len(rendered)


def test_history_template_splits_where_qwen3_strips_reasoning():
    """It keeps the reasoning while tool results follow, and strips it once the user speaks again."""
    template = ChatTemplate(FOLDER / "qwen3")
    play = Play(template)
    play.by_template = True
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI look."}
    history = list(MESSAGES)
    for new in (results(1), results(1), [USER], [USER]):
        sampled = [*template.encode(thinking["content"]), template.stop_ids[0]]
        node = play.ask(history, sampled=sampled)
        history += [node.message, *new]
    play.ask(history, sampled=[*template.encode("done"), template.stop_ids[0]])
    shape = [(node.parent, node.follows, node.split) for node in play.tree.nodes.values()]
    assert shape == [(0, 0, ""), (1, 1, ""), (2, 2, ""), (0, 3, Split.TEMPLATE), (0, 4, Split.TEMPLATE)]
    assert "hm" not in template.written(play.prompts[5])


@pytest.mark.parametrize("family", PACKAGES)
@pytest.mark.parametrize("n", [1, 2])
def test_calls_are_read_from_the_tokens_that_the_template_writes_for_them(family, n):
    """Markers that are special tokens among them."""
    if (family, n) in (("llama3_2", 2), ("deepseek_v3", 1)):
        pytest.skip("its template refuses several calls" if n > 1 else "its template does not close a single call")
    template = ChatTemplate(FOLDER / family)
    prompt, text = template.render(MESSAGES, TOOLS), template.render([*MESSAGES, calling(n)], TOOLS)
    begin = next((at for at, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
    said = text[begin:].partition(template.written([template.stop_ids[0]]))[0]
    answer = [*template.encode(said), template.stop_ids[0]]
    reader = Reader(template.format, declared(TOOLS))
    assert reader.end(template.text(answer, stopped=True)) == Piece()
    assert reader.calls == [("look", '{"at":"door"}')] * n
