"""A PostgreSQL server of a test's own, with Debian's binaries or those on the path.

    with running() as url:
        ...  # postgresql://user@127.0.0.1:port/postgres

Without binaries the test is skipped.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGQUIT

import pytest

START_LIMIT_S = 60
STOP_LIMIT_S = 20
SETTINGS = {
    "fsync": "off",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "100",
    "shared_buffers": "32MB",
}


def binaries() -> Path | None:
    """Where initdb and postgres are; the newest of them."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    found = shutil.which("initdb")
    return debian[-1] if debian else Path(found).parent if found else None


class Postgres:
    """A server that may be killed and started again."""

    def __init__(self, binaries: Path, scratch: Path) -> None:
        self._user = _own(scratch)
        self._binaries = binaries
        self._scratch = scratch
        self._log = scratch / "log"
        self._port = _free_port()
        self.url = f"postgresql://test@127.0.0.1:{self._port}/postgres"
        made = ["--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C", "-U", "test", "-D", scratch / "data"]
        subprocess.run([*self._user, binaries / "initdb", *made], check=True, capture_output=True, cwd=scratch)

    def start(self) -> None:
        settings = [f"--{name}={value}" for name, value in (SETTINGS | {"port": self._port}).items()]
        command = [*self._user, self._binaries / "postgres", "-D", self._scratch / "data", *settings]
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self._scratch)
            while self._process.poll() is None and time.monotonic() < deadline:
                if "ready to accept connections" in self._log.read_text():
                    return
                time.sleep(0.02)
            time.sleep(0.1)  # processes of one that was killed may still hold its memory
        raise TimeoutError(f"PostgreSQL did not start on port {self._port}:\n{self._log.read_text()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """At once: its clients are cut off, and nothing is kept."""
        self._process.send_signal(SIGQUIT)
        self._process.wait(STOP_LIMIT_S)


@contextmanager
def server() -> Iterator[Postgres]:
    """It runs, and has ended after the context."""
    folder = binaries()
    if folder is None:
        pytest.skip("no PostgreSQL is installed (Debian: apt-get install postgresql)")
    # Not in pytest's own folders, which another user cannot enter.
    with tempfile.TemporaryDirectory(prefix="postgres-") as scratch:
        postgres = Postgres(folder, Path(scratch))
        postgres.start()
        try:
            yield postgres
        finally:
            postgres.stop()


@contextmanager
def running() -> Iterator[str]:
    """The URL of an empty database; the server ends with the context."""
    with server() as postgres:
        yield postgres.url


def _own(folder: Path) -> list[str]:
    """What stands before its commands. PostgreSQL refuses to run as root: folder and processes are another user's."""
    if os.geteuid():
        return []
    shutil.chown(folder, "nobody")
    # Should the test be killed, the server ends too.
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--pdeathsig=QUIT", "--"]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
