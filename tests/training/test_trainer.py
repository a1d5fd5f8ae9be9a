"""The trainer's own order of things, with a backend that only looks."""

from itertools import count
from types import SimpleNamespace

import pytest
from scripted_engine import ScriptedEngine
from transcripts import node, transcript

from harnessed.client import Client
from harnessed.config import Advantage, Evaluation
from harnessed.config import Trainer as TrainerSettings
from harnessed.records import Fate, Outcome, Sampling, Turnstile, TurnstileState, Version
from harnessed.training.backends.local import Update
from harnessed.training.metrics import of_groups, of_taken
from harnessed.training.rollouts import Rollouts
from harnessed.training.samples import build
from harnessed.training.selection import select
from harnessed.training.trainer import Trainer

STEPS = [([], [])]
"""The backends here do not look at it."""


def trainer_with(engine, backend):
    trainer = Trainer.__new__(Trainer)
    trainer._config = SimpleNamespace(trainer=TrainerSettings())
    trainer._engine = Client(engine.url)
    trainer._backend = backend
    return trainer


def one_group():
    samples = [build(transcript([node(1, 0, [1], [2, 9])], id=f"g.{i}", reward=float(i))) for i in range(2)]
    return samples, select([samples], Advantage())


def test_the_engine_stands_still_while_the_weights_change_and_goes_on_afterwards():
    with ScriptedEngine(lambda prompt, call: [1]) as engine:
        seen = []

        def update(batches, objective, standing_still):
            with standing_still:
                seen.append(engine.paused)
            return Update(1, {})

        trainer = trainer_with(engine, SimpleNamespace(update=update))
        asked = []

        def gateway(call):
            asked.append(call.path.rpartition("/")[2])
            return Turnstile(run="r", state=TurnstileState.CLOSING if len(asked) == 1 else TurnstileState.CLOSED)

        trainer._gateway, trainer._run = gateway, "r"
        trainer._update(one_group()[1], STEPS)
        assert seen == [True]
        assert not engine.paused
        assert asked == ["close", "close", "open"]  # what does not finish in time is interrupted


def test_an_update_that_was_skipped_trained_nothing():
    with ScriptedEngine(lambda prompt, call: [1]) as engine:
        samples, taken = one_group()
        trainer_with(engine, SimpleNamespace(update=lambda *_: Update(0, {})))._update(taken, STEPS)
        assert [sample.fates for sample in samples] == [{Fate.UPDATE_SKIPPED: 2}] * 2
        assert not engine.paused


class Played(Rollouts):
    """Ends the rollouts of a group at once, with the rewards that its task names; None: by infrastructure."""

    def __init__(self):
        super().__init__(None, "r", 0, None, lambda: None)
        self.rounds = []

    def collect(self, specs):
        self.rounds.append(len(specs))
        return [self._end(spec) for spec in specs]

    def _end(self, spec):
        rewards = spec.task["rewards"]
        outcomes = [Outcome.INFRASTRUCTURE if reward is None else Outcome.OK for reward in rewards]
        return [
            transcript([node(1, 0, [1], [2, 9])], id=f"{spec.id}.{i}", reward=reward, outcome=outcome)
            for i, (reward, outcome) in enumerate(zip(rewards, outcomes, strict=True))
        ]


GOOD, EQUAL, BROKEN = [0.0, 1.0], [1.0, 1.0], [1.0, None]


@pytest.mark.parametrize(
    ("tasks", "refill", "rounds", "taken"),
    [
        ([GOOD, GOOD, GOOD], 2, [3], 3),
        ([GOOD, EQUAL, BROKEN, EQUAL, GOOD, GOOD], 2, [3, 2, 1], 3),
        ([GOOD, EQUAL, EQUAL, EQUAL, GOOD, GOOD], 1, [3, 2], 2),
        ([GOOD, EQUAL, EQUAL, GOOD], 0, [3], 1),
        ([EQUAL] * 9, 2, [3, 3, 3], 0),
        ([GOOD, EQUAL, EQUAL, GOOD], 2, [3, 1], 2),
        ([GOOD, EQUAL, EQUAL], 2, [3], 1),
    ],
    ids=[
        "nothing is missing",
        "two rounds",
        "one round",
        "off",
        "never any signal",
        "one task is left",
        "no task is left",
    ],
)
def test_further_tasks_are_run_in_place_of_groups_that_cannot_be_compared(tasks, refill, rounds, taken):
    trainer = Trainer.__new__(Trainer)
    settings = TrainerSettings(groups_per_step=3, group_size=2, advantage=Advantage(refill=refill))
    trainer._config = SimpleNamespace(trainer=settings, sampling=Sampling())
    trainer._train_tasks = ({"rewards": rewards, "number": number} for number, rewards in zip(count(), tasks))
    trainer._rollouts, trainer._backend = Played(), SimpleNamespace(critic=None)
    groups = trainer._roll_out(7)
    assert trainer._rollouts.rounds == rounds
    assert len({group.spec.id for group in groups}) == len({group.spec.seed for group in groups}) == len(groups)
    assert [group.spec.task["number"] for group in groups] == list(range(sum(rounds)))
    chosen = select([group.samples for group in groups], settings.advantage)
    line = of_groups(groups, 3) | of_taken(chosen, Version(0, 0))
    assert (line["groups"], line["groups_taken"], line["groups_refilled"]) == (sum(rounds), taken, sum(rounds) - 3)
    run = tasks[: sum(rounds)]
    assert line["groups_skipped"] == run.count(EQUAL)
    assert line.get("fates/group_skipped", 0) == run.count(EQUAL) * 2 * 2
    assert line.get("fates/trained", 0) == line["trained_tokens"] == taken * 2 * 2
    assert sum(value for name, value in line.items() if name.startswith("fates/")) == line["sampled_tokens"]


def test_held_out_tasks_are_run_in_between_by_setting():
    done = []
    trainer = Trainer.__new__(Trainer)
    trainer._config = SimpleNamespace(trainer=TrainerSettings(steps=4), evaluation=Evaluation(every=2))
    trainer._backend, trainer._history = SimpleNamespace(step=0), []
    trainer._report = SimpleNamespace(summary=lambda summary: None)
    trainer.step, trainer._evaluate, trainer._summary = done.append, done.append, lambda interrupted: None
    trainer.run()
    assert done == ["before", 1, 2, "2-steps-into", 3, 4, "after"]
