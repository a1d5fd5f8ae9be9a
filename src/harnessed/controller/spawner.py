"""The controller's end of a warm template: starts it, sends orders, waits for exits, starts it again when it died.

Used by local.py, once for the harness and once for the evaluator (evaluation.py).
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harnessed.controller.orders import Exit, Order, Preparation
from harnessed.controller.warm import KILL_LIMIT_S

_PREPARE_LIMIT_S = 120.0
_KILL_ANSWER_S = KILL_LIMIT_S + 5


class TemplateError(Exception):
    """The template could not be started, or it died; the text says how. No fault of the attempt."""


async def _never_held() -> float:
    return 0.0


class Spawner:
    def __init__(self, folder: Path, preparation: Preparation, environment: Mapping[str, str]) -> None:
        """`folder` is the template's own, for its home and log; the environment is all that it gets."""
        self._folder = folder
        self._preparation = preparation
        self._environment = {"HOME": str(folder / "home"), **environment}
        self._opening = asyncio.Lock()
        self._exits: dict[str, asyncio.Future[Exit]] = {}
        self._writer: asyncio.StreamWriter | None = None
        """None while no template runs."""
        self._reading: asyncio.Task[None] | None = None
        self._template_pid = 0

    async def open(self) -> None:
        """Start the template unless it runs; returns when it is warm. Raises TemplateError."""
        async with self._opening:
            if self._writer is None:
                await self._start()

    async def run(self, order: Order, limit_s: float, held: Callable[[], Awaitable[float]] = _never_held) -> Exit:
        """Run one order to its end, when nothing of it is left. After `limit_s`, or when cancelled, it is killed.

        `held` says, when the limit is reached, for how many seconds it could not go on, which do not count.
        """
        await self.open()
        began, added_s = asyncio.get_running_loop().time(), 0.0
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._exits[order.id] = ended
        try:
            self._send({"start": asdict(order)})
            while True:
                try:
                    async with asyncio.timeout_at(began + limit_s + added_s):
                        return await asyncio.shield(ended)
                except TimeoutError:
                    before, added_s = added_s, await held()
                    if added_s <= before and not ended.done():
                        break
            return replace(await self._kill(order.id, ended), timed_out=True)
        except asyncio.CancelledError:
            with suppress(TemplateError):  # then it is gone as well
                await self._kill(order.id, ended)
            raise
        finally:
            del self._exits[order.id]
            ended.cancel()

    async def close(self) -> None:
        """End the template with all its attempts; returns when no process is left."""
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await self._reading

    async def _start(self) -> None:
        (self._folder / "home").mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, (self._folder / "log.txt").open("ab") as log:
            command = [sys.executable, "-P", "-m", "harnessed.controller.warm", str(theirs.fileno()), str(os.getpid())]
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self._folder,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        try:
            writer.write(_line(asdict(self._preparation)))
            async with asyncio.timeout(_PREPARE_LIMIT_S):
                answer = json.loads(await reader.readline() or '{"failed": "it died"}')
            if "failed" in answer:
                raise TemplateError(f"{answer['failed']} (log: {self._folder / 'log.txt'})")
        except BaseException as error:
            # Also when cancelled: nobody else knows of this process. Its death ends the template too.
            with suppress(ProcessLookupError):
                process.kill()
            writer.close()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise TemplateError(f"the warm template was not ready after {_PREPARE_LIMIT_S:.0f} s") from None
            raise
        self._template_pid = answer["ready"]
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, writer, process))

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: asyncio.subprocess.Process
    ) -> None:
        """Hand exits to those who wait, until the template is gone with everything that it had started."""
        with suppress(ConnectionError):
            while line := await reader.readline():
                exit_ = Exit(**json.loads(line))
                if (ended := self._exits.get(exit_.id)) and not ended.done():
                    ended.set_result(exit_)
        writer.close()
        try:
            async with asyncio.timeout(KILL_LIMIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
        self._writer = None
        for ended in self._exits.values():
            if not ended.done():
                ended.set_exception(TemplateError("the warm template died"))

    async def _kill(self, order: str, ended: asyncio.Future[Exit]) -> Exit:
        self._send({"kill": order})
        try:
            async with asyncio.timeout(_KILL_ANSWER_S):
                return await asyncio.shield(ended)
        except TimeoutError:
            os.kill(self._template_pid, signal.SIGKILL)  # it hangs; its keeper cleans up, and the next order starts it
            raise TemplateError("the warm template did not answer and was killed") from None

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is None:
            raise TemplateError("the warm template died")
        self._writer.write(_line(message))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
