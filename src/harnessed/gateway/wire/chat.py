"""OpenAI Chat Completions, unstreamed (platform.openai.com/docs/api-reference/chat).

Unknown fields and model names pass; what cannot be honoured without changing the answer's meaning is refused.
"""

from typing import Any

import orjson

from harnessed.gateway.wire.turn import Reply, Turn, Wanted, WireError

MOST_CHOICES = 128
MOST_STOP_STRINGS = 16


def parse(body: bytes) -> Turn:
    """The Turn of a request body. Raises WireError (400)."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _invalid(f"the body is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise _invalid("the body must be a JSON object")
    try:
        orjson.dumps(request)  # what is recorded has to be written again
    except orjson.JSONEncodeError as error:
        raise _invalid(f"the request cannot be kept: {error}") from None
    if request.get("stream"):
        raise _invalid("this gateway answers Chat Completions unstreamed: send stream=false")
    if request.get("tool_choice") not in (None, "auto", "none"):
        raise _invalid("a forced tool call is not supported: leave `tool_choice` out, or send auto or none")
    if isinstance(grammar := request.get("response_format"), dict) and grammar.get("type") != "text":
        raise _invalid("answers under a grammar are not supported: leave `response_format` out")
    messages = _objects(request, "messages")
    if not messages:
        raise _invalid("`messages` must hold at least one message")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise _invalid("every message needs a `role`")
        if not isinstance(message.get("tool_calls") or [], list) or not all(
            isinstance(call, dict) for call in message.get("tool_calls") or []
        ):
            raise _invalid("`tool_calls` of a message must be a list of objects")
    return Turn(
        messages=messages,
        tools=_objects(request, "tools"),
        model=str(request.get("model") or "policy"),
        wanted=parse_wanted(request),
        asked={key: value for key, value in request.items() if key not in ("messages", "tools")},
    )


def parse_wanted(request: dict[str, Any]) -> Wanted:
    """Of a request, or of what was kept of it. Raises WireError (400)."""
    return Wanted(
        n=_count(request, "n") or 1,
        max_tokens=_count(request, "max_completion_tokens") or _count(request, "max_tokens"),
        stop=tuple(_stop_strings(request)),
    )


def render(reply: Reply) -> bytes:
    """The response body."""
    sampled = sum(choice.tokens for choice in reply.choices)
    return orjson.dumps(
        {
            "id": f"chatcmpl-{reply.id}",
            "object": "chat.completion",
            "created": int(reply.created),
            "model": reply.model,
            "choices": [
                {"index": index, "message": choice.message, "logprobs": None, "finish_reason": choice.finish}
                for index, choice in enumerate(reply.choices)
            ],
            "usage": {
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": reply.prompt_tokens + sampled,
            },
        }
    )


def render_error(error: WireError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": None, "code": error.code}})


def _objects(request: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = request.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _invalid(f"`{name}` must be a list of objects")
    return value


def _stop_strings(request: dict[str, Any]) -> list[str]:
    value = request.get("stop") or []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(each, str) and each for each in strings):
        raise _invalid("`stop` must be a text or a list of texts")
    if len(strings) > MOST_STOP_STRINGS:
        raise _invalid(f"`stop` holds more than {MOST_STOP_STRINGS} texts")
    return strings


def _count(request: dict[str, Any], name: str) -> int | None:
    value = request.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or value < 1 or (name == "n" and value > MOST_CHOICES):
        raise _invalid(f"`{name}` must be a whole number from 1{f' to {MOST_CHOICES}' if name == 'n' else ''}")
    return value


def _invalid(message: str) -> WireError:
    return WireError(400, "invalid_request", message)
