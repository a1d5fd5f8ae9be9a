"""Anthropic Messages (platform.claude.com/docs/en/api/messages), as Claude Code and the Anthropic SDKs speak it.

A request becomes the chat messages that templates know: system blocks a system message, tool results tool messages,
thinking `reasoning_content`. Unknown fields, betas and tools of the server's own pass; what cannot be honoured without
changing the answer's meaning is refused.
"""

from typing import Any

import orjson

from harnessed.gateway.reading import Piece
from harnessed.gateway.wire.body import image, invalid, objects, read_growing, texts, whole_number
from harnessed.gateway.wire.events import written
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.turn import POLICY, Address, Choice, Reply, Turn, Wanted, WireError

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def parse(body: bytes, _: Address, before: Beginning | None = None) -> Turn:
    """The Turn of a request body. Raises WireError (400)."""
    request, _known, beginning = read_growing(body, "messages", before)
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") not in ("auto", "none"):
        raise invalid("a forced tool call is not supported: leave `tool_choice` out, or send auto or none")
    said = objects(request, "messages")
    if not said:
        raise invalid("`messages` must hold at least one message")
    messages = [{"role": "system", "content": _content(request["system"])}] if request.get("system") else []
    for message in said:
        messages += _messages(message)
    return Turn(
        messages=messages,
        tools=[_tool(tool) for tool in objects(request, "tools")],
        model=str(request.get("model") or POLICY),
        wanted=Wanted(
            calls=not (isinstance(choice, dict) and choice.get("type") == "none"),
            max_tokens=whole_number(request, "max_tokens"),
            stop=texts(request, "stop_sequences"),
        ),
        stream=bool(request.get("stream")),
        asked={key: value for key, value in request.items() if key not in ("messages", "system", "tools")},
        beginning=beginning,
    )


def render(reply: Reply) -> bytes:
    """The response body."""
    choice = reply.choices[0]
    return orjson.dumps(
        _message(reply.id, reply.model) | {"content": _blocks(choice), "usage": _usage(reply)} | _ending(choice)
    )


def render_error(error: WireError) -> bytes:
    kind = _ERRORS.get(error.status, "api_error")
    # Claude Code knows by these words that it has to compact.
    words = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": words + error.message}})


def render_models(name: str | None) -> bytes:
    """The model of that name, or the list of those that there are (platform.claude.com/docs/en/api/models)."""
    id = name or POLICY
    model = {"type": "model", "id": id, "display_name": id, "created_at": "1970-01-01T00:00:00Z"}
    return orjson.dumps(model if name else {"data": [model], "has_more": False, "first_id": id, "last_id": id})


def render_count(tokens: int) -> bytes:
    """The answer of `count_tokens`."""
    return orjson.dumps({"input_tokens": tokens})


class Stream:
    """The same answer as server-sent events."""

    def __init__(self, turn: Turn, call: str, created: float) -> None:
        message = _message(call, turn.model) | {"usage": {"input_tokens": 0, "output_tokens": 0}}
        self._start = _event("message_start", message=message)
        """Empty once it is told."""
        self._open = ""
        """The kind of the block that is being told."""
        self._blocks = 0

    def begin(self, n: int) -> bytes:
        """Nothing: where Claude Code gives up on a stream that has begun, it does not send the same request again."""
        return b""

    def ping(self) -> bytes:
        # Claude Code's timer takes no notice of pings.
        return self._tell(self._open, "") if self._open else _event("ping")

    def more(self, index: int, piece: Piece) -> bytes:
        thinking = self._tell("thinking", piece.reasoning) if piece.reasoning else b""
        return thinking + (self._tell("text", piece.text) if piece.text else b"")

    def end(self, reply: Reply, rests: list[Piece]) -> bytes:
        choice, events = reply.choices[0], self._begin() + self.more(0, rests[0])
        calls = choice.message.get("tool_calls") or []
        if not calls and self._open != "text":
            events += self._tell("text", "")
        events += self._close()
        for index, call in enumerate(calls, self._blocks):
            events += _whole_call(index, call)
        return events + _event("message_delta", delta=_ending(choice), usage=_usage(reply)) + _event("message_stop")

    def _begin(self) -> bytes:
        start, self._start = self._start, b""
        return start

    def _tell(self, kind: str, text: str) -> bytes:
        """More of the text of a block, which is opened unless it is."""
        events = self._begin()
        if self._open != kind:
            events += self._close() + _block_start(self._blocks, _block(kind, ""))
            self._open = kind
        return events + _block_delta(self._blocks, {"type": f"{kind}_delta", kind: text})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        index, signed = self._blocks, self._open == "thinking"
        self._open, self._blocks = "", index + 1
        signature = _block_delta(index, {"type": "signature_delta", "signature": ""}) if signed else b""
        return signature + _event("content_block_stop", index=index)


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The chat messages of one message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid("every message needs a `role`: user, assistant or system")
    if not isinstance(content, list):
        return [{"role": role, "content": _content(content)}]
    if not all(isinstance(block, dict) for block in content):
        raise invalid("`content` of a message must be a text or a list of blocks")
    if role == "assistant":
        return [_answer(content)]
    results = [_result(block) for block in content if block.get("type") == "tool_result"]
    others = [block for block in content if block.get("type") != "tool_result"]
    return results + ([{"role": role, "content": _content(others)}] if others or not results else [])


def _answer(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": _joined(blocks, "text")}
    if thinking := _joined(blocks, "thinking"):
        answer["reasoning_content"] = thinking
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": orjson.dumps(block.get("input")).decode()},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    return answer | ({"tool_calls": calls} if calls else {})


def _result(block: dict[str, Any]) -> dict[str, Any]:
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _content(block.get("content"))}
    return result | ({"is_error": True} if block.get("is_error") else {})


def _content(content: Any) -> Any:
    """Blocks as they come, but one text block as its text. Raises WireError (400)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid("`content` must be a text or a list of blocks")
    if len(content) == 1 and content[0].get("type") == "text":
        return content[0].get("text", "")
    return [_picture(block) for block in content]


def _picture(block: dict[str, Any]) -> dict[str, Any]:
    """Blocks with a picture as chat messages have them."""
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, dict):
        return block
    return image(source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}")


def _joined(blocks: list[dict[str, Any]], kind: str) -> str:
    return "".join(str(block.get(kind, "")) for block in blocks if block.get("type") == kind)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema", {})}}


def _ending(choice: Choice) -> dict[str, Any]:
    reason = "stop_sequence" if choice.stop and choice.finish != "tool_calls" else _REASONS[choice.finish]
    return {"stop_reason": reason, "stop_sequence": choice.stop or None}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    message = choice.message
    calls = message.get("tool_calls") or []
    blocks = [_block("thinking", message["reasoning_content"])] if message.get("reasoning_content") else []
    if message.get("content") or not calls:
        blocks.append(_block("text", message.get("content") or ""))
    return blocks + [_call(call) | {"input": parsed(call["function"]["arguments"])} for call in calls]


def _block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def parsed(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object; broken ones in the wrapping that Claude Code gives them."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"__unparsedToolInput": {"raw": arguments, "len": len(arguments)}}


def _whole_call(index: int, call: dict[str, Any]) -> bytes:
    """A block by its start, one delta, and its end; arguments as they were sampled."""
    delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
    start = _block_start(index, _call(call))
    return start + _block_delta(index, delta) + _event("content_block_stop", index=index)


def _block_start(index: int, block: dict[str, Any]) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _block_delta(index: int, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)


def _event(kind: str, **values: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + written({"type": kind} | values) + b"\n\n"


def _message(call: str, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{call}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(reply: Reply) -> dict[str, int]:
    return {"input_tokens": reply.prompt_tokens, "output_tokens": sum(choice.tokens for choice in reply.choices)}
