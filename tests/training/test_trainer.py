"""The trainer's own order of things, with a backend that only looks."""

import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from scripted_engine import ScriptedEngine
from transcripts import node, transcript

from harnessed.client import Client
from harnessed.config import Advantage, ConfigError, Run
from harnessed.config import Trainer as TrainerSettings
from harnessed.records import Fate, Outcome, Sampling, Turnstile, TurnstileState, Version
from harnessed.training.backends.local import Update
from harnessed.training.batches import Alike
from harnessed.training.failures import WrongVersion
from harnessed.training.flights import Flights
from harnessed.training.lineages import Lineage
from harnessed.training.metrics import Clock, of_groups, of_taken
from harnessed.training.rollouts import Rollouts
from harnessed.training.samples import build
from harnessed.training.selection import select
from harnessed.training.trainer import Trainer, plan, uninterrupted

STEPS = [([], [])]
"""The backends here do not look at it."""


def trainer_with(engine, backend, **schedule):
    trainer = Trainer.__new__(Trainer)
    trainer._config = SimpleNamespace(trainer=TrainerSettings(schedule=schedule))
    trainer._engine = Client(engine.url)
    trainer._backend = backend
    trainer._clock, trainer._phase = Clock(), lambda name: nullcontext()
    trainer._rollouts = SimpleNamespace(watch=SimpleNamespace(catch_up=lambda: None))
    trainer._flights = SimpleNamespace(refresh=lambda version: None)
    return trainer


def one_group():
    samples = [build(transcript([node(1, 0, [1], [2, 9])], id=f"g.{i}", reward=float(i))) for i in range(2)]
    return samples, select([samples], Advantage())


@pytest.mark.parametrize(
    ("schedule", "asked"),
    [
        ({"kind": "sync"}, ["interrupt", "open"]),
        ({"kind": "collocated", "at_update": "finish"}, ["finish", "interrupt", "open"]),
        ({"kind": "async"}, ["interrupt", "open"]),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_the_engine_stands_still_while_the_weights_change_and_goes_on_afterwards(schedule, asked):
    with ScriptedEngine(lambda prompt, call: [1]) as engine:
        seen, heard = [], []

        def update(batches, objective, standing_still):
            seen.append(engine.paused)
            with standing_still:
                seen.append(engine.paused)
            return Update(1, {})

        def gateway(call):
            heard.append((call.body or {}).get("mode") or call.path.rpartition("/")[2])
            # What does not finish in time is interrupted.
            state = TurnstileState.CLOSING if heard[-1] == "finish" else TurnstileState.CLOSED
            return Turnstile(run="r", state=state)

        trainer = trainer_with(engine, SimpleNamespace(update=update, version=Version(0, 0)), **schedule)
        trainer._gateway, trainer._run = gateway, "r"
        with trainer._device():
            trainer._update(one_group()[1], STEPS)
        assert seen == [schedule["kind"] != "async", True]  # computed beside the engine, written without it
        assert not engine.paused
        assert heard == asked


def test_an_update_that_was_skipped_trained_nothing():
    with ScriptedEngine(lambda prompt, call: [1]) as engine:
        samples, taken = one_group()
        trainer_with(engine, SimpleNamespace(update=lambda *_: Update(0, {})))._update(taken, STEPS)
        assert [sample.fates for sample in samples] == [{Fate.UPDATE_SKIPPED: 2}] * 2
        assert not engine.paused


class Played(Rollouts):
    """Ends the rollouts of a group while the trainer waits, with the rewards that its task names; None: by
    infrastructure."""

    def __init__(self):
        watch = SimpleNamespace(started=set(), complete=set(), moved=lambda: None, catch_up=lambda: None)
        super().__init__(None, "r", 0, watch, lambda: None)
        self.rounds = []
        self.version = lambda: Version(0, 0)
        """That the engine serves."""

    def create(self, specs):
        self.rounds.append(len(specs))
        self.open |= {spec.id: spec for spec in specs}

    def wait(self, what):
        self.watch.started |= self.open.keys()
        self.watch.complete |= self.open.keys()

    def read(self, group):
        rewards = self.open[group].task["rewards"]
        version = self.version().pack()
        outcomes = [Outcome.INFRASTRUCTURE if reward is None else Outcome.OK for reward in rewards]
        return [
            transcript([node(1, 0, [1], [2, 9], version=version)], id=f"{group}.{i}", reward=reward, outcome=outcome)
            for i, (reward, outcome) in enumerate(zip(rewards, outcomes, strict=True))
        ]


def trainer_of(tasks, **settings):
    """A trainer of rollouts that are played, whose steps only note what they were given."""
    trainer = Trainer.__new__(Trainer)
    trainer._config = SimpleNamespace(trainer=TrainerSettings(**settings), sampling=Sampling(), run=Run())
    trainer._train_tasks = ({"rewards": rewards, "number": number} for number, rewards in enumerate(tasks))
    trainer._rollouts = Played()
    trainer._flights, trainer._plan = (
        Flights(trainer._rollouts, trainer._config, [Lineage(0, 0, 0)]),
        plan(trainer._config.trainer),
    )
    trainer._backend, trainer._steps, trainer._tasks_ended = SimpleNamespace(version=Version(0, 0)), 0, False
    trainer._rollouts.version = lambda: trainer._backend.version
    trainer._display, trainer._phase = SimpleNamespace(step=int, phase=str), lambda name: nullcontext()
    trainer._alike, trainer._remade = Alike(trainer._config.trainer.safety), 0
    trainer.taken = []

    def step(groups):
        trainer._steps += 1
        trainer._backend.version = Version(0, trainer._steps)
        trainer.taken.append(groups)

    trainer._step = step
    trainer._validation = SimpleNamespace(look=lambda: None, finish=lambda: None)
    return trainer


GOOD, EQUAL, BROKEN = [0.0, 1.0], [1.0, 1.0], [1.0, None]


@pytest.mark.parametrize(
    ("tasks", "refill", "rounds", "taken"),
    [
        ([GOOD, GOOD, GOOD], 2, [3], 3),
        ([GOOD, EQUAL, BROKEN, EQUAL, GOOD, GOOD], 2, [3, 2, 1], 3),
        ([GOOD, EQUAL, EQUAL, EQUAL, EQUAL, GOOD, GOOD], 1, [3, 2, 1], 2),
        ([GOOD, EQUAL, EQUAL, GOOD], 0, [3], 1),
        ([EQUAL] * 9, 2, [3, 3, 3], 0),
        ([GOOD, EQUAL, EQUAL, GOOD], 2, [3, 1], 2),
        ([GOOD, EQUAL, EQUAL], 2, [3, 0], 1),
    ],
    ids=[
        "nothing is missing",
        "two rounds",
        "as many as allowed",
        "off",
        "never any signal",
        "one task is left",
        "no task is left",
    ],
)
def test_further_tasks_are_run_in_place_of_groups_that_cannot_be_compared(tasks, refill, rounds, taken):
    trainer = trainer_of(tasks, steps=1, groups_per_step=3, group_size=2, advantage=Advantage(refill=refill))
    settings = trainer._config.trainer
    trainer._train()
    (groups,) = trainer.taken
    assert trainer._rollouts.rounds == rounds
    assert len({group.spec.id for group in groups}) == len({group.spec.seed for group in groups}) == len(groups)
    assert sorted(group.spec.task["number"] for group in groups) == list(range(sum(rounds)))
    chosen = select([group.samples for group in groups], settings.advantage)
    line = of_groups(groups, 3) | of_taken(chosen, Version(0, 0), [Lineage(0, 0, 0)])
    assert (line["groups"], line["groups_taken"], line["groups_refilled"]) == (sum(rounds), taken, sum(rounds) - 3)
    run = tasks[: sum(rounds)]
    assert line["groups_skipped"] == run.count(EQUAL)
    assert line.get("fates/group_skipped", 0) == run.count(EQUAL) * 2 * 2
    assert line.get("fates/trained", 0) == line["trained_tokens"] == taken * 2 * 2
    assert sum(value for name, value in line.items() if name.startswith("fates/")) == line["sampled_tokens"]


def test_tasks_that_do_not_last_for_an_update_are_a_clear_error():
    trainer = trainer_of([GOOD] * 5, steps=2, groups_per_step=3, group_size=2)
    with pytest.raises(ConfigError, match=r"tasks\.train gives 2 tasks where 3 are needed"):
        trainer._train()
    assert len(trainer.taken) == 1


def test_no_more_groups_are_created_than_the_updates_take():
    trainer = trainer_of([GOOD] * 99, steps=3, groups_per_step=2, group_size=2, schedule={"kind": "collocated"})
    trainer._train()
    assert sum(trainer._rollouts.rounds) == 6
    assert trainer._flights.all == []


def test_an_engine_that_serves_what_the_trainer_has_not_written_ends_the_run():
    """It maps another folder: its versions stay behind."""
    trainer = trainer_of([GOOD] * 99, steps=2, groups_per_step=2, group_size=2)
    trainer._rollouts.version = lambda: Version(0, 0)
    with pytest.raises(WrongVersion, match=r"group r\.train\.000002 with weights of 1 updates ago"):
        trainer._train()


def test_an_interruption_waits_for_the_end_of_the_outermost_block(interruptible):
    """Steps are counted after the books of their groups, which are such a block as well."""
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("books")
        done.append("step")
    assert done == ["books", "step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_group_that_was_given_up_for_another_of_its_task_is_not_taken_up_again():
    """Its trainer died before a checkpoint named it."""
    trainer = trainer_of([BROKEN], steps=1, groups_per_step=1, group_size=2)
    rollouts, first = trainer._rollouts, "r.train.000000"
    rollouts.known, rollouts.cancel = lambda: list(rollouts.open.values()), lambda group: None
    trainer._create(1, least=0)
    trainer._wait("the group")
    trainer._flights.drop((first,), again=True)
    for consumed, goes_on in (([], [f"{first}-1"]), ([f"{first}-1"], [])):
        later = Flights(rollouts, trainer._config, [Lineage(0, 0, 0)])
        assert [group.spec.id for group in later.restore(consumed, Version(0, 0))] == [first]
        assert [flight.group for flight in later.all] == goes_on
        assert later.tasks == 1


def test_tasks_count_as_begun_when_their_groups_exist(interruptible):
    """A checkpoint says how many were."""
    trainer = trainer_of([GOOD] * 2, steps=1, groups_per_step=1, group_size=2)
    create, trainer._rollouts.create = trainer._rollouts.create, lambda specs: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer._create(1, least=0)
    assert trainer._flights.tasks == 0
    trainer._rollouts.create = create
    trainer._create(1, least=0)
    assert trainer._flights.tasks == 1


@pytest.mark.parametrize("schedule", [{"kind": "sync"}, {"kind": "collocated"}], ids=lambda each: each["kind"])
@pytest.mark.parametrize("refill", [0, 1])
@pytest.mark.parametrize(
    ("tasks", "steps"), [([GOOD] * 4, 2), ([GOOD, EQUAL] * 2, 2), ([GOOD, GOOD, GOOD, EQUAL, EQUAL], 2)]
)
def test_all_tasks_are_trained_before_their_end_is_told(tasks, steps, refill, schedule):
    """Also where groups begin beside an update."""
    advantage = Advantage(refill=refill)
    trainer = trainer_of(tasks, steps=9, groups_per_step=2, group_size=2, schedule=schedule, advantage=advantage)
    step = trainer._step

    def step_and_top_up(groups):
        trainer._top_up()
        step(groups)

    def wait(what):
        assert trainer._flights.all, "it waits for nothing"
        Played.wait(trainer._rollouts, what)

    trainer._step, trainer._rollouts.wait = step_and_top_up, wait
    with pytest.raises(ConfigError, match=r"tasks\.train gives \d tasks where \d are needed"):
        trainer._train()
    taken = [group.spec.task["number"] for groups in trainer.taken for group in groups]
    assert sorted(taken) == list(range(len(taken)))
    assert len(tasks) - len(taken) < 2
