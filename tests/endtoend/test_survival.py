"""Whole runs whose services are killed with -9, and what they say of it."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest
import torch
from command import HARNESSED, HERE, environment, harnessed, make_config, processes_of, start, wait_for
from policies import add_model, make_policy
from transformers import AutoModelForCausalLM

from harnessed.client import Client, pause_engine, resume_engine
from harnessed.records import Version
from harnessed.weights import SharedWeights

GROUPS, MEMBERS, HELD_OUT = 3, 3, 2
LIMIT_S = 120


def _of_step(column: str, step: int) -> str:
    """A condition for the rollouts of a step."""
    numbers = range(GROUPS * (step - 1), GROUPS * step)
    return "(" + " or ".join(f"{column} like '%.train.{number:06d}.%'" for number in numbers) + ")"


class Watched:
    """A run that goes on, seen from its folder."""

    def __init__(self, folder, steps: int) -> None:
        config = make_config(
            folder,
            run={"folder": str(folder / "run")},
            tasks={"train": "patient_agent:tasks", "held_out": "patient_agent:tasks", "hidden": []},
            harness={"kind": "python", "function": "patient_agent:run"},
            evaluator={"function": "patient_agent:reward"},
            controller={"time_limit_s": 100},
            sampling={"max_tokens": 64},
            trainer={"steps": steps, "groups_per_step": GROUPS, "group_size": MEMBERS, "checkpoint_every": 1},
            evaluation={"tasks": HELD_OUT, "greedy_tasks": 0},
        )
        self.folder = folder
        self.run = folder / "run"
        self.config = config
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            [*HARNESSED, "train", config], env=environment(), stdout=self.output, stderr=subprocess.STDOUT
        )

    def kill(self, service: str) -> None:
        (pid,) = [pid for pid, line in processes_of(self.folder).items() if f" {service} {self.config}" in line]
        os.kill(pid, signal.SIGKILL)

    def until(self, condition: str, what: str) -> None:
        """A condition of the store."""

        def holds() -> bool:
            assert self.process.poll() is None, self.said()
            place = f"file:{self.run / 'gateway.db'}?mode=ro"
            try:
                with closing(sqlite3.connect(place, uri=True, timeout=10)) as database:
                    return bool(database.execute(f"select {condition}").fetchone()[0])
            except sqlite3.OperationalError:  # it is being made
                return False

        wait_for(holds, what, LIMIT_S)

    def sampling(self, step: int) -> None:
        """Calls of this step are being answered."""
        of_step = _of_step("rollout", step)
        self.until(f"exists (select 1 from calls where state = 'admitted' and {of_step})", f"calls of step {step}")

    def sampled(self, step: int) -> None:
        """Its last rollout has ended: an update follows."""
        count = f"select count(*) from rollouts where {_of_step('id', step)} and state = 'finished'"
        self.until(f"({count}) = {GROUPS * MEMBERS}", f"the end of the rollouts of step {step}")

    def said(self) -> str:
        self.output.flush()
        return (self.folder / "output").read_text()


@pytest.fixture
def watched(tmp_path):
    (tmp_path / "patient_agent.py").write_text((HERE / "patient_agent.py").read_text())
    run = Watched(tmp_path, steps=5)
    yield run
    run.process.kill()
    run.process.wait()


def test_a_run_survives_the_death_of_any_service_at_any_moment(watched):
    watched.sampling(1)
    watched.kill("gateway")
    watched.sampled(1)
    watched.kill("engine")
    watched.sampling(2)
    watched.kill("engine")
    watched.sampled(2)
    watched.kill("gateway")
    watched.sampling(3)
    watched.kill("controller")
    watched.sampling(4)
    watched.kill("gateway")
    watched.kill("engine")
    watched.sampled(5)
    watched.kill("controller")
    assert watched.process.wait(LIMIT_S * 2) == 0, watched.said()
    said, summary = watched.said(), json.loads((watched.run / "summary.json").read_text())
    rollouts = 5 * GROUPS * MEMBERS + 2 * HELD_OUT
    assert summary["outcomes"] == {"ok": rollouts}
    assert summary["rollouts"] == rollouts
    assert sum(summary["fates"].values()) == summary["sampled_tokens"]
    assert summary["trained_tokens"] > 0
    assert summary["restarts"] == {"gateway": 3, "engine": 3, "controller": 2}
    assert summary["engine_sampled_tokens"] is None
    lines = [json.loads(line)["rollout"] for line in (watched.run / "transcripts.jsonl").read_bytes().splitlines()]
    assert len(lines) == len(set(lines)) == rollouts
    for service, times in summary["restarts"].items():
        line = f"the {service} was ended by signal 9 (Killed); it is started again"
        assert said.count(line) == times
        assert (watched.run / "logs" / f"{service}.log").read_text().count(line) == times
    assert "died and were started again: controller 2, engine 3, gateway 3" in said
    assert "the books balance" not in said, "what a killed engine had sampled is not known"
    assert "Traceback" not in said
    with closing(sqlite3.connect(watched.run / "gateway.db")) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    wait_for(lambda: processes_of(watched.folder) == {}, "the last process to end", limit_s=10)


def test_a_service_that_keeps_dying_ends_the_run_with_one_line(watched):
    watched.sampling(1)
    for _ in range(5):

        def running() -> bool:
            return any(f" engine {watched.config}" in line for line in processes_of(watched.folder).values())

        wait_for(running, "the engine", LIMIT_S)
        watched.kill("engine")
        wait_for(lambda: not running(), "its end", LIMIT_S)
    assert watched.process.wait(LIMIT_S) == 1
    assert "the engine was ended by signal 9 (Killed), for the 5th time within 60 s" in watched.said()
    assert "Traceback" not in watched.said()
    wait_for(lambda: processes_of(watched.folder) == {}, "the last process to end", limit_s=10)


def test_a_service_that_cannot_start_ends_the_run_at_once(tmp_path):
    config = make_config(tmp_path)
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"no weights")
    began = time.monotonic()
    result = harnessed("eval", config, f"run.folder={tmp_path / 'run'}")
    assert result.returncode == 1
    assert "the engine ended with status" in result.stderr
    assert "engine.log" in result.stderr
    assert "started again" not in result.stdout
    assert time.monotonic() - began < 60, "it waited for what could not come"


def test_an_engine_killed_while_the_weights_are_written_generates_nothing_before_they_are(tmp_path):
    policy, weights = add_model(make_policy(tmp_path / "policy")), tmp_path / "weights"
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    shared = SharedWeights.create(weights, model, Version(0, 0))
    config = make_config(tmp_path, engine={"weights": str(weights)})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def start_engine() -> subprocess.Popen:
            number = listener.fileno()
            command = [*HARNESSED, "engine", config, "--listener", str(number), "--owner", str(os.getpid())]
            return subprocess.Popen(command, env=environment(), pass_fds=[number])

        def generate() -> dict:
            body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 1.0, "seed": 0}
            return httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False).json()

        def health(name: str) -> int:
            return httpx.get(f"{url}/health", timeout=60, trust_env=False).json()[name]

        ask = Client(url, patience_s=60)
        engine = start_engine()
        try:
            with ThreadPoolExecutor(1) as pool:
                ask(pause_engine(60))
                with shared.writing(Version(0, 1)):
                    engine.kill()
                    engine.wait()
                    engine = start_engine()
                    answer = pool.submit(generate)
                    wait_for(lambda: health("waiting"), "the request")
                    assert not health("paused"), "what keeps it from generating is the mark alone"
                    assert not answer.done()
                    assert health("sampled_tokens") == 0
                ask(resume_engine())
                assert set(answer.result(60)["versions"]) == {Version(0, 1).pack()}
        finally:
            engine.kill()
            engine.wait()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_a_house_is_started_together_and_ends_together(tmp_path, how):
    config, folder = make_config(tmp_path), tmp_path / "house"
    process = start("up", config, f"run.folder={folder}")
    try:
        line = process.stdout.readline().decode()
        url, key = line.split()[3].rstrip(";"), (folder / "admin.key").read_text()
        assert (folder / "admin.key").stat().st_mode & 0o777 == 0o600
        (gateway,) = [pid for pid, line in processes_of(tmp_path).items() if f" gateway {config}" in line]
        os.kill(gateway, signal.SIGKILL)
        assert b"the gateway was ended by signal 9 (Killed); it is started again" in process.stdout.readline()
        if how == signal.SIGINT:
            more = [f"run.folder={tmp_path / 'run'}", f"gateway.url={url}", "controller.external=true"]
            done = harnessed("eval", config, *more, env=environment(HARNESSED_ADMIN_KEY=key))
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            httpx.get(f"{url}/api/engines", timeout=60, trust_env=False)  # it is there again
        process.send_signal(how)
        assert process.wait(20) == (0 if how == signal.SIGINT else -signal.SIGKILL)
    finally:
        process.kill()
    wait_for(lambda: processes_of(tmp_path) == {}, "the last process to end", limit_s=10)
