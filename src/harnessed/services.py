"""The processes that a run starts for itself: gateway, controller, engine. The command line calls this.

Sockets are bound here and handed down, so a port in use is known before anything starts, and nobody connects to a
server that is not listening yet. They stay open here, so one that died is started again on its own socket, and whoever
connects meanwhile waits in the backlog and sees no refusal. Services live in sessions of their own (Ctrl-C reaches the
run alone, which then ends them in order) and die with the run, however it dies.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from harnessed.config import ConfigError

STOP_LIMIT_S = 6.0
"""How long all services together have to end after SIGTERM; then they are killed."""
POLL_S = 0.1
MOST_DEATHS = 5
"""Of one service within DEATHS_WITHIN_S, after which it is not started again."""
DEATHS_WITHIN_S = 60.0
"""A service that ends by itself with an error so soon after its start would do so again, and is not started again."""
_PAUSES_S = (0.0, 0.5, 1.0, 2.0)
"""Before a service is started again, by how often it has died lately."""


class ServiceDied(Exception):
    """A process that the run needs has ended and is not started again; the text has its last words."""


@dataclass(slots=True)
class Service:
    name: str
    command: list[str]
    log: Path
    listener: socket.socket | None
    process: "subprocess.Popen[bytes]"
    started: float
    """By the monotonic clock, as all times here."""
    deaths: list[float] = field(default_factory=list)
    start_at: float | None = None
    """When it is started again; None: it runs."""


class Services:
    """Use as a context manager: at its end no process is left.

    A thread looks after them: the trainer may be busy for minutes.
    """

    def __init__(self, logs: Path, entry: Callable[[str], str]) -> None:
        """`entry` makes a line for the log of a service, in the form of its own lines."""
        self._logs = logs
        self._entry = entry
        self._services: list[Service] = []
        self._lock = threading.Lock()
        """Held by whoever looks at services or starts them."""
        self._failure: ServiceDied | None = None
        self._stopping = threading.Event()
        # Linux ends the services when the thread that started them ends: this one outlives them.
        self._watching = threading.Thread(target=self._watch, name="services", daemon=True)
        self.restarts: Counter[str] = Counter()
        """How often each service was started again."""
        self.say: Callable[[str], None] = _print
        """Tells people of deaths and restarts, one line each; called by a thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def start(self, command: str, arguments: list[str], listener: socket.socket | None = None) -> None:
        """Run `harnessed <command> <arguments>` with an inherited listening socket, again whenever it dies."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{command}.log"
        line = [sys.executable, "-m", "harnessed", command, *arguments, "--owner", str(os.getpid())]
        if listener is not None:
            line += ["--listener", str(listener.fileno())]
        with self._lock:
            process = _run(line, log, listener)
            self._services.append(Service(command, line, log, listener, process, time.monotonic()))
        if not self._watching.is_alive():
            self._watching.start()

    def check(self) -> None:
        """Raises ServiceDied if one has ended for good."""
        if self._failure:
            raise self._failure

    def wait(self, what: str, ready: Callable[[], bool], limit_s: float) -> None:
        """Poll until ready. Raises ServiceDied when a service ends for good or the time is up."""
        deadline = time.monotonic() + limit_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceDied(f"{what} within {limit_s:.0f} s; logs are in {self._logs}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End one after the other, the latest first; kill what has not ended in time.

        Ctrl-C and SIGTERM are deaf meanwhile: this is short, and it must not leave processes behind.
        """
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        deadline = time.monotonic() + STOP_LIMIT_S
        with self._lock:
            for service in reversed(self._services):
                service.process.terminate()
                try:
                    service.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    service.process.kill()
                    service.process.wait()
            self._services.clear()
            self._stopping.set()
        if self._watching.is_alive():
            self._watching.join()
        for number, handler in before.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        while not self._stopping.wait(POLL_S):
            with self._lock:
                for service in self._services:
                    self._look_after(service, time.monotonic())

    def _look_after(self, service: Service, now: float) -> None:
        if service.start_at is None:
            status = service.process.poll()
            if status is not None and self._failure is None:
                self._died(service, status, now)
        elif now >= service.start_at:
            try:
                service.process = _run(service.command, service.log, service.listener)
            except OSError as error:
                self._failure = ServiceDied(f"the {service.name} cannot be started again: {error.strerror}")
            service.started, service.start_at = now, None

    def _died(self, service: Service, status: int, now: float) -> None:
        ended = f"the {service.name} {_how(status)}"
        service.deaths = [at for at in service.deaths if now - at < DEATHS_WITHIN_S] + [now]
        hopeless = status > 0 and now - service.started < DEATHS_WITHIN_S
        if hopeless or len(service.deaths) >= MOST_DEATHS:
            often = "" if hopeless else f", for the {MOST_DEATHS}th time within {DEATHS_WITHIN_S:.0f} s"
            self._failure = ServiceDied(f"{ended}{often}: {_last_line(service.log)}")
            if service.listener is not None:
                service.listener.close()  # whoever waits in its backlog waits in vain
            return
        self.restarts[service.name] += 1
        service.start_at = now + _PAUSES_S[min(len(service.deaths), len(_PAUSES_S)) - 1]
        line = f"{ended}; it is started again"
        with suppress(OSError):  # a full disk, or a pipe that nobody reads, must not end the watching
            with service.log.open("a", encoding="utf-8") as log:
                log.write(f"{self._entry(line)}\n")
            self.say(line)


def _run(line: list[str], log: Path, listener: socket.socket | None) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[] if listener is None else [listener.fileno()],
            start_new_session=True,
        )


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket. Raises ConfigError when the port cannot be had."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port}: {error.strerror}; set another port, or 0"
        ) from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"


def die_with(owner: int) -> None:
    """Called first thing by a service: it ends (SIGTERM) when the process that owns it ends, even by kill -9."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != owner:  # it died before the line above
        sys.exit(1)


def _how(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"


def _print(line: str) -> None:
    print(line, flush=True)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1].strip()[:500]} (log: {log})" if lines else f"without a word (log: {log})"
