"""How long small calls wait while the same gateway serves a giant: a request of 10,000 messages, an attempt of 10,000
branches, and the loading of that attempt after a restart. `transcripts.py` calls `measure_neighbours`.

A gateway process, an engine process that answers at once, and eight callers in this one.
"""

import asyncio
import contextlib
import multiprocessing
import socket
import statistics
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

from harnessed.client import AsyncClient, Client, claim, create_groups, create_run, register_engine, renew
from harnessed.config import Gateway
from harnessed.gateway.app import serve
from harnessed.gateway.keys import ADMIN, SECRET, Keyring
from harnessed.gateway.template import ChatTemplate
from harnessed.records import EngineSpec, GroupSpec, Limits, RunSpec

CALLERS = 8
OWNER = "benchmark"
PAUSE_S = 0.05
"""Together they ask as often as a thousand agents. With less of a pause they keep a core busy by themselves, and what
is added is their own queue."""
GIANT = 10_000
ALONE_S = 3.0
ROUNDS = 5
Round = tuple[list[float], list[float]]
"""Seconds of the small calls alone, and beside a giant."""


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

    def __init__(self, url: str, admin: str, keys: list[str]) -> None:
        self.gateway = url
        self.url = f"{url}/v1/chat/completions"
        self.admin = admin
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
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
            AsyncClient(self.gateway, self.admin) as admin,
            asyncio.TaskGroup() as group,  # ends if one of them fails
        ):
            tasks = [group.create_task(self.small(http, key)) for key in self.keys[:CALLERS]]
            tasks.append(group.create_task(_renewing(admin)))
            yield http
            for task in tasks:
                task.cancel()

    async def during(self, work: Awaitable[object]) -> list[float]:
        """The small calls' seconds while something else happens; calls that wait at its end count too."""
        self.taken = []
        await work
        before = dict(self.ended)
        while any(self.ended[key] == before[key] for key in self.keys[:CALLERS]):
            await asyncio.sleep(0.001)
        return self.taken


def measure_neighbours(model: Path, folder: Path) -> list[Figure]:
    with process(engine, model) as engine_url:
        with process(gateway, folder) as url:
            admin, keys = _start(url, folder, model, engine_url)
            figures = asyncio.run(_long_request(Neighbours(url, admin, keys)))
            figures += asyncio.run(_many_branches(Neighbours(url, admin, keys)))
        loadings = []
        for _ in range(ROUNDS):
            with process(gateway, folder) as url:
                loadings.append(asyncio.run(_loading(Neighbours(url, admin, keys))))
        return figures + _figures("its first call after a restart", loadings)


def _start(url: str, folder: Path, model: Path, engine_url: str) -> tuple[str, list[str]]:
    """The admin key, and those of the attempts: the last one is for long requests, the one before for branches."""
    secret = folder / SECRET
    while not secret.exists():
        time.sleep(0.05)
    key = Keyring.from_file(secret).sign(ADMIN)
    with Client(url, key) as admin:
        limits = Limits(calls=10**6, context=10**7)
        admin(create_run(RunSpec(id="r", policy=str(model), limits=limits)))
        admin(register_engine(EngineSpec(id="e", url=engine_url, run="r")))
        admin(create_groups([GroupSpec(id="g", run="r", task={}, n=CALLERS + 2)]))
        return key, [assignment.key for assignment in admin(claim("r", OWNER, CALLERS + 2, 1))]


async def _renewing(admin: AsyncClient) -> None:
    while True:
        await admin(renew(OWNER))
        await asyncio.sleep(5)


async def _long_request(neighbours: Neighbours) -> list[Figure]:
    rounds = []
    says = "says this and that about something that was read in a file before; " * 4
    async with neighbours.calling() as http:
        await asyncio.sleep(1)
        for number in range(ROUNDS):
            messages = [{"role": "user", "content": f"message {number}.{i} {says}"} for i in range(GIANT)]
            alone = await neighbours.during(asyncio.sleep(ALONE_S))
            rounds.append((alone, await neighbours.during(neighbours.call(http, neighbours.keys[-1], messages))))
    return _figures(f"a request of {GIANT:,} messages, {len(orjson.dumps(messages)) / 1e6:.1f} MB", rounds)


async def _many_branches(neighbours: Neighbours) -> list[Figure]:
    """Each call makes a hundred answers to the same question."""
    rounds, key = [], neighbours.keys[-2]
    question = [{"role": "user", "content": "the same question"}]
    async with neighbours.calling() as http:
        for _ in range(GIANT // 100):
            last = await neighbours.call(http, key, question, n=100)
        follow = [*question, last["choices"][0]["message"], {"role": "user", "content": "go on"}]
        for _ in range(ROUNDS):
            alone = await neighbours.during(asyncio.sleep(ALONE_S))
            rounds.append((alone, await neighbours.during(_several(neighbours, http, key, follow, 20))))
    return _figures(f"20 calls on an attempt of {GIANT:,} branches", rounds)


async def _loading(neighbours: Neighbours) -> Round:
    async with neighbours.calling() as http:
        await asyncio.sleep(3)  # the new process reads its neighbours' own attempts first
        alone = await neighbours.during(asyncio.sleep(ALONE_S))
        question = [{"role": "user", "content": "after the restart"}]
        return alone, await neighbours.during(neighbours.call(http, neighbours.keys[-2], question))


async def _several(
    neighbours: Neighbours, http: aiohttp.ClientSession, key: str, messages: list[dict[str, str]], times: int
) -> None:
    for _ in range(times):
        await neighbours.call(http, key, messages)


def _figures(what: str, rounds: list[Round]) -> list[Figure]:
    """What is added to the median, the 95th percentile and the worst of the small calls: of all rounds the median one,
    since other work of the machine decides a single worst call."""
    figures = []
    for name, share in (("median", 0.5), ("95th percentile", 0.95), ("worst", 1)):
        added = [_at(share, beside) - _at(share, alone) for alone, beside in rounds]
        usual = statistics.median(_at(share, alone) for alone, _ in rounds)
        what_is_added = f"{name} of small calls, added by {what}: ms"
        figures.append(Figure(what_is_added, statistics.median(added), 50, f"{usual:.1f} alone"))
    return figures


def _at(share: float, taken: list[float]) -> float:
    return sorted(taken)[int(share * (len(taken) - 1))] * 1e3
