"""Starts services again whenever they end; their listening sockets are its own, so clients wait instead of failing."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
from listening import listen

APART_S = (5.0, 6.0)
"""Two kills, at least and at most."""
SERVES_S = 2.0
"""Each process, at least."""
START_LIMIT_S = 60
TESTS = Path(__file__).parent.parent
PATHS = [TESTS.parent / "src", TESTS, TESTS / "gateway"]


@dataclass
class Service:
    """A process and those that take its place. `command` may name `{listener}` and `{owner}`."""

    name: str
    command: list[str]
    log: Path
    listener: object = field(default_factory=listen)
    process: asyncio.subprocess.Process | None = None
    ended: list[int] = field(default_factory=list)
    """The statuses of those that ended."""
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """The present one has served for a while."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    async def run(self) -> None:
        """Until cancelled."""
        descriptor = self.listener.fileno()
        command = [part.format(listener=descriptor, owner=os.getpid()) for part in self.command]
        environment = {name: os.environ[name] for name in ("PATH", "HOME")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
        with self.log.open("ab") as log:
            while True:
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[descriptor],
                    env=environment,
                )
                serving = asyncio.create_task(self._serve())
                try:
                    self.ended.append(await self.process.wait())
                except asyncio.CancelledError:
                    self.process.kill()
                    await self.process.wait()
                    raise
                finally:
                    serving.cancel()
                    self.served.clear()

    async def _serve(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=START_LIMIT_S) as client:
            await client.get(f"{self.url}/health")
        await asyncio.sleep(SERVES_S)
        self.served.set()

    async def kill(self) -> None:
        """With -9, once it has served: where processes start slowly it would otherwise never come to that."""
        async with asyncio.timeout(START_LIMIT_S):
            await self.served.wait()
        assert self.process
        self.process.kill()


@dataclass
class Kill:
    after_s: float
    """The start."""
    name: str
    """Of the service."""
    at: float = 0.0
    """By the monotonic clock."""


def schedule(names: list[str], seed: int) -> Iterator[Kill]:
    """The kills that follow from a seed, without an end."""
    random, after_s = Random(seed), 2.0
    while True:
        after_s += random.uniform(*APART_S)
        yield Kill(after_s, random.choice(names))


async def kill_all(kills: Iterator[Kill], services: dict[str, Service], start: float, done: list[Kill]) -> None:
    """Play a schedule until cancelled."""
    for kill in kills:
        await asyncio.sleep(max(kill.after_s + start - time.monotonic(), APART_S[0] if done else 0))
        await services[kill.name].kill()
        kill.at = time.monotonic()
        done.append(kill)


def faults(service: Service, kills: list[Kill]) -> str:
    """What a service did on its own."""
    killed = sum(kill.name == service.name for kill in kills)
    others = [status for status in service.ended if status != -signal.SIGKILL]
    if others or len(service.ended) != killed:
        return f"{service.name} ended with {service.ended} and was killed {killed} times: {service.log.read_text()}"
    return service.log.read_text()
