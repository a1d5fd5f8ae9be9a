"""A real local runner, driven from an event loop in a thread, and what one needs to look at processes."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripted_gateway import ScriptedGateway, assignment

from harnessed.config import Config
from harnessed.controller.local import LocalRunner
from harnessed.controller.runner import Ended
from harnessed.records import Assignment


def make_config(**sections: Any) -> Config:
    tree: dict[str, Any] = {
        "policy": {"model": "model"},
        "tasks": {"train": "t.jsonl", "held_out": "t.jsonl", "hidden": ["secret"]},
        "harness": {"kind": "python", "function": "sample_agents:act"},
        "evaluator": {"function": "sample_agents:judge", "time_limit_s": 2},
        "controller": {"time_limit_s": 3, "file_size_mb": 2, "keep_folders": "all"},
    }
    for name, section in sections.items():
        tree[name] = section if name in ("harness", "evaluator") else tree.get(name, {}) | section
    return Config.model_validate(tree)


class Running:
    """A runner on an event loop of its own."""

    def __init__(self, config: Config, gateway: ScriptedGateway, root: Path) -> None:
        self.root = root
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.wake = asyncio.Event()
        self.held: dict[str, float] = {}
        """Rollout -> seconds for which its calls were held."""
        self.runner = LocalRunner(config, gateway.url, root, self.wake, self._held)
        self.do(self.runner.open())
        self.count = 0

    async def _held(self, assignment: Assignment) -> float:
        return self.held.get(assignment.rollout, 0.0)

    def do(self, work: Any, limit_s: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit_s)

    def start(self, task: dict[str, Any]) -> str:
        self.count += 1
        record = Assignment.model_validate(assignment(f"g.{self.count}", task))
        self.loop.call_soon_threadsafe(self.runner.start, record)
        return f"g.{self.count}/1"

    def end(self, name: str, limit_s: float = 30) -> Ended:
        def look() -> Ended | None:
            return self.runner.attempts().get(name)

        return wait_for(look, limit_s)

    def run(self, task: dict[str, Any]) -> Ended:
        return self.end(self.start(task))

    def folder(self, name: str) -> Path:
        return self.root / name.replace("/", ".")

    def close(self) -> None:
        self.do(self.runner.close())
        self.loop.call_soon_threadsafe(self.loop.stop)


def wait_for(look: Callable[[], Any], limit_s: float = 10) -> Any:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if found := look():
            return found
        time.sleep(0.005)
    raise AssertionError(f"waited {limit_s} s in vain")


def processes_with(mark: str) -> list[int]:
    """Living processes that have this text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            alive = folder.joinpath("stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            if alive and mark.encode() in folder.joinpath("cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


@contextmanager
def running(config: Config, root: Path, gateway: ScriptedGateway) -> Iterator[Running]:
    local = Running(config, gateway, root)
    try:
        yield local
    finally:
        local.close()
