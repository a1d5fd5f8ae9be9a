"""Runs the command line as a user does, and looks at what it leaves."""

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml
from policies import add_model, make_policy

HERE = Path(__file__).parent
HARNESSED = [sys.executable, "-m", "harnessed"]


def make_config(folder: Path, **sections) -> Path:
    """A configuration for agent.py with a tiny random policy; sections replace settings."""
    policy = folder / "policy"
    if not policy.exists():
        add_model(make_policy(policy))
    for name in ("agent.py",):
        (folder / name).write_text((HERE / name).read_text())
    config = {
        "run": {"name": "test"},
        "policy": {"model": str(policy)},
        "tasks": {"train": "agent:tasks", "held_out": "agent:easy_tasks", "hidden": ["answer"]},
        "harness": {"kind": "python", "function": "agent:run"},
        "evaluator": {"function": "agent:reward", "time_limit_s": 20, "tries": 1},
        "controller": {"slots": 8, "time_limit_s": 3},
        "sampling": {"max_tokens": 8},
        "limits": {"context": 512},
        "trainer": {"steps": 2, "groups_per_step": 5, "group_size": 3, "checkpoint_every": 1},
        "evaluation": {"tasks": 4, "greedy_tasks": 2},
    }
    for section, settings in sections.items():
        config[section] = config.get(section, {}) | settings
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"} | more


def harnessed(*arguments: object, env: dict[str, str] | None = None, limit_s: float = 120):
    """The finished command."""
    return subprocess.run(
        [*HARNESSED, *map(str, arguments)],
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def start(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [*HARNESSED, *map(str, arguments)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def processes_of(folder: Path) -> dict[int, str]:
    """Processes that name the folder or work in it, with their command lines."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                place = str((process / "cwd").readlink())
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it has ended meanwhile
                continue
            if state != "Z" and (str(folder) in line or place.startswith(str(folder))):
                found[int(process.name)] = line
    return found


def wait_for(condition, what: str, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.05)
