"""The warm template: a plain process that has imported the harness and forks one child per attempt.

Started by spawner.py as `python -m harnessed.controller.warm <descriptor>`. Importing a harness costs seconds, a fork
milliseconds. Nothing that an attempt starts outlives it: the template is a subreaper and so is every attempt's first
process, so orphans of a living attempt stay with that attempt, and a child that the template does not know was left
by a dead one. It is killed; only when none is left is the attempt's end reported.

The process that is started first stays behind as a *keeper*, which does nothing but wait for the template and clean
up if that is killed. Whoever of controller, keeper and template dies by whatever signal, the others end everything.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harnessed.controller import child, processes
from harnessed.controller.orders import Bounds, Exit, Order, Preparation

KILL_LIMIT_S = 10.0
"""How long what an attempt left may take to die; processes in the kernel's hands may never."""
_SWEEP_S = 0.002


@dataclass
class _Attempt:
    id: str
    report: int
    """Descriptor to read why it could not be started; empty if it started."""
    status: int = 0
    """As waitpid gives it."""
    give_up: float = 0
    strays: set[int] = field(default_factory=set)


class _ControllerGone(Exception):
    """The socket was closed, or a signal asks to end."""


class Template:
    def __init__(self, controller: socket.socket) -> None:
        self._controller = controller
        self._received = b""
        self._running: dict[int, _Attempt] = {}
        """By process id."""
        self._ended: list[_Attempt] = []
        """Reaped, and not yet reported."""
        self._users_processes = processes.count_of_user()
        self._stopping = False
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it wakes the loop, no more
        signal.signal(signal.SIGTERM, self._stop)

    def serve(self) -> None:
        """Fork, kill and bury, until the controller is gone."""
        poll = select.poll()
        poll.register(self._controller, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        try:
            while not self._stopping:
                for descriptor, _ in poll.poll(_SWEEP_S * 1000 if self._ended else None):
                    if descriptor == self._woken:
                        os.read(self._woken, 4096)
                    else:
                        self._obey()
                self._reap()
                self._sweep()
        except (_ControllerGone, ConnectionError):
            pass
        processes.kill_all_children(KILL_LIMIT_S)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _obey(self) -> None:
        for line in self._lines():
            message = json.loads(line)
            if "kill" in message:
                processes.kill({pid for pid, attempt in self._running.items() if attempt.id == message["kill"]})
            else:
                order = message["start"]
                self._fork(Order(**order | {"bounds": Bounds(**order["bounds"])}))

    def _lines(self) -> Iterator[bytes]:
        received = self._controller.recv(1 << 20)
        if not received:
            raise _ControllerGone
        *lines, self._received = (self._received + received).split(b"\n")
        yield from lines

    def _fork(self, order: Order) -> None:
        template = os.getpid()
        report, failure = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(report)
            self._send(asdict(Exit(order.id, failure=f"no process could be forked: {error.strerror}")))
        else:
            if pid == 0:
                child.run(order, failure, template, self._users_processes)
            self._running[pid] = _Attempt(order.id, report)
        os.close(failure)

    def _reap(self) -> None:
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if attempt := self._running.pop(reaped[0], None):
                    attempt.status = reaped[1]
                    attempt.give_up = time.monotonic() + KILL_LIMIT_S
                    self._ended.append(attempt)
        except ChildProcessError:
            pass

    def _sweep(self) -> None:
        """Kill what dead attempts left; report those attempts when nothing is left."""
        if not self._ended:
            return
        strays = processes.descendants(self._running.keys() | set())
        processes.kill(strays)
        now = time.monotonic()
        ended, self._ended = self._ended, []
        for attempt in ended:
            # Of several that ended in the same moment, each is given all strays: nothing tells them apart.
            attempt.strays |= strays
            if strays and now < attempt.give_up:
                self._ended.append(attempt)
            else:
                self._send(asdict(self._exit(attempt, len(strays))))

    def _exit(self, attempt: _Attempt, stuck: int) -> Exit:
        failure = b""
        try:
            failure = os.read(attempt.report, 4096)
        except BlockingIOError:
            pass  # a stuck process still holds the other end
        finally:
            os.close(attempt.report)
        killed = os.WIFSIGNALED(attempt.status)
        return Exit(
            attempt.id,
            status=None if killed or failure else os.WEXITSTATUS(attempt.status),
            signal=os.WTERMSIG(attempt.status) if killed else 0,
            strays=len(attempt.strays),
            stuck=stuck,
            failure=failure.decode(errors="replace"),
        )

    def _send(self, message: dict[str, Any]) -> None:
        self._controller.sendall(json.dumps(message).encode() + b"\n")


def _leave_a_keeper(controller: int) -> None:
    """Fork. The parent stays as the keeper, ends with the template and is the last to go; the child returns."""
    processes.die_with_parent(controller, signal.SIGTERM)
    processes.become_subreaper()
    keeper = os.getpid()
    template = os.fork()
    if template:
        os.waitpid(template, 0)
        processes.kill_all_children(KILL_LIMIT_S)
        os._exit(0)
    processes.die_with_parent(keeper, signal.SIGTERM)
    processes.become_subreaper()


def _prepare(preparation: Preparation) -> None:
    sys.path[:] = preparation.path
    for module in preparation.modules:
        importlib.import_module(module)
    if preparation.warm_up:
        child.resolve(preparation.warm_up)(*preparation.arguments)
    _wait_for_idle_threads()
    gc.collect()
    gc.freeze()  # no collection of a child touches, and so copies, what it shares with the template


def _wait_for_idle_threads() -> None:
    """Let a library's background threads finish: a thread that a fork cuts in mid-work may hold a lock for ever."""
    until = time.monotonic() + 2
    while len(list(Path("/proc/self/task").iterdir())) > 1 and time.monotonic() < until:
        before = time.process_time()
        time.sleep(0.05)
        if time.process_time() - before < 0.002:
            return


def main() -> None:
    descriptor, controller_pid = int(sys.argv[1]), int(sys.argv[2])
    _leave_a_keeper(controller_pid)
    controller = socket.socket(fileno=descriptor)
    with controller.makefile("rb") as lines:
        line = lines.readline()
    if not line:
        return
    try:
        _prepare(Preparation(**json.loads(line)))
    except Exception as error:  # noqa: BLE001 - the harness's own code runs here; its failure is the answer
        traceback.print_exc()
        answer: dict[str, Any] = {"failed": f"{type(error).__name__}: {error}"}
    else:
        answer = {"ready": os.getpid()}
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a child killed loses no finished line
    sys.stdout.flush()
    template = Template(controller)
    try:
        controller.sendall(json.dumps(answer).encode() + b"\n")
    except ConnectionError:
        return
    template.serve()


if __name__ == "__main__":
    main()
