"""One optimiser step of the one-machine backend, against the formula written down again with plain autograd."""

from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from policies import add_model, make_policy
from transcripts import node, transcript
from transformers import AutoModelForCausalLM

from harnessed.config import ConfigError, Objective, Optimiser, Trainer
from harnessed.records import Version
from harnessed.training.backends.local import LocalBackend
from harnessed.training.batching import scored
from harnessed.training.packing import pack
from harnessed.training.samples import build


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return add_model(make_policy(tmp_path_factory.mktemp("policy")))


def step_of(temperature):
    """Two rollouts, one of them with two rows; engine log-probabilities far off, so that the cap acts."""
    first = [
        node(1, 0, [1, 2], [3, 258], temperature=temperature, logprobs=[-9.0, -1.0]),
        node(2, 1, [4], [5, 6, 258], temperature=temperature, logprobs=[-4.0, -5.0, -6.0]),
        node(3, 1, [4, 4], [7, 258], temperature=temperature, logprobs=[-5.0, -5.5]),
    ]
    second = [node(1, 0, [1], [8, 258], temperature=temperature, logprobs=[-5.5, -5.5])]
    samples = [build(transcript(first, id="g.0")), build(transcript(second, id="g.1", reward=0.0))]
    return samples, [1.5, -0.5]


def packs(samples, advantages, budget):
    """The only optimiser step of an update."""
    return [pack([scored(samples, advantages, "rollout")], budget, share=True)]


def plain_loss(model, samples, advantages, temperature, cap):
    """-J of the objective, token by token; at the start of an update pi_old is pi."""
    total = torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        for row in sample.rows:
            logits = model(input_ids=torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
            for place in np.flatnonzero(row.trained):
                distribution = torch.log_softmax(logits[place - 1] / temperature, -1)
                logprob = distribution[int(row.tokens[place])]
                importance = min(cap, float(torch.exp(logprob.detach() - float(row.logprobs[place]))))
                ratio = torch.exp(logprob - logprob.detach())
                total = total - importance * ratio * advantage / (len(samples) * sample.trained_tokens)
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("budget", [1, 1000])
def test_two_steps_are_those_of_the_formula(policy, tmp_path, temperature, budget):
    optimiser = Optimiser(learning_rate=1e-2, clip_norm=0.05)
    backend = LocalBackend(policy, tmp_path / "weights", Trainer(optimiser=optimiser))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=optimiser.betas, weight_decay=0.0)
    samples, advantages = step_of(temperature)
    for number in (1, 2):
        update = backend.update(packs(samples, advantages, budget), Objective(), nullcontext())
        plain.zero_grad()
        loss = plain_loss(model, samples, advantages, temperature, 2.0)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        plain.step()
        assert update.applied
        assert backend.version == Version(0, number)
        assert update.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert update.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert norm > 0.05  # clipping had something to do
        for ours, theirs in zip(backend._model.parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=2e-4)


def two_groups():
    """Log-probabilities near those of a fresh model, so that both bounds of the ratio act in later steps."""
    groups = []
    for group in range(2):
        nodes = [[node(1, 0, [1, 2 + i], [3, 4 + group, 258], logprobs=[-5.5] * 3)] for i in range(2)]
        groups.append([build(transcript(each, id=f"g{group}.{i}")) for i, each in enumerate(nodes)])
    return groups


def test_several_steps_of_an_update_have_the_same_old_policy_and_one_standstill(policy, tmp_path):
    settings, advantages = Objective(), [1.0, -1.0]
    free = Optimiser(learning_rate=1e-2, clip_norm=1e9)
    backend = LocalBackend(policy, tmp_path / "weights", Trainer(optimiser=free))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=Optimiser().betas, weight_decay=0.0)
    groups = two_groups()
    old = {row.rollout: row_logprobs(model, row).detach() for group in groups for row in (s.rows[0] for s in group)}
    losses, clipped = [], 0
    for group in [*groups, *groups]:
        plain.zero_grad()
        loss = torch.zeros(())
        for sample, advantage in zip(group, advantages, strict=True):
            (row,) = sample.rows
            ratio = torch.exp(row_logprobs(model, row) - old[row.rollout])
            importance = torch.exp(old[row.rollout] - torch.from_numpy(row.logprobs[row.trained])).clamp(max=2.0)
            bounded = ratio.clamp(0.8, 1.2)
            loss = loss - (importance * torch.minimum(ratio * advantage, bounded * advantage)).sum() / 6
            clipped += int(((ratio - bounded) * advantage > 0).sum())  # elsewhere the minimum is the ratio itself
        loss.backward()
        plain.step()
        losses.append(loss.item())
    assert clipped  # pi_old of the second step is not its own
    entered = []

    @contextmanager
    def standing_still():
        entered.append(backend._weights.readable())
        yield
        entered.append(backend._weights.readable())

    steps = [pack([scored(group, advantages, "rollout")], 1000, share=True) for group in groups] * 2
    update = backend.update(steps, settings, standing_still())
    assert update.applied
    assert update.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    found = update.metrics["clip_fraction_low"] + update.metrics["clip_fraction_high"]
    assert found == pytest.approx(clipped / 24)
    assert entered == [Version(0, 0), Version(0, 1)] == [Version(0, 0), backend.version]
    for ours, theirs in zip(backend._model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)


def row_logprobs(model, row):
    """Of a row's trained tokens."""
    logits = model(input_ids=torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
    at = torch.from_numpy(np.flatnonzero(row.trained))
    return torch.log_softmax(logits, -1)[at - 1, torch.from_numpy(row.tokens)[at].long()]


@pytest.mark.parametrize("budget", [1, 1000])
def test_what_engine_and_trainer_compute_differently_is_told(policy, tmp_path, budget):
    backend = LocalBackend(policy, tmp_path / "weights", Trainer())
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    samples, advantages = step_of(1.0)
    differences = []
    for row in (row for sample in samples for row in sample.rows):
        logits = model(input_ids=torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0].detach()
        logprobs = torch.log_softmax(logits, -1).numpy()
        differences += [abs(logprobs[i - 1, row.tokens[i]] - row.logprobs[i]) for i in np.flatnonzero(row.trained)]
    metrics = backend.update(packs(samples, advantages, budget), Objective(), nullcontext()).metrics
    assert metrics["logprob_difference_max"] == pytest.approx(max(differences), abs=1e-4)
    assert metrics["logprob_difference"] == pytest.approx(np.mean(differences), abs=1e-4)


def test_an_update_that_is_not_finite_is_not_applied(policy, tmp_path):
    backend = LocalBackend(policy, tmp_path / "weights", Trainer(optimiser=Optimiser(learning_rate=1e-2)))
    before = [parameter.detach().clone() for parameter in backend._model.parameters()]
    samples, _ = step_of(1.0)
    update = backend.update(packs(samples, [float("inf"), 1.0], 1000), Objective(), nullcontext())
    assert not update.applied
    assert backend.version == Version(0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, backend._model.parameters(), strict=True))
    assert backend.update(packs(samples, [1.0, -1.0], 1000), Objective(), nullcontext()).applied


def test_weights_that_were_served_before_go_on_in_a_new_lineage(policy, tmp_path):
    first = LocalBackend(policy, tmp_path / "weights", Trainer())
    samples, advantages = step_of(1.0)
    first.update(packs(samples, advantages, 1000), Objective(), nullcontext())
    assert LocalBackend(policy, tmp_path / "weights", Trainer()).version == Version(1, 2)


def test_a_model_that_cannot_be_loaded_is_a_configuration_error(policy, tmp_path):
    damaged = add_model(make_policy(tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot load"):
        LocalBackend(damaged, tmp_path / "weights", Trainer())
