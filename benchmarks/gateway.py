"""What a call costs the gateway, beside a plain relay: CPU, time to the first token, calls that are held, memory.

    make benchmarks          or: python benchmarks/gateway.py MODEL             (any folder with a real tokenizer)
    make benchmarks-memory   or: python benchmarks/gateway.py MODEL --memory CALLS

The gateway keeps its records in SQLite and has one core; the engine and the agents share another. Prints one table.
"""

import argparse
import asyncio
import math
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import relay
import upstream
from agents import FIRST, LATER, OWNER, Agent, connected, renewing, talk, talk_at
from figures import Figure, tell
from memory import measure_memory
from processes import Server, process

from harnessed.client import Client, claim, create_groups, create_run, register_engine
from harnessed.config import Gateway
from harnessed.gateway.app import serve
from harnessed.gateway.keys import ADMIN, SECRET, Keyring
from harnessed.gateway.template import ChatTemplate
from harnessed.records import EngineSpec, GroupSpec, Limits, RunSpec

ITS_CORE, OTHER_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
AGENTS, TURNS = 64, 50
TO_RELAY = 16
"""Agents that call the relay, which keeps about 0.7 MB for each call."""
HELD, HELD_S = 500, 60


def run_gateway(listener: socket.socket, folder: Path) -> None:
    serve(listener, folder, Gateway())


@contextmanager
def gateway(folder: Path, model: Path, engine: Server) -> Iterator[tuple[Server, str]]:
    """With a run `r` and its engine; the admin key."""
    with process(run_gateway, folder, cores={ITS_CORE}) as server:
        secret = folder / SECRET
        while not secret.exists():
            time.sleep(0.05)
        admin = Keyring.from_file(secret).sign(ADMIN)
        with Client(server.url, admin) as call:
            call(
                create_run(RunSpec(id="r", policy=str(model), limits=Limits(calls=10**6, context=10**6, at_once=HELD)))
            )
            call(register_engine(EngineSpec(id="e", url=engine.url, run="r")))
        yield server, admin


def attempts(server: Server, admin: str, group: str, n: int) -> list[str]:
    """The keys of new ones."""
    with Client(server.url, admin) as call:
        call(create_groups([GroupSpec(id=group, run="r", task={}, n=n)]))
        return [assignment.key for assignment in call(claim("r", OWNER, n, 1))]


async def warm_up(agent: Agent) -> None:
    """So that what a process does once is not taken for the cost of a call."""
    async with connected() as http:
        await talk(http, [agent], 2, 10, stream=False)
    agent.forget()


async def cost(server: Server, agents: list[Agent], *, stream: bool) -> tuple[float, float]:
    """CPU milliseconds of a first call and of a later one."""
    async with connected() as http:
        before = server.cpu_s()
        await talk(http, agents, 1, FIRST, stream=stream)
        first = server.cpu_s()
        await talk(http, agents, TURNS - 1, LATER, stream=stream)
        last = server.cpu_s()
    calls = len(agents)
    return (first - before) / calls * 1e3, (last - first) / (calls * (TURNS - 1)) * 1e3


async def direct(engine: Server, per_s: float) -> float:
    """Median seconds from asking the engine for a stream to its first tokens."""

    async def one(at: float) -> list[float]:
        taken = []
        for turn in range(1, TURNS):
            prompt = [7] * (FIRST + 265 * turn)
            body = orjson.dumps({"prompt": prompt, "max_tokens": 1000, "temperature": 1, "stop": [2], "stream": True})
            await asyncio.sleep(at - time.perf_counter())
            started = time.perf_counter()
            async with http.post(f"{engine.url}/generate", data=body) as response:
                await response.content.readany()
                taken.append(time.perf_counter() - started)
                await response.read()
            at += AGENTS / per_s
        return taken

    async with connected() as http:
        begin = time.perf_counter() + 0.1
        each = await asyncio.gather(*(one(begin + i / per_s) for i in range(AGENTS)))
    return statistics.median(seconds for taken in each for seconds in taken)


async def first_token(agents: list[Agent], per_s: float) -> float:
    """Median seconds from a request to its first text."""
    async with connected() as http:
        await talk(http, agents, 1, FIRST, stream=True)
        return statistics.median(await talk_at(http, agents, TURNS - 1, per_s))


async def held(server: Server, engine: Server, agents: list[Agent]) -> float:
    """Per cent of a core while calls wait for an engine that answers none of them."""
    async with connected() as http:
        await (await http.post(f"{engine.url}/stall")).read()
        bodies = [agent.ask(10, stream=number % 2 == 0) for number, agent in enumerate(agents)]
        calls = [asyncio.create_task(agent.call(http, body)) for agent, body in zip(agents, bodies, strict=True)]
        await asyncio.sleep(3)
        before = server.cpu_s()
        await asyncio.sleep(HELD_S)
        used = server.cpu_s() - before
        assert not any(call.done() for call in calls)
        await (await http.post(f"{engine.url}/go_on")).read()
        await asyncio.gather(*calls)
    return used / HELD_S * 100


async def measure(model: Path, folder: Path, engine: Server) -> list[Figure]:
    template = ChatTemplate(model)
    with process(relay.serve, engine.url, cores={ITS_CORE}) as server:
        agents = [Agent(template, number, "k", server.url) for number in range(TO_RELAY)]
        await warm_up(agents[0])
        relayed_first, relayed = await cost(server, agents, stream=False)
    with gateway(folder, model, engine) as (server, admin):

        def some(group: str, n: int) -> list[Agent]:
            keys = attempts(server, admin, group, n)
            return [Agent(template, number, key, server.url) for number, key in enumerate(keys)]

        async with renewing(server.url, admin):
            whole_first, whole = await cost(server, some("whole", AGENTS), stream=False)
            streamed_first, streamed = await cost(server, some("streamed", AGENTS), stream=True)
            half_load = 500 / streamed
            asked = await direct(engine, half_load)
            came = await first_token(some("paced", AGENTS), half_load)
            holding = await held(server, engine, some("held", HELD))
    return [
        Figure("CPU of a first call, 3k tokens: ms", whole_first, math.inf, f"{relayed_first:.2f} ms in the relay"),
        Figure("CPU of a first call, streamed: ms", streamed_first, math.inf),
        Figure("CPU of a later call, up to 16k tokens: ms", whole, relayed / 5, f"{relayed:.2f} ms in the relay"),
        Figure("CPU of a later call, streamed: ms", streamed, whole * 1.5, f"{whole:.2f} ms unstreamed"),
        Figure(
            f"added to the first token at half load ({half_load:.0f}/s), median: ms",
            (came - asked) * 1e3,
            2,
            f"{asked * 1e3:.1f} ms from the engine",
        ),
        Figure(f"{HELD} calls held for {HELD_S} s: % of a core", holding, 1),
    ]


async def kept(model: Path, folder: Path, engine: Server, calls: int) -> list[Figure]:
    with gateway(folder, model, engine) as (server, admin):
        async with renewing(server.url, admin):
            return await measure_memory(server, admin, ChatTemplate(model), calls)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a call costs the gateway.")
    parser.add_argument("model", type=Path, help="a policy's folder")
    parser.add_argument("--memory", type=int, metavar="CALLS", help="measure memory instead, over so many small calls")
    asked = parser.parse_args()
    model = asked.model.resolve()
    os.sched_setaffinity(0, {OTHER_CORE})  # the agents run here, and so does the engine
    with tempfile.TemporaryDirectory() as folder, process(upstream.serve, model) as engine:
        if asked.memory:
            figures = asyncio.run(kept(model, Path(folder), engine, asked.memory))
        else:
            figures = asyncio.run(measure(model, Path(folder), engine))
    tell(figures)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
