"""Runs whose trainer is killed with -9, alone or with everything else, and that go on by the same command."""

import json
import os
import re
import resource
import signal
import subprocess

import numpy as np
import postgres
import pytest
from command import HARNESSED, HERE, environment, harnessed, make_config, processes_of, wait_for
from sqlalchemy import URL, NullPool, create_engine, make_url, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from harnessed.records import Version

LIMIT_S = 120
GROUPS, MEMBERS, HELD_OUT = 2, 3, 2
WITHOUT_END = 1000


class Lives:
    """A run, started again and again."""

    def __init__(self, folder) -> None:
        (folder / "patient_agent.py").write_text((HERE / "patient_agent.py").read_text())
        self.folder = folder
        self.config = make_config(
            folder,
            tasks={"train": "patient_agent:tasks", "held_out": "patient_agent:tasks", "hidden": []},
            harness={"kind": "python", "function": "patient_agent:run"},
            evaluator={"function": "patient_agent:reward"},
            controller={"time_limit_s": 100},
            sampling={"max_tokens": 32},
            trainer={"steps": WITHOUT_END, "groups_per_step": GROUPS, "group_size": MEMBERS, "checkpoint_every": 2},
            evaluation={"tasks": HELD_OUT, "greedy_tasks": 0},
        )
        self.run = folder / "run"
        self.key = ""
        """Of a gateway elsewhere."""
        self.database: str | URL = ""
        """URL of its records; without one they are in the run's folder."""
        self.output = folder / "output"
        self.process: subprocess.Popen | None = None

    def arguments(self, *overrides: str) -> list:
        return ["train", self.config, f"run.folder={self.run}", *overrides]

    def start(self, *more: str) -> None:
        with self.output.open("a") as output:
            command = [*HARNESSED, *map(str, self.arguments(*more))]
            env = environment(**{"HARNESSED_ADMIN_KEY": self.key} if self.key else {})
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    def finish(self, *more: str) -> None:
        """One more life, to its end."""
        self.start(*more)
        assert self.process.wait(LIMIT_S) == 0, self.said()

    def kill(self, *services: str) -> None:
        """The trainer and these, all at once."""
        lines = processes_of(self.folder)
        doomed = [pid for pid, line in lines.items() if any(f" {name} {self.config}" in line for name in services)]
        assert len(doomed) == len(services), lines
        for pid in [*doomed, self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def until(self, condition, what: str) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, self.said()
            return bool(condition())

        wait_for(holds, what, LIMIT_S)

    def ask(self, query: str) -> list[tuple]:
        """Of the store; nothing while it is being made."""
        place = self.database or f"sqlite:///file:{self.run / 'gateway.db'}?mode=ro&uri=true"
        try:
            with create_engine(place, poolclass=NullPool).connect() as database:
                return [tuple(row) for row in database.execute(text(query))]
        except (OperationalError, ProgrammingError):
            return []

    def training(self) -> bool:
        """A training rollout is being answered."""
        query = "select 1 from calls join rollouts on rollout = rollouts.id where purpose = 'train' and calls.state = "
        return bool(self.ask(f"{query} 'admitted'"))

    def updating(self) -> bool:
        return bool(self.ask("select 1 from closings"))

    def checkpoint(self) -> int:
        """Step of the newest one; 0: there is none."""
        return max((int(path.name[5:]) for path in (self.run / "checkpoints").glob("step-*")), default=0)

    def record(self) -> dict:
        return json.loads((self.run / "run.json").read_text())

    def said(self) -> str:
        return self.output.read_text()


@pytest.fixture
def lives(tmp_path):
    run = Lives(tmp_path)
    yield run
    if run.process:
        run.process.kill()
        run.process.wait()


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_run_that_is_killed_again_and_again_goes_on_to_its_end(lives):
    lives.start()
    lives.until(lives.training, "the first step")
    lives.kill()
    id = lives.record()["id"]
    lives.start("--resume")  # from the first weights; its services are still ending
    lives.until(lambda: lives.checkpoint() and lives.training(), "a checkpoint and a further step")
    lives.kill("gateway", "engine", "controller")
    second = lives.checkpoint()
    lives.start("--resume")
    lives.until(lambda: lives.checkpoint() > second and lives.updating(), "an update")
    lives.kill()
    third = lives.checkpoint()
    last = third + 2  # no life came further
    moved = lives.folder / "elsewhere" / "moved"
    moved.parent.mkdir()
    wait_for(lambda: processes_of(lives.folder) == {}, "the end of the services")
    lives.run = lives.run.rename(moved)
    lives.finish("--resume", f"trainer.steps={last}")

    said, summary = lives.said(), json.loads((lives.run / "summary.json").read_text())
    assert "Traceback" not in said
    assert f"trainer.steps: {WITHOUT_END} -> {last}" in said
    assert said.count(f"resuming {id} in ") == 3
    assert f"after step {third}, from {moved / 'checkpoints' / f'step-{third:05d}'}" in said
    assert (summary["steps"], summary["resumed"], summary["restarts"]) == (last, 3, {})
    assert summary["engine_sampled_tokens"] is None and "when the run was resumed is not known" in said

    # The books are those of one run.
    (stored,) = lives.ask("select sum(sampled) from nodes")[0]
    assert sum(summary["fates"].values()) == summary["sampled_tokens"] == stored
    booked = lines(lives.run / "transcripts.jsonl")
    assert len({line["rollout"] for line in booked}) == len(booked) == summary["rollouts"]
    assert sorted({line["step"] for line in booked if line["step"]}) == list(range(1, last + 1))
    assert sum(bool(line["step"]) for line in booked) == last * GROUPS * MEMBERS
    steps = [line["step"] for line in lines(lives.run / "metrics.jsonl") if "reward_mean" in line]
    assert steps == list(range(1, last + 1))
    posted = [json.loads(values) for (values,) in lives.ask('select "values" from metrics order by number')]
    assert posted == lines(lives.run / "metrics.jsonl")
    notes = json.loads((lives.run / "checkpoints" / f"step-{last:05d}" / "harnessed.json").read_text())
    assert len(set(notes["groups"])) == len(notes["groups"]) == notes["tasks"] == last * GROUPS

    # Each life is a lineage, and no version was used twice.
    lineages = lives.record()["lineages"]
    assert [lineage for lineage, _, _ in lineages] == [0, 1, 2, 3]
    numbers = [number for _, number, _ in lineages]
    assert numbers == sorted(set(numbers))
    served = set().union(
        *(np.frombuffer(blob, np.int32).tolist() for (blob,) in lives.ask("select versions from nodes"))
    )
    for version in map(Version.unpack, served):
        later = [number for lineage, number, _ in lineages if lineage > version.lineage]
        assert all(version.number < number for number in later)

    again = harnessed(*lives.arguments("--resume", f"trainer.steps={last}"))
    assert (again.returncode, again.stderr) == (0, "")
    assert f"has taken its {last} steps" in again.stdout
    assert lives.record()["resumed"] == 3


def test_what_runs_elsewhere_lives_on_and_serves_the_next_life(lives, tmp_path):
    """Gateway, engine and controller do not die with the trainer, which is killed while the engine stands still."""
    weights = f"engine.weights={tmp_path / 'weights'}"
    house = [*HARNESSED, "up", str(lives.config), "--engine", f"run.folder={tmp_path / 'house'}", weights]
    with subprocess.Popen(house, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        try:
            urls = [re.search(r"http://[^;\s]+", up.stdout.readline())[0] for _ in ("engine", "gateway")]
            lives.key = (tmp_path / "house" / "admin.key").read_text()
            elsewhere = (f"engine.url={urls[0]}", f"gateway.url={urls[1]}", "controller.external=true", weights)
            lives.start(*elsewhere, "trainer.checkpoint_every=1")
            lives.database = f"sqlite:///file:{tmp_path / 'house' / 'gateway.db'}?mode=ro&uri=true"
            lives.until(lambda: lives.checkpoint() and lives.updating(), "an update")
            lives.kill()
            last = lives.checkpoint()
            lives.finish("--resume", *elsewhere, f"trainer.steps={last + 2}")
            assert up.poll() is None
            summary = json.loads((lives.run / "summary.json").read_text())
            assert (summary["steps"], summary["resumed"]) == (last + 2, 1)
            assert sum(summary["fates"].values()) == summary["sampled_tokens"]
            assert lives.ask("select count(*) from closings") == [(0,)]
            assert "Traceback" not in lives.said()
        finally:
            up.send_signal(signal.SIGINT)


def test_records_in_postgresql_are_those_of_one_run(lives):
    """All four processes die at once, in the middle of an update; the database stays."""
    with postgres.running() as url:
        lives.database = make_url(url).set(drivername="postgresql+psycopg")
        elsewhere = f"gateway.database={url}"
        lives.start(elsewhere)
        lives.until(lambda: lives.checkpoint() and lives.updating(), "an update")
        lives.kill("gateway", "engine", "controller")
        last = lives.checkpoint() + 2
        lives.finish("--resume", elsewhere, f"trainer.steps={last}")
        summary = json.loads((lives.run / "summary.json").read_text())
        assert (summary["steps"], summary["resumed"]) == (last, 1)
        assert sum(summary["fates"].values()) == summary["sampled_tokens"]
        assert lives.ask("select sum(sampled) from nodes") == [(summary["sampled_tokens"],)]
        assert lives.ask("select count(*) from rollouts where state != 'finished'") == [(0,)]
        booked = lines(lives.run / "transcripts.jsonl")
        assert len({line["rollout"] for line in booked}) == len(booked) == summary["rollouts"]
        assert "Traceback" not in lives.said()


def test_a_full_disk_ends_a_run_with_one_line_and_it_goes_on_when_there_is_room(lives):
    """Only the trainer cannot write: no file may become as large as the policy."""
    lives.start("trainer.checkpoint_every=1")
    lives.until(lives.checkpoint, "the first checkpoint")
    size = (lives.run / "checkpoints" / "step-00001" / "model.safetensors").stat().st_size
    resource.prlimit(lives.process.pid, resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))
    assert lives.process.wait(LIMIT_S) == 1, lives.said()
    assert "Traceback" not in lives.said() and lives.said().count("cannot write the checkpoint") == 1
    last = lives.checkpoint()
    lives.finish("--resume", f"trainer.steps={last + 1}")
    summary = json.loads((lives.run / "summary.json").read_text())
    assert (summary["steps"], summary["resumed"]) == (last + 1, 1)
    assert sum(summary["fates"].values()) == summary["sampled_tokens"]
    booked = lines(lives.run / "transcripts.jsonl")
    assert len({line["rollout"] for line in booked}) == len(booked) == summary["rollouts"]


def test_one_trainer_works_in_a_folder(lives):
    lives.start()
    lives.until((lives.run / "run.json").exists, "the run")
    other = harnessed(*lives.arguments("--resume"))
    assert other.returncode == 2
    assert f"another trainer (process {lives.process.pid}) works in {lives.run}" in other.stderr
    fresh = harnessed(*lives.arguments())
    assert fresh.returncode == 2 and "is not empty; go on with its run by --resume" in fresh.stderr
    lives.kill()


def test_what_cannot_go_on_is_said_before_anything_starts(lives, tmp_path):
    nothing = harnessed(*lives.arguments("--resume"))
    assert nothing.returncode == 2 and "holds no run.json" in nothing.stderr
    lives.start()
    lives.until((lives.run / "run.json").exists, "the run")
    lives.kill()
    wait_for(lambda: processes_of(lives.folder) == {}, "the end of the services")
    for override, complaint in (
        ("trainer.lora={}", "trainer.lora.alpha was null and is 32.0"),
        ("run.seed=1", "run.seed was 0 and is 1"),
        ("trainer.optimiser.kind=adamw8bit", "trainer.optimiser.kind"),
    ):
        refused = harnessed(*lives.arguments("--resume", override))
        assert refused.returncode == 2 and complaint in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr
    (tmp_path / "policy" / "chat_template.jinja").write_text("{{ messages }}")
    refused = harnessed(*lives.arguments("--resume"))
    assert refused.returncode == 2 and "is not the model that the run began with" in refused.stderr
    assert lives.record()["resumed"] == 0
