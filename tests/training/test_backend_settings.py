"""What each setting of the one-machine backend changes, and that it changes nothing else."""

import math

import pytest
import torch
from policies import add_model, make_policy
from transformers import AutoModelForCausalLM
from updates import served, step, take, train, watching

from harnessed.config import ConfigError, Kl, Lora, Objective, Optimiser, Trainer
from harnessed.records import Version
from harnessed.training.backends import models, optimiser
from harnessed.training.backends.local import LocalBackend

FAST = Optimiser(learning_rate=1e-2)
SLOW = Optimiser(learning_rate=1e-3)
ON = Objective(kl=Kl(coefficient=0.1))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_model(make_policy(tmp_path_factory.mktemp("policy")))


def backend_of(model, folder, **settings):
    return LocalBackend(model, folder, Trainer(**{"optimiser": FAST} | settings))


def gradients(backend, number=0):
    packs = step(number)
    backend._gradient(packs, [backend._fixed(pack, several=False) for pack in packs], Objective())
    return [parameter.grad.clone() for parameter in backend._parameters]


def merged(backend):
    return torch.cat([tensor.flatten() for tensor in dict.fromkeys(backend._served.values())])


def test_lora_trains_adapters_only_and_serves_the_sum(model, tmp_path):
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    backend = backend_of(model, tmp_path / "w", lora=Lora(rank=4))
    before = served(tmp_path / "w")
    train(backend, [0, 1])
    plain, changed = backend._model.state_dict(), 0
    for name, weights in start.items():
        inner = name.replace("_proj.weight", "_proj.base_layer.weight")
        assert torch.equal(plain[inner], weights), name
        if inner != name:
            stem = inner.removesuffix("base_layer.weight")
            a, b = plain[f"{stem}lora_A.default.weight"], plain[f"{stem}lora_B.default.weight"]
            assert torch.allclose(backend._served[name], weights + 32 / 4 * b @ a, atol=1e-6)
            assert not torch.equal(backend._served[name], weights)
            changed += 1
        else:
            assert torch.equal(backend._served[name], weights)
    assert changed == 14  # two layers with seven linear maps each
    assert not torch.equal(served(tmp_path / "w"), before)


def test_what_lora_serves_is_what_it_trains(model, tmp_path):
    backend = backend_of(model, tmp_path / "w", lora=Lora(rank=4))
    train(backend, [0])
    engine = models.load(model, "policy.model")
    engine.load_state_dict(backend._served)
    ours, theirs, start = (
        backend._distributions(one, step()[0])[0].detach()
        for one in (backend._model, engine, models.load(model, "policy.model"))
    )
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, start, atol=1e-2)


def test_lora_adapts_the_named_layers_only(model, tmp_path):
    backend = backend_of(model, tmp_path / "w", lora=Lora(rank=4, targets=["q_proj"]))
    assert len(backend._parameters) == 4
    for targets in (["nothing"], ["lm_head"], ["embed_tokens"], ["q_norm"]):
        with pytest.raises(ConfigError, match=r"trainer\.lora\.targets"):
            backend_of(model, tmp_path / targets[0], lora=Lora(targets=targets))


def test_the_seed_decides_how_adapters_begin(model, tmp_path):
    def start(seed, name):
        torch.rand(1)  # what was drawn before does not matter
        backend = LocalBackend(model, tmp_path / name, Trainer(lora=Lora(rank=4)), seed=seed)
        return torch.cat([parameter.detach().flatten() for parameter in backend._parameters])

    assert torch.equal(start(1, "a"), start(1, "b"))
    assert not torch.equal(start(1, "c"), start(2, "d"))


def test_bfloat16_differs_a_little_and_keeps_float32_where_it_counts(model, tmp_path):
    exact, rough = (
        backend_of(model, tmp_path / precision, precision=precision) for precision in ("float32", "bfloat16")
    )
    packs = step()
    fine, coarse = (backend._distributions(backend._model, packs[0])[0] for backend in (exact, rough))
    assert fine.dtype == coarse.dtype == torch.float32
    assert 1e-5 < (fine - coarse).abs().max() < 0.05
    for a, b in zip(gradients(exact), gradients(rough), strict=True):
        assert b.dtype == torch.float32
        assert (a - b).norm() < 0.1 * a.norm() + 1e-6
    train(rough, [0, 0, 0])
    assert all(parameter.dtype == torch.float32 for parameter in rough._parameters)
    objective = [take(rough, [step()]).metrics["loss"] for _ in range(2)]
    assert all(map(math.isfinite, objective))


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradient_checkpointing_keeps_less_and_gives_the_same_gradients(model, tmp_path, lora, precision):
    kept_bytes = {}
    found = {}
    for checkpointing in (False, True):
        backend = backend_of(
            model,
            tmp_path / str(checkpointing),
            lora=lora,
            precision=precision,
            gradient_checkpointing=checkpointing,
        )
        held = []

        def pack(tensor, held=held):
            held.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backend._distributions(backend._model, step()[0])
        kept_bytes[checkpointing] = sum(held)
        found[checkpointing] = gradients(backend)
    assert kept_bytes[True] < kept_bytes[False] / 2
    for a, b in zip(found[False], found[True], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_the_divergence_from_the_reference_begins_at_zero_and_grows(model, tmp_path, lora):
    settings = {"objective": ON, "lora": lora, "optimiser": SLOW}
    backend = backend_of(model, tmp_path / "w", **settings)
    first, second, third = (take(backend, [step(0)], ON).metrics["kl_reference"] for _ in range(3))
    assert first == 0
    assert 0 < second < third
    # The reference is the start: what a fresh backend computes, this one's still does.
    fresh = backend_of(model, tmp_path / "fresh", **settings)
    for pack in step(1):
        kept, anew = (one._fixed(pack, several=False).reference_logprobs for one in (backend, fresh))
        assert torch.equal(kept, anew)
        assert not kept.requires_grad


def test_without_a_divergence_there_is_no_reference(model, tmp_path):
    backend = backend_of(model, tmp_path / "w")
    assert backend._reference is None
    assert backend._fixed(step()[0], several=False).reference_logprobs is None


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_several_steps_are_one_version_and_one_write(model, tmp_path, lora):
    backend = backend_of(model, tmp_path / "w", lora=lora)
    seen = [served(tmp_path / "w")]
    update = take(backend, [step(0), step(1), step(0), step(1)], standing_still=watching(tmp_path / "w", seen))
    assert update.metrics["optimiser_steps"] == 4
    assert backend.version == Version(0, 1)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])  # untouched until the engine stands still
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], served(tmp_path / "w"))  # and from then on


def test_the_old_policy_is_the_one_before_the_first_step(model, tmp_path):
    """The second step's ratio is measured from there: the metric kl is log pi_old - log pi over both steps."""
    backend = backend_of(model, tmp_path / "w")
    packs = step()
    (old,) = [backend._distributions(backend._model, pack)[0].detach() for pack in packs]
    single = backend_of(model, tmp_path / "single")
    train(single, [0])
    (new,) = [single._distributions(single._model, pack)[0].detach() for pack in packs]
    metrics = take(backend, [packs, packs]).metrics
    assert metrics["kl"] == pytest.approx((old - new).mean().item() / 2, abs=1e-5)


def test_several_steps_are_those_of_as_many_updates_where_nothing_is_clipped(model, tmp_path):
    free = Objective(loss="policy_gradient", importance={"level": "none"})
    together, apart = backend_of(model, tmp_path / "a"), backend_of(model, tmp_path / "b")
    take(together, [step(0), step(1)], free)
    train(apart, [0, 1], free)
    assert torch.equal(served(tmp_path / "a"), served(tmp_path / "b"))


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_a_step_that_is_not_finite_ends_the_update_and_keeps_those_before(model, tmp_path, lora):
    backend, alone = backend_of(model, tmp_path / "a", lora=lora), backend_of(model, tmp_path / "b", lora=lora)
    bad = step(1, advantages=[float("inf"), 1.0])
    update = take(backend, [step(0), bad, step(2)])
    assert update.applied
    assert (update.metrics["optimiser_steps"], update.metrics["optimiser_steps_skipped"]) == (1, 2)
    assert math.isfinite(update.metrics["loss"])
    take(alone, [step(0)])
    assert torch.equal(served(tmp_path / "a"), served(tmp_path / "b"))
    first = take(backend, [bad, step(0)])
    assert not first.applied
    assert backend.whole
    assert backend.version == Version(0, 1)
    assert torch.equal(served(tmp_path / "a"), served(tmp_path / "b"))
    train(backend, [3])
    train(alone, [3])
    assert torch.equal(served(tmp_path / "a"), served(tmp_path / "b"))  # the moments are as before too


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_an_update_that_is_interrupted_leaves_no_whole_policy(model, tmp_path, lora):
    backend = backend_of(model, tmp_path / "w", lora=lora)

    def interrupted():
        raise KeyboardInterrupt

    backend._optimiser.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        take(backend, [step()])
    assert not backend.whole


def test_the_learning_rate_rises_and_falls():
    def rates(**settings):
        made = Optimiser(learning_rate=1.0, **settings)
        return [round(optimiser.learning_rate(made, number, 6), 4) for number in range(1, 8)]

    assert rates() == [1.0] * 7
    assert rates(warmup=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(warmup=2, schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(schedule="cosine") == [1.0, 0.933, 0.75, 0.5, 0.25, 0.067, 0.0]
    assert rates(warmup=9, schedule="linear")[-1] == round(7 / 9, 4)


def test_the_schedule_moves_the_weights_accordingly(model, tmp_path):
    slow = FAST.model_copy(update={"warmup": 4})
    backend = backend_of(model, tmp_path / "w", optimiser=slow)
    moves = []
    for _ in range(3):
        before = served(tmp_path / "w")
        update = take(backend, [step()])
        moves.append((served(tmp_path / "w") - before).abs().max().item())
        assert update.metrics["learning_rate"] == pytest.approx(1e-2 * len(moves) / 4)
    assert moves[0] == pytest.approx(1e-2 / 4, rel=1e-3)  # Adam's first step is the learning rate


def test_moments_in_8_bits_train_nearly_as_those_in_32(model, tmp_path):
    pytest.importorskip("bitsandbytes")
    ends = {}
    for kind in ("adamw", "adamw8bit"):
        backend = backend_of(model, tmp_path / kind, optimiser=FAST.model_copy(update={"kind": kind}))
        start = served(tmp_path / kind)
        train(backend, [0, 1, 2])
        ends[kind] = served(tmp_path / kind) - start
    assert not torch.equal(ends["adamw"], ends["adamw8bit"])
    assert torch.cosine_similarity(ends["adamw"], ends["adamw8bit"], dim=0) > 0.95


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        optimiser.make([torch.nn.Parameter(torch.zeros(1))], Optimiser(kind="adamw8bit"))


def test_layers_keep_their_inputs_without_dropout(model):
    loaded = models.load(model, "policy.model")
    models.keep_layer_inputs_only(loaded)
    training = [module for module in loaded.modules() if module.training]
    assert [type(module).__name__ for module in training] == ["Qwen3DecoderLayer"] * 2
