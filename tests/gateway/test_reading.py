"""Answers taken apart: reasoning, text and calls, in each family's format, whole and while they grow."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessed.gateway.formats import CALL_FORMATS, THINKING, Format, declared
from harnessed.gateway.reading import Piece, Reader

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
            },
        },
    }
]
TYPES = declared(TOOLS)
JSON, QWEN_XML, GLM, MISTRAL, MISTRAL_NAMED, DEEPSEEK, KIMI, LLAMA = CALL_FORMATS
ARGUMENTS = {"command": "echo '}; {'", "timeout": 20}
TEXT = json.dumps(ARGUMENTS)
OBJECT = json.dumps({"name": "bash", "arguments": ARGUMENTS})
WRITTEN = {
    "json": (JSON, f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "qwen xml": (
        QWEN_XML,
        "<tool_call>\n<function=bash>\n<parameter=command>\necho '}; {'\n</parameter>\n"
        "<parameter=timeout>\n20\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        GLM,
        "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>echo '}; {'</arg_value>\n"
        "<arg_key>timeout</arg_key>\n<arg_value>20</arg_value>\n</tool_call>",
    ),
    "mistral": (MISTRAL, f'[TOOL_CALLS] [{{"name": "bash", "arguments": {TEXT}, "id": "abcdefghi"}}]'),
    "mistral, named": (MISTRAL_NAMED, f"[TOOL_CALLS]bash[ARGS]{TEXT}"),
    "mistral, named with id": (MISTRAL_NAMED, f"[TOOL_CALLS]bash[CALL_ID]abcdefghi[ARGS]{TEXT}"),
    "deepseek v3": (
        DEEPSEEK,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{TEXT}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek v3.1": (
        DEEPSEEK,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{TEXT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi": (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
        f"{TEXT}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "llama": (LLAMA, json.dumps({"name": "bash", "parameters": ARGUMENTS})),
}
SEVERAL = {
    "json": f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{OBJECT}\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{OBJECT}, {OBJECT}]",
    "mistral, named": f"[TOOL_CALLS]bash[ARGS]{TEXT}[TOOL_CALLS]bash[ARGS]{TEXT}",
    "llama": '{"name": "bash", "parameters": {}}; {"name": "bash", "parameters": {}}',
}


def whole(text, calls=None, thinks=None, types=TYPES, thinking=False):
    reader = Reader(Format(calls, thinks, thinking), types)
    return reader.end(text), [(name, json.loads(arguments)) for name, arguments in reader.calls], reader.broken


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_read_in_each_format(name):
    format, text = WRITTEN[name]
    assert whole(text, format) == (Piece(), [("bash", ARGUMENTS)], 0)
    if not format.first:
        assert whole(f"I look. \n\n{text}\n", format)[:2] == (Piece(text="I look."), [("bash", ARGUMENTS)])


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls_are_read_in_their_order(name):
    piece, calls, broken = whole(SEVERAL[name], WRITTEN[name][0])
    assert (piece, [call for call, _ in calls], broken) == (Piece(), ["bash", "bash"], 0)


@pytest.mark.parametrize("name", WRITTEN)
def test_without_tools_a_call_is_text(name):
    format, text = WRITTEN[name]
    assert whole(text, format, types=None) == (Piece(text=text), [], 0)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_is_text_byte_for_byte_and_counted(name):
    """By length; where only the closing marker is missing, it is a call."""
    format, text = WRITTEN[name]
    for end in range(len(format.opens), len(text)):
        piece, calls, broken = whole(text[:end], format)
        assert (piece == Piece(text=text[:end]) and broken == 1) or calls == [("bash", ARGUMENTS)], text[:end]


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "no json",
        '{"name": "bash"}',
        '{"name": 1, "arguments": {}}',
        '{"name": "bash", "arguments": []}',
        '{"name": "bash", "arguments": {"a": NaN}}',
        '{"name": "bash", "arguments": {"a": "\\ud800"}}',
        '["bash", {}]',
        "[" * 3000,
        '{"name": "bash", "arguments": ' + '{"a":' * 400 + "1" + "}" * 401,
    ],
)
def test_what_is_no_call_stays_text_and_the_next_call_is_read(inside):
    text = f"a \n<tool_call>{inside}</tool_call> b\n"
    piece, calls, broken = whole(text + WRITTEN["json"][1], JSON)
    assert (piece.text, calls, broken) == (text.rstrip(), [("bash", ARGUMENTS)], 1)


def test_values_without_quotes_have_the_type_that_the_tool_declares():
    text = (
        "<tool_call><function=bash><parameter=command>12</parameter><parameter=timeout>12</parameter>"
        "<parameter=other>true</parameter><parameter=more>a\nb</parameter></function></tool_call>"
    )
    assert whole(text, QWEN_XML)[1] == [("bash", {"command": "12", "timeout": 12, "other": True, "more": "a\nb"})]


THINK = THINKING[0]


@pytest.mark.parametrize(
    ("said", "thinking", "expected"),
    [
        ("<think>\nhm \n</think>\n\nso", False, Piece("hm", "so")),
        (" <think>hm</think>so", False, Piece("hm", "so")),
        ("<think>\n\n</think>\n\n so", False, Piece("", " so")),
        ("<think>hm", False, Piece("hm", "")),
        ("hm</think>so", True, Piece("hm", "so")),
        ("hm", True, Piece("hm", "")),
        ("<thin", False, Piece("", "<thin")),
        (" so <think>", False, Piece("", " so <think>")),
        ("", False, Piece()),
    ],
)
def test_reasoning_stands_before_the_text(said, thinking, expected):
    assert whole(said, thinks=THINK, thinking=thinking)[0] == expected


def test_a_call_in_the_reasoning_is_a_thought():
    call = WRITTEN["json"][1]
    piece, calls, _ = whole(f"<think>{call}</think>{call}", JSON, THINK)
    assert (piece, len(calls)) == (Piece(reasoning=call), 1)


PARTS = [
    "a",
    " ",
    "\n",
    "{",
    "}",
    "<",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "é",
    *(text for _, text in WRITTEN.values()),
]
ANSWERS = st.lists(st.sampled_from([*PARTS, *(part[: len(part) // 2] for part in PARTS if len(part) > 20)]), max_size=8)


@settings(max_examples=500, deadline=None)
@given(
    ANSWERS,
    st.sampled_from([None, *CALL_FORMATS]),
    st.sampled_from([None, THINK]),
    st.sampled_from([None, TYPES]),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_an_answer_that_grows_says_what_it_says_whole(parts, calls, thinks, types, thinking, cuts):
    text = "".join(parts)
    format = Format(calls, thinks, thinking and thinks is not None)
    grown, once = Reader(format, types), Reader(format, types)
    said, at = Piece(), 0
    for cut in sorted(cuts):
        said += grown.more(text[at:cut])
        at = max(at, cut)
    assert said + grown.end(text[at:]) == once.end(text)
    assert (grown.calls, grown.broken) == (once.calls, once.broken)


@settings(max_examples=200, deadline=None)
@given(ANSWERS, st.sampled_from(CALL_FORMATS))
def test_nothing_but_calls_and_white_space_is_left_out(parts, calls):
    text = "".join(parts)
    piece, found, _ = whole(text, calls)
    if not found:
        assert piece.text == text
    assert "".join(piece.text.split()) in "".join(text.split()) or found


def test_text_goes_out_while_it_cannot_become_a_call():
    reader = Reader(Format(JSON, THINK), TYPES)
    told = [reader.more(text) for text in ("<th", "ink>h", "m\n", "</think>", "\n\nI ", "look", " <tool", "_box> ")]
    assert [piece.reasoning for piece in told] == ["", "h", "m", "", "", "", "", ""]
    assert [piece.text for piece in told] == ["", "", "", "", "I", " look", "", " <tool_box>"]
