"""Starts services again whenever they end; their listening sockets are its own, so clients wait instead of failing."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from listening import listen

APART_S = (5.0, 6.0)
"""Two kills, at least and at most."""
BETWEEN = 60
"""Answers, at least."""
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
                try:
                    self.ended.append(await self.process.wait())
                except asyncio.CancelledError:
                    self.process.kill()
                    await self.process.wait()
                    raise


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


async def kill_all(
    kills: Iterator[Kill], services: dict[str, Service], start: float, done: list[Kill], answers: Callable[[], int]
) -> None:
    """Play a schedule until cancelled; where processes start slowly it waits until they have come to something."""
    before = 0
    for kill in kills:
        await asyncio.sleep(max(kill.after_s + start - time.monotonic(), APART_S[0] if done else 0))
        while answers() < before + BETWEEN:
            await asyncio.sleep(0.01)
        process = services[kill.name].process
        assert process
        process.kill()
        kill.at, before = time.monotonic(), answers()
        done.append(kill)


def faults(service: Service, kills: list[Kill]) -> str:
    """What a service did that it should not have done."""
    killed = [-signal.SIGKILL for kill in kills if kill.name == service.name]
    said = service.log.read_text()
    if service.ended != killed:
        return f"{service.name} ended with {service.ended} and was killed {len(killed)} times: {said}"
    return "\n".join(line for line in said.splitlines() if "ERROR" in line or "Traceback" in line)
