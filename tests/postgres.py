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
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGINT, SIGQUIT

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


@contextmanager
def running() -> Iterator[str]:
    """The URL of an empty database; the server ends with the context."""
    folder = binaries()
    if folder is None:
        pytest.skip("no PostgreSQL is installed (Debian: apt-get install postgresql)")
    # Not in pytest's own folders, which another user cannot enter.
    with tempfile.TemporaryDirectory(prefix="postgres-") as scratch:
        user = _own(Path(scratch))
        data, port = Path(scratch, "data"), _free_port()
        made = [
            folder / "initdb",
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
            "--locale=C",
            "-U",
            "test",
            "-D",
            data,
        ]
        subprocess.run([*user, *made], check=True, capture_output=True, cwd=scratch)
        settings = [f"--{name}={value}" for name, value in (SETTINGS | {"port": port}).items()]
        with Path(scratch, "log").open("wb") as log:
            server = subprocess.Popen(
                [*user, folder / "postgres", "-D", data, *settings], stdout=log, stderr=subprocess.STDOUT, cwd=scratch
            )
        try:
            _wait(server, port, Path(scratch, "log"))
            yield f"postgresql://test@127.0.0.1:{port}/postgres"
        finally:
            _stop(server)


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


def _wait(server: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        if "ready to accept connections" in log.read_text():
            return
        time.sleep(0.02)
    raise TimeoutError(f"PostgreSQL did not start on port {port}:\n{log.read_text()}")


def _stop(server: subprocess.Popen) -> None:
    """Fast: its clients are cut off."""
    server.send_signal(SIGINT)
    with suppress(subprocess.TimeoutExpired):
        server.wait(STOP_LIMIT_S)
        return
    server.send_signal(SIGQUIT)
    server.wait(STOP_LIMIT_S)
