"""Streamed and unstreamed answers of the same tokens are equal, in every protocol: what a client puts together of the
events is what the answer says whole, and both are what was recorded."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from policies import CALLING, make_policy
from scripted_engine import Scripted
from texts import STOP, ids

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
FUNCTION = {"name": "bash", "description": "Run.", "parameters": PARAMETERS}
PROTOCOLS = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 1000}),
    "messages": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 1000,
            "tools": [{"name": "bash", "input_schema": PARAMETERS}],
        },
    ),
    "responses": ("/v1/responses", {"input": "hi", "tools": [FUNCTION | {"type": "function"}]}),
    "gemini": (
        "/v1beta/models/m",
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "tools": [{"functionDeclarations": [FUNCTION]}]},
    ),
}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "é  \\u00e9", "n": 20.0}}\n</tool_call>'
BREAKS = "one\u0085two\u2028three\u2029"
"""What httpx, and so litellm and Google's SDK, takes for the end of a line."""
PARTS = [
    "a",
    " ",
    "\n",
    BREAKS,
    "é☃",
    "🎈",
    "{",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    CALL[:40],
    "STOP",
]


async def asked(house, key, protocol, streamed, **more):
    """What one protocol tells: reasoning, text, calls, how it ended, sampled tokens."""
    path, body = PROTOCOLS[protocol]
    body = body | more
    if protocol == "gemini":
        path += ":streamGenerateContent?alt=sse" if streamed else ":generateContent"
    elif streamed:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
    response = await house.http.post(house.url + path, json=body, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    if not streamed:
        return WHOLE[protocol](response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return STREAMED[protocol]([json.loads(line) for line in lines if line != "[DONE]"])


def chat(answer):
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or []]
    text = message["content"] or ""
    return message.get("reasoning_content", ""), text, calls, choice["finish_reason"], answer["usage"]


def chat_streamed(chunks):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls = [(call["id"], call["function"]) for delta in deltas for call in delta.get("tool_calls", [])]
    reasoning, text = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    return reasoning, text, calls, choices[-1]["finish_reason"], chunks[-1]["usage"]


def completions(answer):
    (choice,) = answer["choices"]
    return choice["text"], choice["finish_reason"], answer["usage"]


def completions_streamed(chunks):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"], chunks[-1]["usage"]


def messages(answer):
    return answer["content"], answer["stop_reason"], answer["usage"]


def messages_streamed(events):
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | ({"input": ""} if "input" in event["content_block"] else {}))
        if event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                name = "input" if name == "partial_json" else name
                blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + value if name != "type" else None
    kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    blocks = [block | {"type": kind} for block, kind in zip(blocks, kinds, strict=True)]
    blocks = [block | ({"input": json.loads(block["input"])} if "input" in block else {}) for block in blocks]
    (end,) = [event for event in events if event["type"] == "message_delta"]
    assert [event["type"] for event in events[:: len(events) - 1]] == ["message_start", "message_stop"]
    return blocks, end["delta"]["stop_reason"], end["usage"]


def plain(items):
    """Items without the ids that name the call."""
    return [{k: v for k, v in item.items() if k != "id"} for item in items]


def responses(answer):
    return plain(answer["output"]), answer["status"], answer["usage"]


def responses_streamed(events):
    """The last event says it whole; what came before has to say the same."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items, told = [], {}
    for event in events:
        if event["type"].endswith(".delta"):
            told.setdefault(event["output_index"], []).append(event["delta"])
        if event["type"] == "response.output_item.done":
            items.append(event["item"])
    assert items == events[-1]["response"]["output"]
    for index, item in enumerate(items):
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(told[index]) == said
    return responses(events[-1]["response"])


def gemini(answer):
    (candidate,) = answer["candidates"]
    return *joined(candidate["content"]["parts"]), candidate["finishReason"], answer["usageMetadata"]


def gemini_streamed(chunks):
    candidates = [candidate for chunk in chunks for candidate in chunk["candidates"]]
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    return *joined(parts), candidates[-1]["finishReason"], chunks[-1]["usageMetadata"]


def joined(parts):
    reasoning = "".join(part["text"] for part in parts if part.get("thought"))
    text = "".join(part["text"] for part in parts if "text" in part and not part.get("thought"))
    return reasoning, text, [part["functionCall"] for part in parts if "functionCall" in part]


WHOLE = {
    "chat": chat,
    "completions": completions,
    "messages": messages,
    "responses": responses,
    "gemini": gemini,
}
STREAMED = {
    "chat": chat_streamed,
    "completions": completions_streamed,
    "messages": messages_streamed,
    "responses": responses_streamed,
    "gemini": gemini_streamed,
}


def without_ids(value):
    """Ids of calls are made for each answer."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id")}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], dict):
        return value[1]
    return [without_ids(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.fixture
async def calling(house):
    make_policy(house.policy, CALLING)
    await house.restart()
    return house


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(PARTS), max_size=7) | st.lists(st.integers(0, 258), max_size=30),
    st.sampled_from(["stop", "length"]),
    st.integers(0, 3),
)
@example([BREAKS], "stop", 0)
async def test_a_stream_tells_what_the_answer_says(calling, protocol, said, finish, cut):
    """For random tokens, calls, broken calls, and characters cut in two."""
    house = calling
    sampled = ids("".join(said)) if all(isinstance(part, str) for part in said) else [id for id in said if id != STOP]
    sampled = sampled[: -cut or None] + ([STOP] if finish == "stop" else ids("x"))
    house.engine.script = lambda prompt, call: Scripted(sampled, finish=finish)
    one, other = await house.attempts(2, group=f"g{len(house.engine.log)}")
    whole = await asked(house, one.key, protocol, streamed=False)
    streamed = await asked(house, other.key, protocol, streamed=True)
    assert without_ids(streamed) == without_ids(whole)
    first, second = [node for index in range(2) for node in await house.nodes(one.rollout[:-2], index)]
    assert without_ids(first.message) == without_ids(second.message)
    assert first.broken_calls == second.broken_calls
