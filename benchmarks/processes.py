"""Servers of a benchmark in processes of their own, and what these use."""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds so far, of all its threads, those that have ended too, and of children that have ended."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self) -> float:
        """Memory that it holds now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def process(target: Callable[..., None], *arguments: object, cores: set[int] | None = None) -> Iterator[Server]:
    """A server in a process of its own, on these cores; `target` is called with its socket first."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    running = multiprocessing.Process(target=_run, args=(target, cores, listener, *arguments), daemon=True)
    running.start()
    try:
        assert running.pid
        yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", running.pid)
    finally:
        listener.close()
        running.terminate()
        running.join(10)


def _run(target: Callable[..., None], cores: set[int] | None, *arguments: object) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    target(*arguments)
