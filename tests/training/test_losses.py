"""The objective against its formula written down again (formula.py), in float64 to 1e-9, on cases made by hand."""

import math
from dataclasses import fields, replace

import pytest
import torch
from formula import written_down

from harnessed.config import Importance, Kl, Objective
from harnessed.training.losses import Terms, importance_weights, kl_estimate, objective_loss, rollout_kl

ANSWERS = [0, 0, 0, 1, 1, 2, 3, 3, 3, 4]
"""Five answers: the first four of a rollout with several rows, the last one of a rollout with one row."""


def made_terms(weights=None, advantages=None, **others):
    """Ten tokens. Ratios and importance weights lie on both sides of their bounds, advantages have both signs."""
    tokens = torch.arange(10, dtype=torch.float64)
    old = -1.0 - tokens / 7
    shift = torch.tensor([0.3, -0.4, 0.02, 2.0, 0.9, 0.6, -0.3, 0.1, -0.6, 1.5], dtype=torch.float64)
    engine = torch.tensor([0.0, 0.1, -0.9, 0.0, -0.2, 0.3, -0.1, -1.2, 0.05, 0.0], dtype=torch.float64)
    signs = torch.tensor([1, 1, 1, -1, -1, 1, -0.5, -0.5, -0.5, -2], dtype=torch.float64)
    chosen = {
        "logprobs": (old + shift).requires_grad_(),
        "old_logprobs": old,
        "engine_logprobs": old + engine,
        "advantages": signs if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        "weights": torch.tensor(weights or [1 / 18] * 9 + [1 / 2], dtype=torch.float64),
        "answers": torch.tensor(ANSWERS),
        "entropies": (0.5 + tokens / 20).requires_grad_(),
        "reference_logprobs": old - 0.2 + tokens / 30,
    }
    return Terms(**(chosen | others))


def agree(terms, settings):
    """Loss and gradients equal those of the formula; gives the sums."""
    leaves = [terms.logprobs, terms.entropies]
    loss, sums = objective_loss(terms, settings)
    expected = -written_down(terms, settings)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    for got, wanted in zip(gradients(loss, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)
    return sums


def gradients(value, leaves):
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "policy_gradient"])
@pytest.mark.parametrize("old", ["recompute", "engine"])
def test_every_loss_is_its_formula(loss, old):
    sums = agree(made_terms(), Objective(loss=loss, old=old, clip_low=0.1, clip_high=0.3))
    if old == "recompute" and loss != "policy_gradient":
        assert sums["clip_fraction_high"] > 0
        assert sums["clip_fraction_low"] > 0
    if old == "engine":
        assert sums["importance_weight"] == 10, "pi_old is the engine's"


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_the_second_clip_bounds_tokens_with_a_negative_advantage(loss):
    terms = made_terms()
    sums = agree(terms, Objective(loss=loss, dual_clip=3.0))
    # Token 3 has ratio e^2 with advantage -1, token 9 e^1.5 with -2; in gspo so do both tokens of token 3's answer.
    assert sums["clip_fraction_dual"] == {"ppo": 2, "gspo": 3}[loss]
    (gradient, _) = gradients(objective_loss(terms, Objective(loss=loss, dual_clip=3.0))[0], [terms.logprobs] * 2)
    assert gradient[9] == 0


@pytest.mark.parametrize("level", ["token", "sequence", "none"])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_importance_weights_are_bounded_at_their_level(level, bound, loss):
    importance = Importance(level=level, bound=bound, cap=1.5)
    sums = agree(made_terms(), Objective(loss=loss, importance=importance))
    # Tokens 2 and 7 are above the cap, and with them the answers of three tokens that they belong to.
    assert sums["importance_bounded"] == {"token": 2, "sequence": 6, "none": 0}[level]
    assert sums["importance_weight_max"] == pytest.approx(
        {"token": math.exp(1.2), "sequence": math.exp(1.25), "none": 1.0}[level]
    )


def test_a_masked_weight_zeroes_its_term_and_changes_no_other():
    """T_r is not what is left: the weights of the other tokens are as before, and so are KL and entropy terms."""
    terms, settings = made_terms(), Objective(importance=Importance(bound="mask", cap=1.5))
    loss, _ = objective_loss(terms, settings)
    (gradient,) = torch.autograd.grad(loss, [terms.logprobs])
    free, _ = objective_loss(terms, Objective(importance=Importance(cap=100.0)))
    (whole,) = torch.autograd.grad(free, [terms.logprobs])
    assert gradient[2] == gradient[7] == 0
    assert whole[2] != 0
    kept = [t for t in range(10) if t not in (2, 7)]
    assert gradient[kept].tolist() == whole[kept].tolist()
    everything = Objective(
        importance=Importance(bound="mask", cap=1e-9), entropy=0.3, kl=Kl(coefficient=0.1, estimator="k2")
    )
    assert agree(terms, everything)["importance_weight"] == 0
    assert objective_loss(terms, everything)[0] != 0


def test_importance_weights_have_no_gradient():
    """On the policy itself pi_old is pi, with a gradient if nobody takes it away."""
    logprobs = torch.full((10,), -1.0, dtype=torch.float64, requires_grad=True)
    terms = made_terms(logprobs=logprobs, old_logprobs=logprobs, engine_logprobs=torch.full_like(logprobs, -1.2))
    loss, _ = objective_loss(terms, Objective())
    (gradient,) = torch.autograd.grad(loss, [logprobs])
    torch.testing.assert_close(gradient, -terms.weights * math.exp(0.2) * terms.advantages)
    found = importance_weights(logprobs - terms.engine_logprobs, terms.answers, Objective())
    assert not any(weights.requires_grad for weights in found)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss", ["ppo", "policy_gradient"])
def test_the_kl_term_is_its_formula(estimator, loss):
    settings = Objective(loss=loss, kl=Kl(coefficient=0.7, estimator=estimator))
    terms = made_terms()
    sums = agree(terms, settings)
    estimates = kl_estimate(terms.logprobs, terms.reference_logprobs, estimator)
    assert sums["kl_reference"].item() == pytest.approx(estimates.sum().item())


def test_a_kl_term_in_the_reward_is_not_in_the_loss():
    terms = made_terms()
    in_reward = objective_loss(terms, Objective(kl=Kl(coefficient=0.7, place="reward")))[0]
    assert in_reward == objective_loss(terms, Objective())[0]


def test_a_kl_term_without_a_reference_says_so():
    with pytest.raises(ValueError, match="needs terms"):
        objective_loss(made_terms(reference_logprobs=None), Objective(kl=Kl(coefficient=0.1)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_a_rollout_is_the_sum_over_its_tokens(estimator):
    terms = made_terms()
    rollouts = torch.tensor([0] * 9 + [2])
    found = rollout_kl(terms.logprobs, terms.reference_logprobs, rollouts, 3, estimator)
    each = kl_estimate(terms.logprobs, terms.reference_logprobs, estimator).detach()
    torch.testing.assert_close(found, torch.stack([each[:9].sum(), each[0] * 0, each[9]]))
    assert not found.requires_grad


def test_the_entropy_bonus_is_its_formula():
    sums = agree(made_terms(), Objective(entropy=0.05))
    assert sums["entropy"].item() == pytest.approx(sum(0.5 + t / 20 for t in range(10)))


def test_stale_and_fresh_tokens_differ_in_nothing_but_the_importance_weight():
    """In one row, tokens 0 to 4 were sampled by an older policy: what the engine recorded for them is all that says so.

    The ratio that is clipped is pi / pi_old for both.
    """
    fresh = made_terms(engine_logprobs=made_terms().old_logprobs)
    engine = fresh.engine_logprobs.clone()
    engine[:5] += 0.25
    stale = replace(fresh, engine_logprobs=engine)
    sums = [agree(terms, Objective()) for terms in (fresh, stale)]
    assert sums[0]["clip_fraction_high"] == sums[1]["clip_fraction_high"]
    (before,), (after,) = (
        torch.autograd.grad(objective_loss(terms, Objective())[0], [fresh.logprobs]) for terms in (fresh, stale)
    )
    torch.testing.assert_close(after[:5], before[:5] * math.exp(-0.25))
    assert after[5:].tolist() == before[5:].tolist()


def test_equal_rewards_leave_what_kl_and_entropy_ask_for():
    terms = made_terms(advantages=[0.0] * 10)
    assert objective_loss(terms, Objective())[0] == 0
    agree(terms, Objective(entropy=0.1, kl=Kl(coefficient=0.2)))


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "policy_gradient"])
def test_no_trained_token_is_a_loss_of_nothing(loss):
    empty = Terms(*(getattr(made_terms(), field.name)[:0] for field in fields(Terms)))
    loss_, sums = objective_loss(empty, Objective(loss=loss, entropy=0.1))
    assert loss_ == 0
    assert all(value == 0 for value in sums.values())


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "policy_gradient"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_micro_batches_of_whole_answers_add_up(loss, level):
    settings = Objective(loss=loss, importance=Importance(level=level), entropy=0.1, kl=Kl(coefficient=0.1))
    terms = made_terms()
    whole, sums = objective_loss(terms, settings)
    parts = []
    for kept in ([5, 3, 4, 9], [8, 7, 6, 0, 2, 1]):
        cut = {field.name: getattr(terms, field.name)[kept] for field in fields(Terms)}
        parts.append(objective_loss(Terms(**cut | {"answers": cut["answers"] % len(kept)}), settings))
    assert sum(part for part, _ in parts).item() == pytest.approx(whole.item(), abs=1e-12)
    for name, value in sums.items():
        together = max if name.endswith("_max") else sum
        assert together(float(part[name]) for _, part in parts) == pytest.approx(float(value)), name


def test_it_works_in_float32():
    terms = made_terms()
    single = Terms(
        *(
            value.detach().float().requires_grad_(value.requires_grad) if value.is_floating_point() else value
            for value in (getattr(terms, field.name) for field in fields(Terms))
        )
    )
    settings = Objective(entropy=0.1, kl=Kl(coefficient=0.1))
    loss, _ = objective_loss(single, settings)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(objective_loss(terms, settings)[0].item(), rel=1e-5)
