"""What was found by trying to break the trainer's settings, its checkpoints and its books."""

import shutil

import pytest
import torch
from policies import add_model, make_policy
from transformers import GPTNeoXForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaForCausalLM
from updates import step, train

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


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 300}


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [GPTNeoXForCausalLM, LlamaForCausalLM])
def test_models_name_their_parts_as_they_like(tmp_path, family):
    """GPT-NeoX (Pythia, say) has `gpt_neox` and `embed_out` where others have `model` and `lm_head`: the first update
    ended with an AttributeError."""
    policy = saved(family(family.config_class(**SMALL, intermediate_size=64)), tmp_path / "policy")
    backend = backend_of(policy, tmp_path / "w", **GAE)
    train(backend, [0])
    assert backend.critic.values(step(), 2).tolist() == [0.0, 0.0]


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    """Its hidden states went through the output layer alone, so another distribution was trained than was sampled."""
    made = GraniteForCausalLM(GraniteConfig(**SMALL, intermediate_size=64, num_key_value_heads=4, logits_scaling=8.0))
    with pytest.raises(ConfigError, match=r"policy\.model.*Granite.*logits"):
        backend_of(saved(made, tmp_path / "policy"), tmp_path / "w")
