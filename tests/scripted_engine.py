"""A fake engine for tests: a real HTTP server that speaks the protocol of `harnessed.engine.app`, its answers scripted.

    with ScriptedEngine(lambda prompt, call: [72, 105, STOP]) as engine:
        ...  # engine.url, engine.log, engine.sampled_tokens, engine.version

It runs in a thread of its own, so that it serves sync and async tests alike. A script gives token ids, or a `Scripted`
for whatever an engine may also do: end by length, break off, be slow, refuse, hang up. With a `policy` it speaks Chat
Completions too, as vLLM does with `return_token_ids`: it applies the policy's template, and reads its own tokens back.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
from listening import listen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from harnessed.gateway.template import ChatTemplate
from harnessed.records import Version

START_LIMIT_S = 10


@dataclass
class Scripted:
    """One answer."""

    tokens: list[int] = field(default_factory=list)
    finish: str = "stop"
    """`interrupted`: it breaks off after these tokens."""
    message: dict[str, Any] | None = None
    """In chat: what its parser made of the tokens; None: their text."""
    prompt: list[int] | None = None
    """In chat: what it made of the messages; None: what the template writes, encoded in one piece."""
    delay_s: float = 0
    """Before the answer."""
    status: int = 200
    """Otherwise an error of this status, with nothing sampled."""
    pace_s: float = 0
    """Between two tokens."""
    stall_at: int = 0
    """After so many tokens it stalls, for `stall_s` or until it is interrupted; 0: it does not."""
    stall_s: float = 30
    stall_until: Callable[[], bool] | None = None
    """In place of a time."""
    hang_up: bool = False
    """Sample, count, and close the connection in place of an answer; a stream has shown all of its tokens."""


Script = Callable[[list[int], int], list[int] | Scripted]
"""(prompt ids, number of the call from 1 in the order of arrival) -> the answer, stop token included."""


@dataclass
class Logged:
    """One call as it came, and what was answered."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop: list[int]
    stop_strings: list[str] = field(default_factory=list)
    top_p: float = 1.0
    stream: bool = False
    id: str = ""
    begun: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    """In chat, with `tools`."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    response_format: dict[str, Any] = field(default_factory=dict)
    answer: list[int] = field(default_factory=list)
    finish: str = ""
    """Empty until it is answered."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody has asked for its end."""

    async def wait(self, seconds: float) -> None:
        if seconds and not self.interrupted.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.interrupted.wait(), seconds)


class ScriptedEngine:
    """The server; attributes may be read and changed while it runs."""

    def __init__(
        self,
        script: Script,
        version: Version = Version(0, 0),  # noqa: B008
        context: int = 32_768,
        policy: Path | None = None,
    ) -> None:
        self.script = script
        self.version = version
        """Stamped on the tokens of answers that begin from now on."""
        self.context = context
        self.log: list[Logged] = []
        """Every call, in the order of arrival."""
        self.sampled_tokens = 0
        self.running = 0
        self.waiting = 0
        self.paused = False
        self.interruptible = True
        """False: it does not know the request, as an engine of somebody else's."""
        self.hung = False
        """True: it takes requests of any kind, and nothing more."""
        self.tells_all = False
        """True: its streams say log-probabilities and versions with each token, as our own engine's do; false: with
        their last line, so that tokens are lost with it."""
        self.url = ""
        self._policy = policy
        self._read: tuple[int, ChatTemplate] | None = None
        self._server: uvicorn.Server | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Begin; after `close` again, at the same address."""
        listening = listen(int(self.url.rpartition(":")[2] or 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        routes = [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/interrupt", self._interrupt, methods=["POST"]),
            Route("/health", self._health),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="error", access_log=False, timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="scripted engine")
        self._thread.start()
        for _ in range(START_LIMIT_S * 200):
            if self._server.started:
                return
            self._thread.join(0.005)
        raise TimeoutError(f"the scripted engine did not start within {START_LIMIT_S} s")

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it, as if its machine died; open requests are cut off."""
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join()

    @staticmethod
    def logprobs(call: int, count: int) -> list[float]:
        """What the answer to a call carries: distinct over all tokens of a test, and exact in float32."""
        return [-(call * 1024 + i + 1) / 2**20 for i in range(count)]

    async def _generate(self, request: Request) -> Response:
        call = Logged(**await request.json())
        return await self._serve(call, self._tokens_answer)

    async def _chat(self, request: Request) -> Response:
        asked = await request.json()
        assert asked["logprobs"] and asked["return_token_ids"] and asked.get("n", 1) == 1
        tools = asked.get("tools", [])
        call = Logged(
            prompt=self._template().first_segment(asked["messages"], tools).tolist(),
            stop=asked["stop_token_ids"],
            stop_strings=asked.get("stop", []),
            tools=tools,
            response_format=asked.get("response_format", {}),
            **{name: asked[name] for name in ("max_tokens", "temperature", "top_p", "seed", "messages")},
        )
        return await self._serve(call, self._chat_answer)

    async def _serve(self, call: Logged, answer_to: Callable[[Logged, Scripted, int], dict[str, Any]]) -> Response:
        await self._until(lambda: not self.hung)
        self.log.append(call)
        number = len(self.log)
        if len(call.prompt) + call.max_tokens > self.context:
            return _error(400, "context", f"the model's maximum context length is {self.context} tokens")
        await self._until(lambda: not self.paused or call.interrupted.is_set())
        self.running += 1
        try:
            return await self._answer(call, number, answer_to)
        finally:
            self.running -= 1

    async def _answer(
        self, call: Logged, number: int, answer_to: Callable[[Logged, Scripted, int], dict[str, Any]]
    ) -> Response:
        version = self.version
        scripted = self.script(call.prompt, number)
        answer = scripted if isinstance(scripted, Scripted) else Scripted(scripted)
        await call.wait(answer.delay_s)
        if answer.status != 200:
            return _error(answer.status, "scripted", "scripted failure")
        call.prompt = answer.prompt or call.prompt

        def body() -> dict[str, Any]:
            return answer_to(call, answer, number) | {"versions": [version.pack()] * len(call.answer)}

        tokens = self._sample(call, answer)
        if call.stream:
            return _Stream(tokens, lambda: self._preview(call, number, version), body, answer)
        async for _ in tokens:
            pass
        return _HangUp() if answer.hang_up else JSONResponse(body())

    async def _sample(self, call: Logged, answer: Scripted) -> AsyncIterator[int]:
        for token in answer.tokens[: call.max_tokens]:
            if call.interrupted.is_set():
                break
            call.answer.append(token)
            self.sampled_tokens += 1
            yield token
            stalls = len(call.answer) == answer.stall_at
            while stalls and answer.stall_until and not (answer.stall_until() or call.interrupted.is_set()):
                await call.wait(0.05)  # polled, since a test changes it from another thread
            await call.wait(answer.stall_s if stalls and not answer.stall_until else answer.pace_s)
        whole = len(call.answer) == len(answer.tokens)
        cut = "length" if len(call.answer) == call.max_tokens else "interrupted"
        call.finish = answer.finish if whole else cut

    def _preview(self, call: Logged, number: int, version: Version) -> dict[str, Any]:
        """Of the last token."""
        told = {"logprobs": self.logprobs(number, len(call.answer))[-1:], "versions": [version.pack()]}
        return {"tokens": call.answer[-1:]} | (told if self.tells_all else {})

    async def _interrupt(self, request: Request) -> Response:
        await self._until(lambda: not self.hung)
        if not self.interruptible:
            return _error(404, "no_such_route", "POST /interrupt")
        ids = (await request.json())["ids"]
        found = [call for call in self.log if call.id in ids]
        for call in found:
            call.interrupted.set()
        return JSONResponse({"found": sorted({call.id for call in found})})

    def _template(self) -> ChatTemplate:
        """Read again where a test has changed it."""
        assert self._policy is not None
        changed = max(file.stat().st_mtime_ns for file in self._policy.iterdir())
        if self._read is None or self._read[0] != changed:
            self._read = (changed, ChatTemplate(self._policy))
        return self._read[1]

    def _tokens_answer(self, call: Logged, _: Scripted, number: int) -> dict[str, Any]:
        return {"tokens": call.answer, "logprobs": self.logprobs(number, len(call.answer)), "finish": call.finish}

    def _chat_answer(self, call: Logged, scripted: Scripted, number: int) -> dict[str, Any]:
        template = self._template()
        readable = [id for id in call.answer if 0 <= id < 2**31]
        text = template.text(readable, stopped=call.answer[-1] in template.stop_ids)
        message = scripted.message or {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        logprobs = [{"token": "", "logprob": value} for value in self.logprobs(number, len(call.answer))]
        finish = {"stop": "tool_calls" if message.get("tool_calls") else "stop", "interrupted": "abort"}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": logprobs},
            "finish_reason": finish.get(call.finish, call.finish),
            "token_ids": call.answer,
        }
        return {"id": f"chatcmpl-{number}", "choices": [choice], "prompt_token_ids": call.prompt}

    async def _health(self, _: Request) -> Response:
        await self._until(lambda: not self.hung)
        body = {
            "status": "ok",
            "reason": "",
            "model": "scripted",
            "version": self.version.pack(),
            "sampled_tokens": self.sampled_tokens,
            "reused_tokens": 0,
            "running": self.running,
            "waiting": self.waiting,
            "paused": self.paused,
            "context": self.context,
        }
        return JSONResponse(body)

    async def _pause(self, _: Request) -> Response:
        self.paused = True
        await self._until(lambda: self.running == 0)
        return JSONResponse({})

    async def _resume(self, _: Request) -> Response:
        self.paused = False
        return JSONResponse({})

    async def _until(self, condition: Callable[[], bool]) -> None:
        self.waiting += 1
        # Polled, since tests change `paused` and `hung` from other threads.
        while not condition():
            await asyncio.sleep(0.002)
        self.waiting -= 1


class _HangUp(Response):
    """Promises a body and closes the connection without it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Any = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]}
        await send(start)
        # uvicorn closes the connection of an application that stops before its body is complete.


class _Stream(Response):
    """Each token by itself, then the whole answer."""

    def __init__(
        self,
        tokens: AsyncIterator[int],
        preview: Callable[[], dict[str, Any]],
        body: Callable[[], dict[str, Any]],
        scripted: Scripted,
    ) -> None:
        self.status_code, self.background = 200, None
        self._tokens = tokens
        self._preview = preview
        self._body = body
        self._scripted = scripted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]}
        )
        async for _ in self._tokens:
            line = json.dumps(self._preview()).encode() + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        if not self._scripted.hang_up:
            await send({"type": "http.response.body", "body": json.dumps(self._body()).encode() + b"\n"})


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": code}}, status)
