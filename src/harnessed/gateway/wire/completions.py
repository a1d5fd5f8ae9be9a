"""OpenAI Completions (platform.openai.com/docs/api-reference/completions): the policy goes on from a bare prompt.

The prompt is no chat: no template writes anything around it, and the answer is delivered as text, with whatever marks
reasoning or calls in it. Unknown fields pass; what cannot be honoured without changing the answer's meaning is refused.
"""

from typing import Any

import orjson

from harnessed.gateway.reading import Piece
from harnessed.gateway.wire.body import invalid, read_object, texts, whole_number
from harnessed.gateway.wire.chat import MOST_CHOICES, event, render_error, render_models, usage
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.turn import POLICY, PROMPT, Address, Reply, Turn, Wanted

__all__ = ["Stream", "parse", "render", "render_error", "render_models"]

MAX_TOKENS = 16
"""Where a request says nothing, as OpenAI has it."""


def parse(body: bytes, _: Address, __: Beginning | None = None) -> Turn:
    """The Turn of a request body. Raises WireError (400)."""
    request = read_object(body)
    options = request.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("`stream_options` must be an object")
    for name in ("echo", "suffix", "logprobs"):
        if request.get(name):
            raise invalid(f"`{name}` is not supported: leave it out")
    n = whole_number(request, "n", MOST_CHOICES) or 1
    if request.get("best_of") not in (None, n):
        raise invalid("`best_of` is not supported: leave it out")
    prompt = _prompt(request.get("prompt"))
    said = {"content": prompt, PROMPT: True} if isinstance(prompt, str) else {"content": "", PROMPT: prompt}
    return Turn(
        messages=[{"role": "user"} | said],
        tools=[],
        model=str(request.get("model") or POLICY),
        wanted=Wanted(n=n, max_tokens=whole_number(request, "max_tokens") or MAX_TOKENS, stop=texts(request, "stop")),
        prompt=prompt,
        stream=bool(request.get("stream")),
        usage=bool(options.get("include_usage")),
        asked={key: value for key, value in request.items() if key != "prompt"},
    )


def render(reply: Reply) -> bytes:
    """The response body."""
    choices = [
        _choice(index, choice.message["content"] or "", choice.finish) for index, choice in enumerate(reply.choices)
    ]
    return orjson.dumps(_completion(reply.id, reply.model, reply.created) | {"choices": choices, "usage": usage(reply)})


class Stream:
    """The same answer as server-sent events."""

    def __init__(self, turn: Turn, call: str, created: float) -> None:
        self._usage = turn.usage
        self._common = _completion(call, turn.model, created)

    def begin(self, n: int) -> bytes:
        return b""

    def ping(self) -> bytes:
        return self._told(0, "")

    def more(self, index: int, piece: Piece) -> bytes:
        return self._told(index, piece.text) if piece.text else b""

    def end(self, reply: Reply, rests: list[Piece]) -> bytes:
        events = [
            self._told(index, rest.text, choice.finish)
            for index, (choice, rest) in enumerate(zip(reply.choices, rests, strict=True))
        ]
        if self._usage:
            events.append(event(self._common | {"choices": [], "usage": usage(reply)}))
        return b"".join(events) + b"data: [DONE]\n\n"

    def _told(self, index: int, text: str, finish: str | None = None) -> bytes:
        told = self._common | {"choices": [_choice(index, text, finish)]}
        return event(told | ({"usage": None} if self._usage else {}))


def _prompt(prompt: Any) -> str | list[int]:
    """A text or token ids, either also alone in a list."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise invalid("several prompts in one request are not supported: send one request for each `prompt`")
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(id) is int and id >= 0 for id in prompt):
        return prompt
    raise invalid("`prompt` must be a text or a list of token ids, and not empty")


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _completion(call: str, model: str, created: float) -> dict[str, Any]:
    return {"id": f"cmpl-{call}", "object": "text_completion", "created": int(created), "model": model}
