"""A training of the demo in its lives: killed at seeded moments, and gone on with by the same command.

`test_training.py` plays it; what its folder holds whenever a trainer was killed is kept for `aftermath.py`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

DEMO = Path(__file__).parents[2] / "examples" / "demo"
SERVICES = ("gateway", "engine", "controller")
LATEST_S = 8.0
"""After its step has begun, a kill comes at most."""
SHARE = 0.85
"""Of the steps, within which all kills come."""
LIMIT_S = 900


@dataclass(frozen=True)
class Kill:
    step: int
    """That has to be in metrics.jsonl; 0: the run has begun."""
    after_s: float
    """Then."""
    victims: tuple[str, ...]


@dataclass(frozen=True)
class Death:
    """What the folder held when a trainer was killed."""

    metrics: list[dict]
    transcripts: list[dict]
    lineages: list[list[int]]
    checkpoint: int
    """Step of the newest; 0: there is none."""
    resumed: int
    """How many lives had gone on with the run by then; one that was killed while it loaded had not."""


def kills(seed: int, count: int, steps: int) -> list[Kill]:
    """One in each part of the run; of six in a row each process dies alone once, and twice several together."""
    random, found = Random(seed), []
    victims: list[tuple[str, ...]] = []
    while len(victims) < count:
        with_trainer = ("trainer", *random.sample(SERVICES, random.randint(1, 3)))
        six = [("trainer",), *((name,) for name in SERVICES), with_trainer, tuple(random.sample(SERVICES, 2))]
        random.shuffle(six)
        victims += six
    part = SHARE * steps / count
    for number in range(count):
        step = int((number + random.random()) * part)
        found.append(Kill(step, random.uniform(0, LATEST_S), victims[number]))
    return found


@dataclass
class Lives:
    run: Path
    overrides: list[str]
    output: Path
    process: subprocess.Popen | None = None
    deaths: list[Death] = field(default_factory=list)

    def start(self) -> None:
        command = [sys.executable, "-m", "harnessed", "train", str(DEMO / "demo.yaml"), *self.overrides]
        if (self.run / "run.json").exists():
            command.append("--resume")
        env = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                command, env=env | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT
            )

    def play(self, planned: list[Kill]) -> None:
        """To the end of the run."""
        self.start()
        for kill in planned:
            self.until(lambda step=kill.step: (self.run / "run.json").exists() and self.step() >= step)
            time.sleep(kill.after_s)
            self.kill(kill.victims)
        self.until(lambda: self.process.poll() is not None)
        assert self.process.returncode == 0, self.said()

    def kill(self, victims: tuple[str, ...]) -> None:
        """All at once; whoever is just being started again is waited for."""
        services = [name for name in victims if name != "trainer"]
        self.until(lambda: all(name in self.services() for name in services))
        found = self.services()
        doomed = [found[name] for name in services]
        for pid in [*doomed, *([self.process.pid] if "trainer" in victims else [])]:
            os.kill(pid, signal.SIGKILL)
        if "trainer" in victims:
            assert self.process.wait() == -signal.SIGKILL, self.said()
            self.deaths.append(self.look())
            self.start()

    def until(self, condition) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() in (None, 0), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def services(self) -> dict[str, int]:
        """Those of the present trainer, by name."""
        found = {}
        for process in Path("/proc").iterdir():
            try:
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                line = (process / "cmdline").read_bytes().split(b"\0")
            except (OSError, IndexError):  # no process, or it has ended meanwhile
                continue
            if parent == self.process.pid and line[1:3] == [b"-m", b"harnessed"]:
                found[line[3].decode()] = int(process.name)
        return found

    def step(self) -> int:
        """The last one in metrics.jsonl."""
        return max((line["step"] for line in whole_lines(self.run / "metrics.jsonl")), default=0)

    def look(self) -> Death:
        steps = [int(path.name[5:]) for path in (self.run / "checkpoints").glob("step-*")]
        lineages = json.loads((self.run / "run.json").read_text())["lineages"]
        return Death(
            whole_lines(self.run / "metrics.jsonl"),
            whole_lines(self.run / "transcripts.jsonl"),
            lineages,
            max(steps, default=0),
            len(self.resumed_from()),
        )

    def said(self) -> str:
        return self.output.read_text()

    def resumed_from(self) -> list[int]:
        """The steps of the checkpoints, one for each later life."""
        return [int(step) for step in re.findall(r"^resuming .* after step (\d+), from ", self.said(), re.MULTILINE)]


def whole_lines(path: Path) -> list[dict]:
    """Without one whose writer was killed in its middle; none while there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
