"""Three schedules, the same work: how long each takes, what it costs in devices, and what comes of it.

    python benchmarks/schedules.py [FOLDER] [--seeds 0 1 2] [--schedules sync collocated async] [--quick]

`make schedules` runs it. The workload is `schedules/schedules.yaml`: the demo's tasks with tools that take a log-normal
time, drawn so that every schedule waits for the same tools. Each run goes into FOLDER/<schedule>-seed<n>; one that
has finished is kept, so that an interrupted comparison goes on. At the end all are told as a table; the figures are in
FOLDER/measured.json.

A device is one core. With `sync` and `collocated` engine and trainer have one core, and all else (gateway, controller,
agents) has another; with `async` engine and trainer are on devices of their own, the trainer's being the core that all
else is on too. More cores are not used. Wall time is that from the creation of the first training group to the end of
the last update: neither the start of the processes nor the held-out tasks are in it.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from sqlalchemy import func, select

from harnessed.browse.opening import opened
from harnessed.browse.timeline import busy, read
from harnessed.gateway.tables import groups
from harnessed.records import Purpose

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = Path(__file__).with_name("schedules")
FIRST = "sync"
"""The others are told against it."""
AHEAD = ["trainer.schedule.groups_in_flight=32", "trainer.schedule.staleness=4"]
SCHEDULES = {
    "sync": ["trainer.schedule.kind=sync"],
    "collocated": ["trainer.schedule.kind=collocated", *AHEAD],
    "async": ["trainer.schedule.kind=async", *AHEAD],
}
SEEDS = (0, 1, 2)
QUICK = ["trainer.steps=4", "evaluation.tasks=32"]
SERVICES = ("gateway", "engine", "controller")
POLL_S = 0.1
START_LIMIT_S = 120
RUN_LIMIT_S = 900


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of a run have used since they began: CPU seconds."""

    at: float
    """Seconds since the epoch."""
    engine: float
    trainer: float
    """Its main thread, which does all but look after the services."""
    services: float
    """Gateway and controller, without the agents."""
    host: float
    """All that ran on the core that is no device."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run."""

    schedule: str
    seed: int
    wall_s: float
    updates: int
    devices: int
    engine_s: float
    """CPU seconds of its process in that time."""
    update_s: float
    """Seconds of the update phase in that time."""
    host_share: float
    """Of the core of gateway, controller and agents: in use."""
    busy: float | None
    """`timeline.busy`: the device, after warm-up."""
    staleness: int | None
    """The largest."""
    before: float
    """Held-out success, of the first policy."""
    after: float
    held_out: int
    """So many tasks."""

    @property
    def device_s(self) -> float:
        """Device-seconds for each update."""
        return self.devices * self.wall_s / self.updates

    @property
    def compute_share(self) -> float:
        """Engine and update together, of the wall time."""
        return (self.engine_s + self.update_s) / self.wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare schedules of training.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "runs" / "schedules")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--quick", action="store_true", help="a few updates, to see that it works")
    asked = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("two cores are needed: one is the device, and all else is on the other")
    folder: Path = asked.folder.absolute() / ("quick" if asked.quick else "")
    overrides = [f"policy.model={make_policy(asked.folder.absolute() / 'policy')}", *(QUICK if asked.quick else [])]
    results = [
        compare(folder / f"{schedule}-seed{seed}", schedule, seed, overrides)
        for seed in asked.seeds
        for schedule in asked.schedules
    ]
    (folder / "measured.json").write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    show(results)


def compare(run: Path, schedule: str, seed: int, overrides: list[str]) -> Result:
    """One run of the workload, unless it has finished already."""
    measured = run / "measured.json"
    if not measured.exists():
        print(f"\n== {run.name}", flush=True)
        shutil.rmtree(run, ignore_errors=True)  # what an interruption left
        usage = train(run, schedule, [f"run.seed={seed}", *SCHEDULES[schedule], *overrides])
        measured.write_text(json.dumps(asdict(result_of(run, schedule, seed, usage)), indent=2) + "\n")
    return Result(**json.loads(measured.read_text()))


def make_policy(folder: Path) -> Path:
    """One for all seeds: these are of tasks and draws."""
    if not folder.exists():
        call = [sys.executable, str(WORKLOAD / "make_policy.py"), str(folder)]
        subprocess.run(call, env=environment(), check=True)
    return folder


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "examples" / "demo"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def train(run: Path, schedule: str, overrides: list[str]) -> list[Usage]:
    """One training with its processes on their cores; what they used meanwhile. Raises SystemExit where it fails."""
    cores = os.sched_getaffinity(0)
    host, device = min(cores), max(cores)
    os.sched_setaffinity(0, {host})  # and of whatever is started
    command = [sys.executable, "-m", "harnessed", "train", str(WORKLOAD / "schedules.yaml"), f"run.folder={run}"]
    trainer = subprocess.Popen([*command, *overrides], env=environment())
    try:
        services = wait_for_services(trainer)
        pin(services["engine"], device)
        if schedule != "async":
            pin(trainer.pid, device)
        usage = list(follow(trainer, services, host))
    finally:
        trainer.terminate()
        trainer.wait()
        os.sched_setaffinity(0, cores)
    if trainer.returncode or json.loads((run / "summary.json").read_text())["interrupted"]:
        sys.exit(f"{run.name} ended with status {trainer.returncode}; the same command goes on with it")
    return usage


def wait_for_services(trainer: "subprocess.Popen[bytes]") -> dict[str, int]:
    """The processes that it starts: name -> process id."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and trainer.poll() is None:
        found = {}
        for pid in children(trainer.pid):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found |= {name: pid for name in SERVICES if words[2:4] == ["harnessed", name]}
        if len(found) == len(SERVICES):
            return found
        time.sleep(0.05)
    if trainer.returncode is not None:
        sys.exit(f"the run ended with status {trainer.returncode} before it had started its services")
    sys.exit(f"the run did not start gateway, engine and controller within {START_LIMIT_S} s")


def children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (thread / "children").read_text().split())


def pin(pid: int, core: int) -> None:
    """All its threads; those that they start follow."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), {core})


def follow(trainer: "subprocess.Popen[bytes]", services: dict[str, int], host: int) -> Iterator[Usage]:
    deadline = time.monotonic() + RUN_LIMIT_S
    while trainer.poll() is None:
        if time.monotonic() > deadline:
            sys.exit(f"not finished within {RUN_LIMIT_S} s")
        with suppress(OSError):  # one has ended
            engine, serving = cpu_s(services["engine"]), cpu_s(services["gateway"]) + cpu_s(services["controller"])
            yield Usage(time.time(), engine, main_thread_s(trainer.pid), serving, core_s(host))
        time.sleep(POLL_S)


def cpu_s(pid: int) -> float:
    """Of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main_thread_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def core_s(core: int) -> float:
    """For how long it was not idle."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            fields = [int(field) for field in line.split()[1:9]]
            return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    raise ValueError(f"no core {core}")


def result_of(run: Path, schedule: str, seed: int, usage: list[Usage]) -> Result:
    timeline = read(run)
    began, ended = first_training_group(run), timeline.updates[-1][1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    held_out = [line["held_out"] for line in lines if "held_out" in line]
    stale = [line["staleness_max"] for line in lines if line.get("staleness_max") is not None]
    settings: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())

    def used(field: str) -> float:
        at, values = [each.at for each in usage], [getattr(each, field) for each in usage]
        return float(np.diff(np.interp((began, ended), at, values))[0])

    return Result(
        schedule,
        seed,
        wall_s=ended - began,
        updates=len(timeline.updates),
        devices=2 if schedule == "async" else 1,
        engine_s=used("engine"),
        update_s=sum(until - since for since, until in timeline.updates),
        host_share=used("host") / (ended - began),
        busy=busy(timeline),
        staleness=max(stale, default=None),
        before=held_out[0],
        after=held_out[-1],
        held_out=settings["evaluation"]["tasks"],
    )


def first_training_group(run: Path) -> float:
    """When it was created."""
    with opened(run) as (connection, spec):
        query = select(func.min(groups.c.created)).where(groups.c.run == spec.id, groups.c.purpose == Purpose.TRAIN)
        return float(connection.execute(query).scalar_one())


def show(results: list[Result]) -> None:
    table = Table(
        "schedule",
        "wall s",
        f"{FIRST} takes so many times as long (smallest, median, largest)",
        "device-s per update",
        "engine and update, of wall",
        "other core in use",
        "busy after warm-up",
        "staleness, largest",
        "held-out success before",
        "after",
        f"less {FIRST}",
    )
    of: dict[str, list[Result]] = {}
    for result in results:
        of.setdefault(result.schedule, []).append(result)
    for mine in of.values():
        table.add_row(*row(mine, of.get(FIRST, [])))
    Console(width=180, highlight=False).print(table)


def row(mine: list[Result], first: list[Result]) -> list[str]:
    """`first`: what is compared with; seeds that only one has are left out of the ratio."""
    by_seed = {result.seed: result.wall_s for result in first}
    ratios = sorted(by_seed[result.seed] / result.wall_s for result in mine if result.seed in by_seed)
    n, p = pooled(mine)
    half = 1.96 * math.sqrt(variance(n, p))
    less = ""
    if first and mine is not first:
        m, q = pooled(first)
        less = f"{p - q:+.3f} ± {1.96 * math.sqrt(variance(n, p) + variance(m, q)):.3f}"
    return [
        mine[0].schedule,
        told([result.wall_s for result in mine], ".0f"),
        f"{ratios[0]:.2f}, {statistics.median(ratios):.2f}, {ratios[-1]:.2f}" if ratios else "",
        told([result.device_s for result in mine], ".1f"),
        told([result.compute_share for result in mine], ".2f"),
        told([result.host_share for result in mine], ".2f"),
        told([result.busy for result in mine if result.busy is not None], ".3f"),
        told([float(result.staleness) for result in mine if result.staleness is not None], ".0f"),
        told([result.before for result in mine], ".2f"),
        f"{p:.3f} ± {half:.3f}",
        less,
    ]


def told(values: list[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


def pooled(results: list[Result]) -> tuple[int, float]:
    """Held-out rollouts over all seeds, and the share of them that succeeded."""
    n = sum(result.held_out for result in results)
    return n, sum(result.after * result.held_out for result in results) / n


def variance(n: int, p: float) -> float:
    """Of the share p of n; after Agresti and Coull, so that it is not 0 where all succeed."""
    p = (p * n + 2) / (n + 4)
    return p * (1 - p) / (n + 4)


if __name__ == "__main__":
    main()
