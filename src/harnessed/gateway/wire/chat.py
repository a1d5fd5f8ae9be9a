"""OpenAI Chat Completions (platform.openai.com/docs/api-reference/chat).

Unknown fields and model names pass; what cannot be honoured without changing the answer's meaning is refused.
"""

from typing import Any

import orjson

from harnessed.gateway.reading import Piece
from harnessed.gateway.wire.body import grammar_of, invalid, objects, read_growing, texts, whole_number
from harnessed.gateway.wire.events import written
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.turn import POLICY, Address, Choice, Reply, Turn, Wanted, WireError

MOST_CHOICES = 128
_TOLD = ("role", "content", "reasoning_content", "tool_calls")
"""Of a message in a stream, everything that has an event of its own."""


def parse(body: bytes, _: Address, before: Beginning | None = None) -> Turn:
    """The Turn of a request body. Raises WireError (400)."""
    request, known, beginning = read_growing(body, "messages", before)
    options = request.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("`stream_options` must be an object")
    if request.get("tool_choice") not in (None, "auto", "none"):
        raise invalid("a forced tool call is not supported: leave `tool_choice` out, or send auto or none")
    messages = objects(request, "messages", known)
    if not messages:
        raise invalid("`messages` must hold at least one message")
    for message in messages[known:]:
        if not isinstance(message.get("role"), str):
            raise invalid("every message needs a `role`")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise invalid("`tool_calls` of a message must be a list of objects")
    return Turn(
        messages=messages,
        tools=objects(request, "tools"),
        model=str(request.get("model") or POLICY),
        wanted=Wanted(
            calls=request.get("tool_choice") != "none",
            n=whole_number(request, "n", MOST_CHOICES) or 1,
            max_tokens=whole_number(request, "max_completion_tokens") or whole_number(request, "max_tokens"),
            stop=texts(request, "stop"),
            grammar=grammar_of(request, "response_format"),
        ),
        stream=bool(request.get("stream")),
        usage=bool(options.get("include_usage")),
        logprobs=bool(request.get("logprobs")),
        asked={key: value for key, value in request.items() if key not in ("messages", "tools")},
        beginning=beginning,
        known=known,
    )


def render(reply: Reply) -> bytes:
    """The response body."""
    return orjson.dumps(
        {
            "id": f"chatcmpl-{reply.id}",
            "object": "chat.completion",
            "created": int(reply.created),
            "model": reply.model,
            "choices": [
                {
                    "index": index,
                    "message": choice.message,
                    "logprobs": _logprobs(choice),
                    "finish_reason": choice.finish,
                }
                for index, choice in enumerate(reply.choices)
            ],
            "usage": usage(reply),
        }
    )


class Stream:
    """The same answer as server-sent events."""

    def __init__(self, turn: Turn, call: str, created: float) -> None:
        self._usage = turn.usage
        self._common = {
            "id": f"chatcmpl-{call}",
            "object": "chat.completion.chunk",
            "created": int(created),
            "model": turn.model,
        }

    def begin(self, n: int) -> bytes:
        """Of n answers."""
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in range(n))

    def ping(self) -> bytes:
        # A comment resets no timer of a client that counts events, as Hermes does.
        return self._delta(0, {})

    def more(self, index: int, piece: Piece) -> bytes:
        reasoning = self._delta(index, {"reasoning_content": piece.reasoning}) if piece.reasoning else b""
        return reasoning + (self._delta(index, {"content": piece.text}) if piece.text else b"")

    def end(self, reply: Reply, rests: list[Piece]) -> bytes:
        events = list(map(self.more, range(len(rests)), rests))
        for index, choice in enumerate(reply.choices):
            calls = [call | {"index": i} for i, call in enumerate(choice.message.get("tool_calls") or [])]
            others = {k: v for k, v in choice.message.items() if k not in _TOLD and v}
            if calls or others:
                events.append(self._delta(index, others | ({"tool_calls": calls} if calls else {})))
            events.append(self._delta(index, {}, choice.finish, _logprobs(choice)))
        if self._usage:
            events.append(event(self._common | {"choices": [], "usage": usage(reply)}))
        return b"".join(events) + b"data: [DONE]\n\n"

    def _delta(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(self._common | {"choices": [choice]} | ({"usage": None} if self._usage else {}))


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + written(value) + b"\n\n"


def usage(reply: Reply) -> dict[str, int]:
    sampled = sum(choice.tokens for choice in reply.choices)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": reply.prompt_tokens + sampled,
    }


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    """Of every sampled token, the stop too; `top_logprobs` are not known here. Streams have them at their end."""
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in choice.logprobs
    ]
    return {"content": content, "refusal": None} if content else None


def render_models(name: str | None) -> bytes:
    """The model of that name, or the list of those that there are (platform.openai.com/docs/api-reference/models)."""
    model = {"id": name or POLICY, "object": "model", "created": 0, "owned_by": "harnessed"}
    return orjson.dumps(model if name else {"object": "list", "data": [model]})


def render_error(error: WireError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": None, "code": error.code}})
