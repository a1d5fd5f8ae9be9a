"""The processes that a run starts for itself: gateway, controller, engine. The command line calls this.

Sockets are bound here and handed down, so a port in use is known before anything starts, and nobody connects to a
server that is not listening yet. Services live in sessions of their own (Ctrl-C reaches the run alone, which then ends
them in order) and die with the run, however it dies.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from harnessed.config import ConfigError

STOP_LIMIT_S = 6.0
"""How long all services together have to end after SIGTERM; then they are killed."""


class ServiceDied(Exception):
    """A process that the run needs has ended; the text has its last words."""


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    process: "subprocess.Popen[bytes]"
    log: Path


class Services:
    """Use as a context manager: at its end no process is left."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._services: list[Service] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def start(self, command: str, arguments: list[str], listener: socket.socket | None = None) -> None:
        """Run `harnessed <command> <arguments>` with an inherited listening socket."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{command}.log"
        line = [sys.executable, "-m", "harnessed", command, *arguments, "--owner", str(os.getpid())]
        inherited = []
        if listener is not None:
            inherited.append(listener.fileno())
            line += ["--listener", str(listener.fileno())]
        with log.open("ab") as output:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=inherited,
                start_new_session=True,
            )
        self._services.append(Service(command, process, log))

    def check(self) -> None:
        """Raises ServiceDied if one has ended."""
        for service in self._services:
            status = service.process.poll()
            if status is not None:
                raise ServiceDied(f"the {service.name} ended with status {status}: {_last_line(service.log)}")

    def wait(self, what: str, ready: Callable[[], bool], limit_s: float) -> None:
        """Poll until ready. Raises ServiceDied when a service ends or the time is up."""
        deadline = time.monotonic() + limit_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceDied(f"{what} within {limit_s:.0f} s; logs are in {self._logs}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End one after the other, the latest first; kill what has not ended in time.

        Ctrl-C is deaf meanwhile: this is short, and it must not leave processes behind.
        """
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        deadline = time.monotonic() + STOP_LIMIT_S
        for service in reversed(self._services):
            service.process.terminate()
            try:
                service.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()
        self._services.clear()
        signal.signal(signal.SIGINT, before)


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


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1].strip()[:500]} (log: {log})" if lines else f"without a word (log: {log})"
