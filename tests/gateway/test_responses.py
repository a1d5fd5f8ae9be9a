"""OpenAI Responses, by the official SDK: the same transcript as any other protocol, its own shapes."""

import json

import httpx
import openai
import pytest
from policies import CALLING, make_policy
from scripted_engine import Scripted
from test_exchange import USER, say
from texts import answer, ids, text

from harnessed.client import get_totals
from harnessed.gateway.wire import responses
from harnessed.gateway.wire.turn import WireError
from harnessed.records import Dialect

TOOL = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}, "strict": False}


async def ask(house, key, said, **options):
    return await house.openai(key).responses.create(model="gpt-any", input=said, **options)


def turn(**request):
    return responses.parse(json.dumps({"input": "hello"} | request).encode(), {})


async def test_a_conversation_goes_on_in_one_row(house):
    (attempt,) = await house.attempts()
    first = await ask(house, attempt.key, "hello", instructions="be brief")
    assert (first.object, first.status, first.model, first.output_text) == (
        "response",
        "completed",
        "gpt-any",
        "answer 1",
    )
    assert first.usage.output_tokens == len(answer("answer 1"))
    assert first.usage.input_tokens == len(house.engine.log[0].prompt)
    history = [USER, *(item.model_dump() for item in first.output), USER]
    await ask(house, attempt.key, history, instructions="be brief")
    assert text(house.engine.log[0].prompt).startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert [node.parent for node in await house.nodes()] == [0, 1]


async def test_the_history_may_be_left_to_the_gateway(house):
    (attempt,) = await house.attempts()
    first = await ask(house, attempt.key, "hello", instructions="be brief")
    second = await ask(house, attempt.key, "more", previous_response_id=first.id, instructions="be brief")
    third = await ask(house, attempt.key, "again", previous_response_id=second.id, instructions="be long")
    assert third.output_text == "answer 3"
    assert [node.parent for node in await house.nodes()] == [0, 1, 0]
    prompt = text(house.engine.log[2].prompt)
    assert prompt.startswith("<|im_start|>system\nbe long<|im_end|>")
    assert "be brief" not in prompt
    assert prompt.index("answer 1") < prompt.index("more") < prompt.index("answer 2") < prompt.index("again")
    with pytest.raises(openai.BadRequestError, match="resp_unknown"):
        await ask(house, attempt.key, "more", previous_response_id="resp_unknown")


async def test_items_may_be_referred_to(house):
    """Several items of one answer are one answer."""
    make_policy(house.policy, CALLING)
    await house.restart()
    call = '<tool_call>{"name": "look", "arguments": {"at": "door"}}</tool_call>'
    house.engine.script = lambda prompt, number: answer(f"<think>hm</think>I look.{call}" if number == 1 else "so")
    (attempt,) = await house.attempts()
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    first = await ask(house, attempt.key, "hello", tools=tools)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    refers = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "a door"}
    for some in (refers, refers[1:], refers[2:]):
        await ask(house, attempt.key, [{"role": "user", "content": "hello"}, *some, result], tools=tools)
    nodes = await house.nodes()
    assert [node.parent for node in nodes] == [0, 1, 1, 1]
    assert nodes[1].segment == nodes[2].segment == nodes[3].segment
    with pytest.raises(openai.BadRequestError, match="no item with the id"):
        await ask(house, attempt.key, [{"type": "item_reference", "id": "msg_unknown"}])


async def test_an_answer_that_was_broken_off_is_no_history(house):
    """Its id was in the first event of the stream; the retry goes on with its tokens under an id of its own."""
    scripts = [Scripted(ids("one "), finish="interrupted"), Scripted(status=500), Scripted(answer("two"))]
    house.engine.script = lambda prompt, call: scripts[min(call, 3) - 1]
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APIError):
        await gathered(house, attempt.key, "hello")
    (begun,) = await house.nodes()
    with pytest.raises(openai.BadRequestError, match="has had no response"):
        await ask(house, attempt.key, "more", previous_response_id=f"resp_{begun.call}")
    assert (await ask(house, attempt.key, "hello")).output_text == "one two"
    with pytest.raises(openai.BadRequestError, match="has had no response"):
        await ask(house, attempt.key, "more", previous_response_id=f"resp_{begun.call}")


async def test_another_attempts_answer_is_no_history(house):
    one, other = await house.attempts(2)
    first = await ask(house, one.key, "hello")
    with pytest.raises(openai.BadRequestError, match="has had no response"):
        await ask(house, other.key, "more", previous_response_id=first.id)


async def test_the_same_conversation_is_the_same_in_both_protocols(house):
    (attempt,) = await house.attempts()
    first = await ask(house, attempt.key, "hello")
    await say(house, attempt.key, [USER, {"role": "assistant", "content": first.output_text}, USER])
    assert [node.parent for node in await house.nodes()] == [0, 1]


async def gathered(house, key, said, **options):
    async with house.openai(key).responses.stream(model="gpt-any", input=said, **options) as stream:
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response, [event.type for event in events]


def plain(response):
    """Without what names this response."""
    output = [
        {k: v for k, v in item.model_dump(exclude_none=True).items() if k not in ("id", "call_id", "parsed_arguments")}
        for item in response.output
    ]
    for item in output:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return output, response.status, response.incomplete_details, response.usage


@pytest.mark.parametrize(
    "scripted", [Scripted(answer("one é☃ two")), Scripted(answer("")), Scripted(ids("cut"), finish="length")]
)
async def test_a_stream_holds_what_the_whole_answer_holds(house, scripted):
    house.engine.script = lambda prompt, call: scripted
    one, other = await house.attempts(2)
    whole = await ask(house, one.key, "hello")
    streamed, events = await gathered(house, other.key, "hello")
    assert plain(streamed) == plain(whole)
    assert (events[0], events[-1]) == ("response.created", f"response.{whole.status}")
    assert events.count("response.output_item.done") == 1


CALLS = [
    {"type": "function", "function": {"name": "look", "arguments": '{"b": 20.0,  "a": "caf\\u00e9"}'}},
    {"type": "function", "function": {"name": "files.read", "arguments": '{"broken'}},
]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_calls_and_reasoning_that_an_engine_parsed_go_there_and_back(house, streams):
    message = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": CALLS}
    house.engine.script = lambda prompt, call: Scripted(answer(f"so {call}"), message=message if call == 1 else None)
    await house.make_run(speaks=Dialect.CHAT)
    (attempt,) = await house.attempts()
    tools = [TOOL, {"type": "web_search"}, {"type": "namespace", "name": "files", "tools": [TOOL | {"name": "read"}]}]
    if streams:
        first, _ = await gathered(house, attempt.key, "hello", tools=tools)
    else:
        first = await ask(house, attempt.key, "hello", tools=tools)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.arguments for item in first.output[2:]] == [call["function"]["arguments"] for call in CALLS]
    assert (first.output[3].name, first.output[3].namespace) == ("read", "files")
    items = [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "a door"} for item in first.output[2:]
    ]
    await ask(house, attempt.key, [USER, *items, *results], tools=tools)
    said = house.engine.log[1].messages
    assert [each["role"] for each in said] == ["user", "assistant", "tool", "tool"]
    assert (said[1]["content"], said[1]["reasoning_content"]) == ("so", "hm")
    assert [call["function"] for call in said[1]["tool_calls"]] == [call["function"] for call in CALLS]
    assert [tool["function"]["name"] for tool in house.engine.log[1].tools] == ["look", "files.read"]
    assert (await house.nodes())[1].follows == 1


def test_items_are_grouped_into_answers():
    """Codex keeps what it got of a broken stream in front of the answer that came then."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]}
    found = turn(input=[developer, USER, thought, thought, said, call, call, result, said, said, USER]).messages
    shape = [(each["role"], each["content"], len(each.get("tool_calls", []))) for each in found]
    assert shape == [
        ("system", "rules", 0),
        ("user", "hello", 0),
        ("assistant", "", 0),
        ("assistant", "so", 2),
        ("tool", "x", 0),
        ("assistant", "so", 0),
        ("assistant", "so", 0),
        ("user", "hello", 0),
    ]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"input": []}, "at least one item"),
        ({"input": 3}, "list of objects"),
        ({"input": [3]}, "list of objects"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role"),
        ({"input": [{"role": "user", "content": 3}]}, "content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"instructions": 3}, "content"),
        ({"tools": [3]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "required"}, "forced"),
        ({"previous_response_id": 3}, "input"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(request_, says):
    with pytest.raises(WireError, match=says) as refusal:
        turn(**request_)
    assert refusal.value.status == 400


async def test_a_socket_is_refused_at_once_and_nothing_is_recorded(house):
    async with httpx.AsyncClient(base_url=house.url, timeout=20) as http:
        assert (await http.get("/v1/responses", headers={"upgrade": "websocket"})).status_code == 426
    assert (await house.admin(get_totals("r"))).calls == 0
