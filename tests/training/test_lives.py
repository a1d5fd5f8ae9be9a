"""Runs that are killed, interrupted and out of disk at seeded random moments, and resumed each time: books balance
balance and nothing is trained twice. The rollouts are played; trainer, books and checkpoints are real."""

import json
import random
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transcripts import node

from harnessed.config import Config
from harnessed.records import Attempt, Outcome, Purpose, Rollout, State, Totals, Transcript, Turnstile, Version
from harnessed.resuming import RunRecord, take_up
from harnessed.training import report
from harnessed.training.backends import checkpoint
from harnessed.training.backends.local import Update
from harnessed.training.failures import CannotWrite, RunFailed
from harnessed.training.lineages import age_of, go_on, next_version
from harnessed.training.report import Report
from harnessed.training.rollouts import Rollouts
from harnessed.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("interruptible")

STEPS, STALENESS = 9, 2


class Killed(BaseException):
    """Nobody handles it: what stands after it in the trainer does not happen."""


class World:
    """What outlives a trainer: the gateway's store, the rollouts in it, the version that is served, and mischief."""

    def __init__(self, seed, mischief):
        self.draw, self.mischief = random.Random(seed), mischief
        self.groups, self.rollouts, self.nodes = {}, {}, {}
        self.served = [Version(0, 0)]
        self.quiet = False

    def strike(self, where):
        """To be called wherever something may happen to a trainer."""
        if self.quiet or self.draw.random() > self.mischief:
            return
        match self.draw.choice(["kill", "interrupt", "interrupt", "full"]):
            case "kill":
                raise Killed(where)
            case "interrupt":
                signal.raise_signal(signal.SIGINT)
            case "full" if where == "write":
                raise CannotWrite("the disk is full")

    def create(self, specs):
        for spec in specs:
            if spec.id not in self.groups:
                self.groups[spec.id] = spec
                for index in range(spec.n):
                    id = f"{spec.id}.{index}"
                    self.nodes[id] = []
                    self.rollouts[id] = Rollout(
                        id=id,
                        run="r",
                        group=spec.id,
                        index=index,
                        purpose=spec.purpose,
                        state=State.QUEUED,
                        attempt=0,
                        created=0.0,
                    )

    def members(self, group):
        spec = self.groups.get(group)
        return [f"{group}.{index}" for index in range(spec.n)] if spec else []

    def progress(self):
        """Some rollouts begin, sample or end."""
        live = [id for id, each in self.rollouts.items() if each.state != State.FINISHED]
        for id in self.draw.sample(live[:12], min(len(live), 5)):
            if self.rollouts[id].state == State.QUEUED:
                self.rollouts[id] = self.rollouts[id].model_copy(update={"state": State.RUNNING, "attempt": 1})
            number = len(self.nodes[id]) + 1
            self.nodes[id].append(node(number, number - 1, [1], [2, 9], version=self.served[-1].pack()))
            if self.draw.random() < 0.5:
                good = self.draw.random() > 0.1
                self.end(id, Outcome.OK if good else Outcome.INFRASTRUCTURE, float(number % 2) if good else None)

    def end(self, id, outcome, reward=None):
        self.rollouts[id] = self.rollouts[id].model_copy(
            update={"state": State.FINISHED, "outcome": outcome, "reward": reward, "reason": outcome}
        )

    def cancel(self, group):
        for id in self.members(group):
            if self.rollouts[id].state != State.FINISHED:
                self.progress()  # the gateway records what is generated yet
                if self.rollouts[id].state != State.FINISHED:
                    self.end(id, Outcome.CANCELLED)
                self.strike("cancel")

    def read(self, group):
        return [Transcript(self.rollouts[id], [Attempt(1, list(self.nodes[id]))]) for id in self.members(group)]

    @property
    def started(self):
        return {each.group for each in self.rollouts.values() if each.state != State.QUEUED}

    @property
    def complete(self):
        ids = self.groups
        return {id for id in ids if all(self.rollouts[each].state == State.FINISHED for each in self.members(id))}

    @property
    def sampled(self):
        return sum(each.sampled for nodes in self.nodes.values() for each in nodes)


class Played(Rollouts):
    def __init__(self, world):
        super().__init__(None, "r", 0, None, lambda: None)
        self.world, self.watch = world, SimpleNamespace(moved=lambda: None, catch_up=self.catch_up)
        self.watch.until_complete = self.until_complete
        self.catch_up()

    def catch_up(self):
        self.watch.started, self.watch.complete = self.world.started, self.world.complete

    def until_complete(self, groups, tick):
        while not set(groups) <= self.watch.complete:
            self.wait("")

    def create(self, specs):
        self.open |= {spec.id: spec for spec in specs}
        self.world.strike("before create")
        self.world.create(specs)
        self.world.strike("after create")

    def known(self):
        return list(self.world.groups.values())

    def read(self, group):
        self.world.strike("read")
        return self.world.read(group)

    def wait(self, what):
        self.world.strike("wait")
        self.world.progress()
        self.catch_up()

    def cancel(self, group):
        self.world.strike("before cancel")
        self.world.cancel(group)

    def give_up(self):
        for group in list(self.world.groups):
            self.world.cancel(group)
        return [(each, spec.task) for spec in self.open.values() for each in self.read(spec.id)]


class Backend:
    """Learns nothing; what it was given is in its checkpoints."""

    critic = None

    def __init__(self, world, resumed):
        self.world = world
        found = checkpoint._read(resumed.checkpoint, "") if resumed and resumed.checkpoint else None
        self.step, self.tasks = (found.step, found.tasks) if found else (0, 0)
        self.trained = list(found.training["trained"]) if found else []
        self.version = next_version(world.served) if resumed else Version(0, 0)
        world.served.append(self.version)
        self.whole = True

    def update(self, packs, objective, standing_still):
        self.world.strike("forward")
        if self.world.draw.random() < 0.15:
            return Update(0, {})
        following = Version(self.version.lineage, self.version.number + 1)
        with standing_still:
            self.whole = False
            self.world.strike("writing")
            self.world.served.append(following)
        self.version, self.whole = following, True
        self.world.strike("after the update")
        return Update(len(packs), {})

    def save(self, folder, notes):
        self.world.strike("write")
        training = {"kind": "", "optimiser": {}, "updates": 0, "random": torch.zeros(1), "trained": self.trained}
        with checkpoint.appearing(folder) as unfinished:
            checkpoint.write_training(unfinished, notes, training)
            save_file({"weights": torch.zeros(1)}, unfinished / "model.safetensors")


class Watched(Trainer):
    """Notes what is trained, and how old it is."""

    def _update(self, taken, steps):
        update = super()._update(taken, steps)
        if update is not None and update.applied:
            groups = {sample.rollout.rpartition(".")[0] for sample in taken.samples}
            self._backend.trained += sorted(groups)
            version = Version(self._backend.version.lineage, self._backend.version.number - 1)
            # A life that is resumed cannot make what others sampled younger, but it drops what is too old.
            assert (age_of(taken.samples, version, self._lineages) or 0) <= self.most_stale
        return update


def settings(folder, schedule, evaluation, **trainer):
    return Config.model_validate(
        {
            "policy": {"model": "policy"},
            "tasks": {"train": "a:b", "held_out": "a:b"},
            "harness": {"kind": "python", "function": "a:b"},
            "evaluator": {"function": "a:b"},
            "trainer": {
                "steps": STEPS,
                "groups_per_step": 2,
                "group_size": 2,
                "checkpoint_every": 4,
                "safety": {"infrastructure": 0.6, "remake": 20, "skipped_updates": 99, "alike_steps": 999},
                "schedule": schedule,
                **trainer,
            },
            "evaluation": {"tasks": 2, "greedy_tasks": 1, **evaluation},
        }
    )


def live(world, folder, config, record, monkeypatch):
    """One life; its summary, or None if it was killed or failed."""
    begun = (folder / "begun").exists()
    resumed = take_up(folder, record, config) if begun else None
    (folder / "begun").touch()
    backend = Backend(world, resumed)
    record.lineages = go_on(record.lineages, backend.version, resumed.version if resumed else None)

    def gateway(call):
        if call.path.endswith("totals"):
            return Totals(calls=0, answers=0, sampled_tokens=world.sampled, lost=0, interrupted=0, undelivered=0)
        if "turnstile" in call.path:
            world.strike("turnstile")
            return Turnstile(run="r", state="closed")
        return [] if call.path.endswith("engines") else None

    display = SimpleNamespace(**dict.fromkeys(("note", "phase", "step", "metrics", "held_out"), lambda *_: None))
    trainer = Watched(
        config,
        folder,
        "r",
        gateway,
        lambda call: world.strike("engine"),
        backend,
        Played(world),
        display,
        iter({"number": number} for number in range(10_000)),
        [{"number": number} for number in range(2)],
        {},
        lambda *_: None,
        record.lineages,
        resumed,
    )
    trainer.most_stale = 0 if config.trainer.schedule.kind == "sync" else config.trainer.schedule.staleness
    try:
        return trainer.run()
    except (Killed, KeyboardInterrupt, RunFailed):
        return None


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


SCHEDULES = {
    "sync": {"kind": "sync"},
    "collocated": {"kind": "collocated", "staleness": STALENESS, "groups_in_flight": 5},
    "async": {"kind": "async", "staleness": STALENESS, "groups_in_flight": 4, "remake": 1},
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", SCHEDULES)
def test_whatever_ends_the_lives_of_a_run_its_books_balance(tmp_path, monkeypatch, kind, seed):
    monkeypatch.setattr(report, "draw", lambda *_: None)
    world, record = World(f"{kind} {seed}", mischief=0.02), RunRecord("r", 0.0, "")
    append = Report._append

    def strike_and_append(self, name, line):
        world.strike("write")
        append(self, name, line)
        world.strike("written")

    monkeypatch.setattr(Report, "_append", strike_and_append)
    evaluation = {"every": 3, "beside": world.draw.random() < 0.5}
    refill = world.draw.choice([0, 1])
    summary, life = None, 0
    while summary is None or summary.interrupted:
        world.quiet = life > 40
        now = world.draw.choice([SCHEDULES[kind], SCHEDULES[kind], *SCHEDULES.values()])  # it may be changed
        config = settings(tmp_path, now, evaluation, advantage={"refill": refill})
        summary = live(world, tmp_path, config, record, monkeypatch)
        life += 1
        if summary and summary.interrupted:
            assert summary.balanced, (life, summary)
    booked = lines(tmp_path / "transcripts.jsonl")
    assert summary.steps == STEPS
    assert len({line["rollout"] for line in booked}) == len(booked)
    assert {line["rollout"] for line in booked} == set(world.rollouts)
    assert summary.balanced, summary
    trained = checkpoint._read(tmp_path / summary.checkpoint, "").training["trained"]
    assert max(Counter(trained).values()) == 1
    steps = [line["step"] for line in lines(tmp_path / "metrics.jsonl") if "reward_mean" in line]
    assert steps == sorted(set(steps))
    told = {line["rollout"].rpartition(".")[0] for line in booked if line["fates"].get("trained")}
    assert told == set(trained)
    tasks = sorted({spec.task["number"] for spec in world.groups.values() if spec.purpose == Purpose.TRAIN})
    assert tasks == list(range(len(tasks)))
