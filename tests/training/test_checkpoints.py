"""Training that goes on from a checkpoint is training that was never interrupted, bit for bit."""

import json
import shutil

import pytest
import torch
from policies import add_model, make_policy
from transformers import AutoModelForCausalLM
from updates import kept, served, step, take, train

from harnessed.cli import _check_checkpoint
from harnessed.config import ConfigError, Kl, Lora, Objective, Optimiser, Trainer
from harnessed.records import Version
from harnessed.training.backends.local import LocalBackend

FAST = Optimiser(learning_rate=1e-2, weight_decay=0.01, warmup=2, schedule="cosine")
COMPARED = Objective(kl=Kl(coefficient=0.1))
WAYS = {
    "plain": {},
    "lora": {"lora": Lora(rank=4)},
    "bfloat16": {"precision": "bfloat16", "gradient_checkpointing": True},
    "lora-bfloat16": {"lora": Lora(rank=4, targets=["q_proj", "down_proj"]), "precision": "bfloat16"},
    "compared": {"objective": COMPARED},
    "lora-compared": {"objective": COMPARED, "lora": Lora(rank=4)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_model(make_policy(tmp_path_factory.mktemp("policy")))


def backend_of(model, folder, **settings):
    return LocalBackend(model, folder, Trainer(**{"optimiser": FAST, "steps": 8} | settings))


def saved(backend, folder, number=2):
    backend.save(folder, {"step": number, "version": list(backend.version), "tasks": 5, "groups": []})
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_steps_after_a_checkpoint_are_those_without_it(model, tmp_path, way):
    settings = WAYS[way]
    objective = settings.get("objective", Objective())
    updates = [[step(0)], [step(1), step(2), step(1), step(2)], [step(3)], [step(0), step(3)]]  # epochs too
    whole = backend_of(model, tmp_path / "whole", **settings)
    for steps in updates:
        take(whole, steps, objective)
    first = backend_of(model, tmp_path / "first", **settings)
    for steps in updates[:2]:
        take(first, steps, objective)
    checkpoint = saved(first, tmp_path / "step-00002")
    second = backend_of(model, tmp_path / "second", resume_from=checkpoint, **settings)
    assert torch.equal(served(tmp_path / "first"), served(tmp_path / "second"))
    for steps in updates[2:]:
        take(second, steps, objective)
    assert torch.equal(served(tmp_path / "whole"), served(tmp_path / "second"))
    assert not torch.equal(served(tmp_path / "whole"), served(tmp_path / "first"))
    for a, b in zip(whole._parameters, second._parameters, strict=True):
        assert torch.equal(a, b)


def test_moments_in_8_bits_go_on_too(model, tmp_path):
    pytest.importorskip("bitsandbytes")
    settings = {"optimiser": FAST.model_copy(update={"kind": "adamw8bit"})}
    whole, first = (backend_of(model, tmp_path / name, **settings) for name in ("whole", "first"))
    train(whole, [0, 1, 2, 3])
    train(first, [0, 1])
    second = backend_of(model, tmp_path / "second", resume_from=saved(first, tmp_path / "c"), **settings)
    train(second, [2, 3])
    assert torch.equal(served(tmp_path / "whole"), served(tmp_path / "second"))


def test_a_checkpoint_says_where_training_is(model, tmp_path):
    first = backend_of(model, tmp_path / "first")
    train(first, [0, 1])
    second = backend_of(model, tmp_path / "second", resume_from=saved(first, tmp_path / "c"))
    assert second.step == 2
    assert second.tasks == 5
    assert second.version == Version(1, 3)  # a lineage of its own
    rates = [take(second, [step()]).metrics["learning_rate"] for _ in range(2)]
    assert rates[1] < rates[0] == 1e-2  # the warm-up of two is over
    assert second.version == Version(1, 5)


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_a_checkpoint_is_a_folder_that_transformers_loads(model, tmp_path, lora):
    backend = backend_of(model, tmp_path / "w", lora=lora)
    train(backend, [0])
    checkpoint = saved(backend, tmp_path / "c")
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, weights in loaded.state_dict().items():
        assert torch.equal(weights, backend._served[name]), name
    assert (checkpoint / "adapter").is_dir() == (lora is not None)
    assert {path.stat().st_mode & 0o777 for path in checkpoint.rglob("*") if path.is_file()} == {0o644}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert (checkpoint / "tokenizer.json").is_file()


def test_the_adapter_is_one_that_peft_loads(model, tmp_path):
    from peft import PeftModel

    backend = backend_of(model, tmp_path / "w", lora=Lora(rank=4))
    train(backend, [0])
    checkpoint = saved(backend, tmp_path / "c")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), checkpoint / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    for name, weights in kept(checkpoint).items():
        assert torch.allclose(weights, merged[name], atol=1e-6), name


def test_a_checkpoint_that_is_not_finished_has_no_name(model, tmp_path, monkeypatch):
    backend = backend_of(model, tmp_path / "w")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        saved(backend, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    monkeypatch.undo()
    saved(backend, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_checkpoint_is_written_over_one_that_was_damaged(model, tmp_path):
    backend = backend_of(model, tmp_path / "w")
    checkpoint = saved(backend, tmp_path / "c")
    (checkpoint / "harnessed.json").write_text("{")
    saved(backend, tmp_path / "c")
    assert json.loads((checkpoint / "harnessed.json").read_text())["step"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"c", "w"}


def test_what_does_not_fit_a_checkpoint_is_said(model, tmp_path):
    plain, adapted = backend_of(model, tmp_path / "a"), backend_of(model, tmp_path / "b", lora=Lora(rank=4))
    for backend in (plain, adapted):
        train(backend, [0])
    checkpoint, with_adapter = saved(plain, tmp_path / "c"), saved(adapted, tmp_path / "d")

    def refused(match, policy=model, **settings):
        with pytest.raises(ConfigError, match=match):
            backend_of(policy, tmp_path / "w", **settings)
        shutil.rmtree(tmp_path / "w", ignore_errors=True)

    with pytest.raises(ConfigError, match=r"it has taken 2 steps: raise trainer\.steps above it"):
        _check_checkpoint(checkpoint, Trainer(optimiser=FAST, steps=2))
    _check_checkpoint(checkpoint, Trainer(optimiser=FAST, steps=3))
    refused("without LoRA", resume_from=checkpoint, lora=Lora())
    refused("with LoRA", resume_from=with_adapter)
    refused("has rank 4", resume_from=with_adapter, lora=Lora(rank=8))
    refused("other layers", resume_from=with_adapter, lora=Lora(rank=4, targets=["q_proj"]))
    refused("is not the model", with_adapter, resume_from=with_adapter, lora=Lora(rank=4))
    (checkpoint / "training.pt").write_bytes(b"nonsense")
    refused("cannot read", resume_from=checkpoint)
    (checkpoint / "training.pt").unlink()
    refused("training.pt is missing", resume_from=checkpoint)
    refused("is missing", resume_from=tmp_path / "nowhere")


def test_reading_a_checkpoint_runs_no_code(model, tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    backend = backend_of(model, tmp_path / "w")
    checkpoint = saved(backend, tmp_path / "c")
    torch.save({"optimiser": Trap()}, checkpoint / "training.pt")
    with pytest.raises(ConfigError, match="cannot read"):
        backend_of(model, tmp_path / "w2", resume_from=checkpoint)
    assert not (tmp_path / "ran").exists()


def test_the_notes_are_the_trainers(model, tmp_path):
    checkpoint = saved(backend_of(model, tmp_path / "w"), tmp_path / "c", 7)
    assert json.loads((checkpoint / "harnessed.json").read_text()) == {
        "step": 7,
        "version": [0, 0],
        "tasks": 5,
        "groups": [],
    }
