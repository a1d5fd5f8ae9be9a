"""What an attacker found in the protocols: each test is one way in which they broke."""

import asyncio
import json
import socket
import struct
import time

import openai
import pytest
from policies import CALLING, make_policy
from scripted_engine import Scripted
from test_exchange import USER, ask_and_leave, finish_what_runs, say, told
from texts import answer, ids

from harnessed.client import ApiError, claim, create_run, end_attempt, get_totals
from harnessed.gateway.formats import CALL_FORMATS, Format
from harnessed.gateway.reading import Reader
from harnessed.records import Dialect, Ending, Fate, Outcome, RunSpec, SideCall


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


async def post(house, path, body, key, **headers):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"} | headers
    return await house.http.post(house.url + path, content=json.dumps(body).encode(), headers=headers)


def format_named(read):
    return next(each for each in CALL_FORMATS if each.read.__name__ == read)


FUNCTION = {"name": "bash", "description": "Run.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture
async def calling(house):
    make_policy(house.policy, CALLING)
    await house.restart()
    return house


async def test_a_late_report_about_an_ended_attempt_leaves_the_live_one_alone(house):
    house.engine.script = lambda prompt, call: Scripted(answer("x" * 40), pace_s=0.02)
    (first,) = await house.attempts()
    ending = Ending(outcome=Outcome.INFRASTRUCTURE, reason="host died")
    await house.admin(end_attempt(first.rollout, 1, ending, 3))
    (second,) = await house.admin(claim("r", "controller", 1, 3))
    assert second.attempt == 2
    asking = asyncio.create_task(say(house, second.key, [USER]))
    while not house.engine.log:
        await asyncio.sleep(0.01)
    with pytest.raises(ApiError):
        await house.admin(end_attempt(first.rollout, 1, ending, 3))
    assert told(await asking)["content"] == "x" * 40


@pytest.mark.parametrize(("path", "name"), [("/v1/messages", "system"), ("/v1/responses", "instructions")])
async def test_no_depth_of_a_system_block_loses_tokens(house, path, name):
    (attempt,) = await house.attempts(max_tokens=50)
    body = {"messages": [USER], "max_tokens": 20} if "messages" in path else {"input": "hi"}
    seen = []
    for depth in range(244, 254):
        block = {"type": "text" if "messages" in path else "input_file", "text": "x", "extra": nested(depth)}
        response = await post(house, path, body | {name: [block, block]}, attempt.key)
        seen.append((depth, response.status_code, response.text[:150]))
    assert {status for _, status, _ in seen} <= {200, 400}, seen
    assert (await house.admin(get_totals("r"))).sampled_tokens == house.engine.sampled_tokens


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_no_depth_of_a_tools_schema_is_a_500_with_an_engine_that_speaks_chat(house, path, caplog):
    await house.make_run(speaks=Dialect.CHAT)
    (attempt,) = await house.attempts(max_tokens=50)
    seen = []
    for depth in range(240, 254):
        schema = {"type": "object", "properties": {}, "x": nested(depth)}
        body = {
            "/v1/messages": {"messages": [USER], "max_tokens": 20, "tools": [{"name": "b", "input_schema": schema}]},
            "/v1/responses": {"input": "hi", "tools": [{"type": "function", "name": "b", "parameters": schema}]},
        }[path]
        response = await post(house, path, body, attempt.key)
        seen.append((depth, response.status_code, response.text[:100]))
    assert {status for _, status, _ in seen} <= {200, 400}, seen


REPEATED = {
    "kimi": ("_kimi", "<|tool_calls_section_begin|><|tool_call_begin|>" + "\n" * 2000),
    "mistral": ("_named", "[TOOL_CALLS]" * 4000),
    "qwen xml": ("_qwen_xml", "<tool_call><function=a>" + "<parameter=a>\n" * 4000 + "</function></tool_call>"),
    "glm": ("_glm", "<tool_call>a" + "<arg_key>a</arg_key><arg_value>b" * 300 + "</tool_call>"),
    "deepseek": ("_deepseek", "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>" * 5000),
    "hermes": ("_json", "<tool_call>" * 32_000),
}


@pytest.mark.parametrize("name", REPEATED)
def test_an_answer_that_repeats_itself_does_not_hold_up_the_gateway(name):
    """An answer of some thousand tokens of a looping policy is read for seconds, in the event loop."""
    format, text = REPEATED[name]
    reader = Reader(Format(format_named(format)), {})
    begun = time.perf_counter()
    reader.end(text)
    assert time.perf_counter() - begun < 0.5


async def test_a_small_request_of_references_does_not_stop_the_gateway(house):
    """A body of 32 kB that names one answer 500 times is rendered and encoded whole, in the event loop, before the
    context limit refuses it: nobody else is served for seconds."""
    house.engine.script = lambda prompt, call: answer("word " * 2000)
    house.engine.context = 10**6
    await house.make_run(context=20_000)
    (attempt,) = await house.attempts(max_tokens=15_000)
    (item,) = (await post(house, "/v1/responses", {"input": "hi"}, attempt.key)).json()["output"]
    said = {"role": "user", "content": "hi"}
    body = {"input": [said, *[{"type": "item_reference", "id": item["id"]}] * 500, said]}
    assert len(json.dumps(body)) < 32 * 2**10
    asking = asyncio.create_task(post(house, "/v1/responses", body, attempt.key))
    longest = 0.0
    while not asking.done():
        before = time.perf_counter()
        await asyncio.sleep(0.005)  # in the gateway's own event loop
        longest = max(longest, time.perf_counter() - before)
    assert (await asking).status_code == 400
    assert longest < 0.5


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_that_spans_a_break_of_the_engine_ends_the_answer(house, streamed):
    scripted = [Scripted(ids("one ST"), finish="interrupted"), answer("OP two")]
    house.engine.script = lambda prompt, call: scripted[call - 1]
    (attempt,) = await house.attempts()
    response = await house.openai(attempt.key).chat.completions.create(
        model="m", messages=[USER], stop=["STOP"], stream=streamed
    )
    if streamed:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in response])
    else:
        text = response.choices[0].message.content
    assert text == "one "


async def test_an_answer_that_goes_on_may_use_the_tokens_that_are_left(house):
    await house.make_run(tokens=20)
    scripted = [Scripted(ids("a" * 12), finish="interrupted"), Scripted(status=500), answer("bc")]
    house.engine.script = lambda prompt, call: scripted[call - 1]
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER])
    completion = await say(house, attempt.key, [USER])
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("a" * 12 + "bc", "stop")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_is_not_delivered_to_a_client_that_has_left(house, streamed):
    """A retry that leaves while its body is being encoded takes the waiting answer with it: it counts as delivered, and
    the next retry is sampled anew."""
    house.engine.context = 10**7
    await house.make_run(context=2_000_000)
    messages = [{"role": "user", "content": "word " * 100_000}]
    (attempt,) = await house.attempts(group="h")
    await ask_and_leave(house, attempt.key, messages)
    await finish_what_runs(house)
    body = json.dumps({"messages": messages, "stream": streamed}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {attempt.key}\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"

    def send_and_leave():
        with socket.create_connection(("127.0.0.1", int(house.url.rpartition(":")[2]))) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(0.01)
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):  # not a byte has come
                connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    await asyncio.to_thread(send_and_leave)
    await asyncio.sleep(1.5)
    assert not (await house.nodes("h"))[0].delivered
    await say(house, attempt.key, messages)
    assert len(house.engine.log) == 1


def test_the_text_of_arguments_is_not_rewritten_where_llama_writes_several_calls():
    reader = Reader(Format(format_named("_json_first")), {})
    one = {"name": "write", "parameters": {"code": "if (a) {b};{c}"}}
    two = {"name": "write", "parameters": {"code": "d"}}
    reader.end(json.dumps(one) + "; " + json.dumps(two))
    assert [json.loads(arguments)["code"] for _, arguments in reader.calls] == ["if (a) {b};{c}", "d"]


def test_a_long_number_in_arguments_keeps_its_digits():
    reader = Reader(Format(format_named("_json")), {})
    reader.end('<tool_call>{"name": "get", "arguments": {"id": 123456789012345678901234}}</tool_call>')
    ((_, arguments),) = reader.calls
    assert json.loads(arguments)["id"] == 123456789012345678901234


@pytest.mark.parametrize(
    "schema", [{"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"enum": ["1", "2"]}]
)
def test_an_optional_text_stays_a_text(schema):
    reader = Reader(Format(format_named("_qwen_xml")), {"f": {"x": schema}})
    reader.end("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>")
    assert reader.calls == [("f", '{"x":"1"}')]


async def test_a_function_with_a_dot_in_its_name_is_called_by_its_name(calling):
    house = calling
    house.engine.script = lambda prompt, call: answer('<tool_call>\n{"name": "fs.read", "arguments": {}}\n</tool_call>')
    (attempt,) = await house.attempts()
    tool = {"type": "function", "name": "fs.read", "parameters": {"type": "object", "properties": {}}}
    response = (await post(house, "/v1/responses", {"input": "hi", "tools": [tool]}, attempt.key)).json()
    (item,) = response["output"]
    assert (item["name"], item.get("namespace")) == ("fs.read", None)


@pytest.mark.parametrize("streamed", [False, True])
async def test_who_asks_for_no_calls_gets_none(calling, streamed):
    house = calling
    call = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    house.engine.script = lambda prompt, n: answer(call)
    (attempt,) = await house.attempts()
    body = {"messages": [USER], "tools": TOOLS}
    house.engine.paused, house.engine.interruptible = True, False
    asking = asyncio.create_task(post(house, "/v1/chat/completions", body, attempt.key))
    while not house.engine.log:
        await asyncio.sleep(0.01)
    asking.cancel()
    await house.left()
    await finish_what_runs(house)
    response = await post(
        house, "/v1/chat/completions", body | {"tool_choice": "none", "stream": streamed}, attempt.key
    )
    assert "tool_calls" not in response.text


async def test_the_context_limit_holds_with_an_engine_that_speaks_chat(house):
    await house.make_run(speaks=Dialect.CHAT, context=100)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.BadRequestError):
        await say(house, attempt.key, [{"role": "user", "content": "x" * 1000}])


async def test_parallel_calls_within_the_token_limit_are_served(house):
    await house.make_run(tokens=1000)
    house.engine.script = lambda prompt, call: Scripted(answer("short"), delay_s=0.3)
    (attempt,) = await house.attempts()
    one = asyncio.create_task(say(house, attempt.key, [USER]))
    while not house.engine.log:
        await asyncio.sleep(0.01)
    title = [{"role": "user", "content": "title"}]
    with pytest.raises(openai.RateLimitError, match="other calls"):
        await say(house, attempt.key, title)
    await house.openai(attempt.key, max_retries=5).chat.completions.create(model="m", messages=title)
    await one


async def test_a_stop_sequence_is_named_to_anthropics_clients(house):
    house.engine.script = lambda prompt, call: ids("one STOP")
    (attempt,) = await house.attempts()
    body = {"messages": [USER], "max_tokens": 100, "stop_sequences": ["STOP"]}
    response = (await post(house, "/v1/messages", body, attempt.key)).json()
    assert (response["content"][0]["text"], response["stop_reason"], response["stop_sequence"]) == (
        "one ",
        "stop_sequence",
        "STOP",
    )


async def test_instructions_and_a_system_message_are_the_same(house):
    (attempt,) = await house.attempts()
    first = (await post(house, "/v1/responses", {"instructions": "be kind", "input": "hello"}, attempt.key)).json()
    text = first["output"][0]["content"][0]["text"]
    await say(
        house,
        attempt.key,
        [{"role": "system", "content": "be kind"}, USER, {"role": "assistant", "content": text}, USER],
    )
    assert [node.follows for node in await house.nodes()] == [0, 1]


def test_a_marker_in_an_argument_is_part_of_it():
    reader = Reader(Format(format_named("_json")), {})
    text = "grep '</tool_call>' a"
    reader.end('<tool_call>\n{"name": "bash", "arguments": {"command": "' + text + '"}}\n</tool_call>')
    assert [json.loads(arguments) for _, arguments in reader.calls] == [{"command": text}]


def test_mistral_marker_in_an_argument_is_part_of_it():
    reader = Reader(Format(format_named("_named")), {})
    reader.end('[TOOL_CALLS]bash[ARGS]{"command": "grep [TOOL_CALLS] a"}')
    assert [json.loads(arguments) for _, arguments in reader.calls] == [{"command": "grep [TOOL_CALLS] a"}]


@pytest.mark.parametrize("role", ["user"])
async def test_a_request_that_an_engine_refuses_is_the_agents_fault(house, role):
    """vLLM answers 400 to messages it cannot take (a picture for a text model, a tool call without a name): the harness
    gets 503, which it sends again and again, and the attempt ends as infrastructure."""
    await house.make_run(speaks=Dialect.CHAT)
    house.engine.script = lambda prompt, call: Scripted(status=400)
    (attempt,) = await house.attempts()
    response = await post(house, "/v1/chat/completions", {"messages": [USER]}, attempt.key)
    rollout = await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 1))
    assert (response.status_code, rollout.outcome) == (400, Outcome.OK)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "write a title"},
        {
            "role": "system",
            "content": [{"type": "text", "text": "You are."}, {"type": "text", "text": "write a title"}],
        },
    ],
)
async def test_a_side_call_is_known_by_its_system_text_in_every_shape(house, message):
    """`system` is not compared with developer messages, and with the JSON of blocks in place of their text."""
    await house.admin(
        create_run(RunSpec(id="r", policy=str(house.policy), side_calls=[SideCall(system="(?m)^write a title$")]))
    )
    (attempt,) = await house.attempts()
    await say(house, attempt.key, [message, USER])
    assert [node.apart for node in await house.nodes()] == [Fate.SIDE_CALL]


async def test_no_name_of_an_interrupted_generation_is_kept_for_ever(house):
    """The ids of answers that had ended already when the client left stay in the books of `Engines`."""
    slow = Scripted(answer("slow" * 20), pace_s=0.05)
    house.engine.script = lambda prompt, call: answer("fast") if call == 1 else slow
    (attempt,) = await house.attempts()
    asking = asyncio.create_task(say(house, attempt.key, [USER], n=2))
    while len(house.engine.log) < 2 or len(house.engine.log[1].answer) < 3:
        await asyncio.sleep(0.01)
    asking.cancel()
    await house.left()
    await asyncio.sleep(0.5)
    assert not house.memory._engines._running


@pytest.mark.parametrize("value", ["123456789012345678901234567890", '"\\ud800"'], ids=["large", "surrogate"])
async def test_an_event_of_odd_values_is_no_500(house, value):
    """An agent's key gets a 500 with a traceback for an event that holds an integer above 64 bits."""
    (attempt,) = await house.attempts()
    event = f'{{"rollout": "{attempt.rollout}", "attempt": 1, "type": "t", "data": {{"a": {value}}}}}'
    headers = {"authorization": f"Bearer {attempt.key}"}
    response = await house.http.post(house.url + "/api/events", content=event, headers=headers)
    assert response.status_code in (200, 400)


async def test_tokens_of_an_answer_that_cannot_be_stored_are_counted(house):
    """As the test of depths above, for the books: the answer to such a request is in no total."""
    (attempt,) = await house.attempts(max_tokens=50)
    for depth in range(244, 254):
        block = {"type": "text", "text": "x", "extra": nested(depth)}
        await post(house, "/v1/messages", {"messages": [USER], "max_tokens": 20, "system": [block, block]}, attempt.key)
    assert (await house.admin(get_totals("r"))).sampled_tokens == house.engine.sampled_tokens
