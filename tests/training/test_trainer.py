"""The trainer's own order of things, with a backend that only looks."""

from types import SimpleNamespace

from scripted_engine import ScriptedEngine
from transcripts import node, transcript

from harnessed.client import Client
from harnessed.config import Advantage
from harnessed.config import Trainer as TrainerSettings
from harnessed.records import Fate, Turnstile, TurnstileState
from harnessed.training.backends.local import Update
from harnessed.training.samples import build
from harnessed.training.selection import select
from harnessed.training.trainer import Trainer


def trainer_with(engine, backend):
    trainer = Trainer.__new__(Trainer)
    trainer._config = SimpleNamespace(run=SimpleNamespace(seed=0), trainer=TrainerSettings())
    trainer._steps = 0
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
            return Update(True, {})

        trainer = trainer_with(engine, SimpleNamespace(update=update))
        asked = []

        def gateway(call):
            asked.append(call.path.rpartition("/")[2])
            return Turnstile(run="r", state=TurnstileState.CLOSING if len(asked) == 1 else TurnstileState.CLOSED)

        trainer._gateway, trainer._run = gateway, "r"
        trainer._update(one_group()[1])
        assert seen == [True]
        assert not engine.paused
        assert asked == ["close", "close", "open"]  # what does not finish in time is interrupted


def test_an_update_that_was_skipped_trained_nothing():
    with ScriptedEngine(lambda prompt, call: [1]) as engine:
        samples, taken = one_group()
        trainer_with(engine, SimpleNamespace(update=lambda *_: Update(False, {})))._update(taken)
        assert [sample.fates for sample in samples] == [{Fate.UPDATE_SKIPPED: 2}] * 2
        assert not engine.paused
