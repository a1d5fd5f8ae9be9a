"""An engine in a process of its own, and what the tests ask of it."""

import os
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models

VOCABULARY = 40
CONTEXT = 2048

LETTERS = string.ascii_letters[:VOCABULARY]
"""The text of each token."""


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


PROGRAM = """
import socket, sys
from pathlib import Path
from harnessed.config import EngineSettings
from harnessed.engine.serve import serve
fd, model, weights = sys.argv[1:]
serve(socket.socket(fileno=int(fd)), Path(model), Path(weights) if weights else None, EngineSettings())
"""


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


@dataclass
class RunningEngine:
    process: subprocess.Popen[bytes]
    http: httpx.Client
    url: str

    def post(self, **changes: Any) -> httpx.Response:
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 1.0, "seed": 0, "stop": []}
        return self.http.post("/generate", json=body | changes)

    def generate(self, **changes: Any) -> dict[str, Any]:
        response = self.post(**changes)
        assert response.status_code == 200, response.text
        return response.json()

    def generate_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.generate(**body), bodies))

    def interrupt(self, id: str) -> bool:
        """Whether there was something to interrupt."""
        return self.http.post("/interrupt", json={"ids": [id]}).json()["found"] == [id]

    def health(self) -> dict[str, Any]:
        return self.http.get("/health").json()

    def until(self, condition: Callable[[dict[str, Any]], bool], limit_s: float = 10) -> dict[str, Any]:
        """The health, once it is as it should be."""
        deadline = time.monotonic() + limit_s
        while not condition(health := self.health()):
            assert time.monotonic() < deadline, f"still {health} after {limit_s} s"
            time.sleep(0.005)
        return health

    def pause(self) -> None:
        assert self.http.post("/pause").status_code == 200

    def resume(self) -> None:
        assert self.http.post("/resume").status_code == 200

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        yield
        self.resume()


@contextmanager
def running_engine(model: Path, weights: Path | None = None) -> Iterator[RunningEngine]:
    """Started at once; the first request waits until it is ready."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    command = [sys.executable, "-c", PROGRAM, str(listening.fileno()), str(model), str(weights or "")]
    process = subprocess.Popen(command, pass_fds=[listening.fileno()], env=environment())
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()
    with httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_connections=100), trust_env=False) as http:
        try:
            yield RunningEngine(process, http, url)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
