"""An engine as a process of its own that keeps books which outlive it: `python logging_engine.py LISTENER LOG OWNER`.

It speaks the protocol of `harnessed.engine.app` for the policy of `policies.py`. What it says follows from the
prompt, in one of three variants, so that an answer that was broken off can be gone on with by whoever comes after.
Every prompt and every token stands in the log before it is given, so `read` knows after any kill what was sampled.
"""

import asyncio
import hashlib
import json
import os
import socket
import sys
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from texts import STOP, answer, ids

from harnessed.services import die_with

BEGIN = ids("<|im_start|>assistant\n")
TOOLS = ids("<|im_start|>tools\n")
CALL = b'{"what":"call"'
"""How the line of a call begins."""
VARIANTS = 3
BURST = 10
"""Tokens that are given together."""
PACE_S = 0.1
"""Between two bursts."""


@dataclass
class Sampled:
    """One call, as the log has it."""

    id: str
    """The gateway's name for the generation."""
    prompt: list[int]
    planned: list[int]
    began: float
    """By the monotonic clock, which all processes share."""
    given: int = 0
    """Tokens that may have left the engine."""
    ended: float | None = None
    """None: the engine was killed before."""

    @property
    def answer(self) -> list[int]:
        return self.planned[: self.given]


def read(log: Path) -> list[Sampled]:
    """All calls in the order of arrival."""
    calls: list[Sampled] = []
    for line in log.read_bytes().split(b"\n")[:-1]:
        entry = orjson.loads(line)
        match entry.pop("what"):
            case "call":
                calls.append(Sampled(**entry))
            case "tokens":
                calls[entry["call"] - 1].given = entry["given"]
            case "end":
                calls[entry["call"] - 1].ended = entry["at"]
    return calls


def plan(prompt: list[int], random: Random) -> list[int]:
    """What is still to be said after a prompt that may hold the beginning of an answer."""
    begun = max(i for i in range(len(prompt)) if prompt[i : i + len(BEGIN)] == BEGIN) + len(BEGIN)
    said, kept = prompt[:begun], prompt[begun:]
    wholes = [variant(said, number) for number in range(VARIANTS)]
    return random.choice([whole for whole in wholes if whole[: len(kept)] == kept])[len(kept) :]


def variant(said: list[int], number: int) -> list[int]:
    """One of the answers to a conversation: a text, perhaps after a thought, perhaps with calls of a tool."""
    random = Random(hashlib.blake2b(array("i", said), digest_size=8, salt=bytes([number])).digest())
    words = [random.choice(["so", "é", "  two", "\n", "☃", "<b", "done."]) for _ in range(random.randint(3, 20))]
    told = f"{'ABC'[number]} {' '.join(words)}."
    if random.random() < 0.5:
        told = f"<think>\n{'Hm, Oh, Ah,'.split()[number]} so.\n</think>\n\n{told}"
    if said[: len(TOOLS)] == TOOLS:
        for _ in range(random.choice([0, 0, 1, 2])):
            call = {"name": "look", "arguments": {"at": f"the  door {random.randint(1, 9)} é"}}
            told += f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    return answer(told)


@dataclass
class LoggingEngine:
    log: int
    """A descriptor, open to append."""
    calls: int
    """In the log."""
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    """Generations by their id; set when somebody has asked for their end."""

    async def generate(self, request: Request) -> Response:
        asked = await request.json()
        self.calls += 1
        number, interrupted = self.calls, asyncio.Event()
        planned = plan(asked["prompt"], Random(number))[: asked["max_tokens"]]
        self.write(what="call", id=asked["id"], prompt=asked["prompt"], planned=planned, began=time.monotonic())
        self.running[asked["id"]] = interrupted
        given: list[int] = []
        # It goes on if nobody listens any more, as the real one does.
        bursts = self.sample(number, planned, given, interrupted, asked["id"])

        def body() -> dict:
            whole = len(given) == len(planned)
            finish = "interrupted" if not whole else "stop" if planned[-1] == STOP else "length"
            logprobs = [-(number * 1024 + i + 1) / 2**20 for i in range(len(given))]
            return {"tokens": given, "logprobs": logprobs, "versions": [0] * len(given), "finish": finish}

        if asked["stream"]:
            return Lines(bursts, body)
        async for _ in bursts:
            pass
        return JSONResponse(body())

    async def sample(
        self, number: int, planned: list[int], given: list[int], interrupted: asyncio.Event, id: str
    ) -> AsyncIterator[list[int]]:
        for at in range(0, len(planned), BURST):
            with suppress(TimeoutError):
                await asyncio.wait_for(interrupted.wait(), PACE_S)
            if interrupted.is_set():
                break
            burst = planned[at : at + BURST]
            self.write(what="tokens", call=number, given=at + len(burst))
            given += burst
            yield burst
        self.write(what="end", call=number, at=time.monotonic())
        self.running.pop(id, None)

    async def interrupt(self, request: Request) -> Response:
        found = [id for id in (await request.json())["ids"] if id in self.running]
        for id in found:
            self.running[id].set()
        return JSONResponse({"found": found})

    async def health(self, _: Request) -> Response:
        body = {"status": "ok", "reason": "", "model": "logging", "version": 0, "sampled_tokens": 0, "reused_tokens": 0}
        counts = {"running": len(self.running), "waiting": 0, "paused": False, "context": 32_768}
        return JSONResponse(body | counts)

    def write(self, **entry) -> None:
        os.write(self.log, orjson.dumps(entry) + b"\n")


class Lines(Response):
    """Each burst by itself, then the whole answer."""

    def __init__(self, bursts, body) -> None:
        self.status_code, self.background = 200, None
        self.bursts, self.body_of = bursts, body

    async def __call__(self, scope, receive, send) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for burst in self.bursts:
            line = orjson.dumps({"tokens": burst}) + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": orjson.dumps(self.body_of()) + b"\n"})


def main(listener: int, log: Path, owner: int) -> None:
    die_with(owner)
    log.touch()
    written = log.read_bytes()
    written = written[: written.rfind(b"\n") + 1]
    os.truncate(log, len(written))  # what a killed engine has not written to the end is no line
    engine = LoggingEngine(os.open(log, os.O_WRONLY | os.O_APPEND), written.count(CALL))
    routes = [
        Route("/generate", engine.generate, methods=["POST"]),
        Route("/interrupt", engine.interrupt, methods=["POST"]),
        Route("/health", engine.health),
    ]
    config = uvicorn.Config(Starlette(routes=routes), log_level="warning", access_log=False)
    uvicorn.Server(config).run([socket.socket(fileno=listener)])


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
