"""The recipes of docs/algorithms.md are configurations that train."""

import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from policies import add_model, make_policy
from updates import groups_of

from harnessed.loading import load
from harnessed.training.backends.local import LocalBackend
from harnessed.training.trainer import Trainer, packed_steps
from harnessed.training.valuing import of_penalties, penalise

PAGE = (Path(__file__).parent.parent.parent / "docs" / "algorithms.md").read_text()
RECIPES = dict(re.findall(r"^\| ([^|]+) \| `(\{.+\})` \|", PAGE.partition("## Recipes")[2], re.MULTILINE))
MINIMAL = {
    "policy": {"model": "model"},
    "tasks": {"train": "tasks:train", "held_out": "held_out.jsonl"},
    "harness": {"kind": "python", "function": "agent:run"},
    "evaluator": {"function": "agent:judge"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_model(make_policy(tmp_path_factory.mktemp("policy")))


def test_the_page_has_those_that_people_look_for():
    assert set(RECIPES) >= {"GRPO", "Dr. GRPO", "DAPO", "GSPO", "REINFORCE++", "RLOO", "PPO"}


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_takes_an_update(model, tmp_path, name):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL) + f"trainer: {RECIPES[name]}\n")
    config = load(path, ["trainer.optimiser.learning_rate=1e-2"])
    settings = config.trainer
    trainer = Trainer.__new__(Trainer)
    trainer._config, trainer._engine_stands_still = config, nullcontext
    trainer._backend = backend = LocalBackend(model, tmp_path / "w", settings)
    for number in (1, 2):
        groups = groups_of([(0.0, 1.0), (1.0, 0.0), (0.5, 0.0), (0.0, 1.0)])
        penalise(groups, backend, settings)
        taken, lesson = trainer._select(groups)
        update = trainer._update(taken, packed_steps(taken, settings, seed=number))
        assert update.steps == settings.optimiser_steps
        assert backend.version.number == number
        metrics = update.metrics | of_penalties(groups, settings)
        if lesson:
            metrics |= backend.critic.learn(lesson.packs, lesson.before, lesson.returns)
        assert all(map(math.isfinite, metrics.values()))
        assert ("kl_reference" in metrics) == ("kl" in RECIPES[name])
        assert ("value_loss" in metrics) == (name == "PPO")
