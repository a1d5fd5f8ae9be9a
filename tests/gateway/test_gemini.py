"""Google's Gemini API, by the official SDK: the same transcript as any other protocol, its own shapes."""

import json

import httpx
import pytest
from google import genai
from google.genai import types
from google.genai.errors import APIError
from policies import make_policy
from scripted_engine import Scripted
from test_exchange import USER, say
from test_splits import end, shape
from texts import answer, ids, text

from harnessed.client import end_attempt, get_totals
from harnessed.gateway.wire import gemini
from harnessed.gateway.wire.turn import WireError
from harnessed.records import Dialect, Ending, Outcome

CALLING = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A policy that thinks and calls."""
CALLED = '<think>hm</think>so <tool_call>\n{"name": "look", "arguments": {"at": "the  door", "n": 20.0}}\n</tool_call>'
LOOK = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "OBJECT", "properties": {"at": {"type": "STRING"}, "n": {"type": "NUMBER"}}},
}
TOOLS = [types.Tool(function_declarations=[types.FunctionDeclaration(**LOOK)])]
AT = {"model": "m", "method": "generateContent"}


@pytest.fixture
async def google(house):
    """The SDK with a key."""
    async with httpx.AsyncClient(timeout=60) as http:

        def client(key):
            options = types.HttpOptions(base_url=house.url, httpx_async_client=http)
            return genai.Client(api_key=key, http_options=options).aio

        yield client


@pytest.fixture
async def calling(house):
    make_policy(house.policy, CALLING)
    await house.restart()
    return house


async def ask(client, contents="hello", **config):
    return await client.models.generate_content(model="gemini-any", contents=contents, config=config or None)


async def gathered(client, contents="hello", **config):
    """All parts of a stream, texts of one kind joined; and its last chunk."""
    parts, last = [], None
    async for last in await client.models.generate_content_stream(
        model="gemini-any", contents=contents, config=config or None
    ):
        for part in last.candidates[0].content.parts:
            if parts and part.text is not None and parts[-1].text is not None and parts[-1].thought == part.thought:
                parts[-1] = types.Part(text=parts[-1].text + part.text, thought=part.thought)
            elif part.text != "" or not parts:
                parts.append(part)
    return parts, last


def turn(at=AT, **request):
    contents = [{"role": "user", "parts": [{"text": "hello"}]}]
    return gemini.parse(json.dumps({"contents": contents} | request).encode(), at)


def said(text, role="user"):
    return types.Content(role=role, parts=[types.Part(text=text)])


async def test_a_conversation_goes_on_in_one_row(house, google):
    (attempt,) = await house.attempts()
    client = google(attempt.key)
    first = await ask(client, system_instruction="be brief")
    assert (first.text, first.model_version) == ("answer 1", "gemini-any")
    candidate = first.candidates[0]
    assert (candidate.index, candidate.finish_reason, candidate.content.role) == (0, types.FinishReason.STOP, "model")
    usage = first.usage_metadata
    assert usage.candidates_token_count == len(answer("answer 1"))
    assert usage.prompt_token_count == len(house.engine.log[0].prompt)
    assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
    await ask(client, [said("hello"), candidate.content, said("more")], system_instruction="be brief")
    assert text(house.engine.log[0].prompt).startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert shape((await end(house, attempt))[0]) == [(0, 0, ""), (1, 1, "")]


async def test_the_same_conversation_is_the_same_in_both_protocols(house, google):
    (attempt,) = await house.attempts()
    first = await ask(google(attempt.key))
    await say(house, attempt.key, [USER, {"role": "assistant", "content": first.text}, USER])
    assert [node.parent for node in await house.nodes()] == [0, 1]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_the_sdks_own_history_goes_on_in_one_row(house, google, streams):
    """Of a stream it keeps every chunk as a content of its own."""
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), pace_s=0.002)
    (attempt,) = await house.attempts()
    chat = google(attempt.key).chats.create(model="gemini-any")
    for number in range(3):
        if streams:
            assert [chunk async for chunk in await chat.send_message_stream(f"turn {number}")]
        else:
            await chat.send_message(f"turn {number}")
    assert shape((await end(house, attempt))[0]) == [(0, 0, ""), (1, 1, ""), (2, 2, "")]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ids_kept", [True, False], ids=["ids", "no ids"])
async def test_calls_and_thoughts_go_there_and_back(calling, google, streams, ids_kept):
    house = calling
    house.engine.script = lambda prompt, call: answer(CALLED if call == 1 else f"answer {call}")
    (attempt,) = await house.attempts()
    client, config = google(attempt.key), {"tools": TOOLS, "automatic_function_calling": {"disable": True}}
    if streams:
        parts, last = await gathered(client, **config)
    else:
        last = await ask(client, **config)
        parts = last.candidates[0].content.parts
    assert last.candidates[0].finish_reason == types.FinishReason.STOP
    assert [(part.text, part.thought) for part in parts[:2]] == [("hm", True), ("so", None)]
    (call,) = [part.function_call for part in parts if part.function_call]
    assert (call.name, call.args) == ("look", {"at": "the  door", "n": 20})
    assert len(call.id) == 9
    if not ids_kept:
        call.id = None
    result = types.FunctionResponse(id=call.id, name="look", response={"output": "a door"})
    history = [
        said("hello"),
        types.Content(role="model", parts=parts),
        types.Content(role="user", parts=[types.Part(function_response=result)]),
    ]
    second = await ask(client, history, **config)
    await ask(client, [*history, second.candidates[0].content, said("go")], **config)
    nodes, sample = await end(house, attempt)
    assert shape(nodes) == [(0, 0, ""), (1, 1, ""), (2, 2, "")]
    assert len(sample.rows) == 1
    assert nodes[1].messages[0]["content"] == "a door"
    assert ids_kept == (nodes[1].messages[0]["tool_call_id"] == nodes[0].message["tool_calls"][0]["id"])
    assert '"properties": {"at": {"type": "string"}, "n": {"type": "number"}}' in text(house.engine.log[0].prompt)
    assert "tool\na door<|im_end|>" in text(house.engine.log[1].prompt)


async def test_the_sdk_calls_python_functions(calling, google):
    """Its automatic function calling: one request of the user, two of the model."""
    house = calling
    called = '<tool_call>\n{"name": "look", "arguments": {"at": "the door"}}\n</tool_call>'
    house.engine.script = lambda prompt, call: answer(called if call == 1 else "it is open")
    (attempt,) = await house.attempts()

    def look(at: str) -> str:
        """Look at something."""
        return f"{at} is open"

    told = await ask(google(attempt.key), tools=[look])
    assert told.text == "it is open"
    assert '{"result":"the door is open"}' in text(house.engine.log[1].prompt)
    assert shape((await end(house, attempt))[0]) == [(0, 0, ""), (1, 1, "")]


async def test_no_calls_are_read_where_none_are_wanted(calling, google):
    house = calling
    house.engine.script = lambda prompt, call: answer(CALLED)
    (attempt,) = await house.attempts()
    mode = types.ToolConfig(function_calling_config=types.FunctionCallingConfig(mode="NONE"))
    told = await ask(google(attempt.key), tools=TOOLS, tool_config=mode)
    assert [part.text for part in told.candidates[0].content.parts] == ["hm", CALLED.removeprefix("<think>hm</think>")]


@pytest.mark.parametrize(
    ("scripted", "config"),
    [
        (Scripted(answer("one é☃ two")), {}),
        (Scripted(answer("")), {}),
        (Scripted(ids("cut"), finish="length"), {"max_output_tokens": 3}),
        (Scripted(ids("one STOP"), finish="stop"), {"stop_sequences": ["STOP"]}),
        (Scripted(answer("<think>hm\n</think>\n\nso")), {}),
    ],
    ids=["plain", "empty", "length", "stop sequence", "thought"],
)
async def test_a_stream_holds_what_the_whole_answer_holds(calling, google, scripted, config):
    house = calling
    house.engine.script = lambda prompt, call: scripted
    one, other = await house.attempts(2)
    whole = await ask(google(one.key), **config)
    parts, last = await gathered(google(other.key), **config)
    assert parts == whole.candidates[0].content.parts
    assert last.candidates[0].finish_reason == whole.candidates[0].finish_reason
    assert last.usage_metadata == whole.usage_metadata
    assert last.model_version == whole.model_version


async def test_several_candidates_come_together(house, google):
    house.engine.script = lambda prompt, call: answer(f"answer {call}")
    (attempt,) = await house.attempts()
    whole = await ask(google(attempt.key), candidate_count=2)
    assert [(each.index, each.content.parts[0].text) for each in whole.candidates] == [(0, "answer 1"), (1, "answer 2")]


async def test_without_sse_a_stream_is_a_json_list(house):
    house.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), pace_s=0.002)
    (attempt,) = await house.attempts()
    body = {"contents": [{"parts": [{"text": "hello"}]}]}
    async with httpx.AsyncClient(base_url=house.url, timeout=20) as http:
        said = await http.post(f"/v1beta/models/m:streamGenerateContent?key={attempt.key}", json=body)
    assert said.headers["content-type"] == "application/json"
    chunks = said.json()
    parts = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(parts) == "answer 1"
    assert [chunk["candidates"][0].get("finishReason") for chunk in chunks] == [None] * (len(chunks) - 1) + ["STOP"]
    assert chunks[-1]["usageMetadata"]["candidatesTokenCount"] == len(answer("answer 1"))


async def test_broken_arguments_of_an_engines_parser_come_wrapped(house, google):
    call = {"type": "function", "function": {"name": "look", "arguments": '{"a":'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    house.engine.script = lambda prompt, number: Scripted(answer("x"), message=message)
    await house.make_run(speaks=Dialect.CHAT)
    (attempt,) = await house.attempts()
    (part,) = (await ask(google(attempt.key))).candidates[0].content.parts
    assert part.function_call.args == {"__unparsedToolInput": {"raw": '{"a":', "len": 5}}


def test_results_find_their_calls():
    """By id; else by name, in order; else any call that is open."""

    def call(name, **id):
        return {"functionCall": {"name": name} | id}

    def result(name, **id):
        return {"functionResponse": {"name": name, "response": {"a": 1}} | id}

    contents = [
        {"role": "user", "parts": [{"text": "go"}]},
        {"role": "model", "parts": [call("look", id="a"), call("look"), call("see", id="b"), call("hear")]},
        {"role": "user", "parts": [result("see", id="b"), result("look"), result("look"), result("other")]},
        {"role": "model", "parts": [call("look")]},
        {"role": "function", "parts": [result("look")]},
        {"role": "user", "parts": [result("look"), {"text": "on"}]},
    ]
    messages = turn(contents=contents).messages
    calls = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert results[:5] == ["b", calls[0], calls[1], calls[3], calls[4]]
    assert len({*calls, *results}) == 6
    assert all(len(id) == 9 and id.isalnum() for id in (calls[1], calls[3], calls[4], results[5]))
    assert messages[2]["content"] == '{"a":1}'
    assert turn(contents=contents).messages == messages


def test_what_harnesses_send_is_understood():
    request = turn(
        at=AT | {"method": "streamGenerateContent", "alt": "sse"},
        system_instruction={"role": "user", "parts": [{"text": "a"}, {"text": "b"}]},
        contents=[
            {"parts": [{"text": "x"}, {"inlineData": {"mimeType": "image/png", "data": "eA=="}}]},
            {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "so "}]},
            {"role": "model", "parts": [{"text": "far"}, {"text": "", "thoughtSignature": "x"}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"error": "no"}}}]},
        ],
        tools=[
            {"functionDeclarations": [LOOK, {"name": "see", "parametersJsonSchema": {"a": 1}}]},
            {"googleSearch": {}},
        ],
        tool_config={"functionCallingConfig": {"mode": "AUTO"}},
        generation_config={"stopSequences": ["END"], "maxOutputTokens": 9, "candidateCount": 2, "topK": 40},
        safetySettings=[],
    )
    assert [(each["role"], each["content"]) for each in request.messages] == [
        ("system", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        (
            "user",
            [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}],
        ),
        ("assistant", "so far"),
        ("tool", '{"error":"no"}'),
    ]
    assert request.messages[2]["reasoning_content"] == "hm"
    schema = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "number"}}}
    assert [tool["function"]["parameters"] for tool in request.tools] == [schema, {"a": 1}]
    assert (request.wanted.stop, request.wanted.max_tokens, request.wanted.n) == (("END",), 9, 2)
    assert (request.model, request.stream, request.events, request.wanted.calls) == ("m", True, True, True)
    assert request.asked["generation_config"]["topK"] == 40


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"contents": []}, "at least one"),
        ({"contents": [1]}, "contents"),
        ({"contents": [{"role": "tool", "parts": []}]}, "role"),
        ({"contents": [{"parts": 3}]}, "parts"),
        ({"contents": [{"parts": [{"text": 3}]}]}, "text"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": 3}]}]}, "functionCall"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]}, "name"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": 3}}]}]}, "args"),
        ({"contents": [{"parts": [{"functionResponse": {"name": "f", "id": 3}}]}]}, "id"),
        ({"systemInstruction": 7}, "systemInstruction"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [{"functionDeclarations": [3]}]}, "functionDeclarations"),
        ({"generationConfig": {"maxOutputTokens": "many"}}, "maxOutputTokens"),
        ({"generationConfig": {"stopSequences": [""]}}, "stopSequences"),
        ({"generationConfig": {"responseMimeType": "application/json"}}, "grammar"),
        ({"generation_config": 3}, "generation_config"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "forced"),
        ({"at": {"model": "m"}, "generateContentRequest": 3}, "generateContentRequest"),
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(request_, says):
    with pytest.raises(WireError, match=says) as refusal:
        turn(**request_)
    assert refusal.value.status == 400


async def test_refusals_have_the_protocols_shape(house, google):
    (attempt,) = await house.attempts()

    async def refused(key, method="generateContent", **body):
        async with httpx.AsyncClient(base_url=house.url, timeout=20) as http:
            said = await http.post(f"/v1beta/models/m:{method}", json=body, headers={"x-goog-api-key": key})
        error = said.json()["error"]
        assert error["code"] == said.status_code
        return error["code"], error["status"]

    assert await refused(attempt.key) == (400, "INVALID_ARGUMENT")
    assert await refused(attempt.key, "countTokens") == (400, "INVALID_ARGUMENT")
    assert await refused(attempt.key, "embedContent") == (404, "NOT_FOUND")
    assert await refused("nonsense") == (401, "UNAUTHENTICATED")
    with pytest.raises(APIError, match=r"exceeds the maximum number of tokens .* maximum context length is 2000") as no:
        await ask(google(attempt.key), "long " * 500)
    assert (no.value.code, no.value.status) == (400, "INVALID_ARGUMENT")
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    assert await refused(attempt.key, contents=[{"parts": []}]) == (403, "PERMISSION_DENIED")
    assert (await house.admin(get_totals("r"))).calls == 0


@pytest.mark.parametrize(
    ("status", "said"),
    [(429, "RESOURCE_EXHAUSTED"), (500, "INTERNAL"), (503, "UNAVAILABLE"), (413, "INVALID_ARGUMENT")],
)
def test_every_status_has_googles_name(status, said):
    assert json.loads(gemini.render_error(WireError(status, "x", "why")))["error"] == {
        "code": status,
        "message": "why",
        "status": said,
    }


async def test_a_prompt_is_counted_without_a_record(house, google):
    (attempt,) = await house.attempts()
    client = google(attempt.key)
    first = await ask(client)
    history = [said("hello"), first.candidates[0].content, said("more")]
    counted = await client.models.count_tokens(model="m", contents=history)
    second = await ask(client, history)
    assert counted.total_tokens == second.usage_metadata.prompt_token_count
    whole = {"generateContentRequest": {"model": "models/m", "contents": [{"parts": [{"text": "hello"}]}]}}
    async with httpx.AsyncClient(base_url=house.url, timeout=20) as http:
        by_path = await http.post(f"/a/{attempt.key}/v1beta/models/m:countTokens", json=whole)
    assert by_path.json() == {"totalTokens": first.usage_metadata.prompt_token_count}
    assert (await house.admin(get_totals("r"))).calls == 2


async def test_models_and_the_ways_to_give_a_key(house, google):
    (attempt,) = await house.attempts()
    client = google(attempt.key)
    assert [model.name async for model in await client.models.list()] == ["models/policy"]
    assert (await client.models.get(model="gemini-any")).display_name == "gemini-any"
    body, path = {"contents": [{"parts": [{"text": "hello"}]}]}, "/v1beta/models/some/name:generateContent"
    async with httpx.AsyncClient(base_url=house.url, timeout=20) as http:
        by_query = await http.post(f"{path}?key={attempt.key}", json=body)
        by_path = await http.post(f"/a/{attempt.key}{path}", json=body)
        beta = await http.get(f"/v1beta/models?key={attempt.key}")
        without = await http.get("/v1beta/models")
    assert by_query.json()["candidates"][0]["content"] == {"parts": [{"text": "answer 1"}], "role": "model"}
    assert by_path.json()["candidates"][0]["content"]["parts"] == [{"text": "answer 2"}]
    assert by_path.json()["modelVersion"] == "some/name"
    assert [model["name"] for model in beta.json()["models"]] == ["models/policy"]
    assert (without.status_code, without.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
