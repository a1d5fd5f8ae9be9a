"""Google's Gemini API (ai.google.dev/api/generate-content), as Gemini CLI and the Google Gen AI SDKs speak it.

A request's contents become the chat messages that templates know: the system instruction a system message, what the
model said in a row one assistant message, function responses tool messages. Model and method stand in the path. Unknown
fields and tools of the server's own pass; what cannot be honoured without changing the answer's meaning is refused.
"""

import hashlib
from itertools import count
from typing import Any

import orjson

from harnessed.gateway.reading import Piece
from harnessed.gateway.wire.body import image, invalid, objects, read_growing, texts, whole_number
from harnessed.gateway.wire.chat import MOST_CHOICES
from harnessed.gateway.wire.events import written
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.messages import parsed
from harnessed.gateway.wire.turn import POLICY, Address, Choice, Reply, Turn, Wanted, WireError

Item = dict[str, Any]
METHODS = ("generateContent", "streamGenerateContent")
"""`countTokens` has a path of its own, in which no method is named."""
_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
_MODES = (None, "", "MODE_UNSPECIFIED", "AUTO", "VALIDATED", "NONE")
_MESSAGES = ("contents", "systemInstruction", "system_instruction", "tools")


def parse(body: bytes, at: Address, before: Beginning | None = None) -> Turn:
    """The Turn of a request body and its path. Raises WireError (400, 404)."""
    method = at.get("method", "")
    if method and method not in METHODS:
        raise WireError(404, "not_found", f"there is no method {method}; there are {', '.join(METHODS)}")
    request, _known, beginning = read_growing(body, "contents", before)
    if not method:
        request = _object(request, "generateContentRequest") or request
    config = _object(request, "generationConfig", "generation_config")
    if config.get("responseMimeType") not in (None, "", "text/plain"):
        raise invalid("answers under a grammar are not supported: leave `responseMimeType` out")
    if request.get("cachedContent"):
        raise invalid("there are no cached contents: leave `cachedContent` out")
    return Turn(
        messages=_system(request) + _messages(objects(request, "contents")),
        tools=[
            _tool(function) for tool in objects(request, "tools") for function in objects(tool, "functionDeclarations")
        ],
        model=at["model"],
        wanted=Wanted(
            calls=_calls_wanted(request),
            n=whole_number(config, "candidateCount", MOST_CHOICES) or 1,
            max_tokens=whole_number(config, "maxOutputTokens"),
            stop=texts(config, "stopSequences"),
        ),
        stream=method == METHODS[1],
        events=at.get("alt") == "sse",
        asked={"model": at["model"]} | {key: value for key, value in request.items() if key not in _MESSAGES},
        beginning=beginning,
    )


def render(reply: Reply) -> bytes:
    """The response body."""
    candidates = [
        _candidate(index, _told(_piece(choice)) + _called(choice), choice) for index, choice in enumerate(reply.choices)
    ]
    return orjson.dumps({"candidates": candidates} | _common(reply.id, reply.model) | _usage(reply))


def render_error(error: WireError) -> bytes:
    # Harnesses know by Google's words that they have to compact.
    overflow = error.code == "context_length_exceeded"
    words = "The input token count exceeds the maximum number of tokens allowed. " if overflow else ""
    status = _STATUSES.get(error.status, "INTERNAL")
    return orjson.dumps({"error": {"code": error.status, "message": words + error.message, "status": status}})


def render_models(name: str | None) -> bytes:
    """The model of that name, or the list of those that there are (ai.google.dev/api/models)."""
    id = name or POLICY
    model = {
        "name": f"models/{id}",
        "version": "1",
        "displayName": id,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    return orjson.dumps(model if name else {"models": [model]})


def render_count(tokens: int) -> bytes:
    """The answer of `countTokens`."""
    return orjson.dumps({"totalTokens": tokens})


class Stream:
    """The same answer in parts: as server-sent events, or as the elements of a JSON list."""

    def __init__(self, turn: Turn, call: str, created: float) -> None:
        self._common = _common(call, turn.model)
        self._events = turn.events
        self._before = b"["

    def begin(self, n: int) -> bytes:
        return b""

    def ping(self) -> bytes:
        """White space, between events and in JSON; Google's SDK for Python reads a comment as broken JSON."""
        return b"\r\n"

    def more(self, index: int, piece: Piece) -> bytes:
        return self._chunk({"candidates": [_candidate(index, _told(piece))]}) if piece else b""

    def end(self, reply: Reply, rests: list[Piece]) -> bytes:
        candidates = [
            _candidate(index, _told(rest) + _called(choice), choice)
            for index, (choice, rest) in enumerate(zip(reply.choices, rests, strict=True))
        ]
        return self._chunk({"candidates": candidates} | _usage(reply)) + (b"" if self._events else b"]")

    def _chunk(self, values: Item) -> bytes:
        value = written(values | self._common)
        if self._events:
            return b"data: " + value + b"\r\n\r\n"
        before, self._before = self._before, b",\r\n"
        return before + value


class _Conversation:
    """Contents, one after the other, as chat messages. Ids that a client leaves out are made from what it sends, so
    that the same request has the same ones again."""

    def __init__(self) -> None:
        self.messages: list[Item] = []
        self._awaited: list[tuple[str, str]] = []
        """Calls of the last answer that have no result yet: name and id."""
        self._made = count()

    def answer(self, parts: list[Item]) -> None:
        """A stream's parts come back as contents of their own (Google's SDK), so an answer goes on until a user
        speaks."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._awaited = []
        answer = self.messages[-1]
        for part in parts:
            if part.get("functionCall") is not None:
                answer.setdefault("tool_calls", []).append(self._call(_object(part, "functionCall")))
            elif text := _text(part):
                where = "reasoning_content" if part.get("thought") else "content"
                answer[where] = answer.get(where, "") + text

    def prompt(self, parts: list[Item]) -> None:
        results = [part for part in parts if part.get("functionResponse") is not None]
        others = [part for part in parts if part.get("functionResponse") is None]
        for part in results:
            self.messages.append(self._result(_object(part, "functionResponse")))
        if others or not results:
            self.messages.append({"role": "user", "content": _content(others)})

    def _call(self, call: Item) -> Item:
        name = _named(call, "functionCall")
        id = _id(call, "functionCall") or self._make_id(name)
        self._awaited.append((name, id))
        arguments = orjson.dumps(_object(call, "args")).decode()
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, result: Item) -> Item:
        name, id = _named(result, "functionResponse"), _id(result, "functionResponse")
        if id:
            meant = [each for each in self._awaited if each[1] == id]
        else:
            meant = [each for each in self._awaited if each[0] == name] or self._awaited
        if meant:
            id = meant[0][1]
            self._awaited.remove(meant[0])
        said: Any = _output(result.get("response"))
        if parts := objects(result, "parts"):
            said = [{"type": "text", "text": said}, *parts]
        return {"role": "tool", "tool_call_id": id or self._make_id(name), "content": said}

    def _make_id(self, name: str) -> str:
        """Nine letters and digits: Mistral's templates take no other ids."""
        return hashlib.blake2b(f"{name} {next(self._made)}".encode(), digest_size=5).hexdigest()[:9]


def _messages(contents: list[Item]) -> list[Item]:
    if not contents:
        raise invalid("`contents` must hold at least one content")
    conversation = _Conversation()
    for content in contents:
        parts = objects(content, "parts")
        if content.get("role") == "model":
            conversation.answer(parts)
        elif content.get("role") in (None, "", "user", "function"):
            conversation.prompt(parts)
        else:
            raise invalid("`role` of a content must be user or model")
    return conversation.messages


def _system(request: Item) -> list[Item]:
    name = "systemInstruction" if request.get("systemInstruction") else "system_instruction"
    instruction = request.get(name)
    if not instruction:
        return []
    if isinstance(instruction, str):
        return [{"role": "system", "content": instruction}]
    return [{"role": "system", "content": _content(objects(_object(request, name), "parts"))}]


def _content(parts: list[Item]) -> Any:
    """Parts as they come, but texts as templates know them, and one text as itself."""
    content = [{"type": "text", "text": _text(part)} if "text" in part else _picture(part) for part in parts]
    if not content:
        return ""
    return content[0]["text"] if len(content) == 1 and "text" in parts[0] else content


def _picture(part: Item) -> Item:
    """Parts with a picture as chat messages have them."""
    data = part.get("inlineData") or part.get("inline_data")
    if not isinstance(data, dict) or not str(data.get("mimeType")).startswith("image/"):
        return part
    return image(f"data:{data['mimeType']};base64,{data.get('data')}")


def _text(part: Item) -> str:
    text = part.get("text")
    if not isinstance(text, str | None):
        raise invalid("`text` of a part must be a text")
    return text or ""


def _output(response: Any) -> str:
    """What a function gave: under `output` as Google advises, else all of it."""
    if isinstance(response, dict) and response.keys() == {"output"}:
        response = response["output"]
    if response is None:
        return ""
    return response if isinstance(response, str) else orjson.dumps(response).decode()


def _object(value: Item, *names: str) -> Item:
    """Under the first of the names that says something."""
    name = next((name for name in names if value.get(name)), names[0])
    found = value.get(name) or {}
    if not isinstance(found, dict):
        raise invalid(f"`{name}` must be an object")
    return found


def _named(value: Item, where: str) -> str:
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"every `{where}` needs a `name`")
    return name


def _id(value: Item, where: str) -> str:
    id = value.get("id")
    if not isinstance(id, str | None):
        raise invalid(f"`id` of a `{where}` must be a text")
    return id or ""


def _calls_wanted(request: Item) -> bool:
    mode = _object(_object(request, "toolConfig", "tool_config"), "functionCallingConfig").get("mode")
    if mode not in _MODES:
        raise invalid("a forced function call is not supported: leave `mode` out, or send AUTO or NONE")
    return bool(mode != "NONE")


def _tool(function: Item) -> Item:
    parameters = function.get("parametersJsonSchema") or _schema(function.get("parameters")) or {}
    described = {"name": function.get("name"), "description": function.get("description") or ""}
    return {"type": "function", "function": described | {"parameters": parameters}}


def _schema(schema: Any) -> Any:
    """With the names of types that JSON Schema has; Google's own are in capitals."""
    if isinstance(schema, list):
        return [_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    shown = dict(schema)
    if isinstance(schema.get("type"), str):
        shown["type"] = schema["type"].lower()
    if isinstance(schema.get("properties"), dict):
        shown["properties"] = {name: _schema(each) for name, each in schema["properties"].items()}
    return shown | {name: _schema(schema[name]) for name in ("items", "anyOf") if name in schema}


def _candidate(index: int, parts: list[Item], choice: Choice | None = None) -> Item:
    """`choice`: it is the last of it."""
    finish = {"finishReason": _REASONS[choice.finish]} if choice else {}
    return {"content": {"parts": parts or [{"text": ""}], "role": "model"}, "index": index} | finish


def _piece(choice: Choice) -> Piece:
    return Piece(choice.message.get("reasoning_content") or "", choice.message.get("content") or "")


def _told(piece: Piece) -> list[Item]:
    thought = [{"text": piece.reasoning, "thought": True}] if piece.reasoning else []
    return thought + ([{"text": piece.text}] if piece.text else [])


def _called(choice: Choice) -> list[Item]:
    return [
        {
            "functionCall": {
                "id": call["id"],
                "name": call["function"]["name"],
                "args": parsed(call["function"]["arguments"]),
            }
        }
        for call in choice.message.get("tool_calls") or []
    ]


def _common(call: str, model: str) -> Item:
    return {"modelVersion": model, "responseId": call}


def _usage(reply: Reply) -> Item:
    sampled = sum(choice.tokens for choice in reply.choices)
    usage = {
        "promptTokenCount": reply.prompt_tokens,
        "candidatesTokenCount": sampled,
        "totalTokenCount": reply.prompt_tokens + sampled,
    }
    return {"usageMetadata": usage}
