"""Whatever comes is served or refused, in every protocol: no request makes a parser, the tree or a template fail."""

import copy
import json

import pytest
from policies import make_policy
from texts import text

from harnessed.gateway.intake import prompted
from harnessed.gateway.routes import WIRES
from harnessed.gateway.template import ChatTemplate, TemplateError
from harnessed.gateway.transcript import Tree
from harnessed.gateway.wire.turn import WireError
from harnessed.records import Dialect

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 20.0}'}}
WHOLE = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "rules", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "a door"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stop": ["END"],
        "n": 1,
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {
        "model": "m",
        "prompt": [[72, 105]],
        "suffix": None,
        "echo": False,
        "logprobs": None,
        "stop": ["END"],
        "n": 1,
        "best_of": 1,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/messages": {
        "model": "m",
        "system": [{"type": "text", "text": "rules"}, {"type": "text", "text": "more"}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello"}, {"type": "image", "source": {"data": "x"}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 20.0}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a door"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                ],
            },
            {"role": "system", "content": "note"},
        ],
        "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}, {"type": "web_search"}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["END"],
        "max_tokens": 5,
        "stream": True,
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "rules",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "more"}]},
            {"role": "user", "content": "hello"},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c1", "namespace": "files", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a door"}]},
        ],
        "tools": [
            FUNCTION | {"type": "function"},
            {"type": "namespace", "name": "files", "tools": [FUNCTION | {"type": "function"}]},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "previous_response_id": "",
        "max_output_tokens": 5,
        "stream": True,
    },
}
PARAMETERS = {"type": "OBJECT", "properties": {"a": {"type": "ARRAY", "items": {"anyOf": [{"type": "STRING"}]}}}}
WHOLE["/{version}/models/{model:path}:{method}"] = {
    "systemInstruction": {"parts": [{"text": "rules"}, {"text": "more"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "hello"}, {"inlineData": {"mimeType": "image/png", "data": "x"}}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"text": "so", "thoughtSignature": "x"},
                {"functionCall": {"id": "c1", "name": "look", "args": {"a": 20.0}}},
                {"functionCall": {"name": "look"}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "a door"}}},
                {"functionResponse": {"name": "look", "response": {"a": 1}, "parts": [{"inlineData": {}}]}},
                {"text": "go"},
            ],
        },
    ],
    "tools": [
        {"functionDeclarations": [{"name": "look", "description": "Look.", "parameters": PARAMETERS}]},
        {"functionDeclarations": [{"name": "see", "parametersJsonSchema": SCHEMA}], "googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        "candidateCount": 1,
        "maxOutputTokens": 5,
        "stopSequences": ["END"],
        "responseMimeType": "text/plain",
        "thinkingConfig": {"includeThoughts": True},
    },
    "cachedContent": "",
}
AT = {"model": "m", "method": "streamGenerateContent", "alt": "sse"}
ODD = [None, True, -1, 0, 1.5, "", "x", [], {}, [[]], [{}], [3], ["x"], {"a": {}}, {"type": "text", "text": 3}]


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def changed(value, path, odd):
    if not path:
        return odd
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return value


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return ChatTemplate(make_policy(tmp_path_factory.mktemp("policy")))


def serve(path, body, template):
    """What the gateway does with a request before it asks an engine. Raises WireError or TemplateError."""
    turn = WIRES[path].parse(body, AT)
    tree = Tree()
    place = tree.place(turn.messages, turn.tools)
    json.dumps([turn.asked, place.new])
    if turn.prompt is None:
        tree.segment(place, turn.tools, template)
    else:
        prompted(tree, place, turn.prompt, template)


@pytest.mark.parametrize("path", WIRES)
def test_any_value_at_any_place_is_understood_or_refused(path, template):
    whole, refused = WHOLE[path], 0
    serve(path, json.dumps(whole).encode(), template)
    for place in places(whole):
        for odd in ODD:
            try:
                serve(path, json.dumps(changed(whole, place, odd)).encode(), template)
            except WireError as error:
                refused += 1
                assert error.status == 400
                assert json.loads(WIRES[path].render_error(error))["error"]["message"] == error.message
            except TemplateError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{odd!r} at {place}") from error
    assert refused > 100


@pytest.mark.parametrize("path", WIRES)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages": "\xff"}', b"[" * 2000, b'{"a":' * 300 + b"1" + b"}" * 300]
)
def test_what_is_no_request_is_refused(path, body):
    with pytest.raises(WireError) as refusal:
        WIRES[path].parse(body, AT)
    assert refusal.value.status == 400


PNG = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PNG}"
SAID = {"type": "text", "text": "what is this?"}
PICTURES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [SAID, {"type": "image_url", "image_url": {"url": URL}}]}]
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [
                    SAID,
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                ],
            }
        ],
    },
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": SAID["text"]}, {"type": "input_image", "image_url": URL}],
            }
        ]
    },
    "/v1beta/models/m:generateContent": {
        "contents": [
            {
                "role": "user",
                "parts": [{"text": SAID["text"]}, {"inlineData": {"mimeType": "image/png", "data": PNG}}],
            }
        ]
    },
}


@pytest.mark.parametrize("path", PICTURES)
async def test_a_picture_is_kept_and_given_to_engines_that_take_them(house, path):
    """Every protocol's shape becomes the one that engines know; a policy that is asked by tokens reads its name."""
    shown = [{"role": "user", "content": [SAID, {"type": "image_url", "image_url": {"url": URL}}]}]
    for speaks in (Dialect.TOKENS, Dialect.CHAT):
        await house.make_run(speaks=speaks)
        (attempt,) = await house.attempts(group=f"g-{speaks}")
        headers = {"authorization": f"Bearer {attempt.key}"}
        response = await house.http.post(house.url + path, json=PICTURES[path], headers=headers)
        assert response.status_code == 200, response.text
        (node,) = await house.nodes(f"g-{speaks}")
        assert node.messages == shown
    by_tokens, by_chat = house.engine.log
    assert text(by_tokens.prompt).startswith("<|im_start|>user\nwhat is this?\n[image_url]<|im_end|>")
    assert by_chat.messages == shown
