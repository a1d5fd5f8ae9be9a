"""The objective, as a pure function of tensors. Backends call it once per micro-batch; the losses of a step add up.

For tokens t of a micro-batch, with A their advantage and w their weight (1 / (R * T_r) by default):

    J = sum_t w_t * (rho_t * l_t - beta * k_t + eta * H_t)

l is what `settings.loss` names, rho the importance weight between engine and trainer, k the estimate of the KL
divergence to the reference, H the entropy. The weights are fixed over the whole optimiser step beforehand
(batching.py), so a mask of rho makes a term zero and changes no weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from harnessed.config import Objective


@dataclass(frozen=True, slots=True)
class Terms:
    """Per-token inputs, each of shape [N], the trained tokens of a micro-batch; float32 or float64, log-probabilities
    in nats. Whole answers: a sequence-level ratio needs all trained tokens of its answer."""

    logprobs: Tensor
    """log pi of the current policy, with a gradient."""
    old_logprobs: Tensor
    """log pi_old: the trainer's own, from when the update started. Not used in the loss where `old` is `engine`."""
    engine_logprobs: Tensor
    """log pi_engine: recorded when the token was sampled."""
    advantages: Tensor
    """A of the token's rollout or call."""
    weights: Tensor
    """w, fixed over the optimiser step: 1 / (R * T_r) by default."""
    answers: Tensor
    """int64: which answer of the micro-batch the token belongs to, 0 .. N - 1."""
    entropies: Tensor
    """H of the distribution that the token was sampled from, in nats, with a gradient where it has a coefficient."""
    reference_logprobs: Tensor | None = None
    """log pi_ref; needed for a KL term in the loss."""


def objective_loss(terms: Terms, settings: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss -J, a scalar, and sums for the metrics (`metric_sums`).

    It is a sum over the micro-batch: the loss of an optimiser step is the sum over its micro-batches, whatever the cut.
    Raises ValueError where a KL term has no reference.
    """
    old = terms.engine_logprobs if settings.old == "engine" else terms.old_logprobs.detach()
    log_ratio = terms.logprobs - old
    importance, uncapped = importance_weights(old - terms.engine_logprobs, terms.answers, settings)
    objective, clipped = policy_objective(log_ratio, terms, settings)
    total = importance * objective
    sums = metric_sums(terms, log_ratio, importance, uncapped) | clipped
    if settings.kl.coefficient and settings.kl.place == "loss":
        if terms.reference_logprobs is None:
            raise ValueError("trainer.objective.kl: a KL term in the loss needs terms.reference_logprobs")
        divergence = kl_estimate(terms.logprobs, terms.reference_logprobs, settings.kl.estimator)
        total = total - settings.kl.coefficient * divergence
        sums["kl_reference"] = divergence.detach().sum()
    if settings.entropy:
        total = total + settings.entropy * terms.entropies
    return -(terms.weights * total).sum(), sums


def policy_objective(log_ratio: Tensor, terms: Terms, settings: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    """l of every token, [N], and how many tokens were clipped. `log_ratio`: log pi / pi_old, [N].

    ppo: min(ratio A, clip(ratio) A) (PPO, arXiv 1707.06347, equation 7; the two bounds as in DAPO, 2503.14476, eq. 8).
    gspo: the same with the ratio of the answer y, exp(1/|y| sum log pi / pi_old) (GSPO, 2507.18071, eq. 5 and 7).
    cispo: clip(ratio) A log pi, no gradient through the ratio (MiniMax-M1, 2506.13585, eq. 4 and 5).
    policy_gradient: A log pi (REINFORCE); its value means nothing, its gradient is the policy gradient.
    """
    advantages = terms.advantages
    if settings.loss == "policy_gradient":
        none = torch.zeros_like(advantages, dtype=torch.bool)
        return advantages * terms.logprobs, clip_counts(none, none, none)
    if settings.loss == "gspo":
        log_ratio = answer_means(log_ratio, terms.answers)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    low, high = ratio < clipped, ratio > clipped
    if settings.loss == "cispo":
        return clipped.detach() * advantages * terms.logprobs, clip_counts(low, high, low & high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    # Where the advantage has the other sign, the minimum is the unclipped term.
    low, high = low & (advantages < 0), high & (advantages > 0)
    floor = torch.zeros_like(low)
    if settings.dual_clip is not None:
        # max(., c A) for A < 0 (dual-clip PPO, arXiv 1912.09729, equation 5)
        least = settings.dual_clip * advantages
        floor = (advantages < 0) & (objective < least)
        objective = torch.where(floor, least, objective)
    return objective, clip_counts(low, high, floor)


def importance_weights(log_weights: Tensor, answers: Tensor, settings: Objective) -> tuple[Tensor, Tensor]:
    """rho of every token, [N], without gradient, and what it was before its bound. `log_weights`: log pi_old /
    pi_engine, [N].

    Token level: min(C, pi_old / pi_engine), truncated importance sampling (Ionides 2008). Sequence level: the same of
    the product over an answer. `mask`: 0 above C.
    """
    log_weights = log_weights.detach()
    bounds = settings.importance
    if bounds.level == "none":
        ones = torch.ones_like(log_weights)
        return ones, ones
    if bounds.level == "sequence":
        log_weights = answer_sums(log_weights, answers)[answers]
    weights = log_weights.exp()
    if bounds.bound == "truncate":
        return weights.clamp(max=bounds.cap), weights
    return torch.where(weights > bounds.cap, 0, weights), weights


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(pi || pi_ref) from each token sampled by pi, [N], in nats, with d = log pi - log pi_ref:

    k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d, never negative (DeepSeekMath, arXiv 2402.03300, equation 4).
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def rollout_kl(logprobs: Tensor, reference: Tensor, rollouts: Tensor, count: int, estimator: str) -> Tensor:
    """The estimates of each of `count` rollouts summed over its trained tokens, [count], in nats, without gradient.

    `rollouts` int64 [N] says whose token it is. For a KL term in the reward: r_i - beta * rollout_kl_i.
    """
    estimates = kl_estimate(logprobs.detach(), reference.detach(), estimator)
    return estimates.new_zeros(count).index_add(0, rollouts, estimates)


def answer_sums(values: Tensor, answers: Tensor) -> Tensor:
    """Sums over the tokens of each answer; shape [N], of which the first so many as there are answers count."""
    return torch.zeros_like(values).index_add(0, answers, values)


def answer_means(values: Tensor, answers: Tensor) -> Tensor:
    """For every token the mean over its answer, [N]."""
    tokens = answer_sums(torch.ones_like(values), answers)
    return (answer_sums(values, answers) / tokens.clamp(min=1))[answers]


def clip_counts(low: Tensor, high: Tensor, dual: Tensor) -> dict[str, Tensor]:
    return {"clip_fraction_low": low.sum(), "clip_fraction_high": high.sum(), "clip_fraction_dual": dual.sum()}


def metric_sums(terms: Terms, log_ratio: Tensor, importance: Tensor, uncapped: Tensor) -> dict[str, Tensor]:
    """Sums over tokens, of micro-batches that add up; divided by the tokens they are means. Of names that end with
    `_max`, the largest counts. `importance_weight_squared` is for the effective sample size, (sum w)^2 / sum w^2."""
    with torch.no_grad():
        differences = (terms.old_logprobs - terms.engine_logprobs).abs()
        nothing = differences.new_zeros(1)
        return {
            "entropy": terms.entropies.sum(),
            "kl": -log_ratio.sum(),  # k1 estimate of KL(pi_old || pi)
            "importance_weight": importance.sum(),
            "importance_weight_squared": importance.square().sum(),
            "importance_weight_max": torch.cat((uncapped, nothing)).max(),
            "importance_bounded": (importance != uncapped).sum(),
            "logprob_difference": differences.sum(),
            "logprob_difference_max": torch.cat((differences, nothing)).max(),
        }
