"""Anthropic Messages, by the official SDK: the same transcript as any other protocol, its own shapes."""

import json

import anthropic
import httpx
import pytest
from scripted_engine import Scripted
from test_exchange import USER, say
from texts import answer, ids, text

from harnessed.client import end_attempt, get_totals
from harnessed.gateway.wire import messages
from harnessed.gateway.wire.turn import WireError
from harnessed.records import Dialect, Ending, Outcome

ASKED = {"role": "user", "content": "hello"}
TOOLS = [{"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}]


async def ask(house, key, *said, **options):
    return await house.anthropic(key).messages.create(
        model="claude-any", messages=list(said), **{"max_tokens": 100} | options
    )


def told(message):
    """The answer as the SDK's users send it back."""
    return {"role": "assistant", "content": [block.model_dump() for block in message.content]}


def turn(**request):
    return messages.parse(json.dumps({"max_tokens": 10, "messages": [ASKED]} | request).encode(), {})


async def test_a_conversation_goes_on_in_one_row(house):
    (attempt,) = await house.attempts()
    first = await ask(house, attempt.key, ASKED, system="be brief")
    assert (first.type, first.role, first.model, first.stop_reason) == (
        "message",
        "assistant",
        "claude-any",
        "end_turn",
    )
    assert [block.text for block in first.content] == ["answer 1"]
    assert first.usage.output_tokens == len(answer("answer 1"))
    assert first.usage.input_tokens == len(house.engine.log[0].prompt)
    second = await ask(house, attempt.key, ASKED, told(first), ASKED, system=[{"type": "text", "text": "be brief"}])
    assert second.usage.input_tokens == len(house.engine.log[1].prompt)
    assert text(house.engine.log[0].prompt).startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert [node.parent for node in await house.nodes()] == [0, 1]


async def test_the_same_conversation_is_the_same_in_both_protocols(house):
    (attempt,) = await house.attempts()
    first = await ask(house, attempt.key, ASKED)
    await say(house, attempt.key, [USER, {"role": "assistant", "content": first.content[0].text}, USER])
    assert [node.parent for node in await house.nodes()] == [0, 1]


async def gathered(house, key, *said, **options):
    async with house.anthropic(key).messages.stream(
        model="claude-any", messages=list(said), **{"max_tokens": 100} | options
    ) as stream:
        events = [event.type async for event in stream]
        return await stream.get_final_message(), events


@pytest.mark.parametrize(
    ("scripted", "options"),
    [
        (Scripted(answer("one é☃ two")), {}),
        (Scripted(answer("")), {}),
        (Scripted(ids("cut"), finish="length"), {}),
        (Scripted(ids("one STOP"), finish="stop"), {"stop_sequences": ["STOP"]}),
    ],
    ids=["plain", "empty", "length", "stop sequence"],
)
async def test_a_stream_holds_what_the_whole_answer_holds(house, scripted, options):
    house.engine.script = lambda prompt, call: scripted
    one, other = await house.attempts(2)
    whole = await ask(house, one.key, ASKED, **options)
    streamed, events = await gathered(house, other.key, ASKED, **options)
    assert told(streamed) == told(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert (streamed.usage.input_tokens, streamed.usage.output_tokens) == (
        whole.usage.input_tokens,
        whole.usage.output_tokens,
    )
    assert (events[0], events[-1]) == ("message_start", "message_stop")


CALLS = [
    {"type": "function", "function": {"name": "look", "arguments": '{"b": 20.0,  "a": "caf\\u00e9"}'}},
    {"type": "function", "function": {"name": "look", "arguments": "{}"}},
]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_calls_and_thinking_that_an_engine_parsed_go_there_and_back(house, streams):
    """Claude Code writes arguments in another order and numbers anew; the answer is found again."""
    message = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": CALLS}
    house.engine.script = lambda prompt, call: Scripted(answer(f"so {call}"), message=message if call == 1 else None)
    await house.make_run(speaks=Dialect.CHAT)
    (attempt,) = await house.attempts()
    if streams:
        first, _ = await gathered(house, attempt.key, ASKED, tools=TOOLS)
    else:
        first = await ask(house, attempt.key, ASKED, tools=TOOLS)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    assert first.content[2].input == {"a": "café", "b": 20}
    again = told(first)
    again["content"][2]["input"] = {"a": "café", "b": 20}
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "a door"}]}
        for block in first.content[2:]
    ]
    new = {"role": "user", "content": [*results, {"type": "text", "text": "go"}]}
    await ask(house, attempt.key, ASKED, again, new, tools=TOOLS)
    said = house.engine.log[1].messages
    assert [each["role"] for each in said] == ["user", "assistant", "tool", "tool", "user"]
    assert said[1]["reasoning_content"] == "hm"
    assert said[2] == {"role": "tool", "tool_call_id": first.content[2].id, "content": "a door"}
    assert (await house.nodes())[1].follows == 1


def test_broken_arguments_come_as_claude_code_wraps_them():
    assert messages.parsed('{"a":') == {"__unparsedToolInput": {"raw": '{"a":', "len": 5}}
    assert messages.parsed("[1]") == {"__unparsedToolInput": {"raw": "[1]", "len": 3}}


def test_what_claude_code_sends_is_understood():
    request = turn(
        system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "system", "content": [{"type": "text", "text": "env", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": True}]},
        ],
        tools=[*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        stop_sequences=["END"],
        stream=True,
    )
    assert [(each["role"], each["content"]) for each in request.messages[1:]] == [
        ("user", "x"),
        ("system", "env"),
        ("assistant", ""),
        ("tool", ""),
    ]
    assert request.messages[3]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a":1}'}
    assert request.messages[4]["is_error"]
    assert [tool["function"]["name"] for tool in request.tools] == ["look", "web_search"]
    assert (request.wanted.stop, request.wanted.max_tokens, request.stream) == (("END",), 10, True)
    assert request.asked["thinking"] == {"type": "adaptive"}


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [1]}, "list of objects"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 4}]}]}, "content"),
        ({"system": 7}, "content"),
        ({"tools": {}}, None),
        ({"tools": [3]}, "tools"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"tool_choice": {"type": "any"}}, "forced"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(request_, says):
    if says is None:
        assert turn(**request_).tools == []
        return
    with pytest.raises(WireError, match=says) as refusal:
        turn(**request_)
    assert refusal.value.status == 400


async def test_refusals_have_the_protocols_shape(house):
    (attempt,) = await house.attempts()
    with pytest.raises(anthropic.BadRequestError, match="at least one") as refusal:
        await ask(house, attempt.key)
    assert refusal.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* maximum context length is 2000"):
        await ask(house, attempt.key, {"role": "user", "content": "long " * 500})
    with pytest.raises(anthropic.AuthenticationError):
        await ask(house, "nonsense", ASKED)
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    with pytest.raises(anthropic.PermissionDeniedError, match="has ended"):
        await ask(house, attempt.key, ASKED)
    assert (await house.admin(get_totals("r"))).calls == 0


async def test_a_prompt_is_counted_without_a_record(house):
    (attempt,) = await house.attempts()
    client = house.anthropic(attempt.key)
    first = await ask(house, attempt.key, ASKED)
    counted = await client.messages.count_tokens(model="m", messages=[ASKED, told(first), ASKED])
    second = await ask(house, attempt.key, ASKED, told(first), ASKED)
    assert counted.input_tokens == second.usage.input_tokens
    assert (await house.admin(get_totals("r"))).calls == 2


async def test_models_and_the_addresses_that_claude_code_uses(house):
    (attempt,) = await house.attempts()
    client = house.anthropic(attempt.key)
    assert [model.id async for model in await client.models.list()] == ["policy"]
    assert (await client.models.retrieve("claude-any")).display_name == "claude-any"
    body = {"model": "m", "max_tokens": 9, "messages": [ASKED]}
    async with httpx.AsyncClient(base_url=house.url, timeout=20) as http:
        by_header = await http.post("/v1/messages?beta=true", json=body, headers={"x-api-key": attempt.key})
        by_path = await http.post(f"/a/{attempt.key}/v1/messages?beta=true", json=body)
    assert by_header.json()["content"] == [{"type": "text", "text": "answer 1"}]
    assert by_path.json()["content"] == [{"type": "text", "text": "answer 2"}]
