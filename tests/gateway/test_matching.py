"""What harnesses do to messages between one request and the next, each kind by name."""

import pytest

from harnessed.gateway.matching import answer_identity, call_ids, prompt_identity


def call(arguments, id="call_a1", name="bash"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content="text", **fields):
    return {"role": "assistant", "content": content} | fields


DELIVERED = answer(
    "\n  I'll  write. \n", reasoning_content=" Think\n", tool_calls=[call('{ "b":  20.0 , "a": "caf\\u00e9 \\/"}')]
)

SAME_ANSWER = {
    "as it is": DELIVERED,
    "text in a block (OpenHands)": DELIVERED | {"content": [{"type": "text", "text": DELIVERED["content"]}]},
    "stripped text (Hermes)": DELIVERED | {"content": "I'll  write."},
    "reasoning dropped (OpenHands, LangChain)": {k: v for k, v in DELIVERED.items() if k != "reasoning_content"},
    "reasoning trimmed (Qwen Code)": DELIVERED | {"reasoning_content": "Think"},
    "reasoning renamed (mini-swe-agent)": DELIVERED | {"provider_specific_fields": {"reasoning": " Think\n"}},
    "nulls added (openai-python)": DELIVERED | {"refusal": None, "annotations": None, "audio": None, "parsed": None},
    "arguments re-serialised (OpenHands)": DELIVERED | {"tool_calls": [call('{"b": 20.0, "a": "caf\\u00e9 /"}')]},
    "arguments compact, raw UTF-8 (OpenCode)": DELIVERED | {"tool_calls": [call('{"b":20,"a":"café /"}')]},
    "keys sorted (Hermes)": DELIVERED | {"tool_calls": [call('{"a":"caf\\u00e9 /","b":20.0}')]},
    "numbers normalised (Claude Code)": DELIVERED | {"tool_calls": [call('{"b":20,"a":"caf\\u00e9 /"}')]},
    "arguments parsed (anthropic-python)": DELIVERED | {"tool_calls": [call({"b": 20.0, "a": "café /"})]},
    "call id rewritten (OpenClaw)": DELIVERED | {"tool_calls": [call('{"b":20,"a":"café /"}', id="calla1")]},
    "an index added (openai-python)": DELIVERED | {"tool_calls": [DELIVERED["tool_calls"][0] | {"index": 0}]},
}


@pytest.mark.parametrize("rewritten", SAME_ANSWER.values(), ids=SAME_ANSWER)
def test_an_answer_is_the_same(rewritten):
    assert answer_identity(rewritten) == answer_identity(DELIVERED)


OTHER_ANSWER = {
    "other text": DELIVERED | {"content": "I'll write."},
    "another tool": DELIVERED | {"tool_calls": [call('{ "b":  20.0 , "a": "caf\\u00e9 \\/"}', name="sh")]},
    "another argument": DELIVERED | {"tool_calls": [call('{"b": 20.5, "a": "café /"}')]},
    "an argument of another type": DELIVERED | {"tool_calls": [call('{"b": "20", "a": "café /"}')]},
    "a call more": DELIVERED | {"tool_calls": [*DELIVERED["tool_calls"], *DELIVERED["tool_calls"]]},
    "no call": {k: v for k, v in DELIVERED.items() if k != "tool_calls"},
}


@pytest.mark.parametrize("rewritten", OTHER_ANSWER.values(), ids=OTHER_ANSWER)
def test_an_answer_is_another(rewritten):
    assert answer_identity(rewritten) != answer_identity(DELIVERED)


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_empty_content_has_many_shapes(content):
    assert answer_identity(answer(content)) == answer_identity(answer(""))
    absent = {"role": "assistant"}
    assert answer_identity(absent) == answer_identity(answer(""))


def test_broken_arguments_are_compared_as_they_stand():
    broken = '{"command":  "echo hel'
    delivered = answer("", tool_calls=[call(broken)])
    kept = answer(None, tool_calls=[call(broken)])  # Codex, LangChain
    wrapped = answer("", tool_calls=[call({"__unparsedToolInput": {"raw": broken, "len": 22}})])  # Claude Code
    repaired = answer("", tool_calls=[call('{"command":"echo hel"}')])  # Qwen Code
    assert answer_identity(kept) == answer_identity(wrapped) == answer_identity(delivered)
    assert answer_identity(repaired) != answer_identity(delivered)
    assert call_ids(repaired) == call_ids(delivered) == ["calla1"]


SAME_PROMPT = {
    "one block (OpenHands, Qwen Code)": {"role": "user", "content": [{"type": "text", "text": " a "}]},
    "a mark on the block (Claude Code)": {
        "role": "user",
        "content": [{"type": "text", "text": " a ", "cache_control": {"type": "ephemeral"}}],
    },
    "a mark on the message": {"role": "user", "content": " a ", "cache_control": {"type": "ephemeral"}},
    "nulls": {"role": "user", "content": " a ", "name": None},
}


@pytest.mark.parametrize("rewritten", SAME_PROMPT.values(), ids=SAME_PROMPT)
def test_a_prompt_message_is_the_same(rewritten):
    assert prompt_identity(rewritten) == prompt_identity({"role": "user", "content": " a "})


OTHER_PROMPT = {
    "trimmed": {"role": "user", "content": "a"},
    "another role": {"role": "system", "content": " a "},
    "two blocks": {"role": "user", "content": [{"type": "text", "text": " "}, {"type": "text", "text": "a "}]},
    "a name": {"role": "user", "content": " a ", "name": "x"},
}


@pytest.mark.parametrize("rewritten", OTHER_PROMPT.values(), ids=OTHER_PROMPT)
def test_a_prompt_message_is_another(rewritten):
    assert prompt_identity(rewritten) != prompt_identity({"role": "user", "content": " a "})


def test_a_result_keeps_its_call_through_a_rewritten_id():
    result = {"role": "tool", "tool_call_id": "chatcmpl-tool-0f01", "content": "ok"}
    assert prompt_identity(result) == prompt_identity(result | {"tool_call_id": "chatcmpltool0f01"})  # OpenClaw
    assert prompt_identity(result) != prompt_identity(result | {"tool_call_id": "chatcmpl-tool-0f02"})
