"""An engine that answers at once: by token ids, as the gateway asks, and as a chat, as a plain relay asks.

Answers are texts of 100 to 300 tokens, made before the first request. A stream has all tokens when it begins, so its
lines are what an engine that is this fast would send: one with the tokens, one with the whole answer.
"""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from texts import source

from harnessed.gateway.template import ChatTemplate

ANSWERS = 256
LENGTHS = (100, 300)
CHARACTERS_PER_TOKEN = 3


def serve(listener: socket.socket, model: Path) -> None:
    config = uvicorn.Config(Upstream(model).application(), lifespan="off", log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


class Upstream:
    def __init__(self, model: Path) -> None:
        template, draw = ChatTemplate(model), random.Random(0)
        self._ids = template.encode(source())
        self._chosen = 0
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._by_tokens: list[dict[str, Any]] = []
        self._as_chat: list[dict[str, Any]] = []
        for _ in range(ANSWERS):
            length = draw.randint(*LENGTHS)
            begin = draw.randrange(len(self._ids) - length)
            ids = [*self._ids[begin : begin + length - 1], template.stop_ids[0]]
            logprobs = [-draw.expovariate(2) for _ in ids]
            self._by_tokens.append(
                {"tokens": ids, "logprobs": logprobs, "versions": [0] * length, "finish": "stop"},
            )
            self._as_chat.append(_choice(template, ids, logprobs))

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/interrupt", self.interrupt, methods=["POST"]),
                Route("/health", self.health),
                Route("/stall", self.stall, methods=["POST"]),
                Route("/go_on", self.go_on, methods=["POST"]),
            ]
        )

    async def generate(self, request: Request) -> Response:
        asked = orjson.loads(await request.body())
        await self._go_on.wait()
        answer = self._by_tokens[self._next()]
        if not asked["stream"]:
            return Response(orjson.dumps(answer), media_type="application/json")

        async def lines() -> AsyncIterator[bytes]:
            yield orjson.dumps({"tokens": answer["tokens"]}) + b"\n"
            yield orjson.dumps(answer) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def chat(self, request: Request) -> Response:
        """As vLLM answers with `return_token_ids` and `logprobs`; the prompt's ids are some, of about its length."""
        body = await request.body()
        orjson.loads(body)
        choice = self._as_chat[self._next()]
        prompt = self._ids[: len(body) // CHARACTERS_PER_TOKEN].tolist()
        used = len(choice["token_ids"])
        answer = {
            "id": "chatcmpl-0123456789abcdef",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "m",
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": used, "total_tokens": len(prompt) + used},
            "prompt_token_ids": prompt,
        }
        return Response(orjson.dumps(answer), media_type="application/json")

    async def interrupt(self, request: Request) -> Response:
        return Response(orjson.dumps({"found": orjson.loads(await request.body())["ids"]}))

    async def health(self, _: Request) -> Response:
        return Response(orjson.dumps({"status": "ok", "reason": "", "sampled_tokens": 0, "version": 0}))

    async def stall(self, _: Request) -> Response:
        """Answer nothing from now on."""
        self._go_on.clear()
        return Response()

    async def go_on(self, _: Request) -> Response:
        self._go_on.set()
        return Response()

    def _next(self) -> int:
        self._chosen = (self._chosen + 1) % ANSWERS
        return self._chosen


def _choice(template: ChatTemplate, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip([template.written([id]) for id in ids], logprobs, strict=True)
    ]
    return {
        "index": 0,
        "message": {"role": "assistant", "content": template.text(ids, stopped=True), "tool_calls": []},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
    }
