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

from listening import listen

APART_S = (5.0, 6.0)
"""Two kills, at least and at most."""
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

    def kill(self) -> bool:
        """With -9; False: it has just ended, and the next is not there yet."""
        if self.process is None or self.process.returncode is not None:
            return False
        self.process.kill()
        return True


@dataclass
class Kill:
    after_s: float
    """The start."""
    service: Service
    at: float = 0.0
    """By the monotonic clock."""


def schedule(services: list[Service], seed: int) -> Iterator[Kill]:
    """The kills that follow from a seed, without an end."""
    random, after_s = Random(seed), 2.0
    while True:
        after_s += random.uniform(*APART_S)
        yield Kill(after_s, random.choice(services))


async def kill_all(kills: Iterator[Kill], start: float, done: list[Kill]) -> None:
    """Play a schedule until cancelled."""
    for kill in kills:
        await asyncio.sleep(max(kill.after_s + start - time.monotonic(), APART_S[0] if done else 0))
        while not kill.service.kill():
            await asyncio.sleep(0.01)
        kill.at = time.monotonic()
        done.append(kill)


def faults(service: Service, kills: list[Kill]) -> str:
    """What a service did on its own."""
    killed = sum(kill.service is service for kill in kills)
    others = [status for status in service.ended if status != -signal.SIGKILL]
    if others or len(service.ended) != killed:
        return f"{service.name} ended with {service.ended} and was killed {killed} times: {service.log.read_text()}"
    return service.log.read_text()
