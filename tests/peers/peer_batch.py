"""One batch, as peers have it (padded, [B, T]) and as we have it (trained tokens alone, [N]), in float64.

Four rollouts of one row and one answer each: that is where the definitions coincide.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from harnessed.training.losses import Terms

B, T = 4, 6
LENGTHS = torch.tensor([6, 3, 1, 5])
MASK = (torch.arange(T)[None] < LENGTHS[:, None]).double()


@dataclass
class Batch:
    """All [B, T] but the advantages [B]."""

    logprobs: Tensor
    old: Tensor
    engine: Tensor
    reference: Tensor
    entropies: Tensor
    advantages: Tensor


def batch(spread=0.4):
    """`spread`: how far apart the policies are, in nats."""
    draw = torch.Generator().manual_seed(5)
    noise = [torch.randn(B, T, generator=draw, dtype=torch.float64) * spread for _ in range(3)]
    old = -torch.rand(B, T, generator=draw, dtype=torch.float64) * 3 - 0.1
    return Batch(
        logprobs=(old + noise[0]).requires_grad_(),
        old=old,
        engine=old + noise[1],
        reference=old + noise[2],
        entropies=torch.rand(B, T, generator=draw, dtype=torch.float64).requires_grad_(),
        advantages=torch.tensor([1.3, -0.8, -1.1, 0.6], dtype=torch.float64),
    )


def weights(normalisation, constant=10):
    """What `batching.scored` gives for these rows, [B, T]."""
    each = {
        "rollout": 1 / (B * LENGTHS.double()),
        "token": torch.full((B,), 1 / LENGTHS.sum().item(), dtype=torch.float64),
        "constant": torch.full((B,), 1 / (B * constant), dtype=torch.float64),
    }[normalisation]
    return each[:, None].expand(B, T)


def terms(made, normalisation="rollout", constant=10):
    kept = MASK.bool()
    answers = torch.arange(B)[:, None].expand(B, T)
    advantages = made.advantages[:, None].expand(B, T)
    columns = (made.logprobs, made.old, made.engine, advantages, weights(normalisation, constant))
    return Terms(*(column[kept] for column in (*columns, answers, made.entropies, made.reference)))


def assert_same(made, ours, theirs, tolerance=1e-12):
    """The same loss and the same gradients."""
    torch.testing.assert_close(ours, theirs.double(), rtol=tolerance, atol=tolerance)
    leaves = [made.logprobs, made.entropies]
    for mine, other in zip(*(_gradients(loss, leaves) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        assert torch.isfinite(mine).all()


def _gradients(loss, leaves):
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)]
