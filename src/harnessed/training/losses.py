"""The objective, as a pure function of tensors. Backends call it once per micro-batch; the losses of a step add up."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """Per-token inputs; each tensor has shape [N], the trained tokens of a micro-batch."""

    logprobs: Tensor
    """log pi of the current policy; the only one with a gradient."""
    old_logprobs: Tensor
    """log pi_old: the trainer's own, from when the update started."""
    engine_logprobs: Tensor
    """log pi_engine: recorded when the token was sampled."""
    advantages: Tensor
    """A_r of the token's rollout."""
    weights: Tensor
    """1 / (R * T_r): R rollouts in the optimiser step, T_r trained tokens of the token's rollout over all its rows."""


def clipped_policy_loss(terms: Terms, *, clip: float, importance_cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-J with J = 1/R sum_r 1/T_r sum_t min(C, pi_old/pi_engine) * min(ratio A, clip(ratio) A), ratio = pi / pi_old.

    PPO's clipped surrogate (arXiv 1707.06347, equation 7), normalised per rollout, with a truncated importance weight
    between engine and trainer that carries no gradient. Returns the loss (a scalar, a sum over the micro-batch: the
    step's loss is the sum over micro-batches, whatever the cut) and weighted sums for the metrics.
    """
    ratio = torch.exp(terms.logprobs - terms.old_logprobs)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    surrogate = torch.minimum(ratio * terms.advantages, clipped * terms.advantages)
    importance = torch.exp(terms.old_logprobs - terms.engine_logprobs).clamp(max=importance_cap).detach()
    loss = -(terms.weights * importance * surrogate).sum()
    with torch.no_grad():
        sums = {
            "clip_fraction": ((ratio - clipped).abs() > 0).float().sum(),
            "importance_weight": importance.sum(),
            "kl": (terms.old_logprobs - terms.logprobs).sum(),  # k1 estimate of KL(pi_old || pi)
            "logprob_difference": (terms.old_logprobs - terms.engine_logprobs).abs().sum(),
        }
    return loss, sums
