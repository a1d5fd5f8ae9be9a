"""How long small calls wait while the same gateway serves a giant: a request of 10,000 messages, an attempt of 10,000
branches, and the loading of that attempt after a restart. `transcripts.py` calls `measure_neighbours`.

A gateway process, an engine process that answers at once, and eight callers in this one.
"""

import asyncio
import contextlib
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import aiohttp
import orjson
import uvicorn
from figures import Figure
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harnessed.client import Client, claim, create_groups, create_run, register_engine
from harnessed.config import Gateway
from harnessed.gateway.app import SECRET, serve
from harnessed.gateway.keys import ADMIN, Keyring
from harnessed.gateway.template import ChatTemplate
from harnessed.records import EngineSpec, GroupSpec, Limits, RunSpec

CALLERS = 8
PAUSE_S = 0.05
"""Together they ask as often as a thousand agents. With less of a pause they keep a core busy by themselves, and what
is added is their own queue."""
GIANT = 10_000
ALONE_S = 5.0


def gateway(listener: socket.socket, folder: Path) -> None:
    serve(listener, folder, Gateway())


def engine(listener: socket.socket, model: Path) -> None:
    """Each answer is another one: its number in words."""
    template = ChatTemplate(model)
    numbers = iter(range(10**9))

    async def generate(request: Request) -> Response:
        await request.body()
        tokens = [*template.encode(f"answer {next(numbers)}"), template.stop_ids[0]]
        answer = {"tokens": tokens, "logprobs": [-1.0] * len(tokens), "versions": [0] * len(tokens), "finish": "stop"}
        return Response(orjson.dumps(answer))

    async def health(_: Request) -> Response:
        return Response(orjson.dumps({"status": "ok", "reason": "", "sampled_tokens": 0, "version": 0}))

    routes = [Route("/generate", generate, methods=["POST"]), Route("/health", health)]
    uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error")).run(sockets=[listener])


@contextlib.contextmanager
def process(target: object, *arguments: object) -> Iterator[str]:
    """A server in a process of its own; its URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    running = multiprocessing.Process(target=target, args=(listener, *arguments), daemon=True)
    running.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        running.terminate()
        running.join(10)


class Neighbours:
    """Small calls, each on an attempt of its own, and how long they took."""

    def __init__(self, url: str, keys: list[str]) -> None:
        self.url = f"{url}/v1/chat/completions"
        self.keys = keys
        self.taken: list[float] = []
        self.ended = dict.fromkeys(keys, 0)
        """Calls that each of them has had answered."""

    async def call(self, http: aiohttp.ClientSession, key: str, messages: list[dict[str, str]], n: int = 1) -> dict:
        body = orjson.dumps({"model": "m", "messages": messages, "n": n})
        async with http.post(self.url, data=body, headers={"authorization": f"Bearer {key}"}) as response:
            answer = orjson.loads(await response.read())
            assert response.status == 200, answer
            return dict(answer)

    async def small(self, http: aiohttp.ClientSession, key: str) -> None:
        while True:
            started = time.perf_counter()
            await self.call(http, key, [{"role": "user", "content": f"hello {started}"}])
            self.taken.append(time.perf_counter() - started)
            self.ended[key] += 1
            await asyncio.sleep(PAUSE_S)

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
            tasks = [asyncio.create_task(self.small(http, key)) for key in self.keys[:CALLERS]]
            yield http
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def during(self, work: Awaitable[object]) -> tuple[list[float], float]:
        """The small calls' seconds while something else happens, and how long that took.

        Calls that wait at its end count too.
        """
        self.taken, started = [], time.perf_counter()
        await work
        seconds, before = time.perf_counter() - started, dict(self.ended)
        while any(self.ended[key] == before[key] for key in self.keys[:CALLERS]):
            await asyncio.sleep(0.001)
        return self.taken, seconds


def measure_neighbours(model: Path, folder: Path) -> list[Figure]:
    with process(engine, model) as engine_url:
        with process(gateway, folder) as url:
            keys = _start(url, folder, model, engine_url)
            figures = asyncio.run(_long_request(url, keys)) + asyncio.run(_many_branches(url, keys))
        with process(gateway, folder) as url:
            return figures + asyncio.run(_loading(url, keys))


def _start(url: str, folder: Path, model: Path, engine_url: str) -> list[str]:
    secret = folder / SECRET
    while not secret.exists():
        time.sleep(0.05)
    with Client(url, Keyring.from_file(secret).sign(ADMIN)) as admin:
        limits = Limits(calls=10**6, context=10**7)
        admin(create_run(RunSpec(id="r", policy=str(model), limits=limits)))
        admin(register_engine(EngineSpec(id="e", url=engine_url, run="r")))
        admin(create_groups([GroupSpec(id="g", run="r", task={}, n=CALLERS + 2)]))
        return [assignment.key for assignment in admin(claim("r", "me", CALLERS + 2, 1))]


async def _long_request(url: str, keys: list[str]) -> list[Figure]:
    neighbours = Neighbours(url, keys)
    says = "says this and that about something that was read in a file before; " * 4
    messages = [{"role": "user", "content": f"message {i} {says}"} for i in range(GIANT)]
    megabytes = len(orjson.dumps(messages)) / 1e6
    async with neighbours.calling() as http:
        await asyncio.sleep(1)
        alone, _ = await neighbours.during(asyncio.sleep(ALONE_S))
        beside, seconds = await neighbours.during(neighbours.call(http, keys[-1], messages))
    return _figures(f"a request of {GIANT:,} messages, {megabytes:.1f} MB ({seconds:.1f} s)", alone, beside)


async def _many_branches(url: str, keys: list[str]) -> list[Figure]:
    """Each call makes a hundred answers to the same question."""
    neighbours, key = Neighbours(url, keys), keys[-2]
    question = [{"role": "user", "content": "the same question"}]
    async with neighbours.calling() as http:
        for _ in range(GIANT // 100):
            last = await neighbours.call(http, key, question, n=100)
        follow = [*question, last["choices"][0]["message"], {"role": "user", "content": "go on"}]
        alone, _ = await neighbours.during(asyncio.sleep(ALONE_S))
        beside, seconds = await neighbours.during(_several(neighbours, http, key, follow, 20))
    return _figures(f"20 calls on an attempt of {GIANT:,} branches ({seconds:.1f} s)", alone, beside)


async def _loading(url: str, keys: list[str]) -> list[Figure]:
    neighbours = Neighbours(url, keys)
    async with neighbours.calling() as http:
        await asyncio.sleep(3)  # the new process reads its neighbours' own attempts first
        alone, _ = await neighbours.during(asyncio.sleep(ALONE_S))
        question = [{"role": "user", "content": "after the restart"}]
        beside, seconds = await neighbours.during(neighbours.call(http, keys[-2], question))
    return _figures(f"its first call after a restart ({seconds:.1f} s)", alone, beside)


async def _several(
    neighbours: Neighbours, http: aiohttp.ClientSession, key: str, messages: list[dict[str, str]], times: int
) -> None:
    for _ in range(times):
        await neighbours.call(http, key, messages)


def _figures(what: str, alone: list[float], beside: list[float]) -> list[Figure]:
    """What is added to the median, the 95th percentile and the worst of the small calls."""
    return [
        Figure(
            f"{name} of small calls, added by {what}: ms",
            _at(share, beside) - _at(share, alone),
            50,
            f"{_at(share, alone):.1f} alone",
        )
        for name, share in (("median", 0.5), ("95th percentile", 0.95), ("worst", 1))
    ]


def _at(share: float, taken: list[float]) -> float:
    return sorted(taken)[int(share * (len(taken) - 1))] * 1e3
