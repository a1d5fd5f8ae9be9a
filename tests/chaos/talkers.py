"""Conversations by the real SDKs, one class for each protocol: what a linear harness does, turn by turn.

`ask` sends what is to be said and returns what was heard; the history is the talker's, and grows only with a whole
answer, so that the same `ask` again is the same request. An SDK that takes a broken stream for a whole answer is told
from one that got it by the missing finish: then `Cut` is raised.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import httpx2
import openai
from google import genai
from google.genai import types

from harnessed.records import Node

RETRIES = 6
TIMEOUT_S = 120
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOLD = {"name": "look", "description": "Look."}
RESULT = "it is open"


class Cut(Exception):
    """A stream that ended before its answer."""


BROKEN = (
    Cut,
    openai.APIConnectionError,
    anthropic.APIConnectionError,
    httpx.TransportError,
    httpx2.TransportError,
)
"""After these the caller repeats the request: the connection broke, and the SDK has given up."""


@dataclass
class Heard:
    """An answer as its client has it."""

    call: str
    text: str
    thought: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Name and arguments."""
    ids: list[str] = field(default_factory=list)
    """Of those."""


def stored(node: Node) -> Heard:
    """The same from the gateway's records."""
    functions = [call["function"] for call in node.message.get("tool_calls") or []]
    return Heard(
        node.call,
        node.message.get("content") or "",
        node.message.get("reasoning_content") or "",
        [(each["name"], json.loads(each["arguments"])) for each in functions],
        [call["id"] for call in node.message.get("tool_calls") or []],
    )


@dataclass
class Connections:
    """Of all talkers. One that is left to the garbage collector closes its connections when it likes."""

    openai: httpx2.AsyncClient = field(default_factory=lambda: openai.DefaultAsyncHttpxClient(timeout=TIMEOUT_S))
    anthropic: httpx2.AsyncClient = field(default_factory=lambda: anthropic.DefaultAsyncHttpxClient(timeout=TIMEOUT_S))
    google: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=TIMEOUT_S))

    async def __aenter__(self) -> "Connections":
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in (self.openai, self.anthropic, self.google):
            await each.aclose()


class Talker:
    """One attempt. What is said next is made by `user`, or by `results` if the answer before has called."""

    def __init__(self, connections: Connections, key: str) -> None:
        self.connections = connections
        self.key = key
        self.history: list[Any] = []
        self.clients: dict[str, Any] = {}
        """By URL."""

    async def ask(self, url: str, said: list[Any], *, streams: bool) -> Heard:
        raise NotImplementedError

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def results(self, ids: list[str]) -> list[Any]:
        """Of the calls of the last answer."""
        raise NotImplementedError

    def client(self, url: str) -> Any:
        if url not in self.clients:
            self.clients[url] = self.make(url)
        return self.clients[url]

    def make(self, url: str) -> Any:
        return openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=self.key, max_retries=RETRIES, http_client=self.connections.openai
        )


class Chat(Talker):
    async def ask(self, url: str, said: list[Any], *, streams: bool) -> Heard:
        tools: Any = [{"type": "function", "function": TOLD | {"parameters": LOOK}}]
        asked: Any = {"model": "m", "messages": self.history + said, "tools": tools}
        if streams:
            async with self.client(url).chat.completions.stream(**asked) as stream:
                completion: Any = await stream.get_final_completion()
        else:
            completion = await self.client(url).chat.completions.create(**asked)
        choice = completion.choices[0]
        if choice.finish_reason is None:
            raise Cut
        message = choice.message.to_dict()
        self.history += [*said, message]
        calls = message.get("tool_calls") or []
        return Heard(
            completion.id.removeprefix("chatcmpl-"),
            message.get("content") or "",
            message.get("reasoning_content") or "",
            [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls],
            [call["id"] for call in calls],
        )

    def results(self, ids: list[str]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": id, "content": RESULT} for id in ids]


class Completions(Talker):
    """The harness writes the policy's marks itself."""

    async def ask(self, url: str, said: list[Any], *, streams: bool) -> Heard:
        prompt = "".join(self.history + said)
        asked = await self.client(url).completions.create(model="m", prompt=prompt, max_tokens=900, stream=streams)
        if streams:
            text, finish, call = "", None, ""
            async for chunk in asked:
                text, call = text + chunk.choices[0].text, chunk.id
                finish = chunk.choices[0].finish_reason or finish
        else:
            text, finish, call = asked.choices[0].text, asked.choices[0].finish_reason, asked.id
        if finish is None:
            raise Cut
        self.history += [*said, text, "<|im_end|>\n"]
        return Heard(call.removeprefix("cmpl-"), text)

    def user(self, text: str) -> list[Any]:
        return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"]


class Responses(Talker):
    """With its history in every request."""

    async def ask(self, url: str, said: list[Any], *, streams: bool) -> Heard:
        response = await self.response(url, streams=streams, input=self.history + said)
        self.history += [*said, *(item.to_dict(exclude_unset=False) for item in response.output)]
        return self.heard(response)

    async def response(self, url: str, *, streams: bool, **asked: Any) -> Any:
        asked |= {"model": "m", "tools": [{"type": "function", "strict": False, "parameters": LOOK} | TOLD]}
        if not streams:
            return await self.client(url).responses.create(**asked)
        async with self.client(url).responses.stream(**asked) as stream:
            async for event in stream:
                if event.type == "response.completed":
                    return event.response
        raise Cut

    def heard(self, response: Any) -> Heard:
        thoughts = [item for item in response.output if item.type == "reasoning"]
        calls = [item for item in response.output if item.type == "function_call"]
        return Heard(
            response.id.removeprefix("resp_"),
            response.output_text,
            "".join(part.text for item in thoughts for part in item.content or item.summary),
            [(call.name, json.loads(call.arguments)) for call in calls],
            [call.call_id for call in calls],
        )

    def results(self, ids: list[str]) -> list[Any]:
        return [{"type": "function_call_output", "call_id": id, "output": RESULT} for id in ids]


class ResponsesById(Responses):
    """The gateway keeps its history."""

    async def ask(self, url: str, said: list[Any], *, streams: bool) -> Heard:
        before = {"previous_response_id": self.history[-1]} if self.history else {}
        response = await self.response(url, streams=streams, input=said, **before)
        self.history.append(response.id)
        return self.heard(response)


class Messages(Talker):
    async def ask(self, url: str, said: list[Any], *, streams: bool) -> Heard:
        tools: Any = [TOLD | {"input_schema": LOOK}]
        asked: Any = {"model": "m", "max_tokens": 900, "messages": self.history + said, "tools": tools}
        if streams:
            async with self.client(url).messages.stream(**asked) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await self.client(url).messages.create(**asked)
        if message.stop_reason is None:
            raise Cut
        self.history += [*said, {"role": "assistant", "content": message.content}]
        calls = [block for block in message.content if block.type == "tool_use"]
        return Heard(
            message.id.removeprefix("msg_"),
            "".join(block.text for block in message.content if block.type == "text"),
            "".join(block.thinking for block in message.content if block.type == "thinking"),
            [(call.name, call.input) for call in calls],
            [call.id for call in calls],
        )

    def make(self, url: str) -> Any:
        return anthropic.AsyncAnthropic(
            base_url=url, auth_token=self.key, max_retries=RETRIES, http_client=self.connections.anthropic
        )

    def results(self, ids: list[str]) -> list[Any]:
        content = [{"type": "tool_result", "tool_use_id": id, "content": RESULT} for id in ids]
        return [{"role": "user", "content": content}]


class Gemini(Talker):
    async def ask(self, url: str, said: list[Any], *, streams: bool) -> Heard:
        models = self.client(url).aio.models
        declared = TOLD | {"parameters": {"type": "OBJECT", "properties": {"at": {"type": "STRING"}}}}
        config = {
            "tools": [types.Tool(function_declarations=[types.FunctionDeclaration(**declared)])],
            "automatic_function_calling": {"disable": True},
        }
        asked: Any = {"model": "m", "contents": self.history + said, "config": config}
        if streams:
            chunks = [chunk async for chunk in await models.generate_content_stream(**asked)]
        else:
            chunks = [await models.generate_content(**asked)]
        if not (chunks and chunks[-1].candidates[0].finish_reason):
            raise Cut
        parts = joined([part for chunk in chunks for part in chunk.candidates[0].content.parts or []])
        self.history += [*said, types.Content(role="model", parts=parts)]
        calls = [part.function_call for part in parts if part.function_call]
        return Heard(
            chunks[-1].response_id,
            "".join(part.text for part in parts if part.text and not part.thought),
            "".join(part.text for part in parts if part.text and part.thought),
            [(call.name, call.args) for call in calls],
            [call.id for call in calls],
        )

    def make(self, url: str) -> Any:
        # It waits a second and more before its first retry, if it is not told otherwise.
        retries = types.HttpRetryOptions(attempts=RETRIES + 1, initial_delay=0.5, max_delay=8)
        options = types.HttpOptions(
            base_url=url, httpx_async_client=self.connections.google, retry_options=retries, timeout=TIMEOUT_S * 1000
        )
        return genai.Client(api_key=self.key, http_options=options)

    def user(self, text: str) -> list[Any]:
        return [types.Content(role="user", parts=[types.Part(text=text)])]

    def results(self, ids: list[str]) -> list[Any]:
        told = [types.FunctionResponse(id=id, name="look", response={"output": RESULT}) for id in ids]
        return [types.Content(role="user", parts=[types.Part(function_response=each) for each in told])]


def joined(parts: list[Any]) -> list[Any]:
    """Neighbouring texts of one kind as one part."""
    whole: list[Any] = []
    for part in parts:
        if whole and None not in (part.text, whole[-1].text) and part.thought == whole[-1].thought:
            whole[-1] = types.Part(text=whole[-1].text + part.text, thought=part.thought)
        elif part.text != "":
            whole.append(part)
    return whole


TALKERS = (Chat, Messages, Gemini, Responses, Chat, Messages, Completions, ResponsesById)
"""Responses with its history costs an SDK the most by far."""
