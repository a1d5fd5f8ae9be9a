"""How long an update waits for generations that it interrupts, however many they are and however long.

    make benchmarks-interrupting   or: python benchmarks/interrupting.py MODEL [--tokens 100 1000] [--in-flight 1 16]
                                       [--database postgresql://...]

The turnstile is closed with mode `interrupt` when every generation has at least so many tokens, and the answer `closed`
has to come within one decoding step and 50 ms; then the engine is paused, as the trainer does. Each is done three
times, and the slowest counts. The baseline is mode `finish` with as many tokens to come. Half of the calls are
streams. Gateway, engine and callers are processes of one machine, the model greedy and without an end; with a database
two gateways share the calls. Prints one table.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import secrets
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from figures import Figure, tell
from processes import Server, process
from safetensors.torch import load_file, save_file

from harnessed.client import (
    AsyncClient,
    Client,
    cancel_group,
    claim,
    close_turnstile,
    create_groups,
    create_run,
    open_turnstile,
    register_engine,
    renew,
)
from harnessed.config import EngineSettings, Gateway
from harnessed.engine.serve import serve as serve_engine
from harnessed.gateway.app import serve as serve_gateway
from harnessed.gateway.keys import ADMIN, SECRET, Keyring
from harnessed.records import CloseMode, EngineSpec, GroupSpec, Limits, RunSpec, Sampling, TurnstileState

TOKENS, IN_FLIGHT = (100, 1000, 4000), (1, 16, 64, 256)
BATCH = 64
"""Generations at once; more wait in the engine. It has one place more, for the probe."""
TIMES, STEPS = 3, 20
"""Closings, and steps before each, which are measured."""
ALLOWED_S = 0.05
"""Beside one decoding step."""
LONGEST_FINISH = 100
"""Tokens that mode `finish` is waited for: with more the baseline takes minutes."""
RUN, OWNER, PROBE = "r", "benchmark", "probe"
LIMIT_S = 600.0


def endless(model: Path, folder: Path) -> Path:
    """A copy of a model in which a greedy answer never ends, with room for long ones."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], 2 * max(TOKENS))
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(folder / "model.safetensors")
    ends = config["eos_token_id"]
    # Its logit is 0 then, and the largest of all others is not less.
    state["model.embed_tokens.weight"][ends] = 0
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def run_engine(listener: socket.socket, model: Path) -> None:
    serve_engine(listener, model, None, EngineSettings(batch=BATCH + 1))


def run_gateway(listener: socket.socket, folder: Path, database: str | None) -> None:
    serve_gateway(listener, folder, Gateway(database=database, generation_limit_s=LIMIT_S))


@dataclass
class House:
    """What is measured."""

    engine: Server
    gateways: list[Server]
    admin: str
    http: aiohttp.ClientSession
    model: Path

    def client(self) -> AsyncClient:
        return AsyncClient(self.gateways[0].url, self.admin)

    async def health(self) -> dict[str, Any]:
        async with self.http.get(f"{self.engine.url}/health") as response:
            return await response.json()

    async def tell(self, path: str, body: Any = None) -> None:
        async with self.http.post(f"{self.engine.url}/{path}", json=body) as response:
            assert response.status == 200, await response.text()


@contextmanager
def servers(model: Path, folder: Path, database: str | None) -> Iterator[tuple[Server, list[Server], str]]:
    """An engine, one or two gateways, and the admin key."""
    with ExitStack() as stack:
        engine = stack.enter_context(process(run_engine, model))
        gateways = [stack.enter_context(process(run_gateway, folder, database)) for _ in range(2 if database else 1)]
        secret = folder / SECRET
        while not secret.exists():
            time.sleep(0.05)
        admin = Keyring.from_file(secret).sign(ADMIN)
        limits = Limits(calls=10**6, context=10**6, tokens=10**9)
        with Client(gateways[0].url, admin) as call:
            call(create_run(RunSpec(id=RUN, policy=str(model), limits=limits)))
            call(register_engine(EngineSpec(id="e", url=engine.url, run=RUN)))
        time.sleep(1)  # the other gateway hears of it
        yield engine, gateways, admin


class Probe:
    """A generation of the engine's own, which sees the steps of the batch that it grows in."""

    def __init__(self, house: House) -> None:
        self._house = house
        self.times: list[float] = []
        """When each token came, in seconds of `time.perf_counter`."""

    async def begin(self) -> None:
        """It has its place in the batch when this returns."""
        self._running = asyncio.create_task(self._run())
        await _until(lambda health: health["running"], self._house)

    async def end(self) -> None:
        await self._house.tell("interrupt", {"ids": [PROBE]})
        await self._running

    async def _run(self) -> None:
        asked = {"prompt": [5, 6, 7], "max_tokens": 2 * max(TOKENS) - 3, "temperature": 0, "seed": 0, "id": PROBE}
        async with self._house.http.post(f"{self._house.engine.url}/generate", json=asked | {"stream": True}) as lines:
            async for line in lines.content:
                said = orjson.loads(line)
                if "finish" not in said:
                    self.times += [time.perf_counter()] * len(said["tokens"])

    def step_s(self, steps: int) -> float:
        """Mean of the last ones: what comes late comes together, so that a median would be of nothing."""
        times = self.times[-steps - 1 :]
        return (times[-1] - times[0]) / (len(times) - 1)


@asynccontextmanager
async def calls(house: House, n: int, max_tokens: int) -> AsyncIterator[list["asyncio.Task[int]"]]:
    """So many calls at once, each of an attempt of its own; they are cancelled at the end."""
    group = secrets.token_hex(4)
    spec = GroupSpec(id=group, run=RUN, task={}, n=n, sampling=Sampling(temperature=0, max_tokens=max_tokens))
    async with house.client() as call:
        await call(create_groups([spec]))
        keys = [assignment.key for assignment in await call(claim(RUN, OWNER, n, 1))]
        urls = [house.gateways[number % len(house.gateways)].url for number in range(n)]
        asked = zip(urls, keys, strict=True)
        running = [asyncio.create_task(_call(house, *each, number)) for number, each in enumerate(asked)]
        try:
            yield running
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await call(cancel_group(group))


async def _call(house: House, url: str, key: str, number: int) -> int:
    """The status of a call that is answered whole."""
    messages = [{"role": "user", "content": f"count from {number}"}]
    body = orjson.dumps({"model": "m", "messages": messages, "stream": number % 2 == 0})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with house.http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        async for _ in response.content.iter_any():
            pass
        return response.status


async def _until(condition: Any, house: House) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition(await house.health()):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def growing(house: House, n: int, tokens: int, max_tokens: int) -> AsyncIterator[Probe]:
    """So many calls of which those that run have so many tokens."""
    probe = Probe(house)
    await probe.begin()
    try:
        async with calls(house, n, max_tokens):
            await _until(lambda health: health["running"] + health["waiting"] > n, house)
            await _grown(probe, tokens)
            yield probe
    finally:
        await probe.end()
        await _until(lambda health: not (health["running"] or health["waiting"]), house)


async def _grown(probe: Probe, tokens: int) -> None:
    begun = len(probe.times)
    async with asyncio.timeout(LIMIT_S):
        while len(probe.times) < begun + tokens:
            await asyncio.sleep(0.02)


@dataclass
class Measured:
    steps_s: list[float] = field(default_factory=list)
    closed_s: list[float] = field(default_factory=list)
    paused_s: list[float] = field(default_factory=list)
    finished_s: float = math.nan


async def interrupted(house: House, n: int, tokens: int) -> Measured:
    found = Measured()
    async with growing(house, n, tokens, 2 * max(TOKENS) - 1000) as probe, house.client() as call:
        for _ in range(TIMES):
            await _grown(probe, STEPS)
            found.steps_s.append(probe.step_s(STEPS))
            began = time.perf_counter()
            closed = await call(close_turnstile(RUN, OWNER, CloseMode.INTERRUPT))
            found.closed_s.append(time.perf_counter() - began)
            assert closed.state == TurnstileState.CLOSED, closed
            asked = time.perf_counter()
            pausing = asyncio.create_task(house.tell("pause"))
            await probe.end()
            await pausing
            found.paused_s.append(time.perf_counter() - asked)
            await house.tell("resume")
            await probe.begin()
            await call(open_turnstile(RUN, OWNER))
            await _until(lambda health: health["running"] + health["waiting"] > n, house)
    return found


async def finished(house: House, n: int, tokens: int) -> float:
    """Seconds that a closing with mode `finish` takes when as many tokens are still to come."""
    async with growing(house, n, tokens, 2 * tokens) as _, house.client() as call:
        began = time.perf_counter()
        closed = await call(close_turnstile(RUN, OWNER, CloseMode.FINISH, drain_s=LIMIT_S))
        took = time.perf_counter() - began
        assert closed.state == TurnstileState.CLOSED, closed
        await call(open_turnstile(RUN, OWNER))
    return took


async def measure(house: House, n: int, tokens: int) -> Figure:
    found = await interrupted(house, n, tokens)
    step_s = statistics.median(found.steps_s)
    finish = f"; finish: {await finished(house, n, tokens) * 1e3:.0f} ms" if tokens <= LONGEST_FINISH else ""
    closed = " ".join(f"{each * 1e3:.0f}" for each in sorted(found.closed_s))
    return Figure(
        f"{n} in flight with {tokens} tokens: ms",
        max(found.closed_s) * 1e3,
        (step_s + ALLOWED_S) * 1e3,
        f"step {step_s * 1e3:.1f} ms; each {closed}; then paused {max(found.paused_s) * 1e3:.0f} ms{finish}",
    )


async def measure_all(engine: Server, gateways: list[Server], admin: str, model: Path, asked: Any) -> list[Figure]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        house = House(engine, gateways, admin, http, model)
        keeping = asyncio.create_task(_keep_attempts(house))
        await interrupted(house, 1, 10)  # so that what is done once is not measured
        figures = []
        for tokens in asked.tokens:
            for n in asked.in_flight:
                figures.append(await measure(house, n, tokens))
                print(*figures[-1].row(), file=sys.stderr)
        keeping.cancel()
        return figures


async def _keep_attempts(house: House) -> None:
    async with house.client() as call:
        while True:
            await call(renew(OWNER))
            await asyncio.sleep(5)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long an update waits for generations that it interrupts.")
    parser.add_argument("model", type=Path, help="a policy's folder")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT)
    parser.add_argument("--database", help="an empty PostgreSQL database, for two gateways")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = endless(asked.model.resolve(), Path(scratch) / "model")
        with servers(model, Path(scratch), asked.database) as (engine, gateways, admin):
            figures = asyncio.run(measure_all(engine, gateways, admin, model, asked))
    tell(figures, "close(interrupt)")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
