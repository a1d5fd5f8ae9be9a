"""OpenAI Responses (platform.openai.com/docs/api-reference/responses), as Codex and the OpenAI SDKs speak it.

A request's items become the chat messages that templates know: `instructions` and developer messages system messages,
what an answer consisted of (reasoning, text, calls) one assistant message, outputs of calls tool messages. Unknown
fields and tool types pass; what cannot be honoured without changing the answer's meaning is refused.
"""

from itertools import count
from typing import Any

import orjson

from harnessed.gateway.reading import Piece
from harnessed.gateway.wire.body import grammar_of, image, invalid, objects, read_growing, whole_number
from harnessed.gateway.wire.chat import render_error, render_models
from harnessed.gateway.wire.events import written
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.turn import INSTRUCTIONS, POLICY, REFERENCE, Address, Choice, Reply, Turn, Wanted

__all__ = ["Stream", "parse", "render", "render_error", "render_models"]

Item = dict[str, Any]
_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_REFERENCES = {"rs": "reasoning", "msg": "message", "fc": "function_call"}
"""The beginning of an item's id -> its type."""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def parse(body: bytes, _: Address, before: Beginning | None = None) -> Turn:
    """The Turn of a request body. Raises WireError (400)."""
    request, _known, beginning = read_growing(body, "input", before)
    if request.get("tool_choice") not in (None, "auto", "none"):
        raise invalid("a forced tool call is not supported: leave `tool_choice` out, or send auto or none")
    said = request.get("input")
    items = [{"role": "user", "content": said}] if isinstance(said, str) else objects(request, "input")
    after = request.get("previous_response_id") or ""
    if not isinstance(after, str) or not (items or after):
        raise invalid("`input` must be a text or a list of at least one item")
    instructions = request.get("instructions")
    first = [{"role": "system", "content": _content(instructions), INSTRUCTIONS: True}] if instructions else []
    return Turn(
        messages=first + _messages(items),
        tools=_tools(objects(request, "tools")),
        model=str(request.get("model") or POLICY),
        wanted=Wanted(
            calls=request.get("tool_choice") != "none",
            max_tokens=whole_number(request, "max_output_tokens"),
            grammar=_grammar(request),
        ),
        stream=bool(request.get("stream")),
        after=after.removeprefix("resp_"),
        namespaces=tuple(
            str(tool.get("name")) for tool in objects(request, "tools") if tool.get("type") == "namespace"
        ),
        asked={key: value for key, value in request.items() if key not in ("input", "instructions", "tools")},
        beginning=beginning,
    )


def render(reply: Reply) -> bytes:
    """The response body."""
    return orjson.dumps(_finished(reply))


class Stream:
    """The same answer as server-sent events."""

    def __init__(self, turn: Turn, call: str, created: float) -> None:
        self._call = call
        self._response = _response(call, turn.model, created) | {"status": "in_progress", "output": []}
        self._numbers = count()
        self._open = ""
        """The type of the item that is being told."""
        self._text = ""
        """What was told of it."""
        self._items = 0

    def begin(self, n: int) -> bytes:
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def ping(self) -> bytes:
        # Codex gives up on a stream of comments; an event of another type would be unknown to typed clients.
        return self._event("response.in_progress", response=self._response)

    def more(self, index: int, piece: Piece) -> bytes:
        reasoning = self._tell("reasoning", piece.reasoning) if piece.reasoning else b""
        return reasoning + (self._tell("message", piece.text) if piece.text else b"")

    def end(self, reply: Reply, rests: list[Piece]) -> bytes:
        response, events = _finished(reply) | {"created_at": self._response["created_at"]}, self.more(0, rests[0])
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if not calls and self._open != "message":
            events += self._tell("message", "")
        events += self._close()
        for index, item in enumerate(calls, self._items):
            events += self._whole_call(index, item)
        kind = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return events + self._event(kind, response=response)

    def _tell(self, kind: str, text: str) -> bytes:
        """More of the text of an item, which is opened unless it is."""
        events = b""
        if self._open != kind:
            events = self._close()
            self._open, self._text = kind, ""
            item = _told(kind, self._call, "")
            begun = item | {"status": "in_progress", "content": []}
            events += self._event("response.output_item.added", output_index=self._items, item=begun)
            events += self._event("response.content_part.added", **self._part(item), part=item["content"][0])
        self._text += text
        item = _told(kind, self._call, self._text)
        return events + self._text_event("delta", item, delta=text)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        item, index = _told(self._open, self._call, self._text), self._items
        events = self._text_event("done", item, text=self._text)
        events += self._event("response.content_part.done", **self._part(item), part=item["content"][0])
        self._open, self._items = "", index + 1
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _text_event(self, what: str, item: Item, **text: str) -> bytes:
        kind = item["content"][0]["type"]
        extra: Item = {} if self._open == "reasoning" else {"logprobs": []}
        return self._event(f"response.{kind}.{what}", **self._part(item), **text, **extra)

    def _part(self, item: Item) -> Item:
        return {"item_id": item["id"], "output_index": self._items, "content_index": 0}

    def _whole_call(self, index: int, item: Item) -> bytes:
        """By its start, one delta, and its end; arguments as they were sampled."""
        at, said = {"item_id": item["id"], "output_index": index}, item["arguments"]
        begun = item | {"arguments": "", "status": "in_progress"}
        return (
            self._event("response.output_item.added", output_index=index, item=begun)
            + self._event("response.function_call_arguments.delta", **at, delta=said)
            + self._event("response.function_call_arguments.done", **at, arguments=said, name=item["name"])
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _event(self, kind: str, **values: Any) -> bytes:
        event = {"type": kind, "sequence_number": next(self._numbers)} | values
        return b"event: " + kind.encode() + b"\ndata: " + written(event) + b"\n\n"


def _grammar(request: Item) -> str:
    """`text.format`, in the shape of Chat Completions."""
    format = (request.get("text") or {}).get("format") if isinstance(request.get("text"), dict) else None
    if isinstance(format, dict) and format.get("type") == "json_schema":
        schema = {key: value for key, value in format.items() if key != "type"}
        return grammar_of({"text.format": {"type": "json_schema", "json_schema": schema}}, "text.format")
    return grammar_of({"text.format": format}, "text.format")


def _messages(items: list[Item]) -> list[Item]:
    """Items of one answer, in the order reasoning, text, calls, become one message."""
    messages: list[Item] = []
    stage = 0
    """Of the answer that the last message is: 1 reasoning, 2 text, 3 calls; 0: it is none."""
    for item in items:
        kind = item.get("type") or "message"
        if kind == "item_reference":
            kind = _REFERENCES.get(str(item.get("id")).partition("_")[0], "item_reference")
        if kind == "function_call_output":
            content = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            stage = 0
        elif kind == "message" and item.get("role") != "assistant" and item.get("type") != "item_reference":
            if item.get("role") not in list(_ROLES):
                raise invalid("every message needs a `role`: user, assistant, system or developer")
            messages.append({"role": _ROLES[item["role"]], "content": _content(item.get("content"))})
            stage = 0
        elif kind in ("reasoning", "message", "function_call"):
            now = {"reasoning": 1, "message": 2, "function_call": 3}[kind]
            if not stage or now < stage or now == stage < 3:
                messages.append({"role": "assistant", "content": ""})
            _add(messages[-1], kind, item)
            stage = now
        else:
            raise invalid(f"items of type {kind!r} are not supported: send the whole history as messages and calls")
    return messages


def _add(answer: Item, kind: str, item: Item) -> None:
    """One item of an answer."""
    if item.get("type") == "item_reference":
        answer[REFERENCE] = str(item["id"]).partition("_")[2]
    elif kind == "reasoning":
        answer["reasoning_content"] = _joined(item.get("content") or item.get("summary"))
    elif kind == "message":
        answer["content"] = _joined(item.get("content"))
    else:
        name = ".".join(str(item[part]) for part in ("namespace", "name") if item.get(part))
        function = {"name": name, "arguments": item.get("arguments", "")}
        answer.setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "type": "function", "function": function}
        )


def _content(content: Any) -> Any:
    """Parts as they come, but one text as itself. Raises WireError (400)."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise invalid("`content` must be a text or a list of parts")
    parts = [_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0].get("type") == "text" else parts


def _part(part: Item) -> Item:
    if part.get("type") in _TEXTS:
        return {"type": "text", "text": str(part.get("text") or "")}
    return image(part["image_url"]) if part.get("type") == "input_image" and part.get("image_url") else part


def _joined(parts: Any) -> str:
    content = _content(parts)
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def _tools(tools: list[Item]) -> list[Item]:
    """Functions, also those in namespaces, as templates know them; others are the server's own and there are none."""
    functions = [("", tool) for tool in tools if tool.get("type") == "function"]
    for space in tools:
        if space.get("type") == "namespace":
            functions += [(f"{space.get('name')}.", tool) for tool in objects(space, "tools")]
    return [
        {
            "type": "function",
            "function": {
                "name": f"{space}{tool.get('name')}",
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters") or {},
            },
        }
        for space, tool in functions
    ]


def _finished(reply: Reply) -> Item:
    choice = reply.choices[0]
    cut = choice.finish == "length"
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": choice.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + choice.tokens,
    }
    return _response(reply.id, reply.model, reply.created) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(reply, choice),
        "usage": usage,
    }


def _output(reply: Reply, choice: Choice) -> list[Item]:
    message, items = choice.message, []
    calls = message.get("tool_calls") or []
    if message.get("reasoning_content"):
        items.append(_told("reasoning", reply.id, message["reasoning_content"]))
    if message.get("content") or not calls:
        items.append(_told("message", reply.id, message.get("content") or ""))
    for each in calls:
        name = each["function"]["name"]
        space = next((space for space in reply.namespaces if name.startswith(f"{space}.")), "")
        item = {
            "type": "function_call",
            "id": f"fc_{each['id']}",
            "call_id": each["id"],
            "name": name.removeprefix(f"{space}.") if space else name,
            "arguments": each["function"]["arguments"],
            "status": "completed",
        }
        items.append(item | ({"namespace": space} if space else {}))
    return items


def _told(kind: str, call: str, text: str) -> Item:
    """The item of an answer's reasoning or of its text."""
    if kind == "reasoning":
        part: Item = {"type": "reasoning_text", "text": text}
        return {"type": kind, "id": f"rs_{call}", "status": "completed", "summary": [], "content": [part]}
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": kind, "id": f"msg_{call}", "role": "assistant", "status": "completed", "content": [part]}


def _response(call: str, model: str, created: float) -> Item:
    return {
        "id": f"resp_{call}",
        "object": "response",
        "created_at": int(created),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }
