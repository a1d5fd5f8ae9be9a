"""What was found by trying to break the trainer's settings, its checkpoints and its books."""

import shutil

import pytest
import torch
from policies import add_model, make_policy
from updates import train

from harnessed.config import Advantage, ConfigError, Critic, Lora, Optimiser, Trainer
from harnessed.training.backends.local import LocalBackend
from harnessed.training.selection import select

FAST = Optimiser(learning_rate=1e-2)
LORA = {"lora": Lora(rank=4)}
GAE = {"advantage": Advantage(kind="gae")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_model(make_policy(tmp_path_factory.mktemp("policy")))


def backend_of(model, folder, **settings):
    return LocalBackend(model, folder, Trainer(**{"optimiser": FAST} | settings))


def checkpoint_of(model, folder, **settings):
    """Of a run of one step."""
    backend = backend_of(model, folder / "before", **settings)
    train(backend, [0])
    backend.save(folder / "step-00001", {"step": 1, "version": list(backend.version), "tasks": 5, "groups": []})
    return folder / "step-00001"


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_plus_plus"])
def test_a_step_may_take_no_group(kind):
    assert select([], Advantage(kind=kind)).advantages == []
