"""What an update asks its backend before it takes groups: divergences for the reward, values for advantages.

`trainer.py` calls `penalise`, and then `selection.select` or, where there is a critic, `select_by_critic`.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from harnessed.config import Trainer
from harnessed.training.advantages import gae, with_reward
from harnessed.training.batching import Advantages
from harnessed.training.marking import by_call, by_rollout
from harnessed.training.packing import Pack
from harnessed.training.samples import Sample
from harnessed.training.selection import Taken, in_reward


class Reference(Protocol):
    def divergences(self, packs: list[Pack], rollouts: int) -> list[float]:
        """For each rollout, the KL estimates of its trained tokens summed, in nats."""


class Values(Protocol):
    def values(self, packs: list[Pack], calls: int) -> NDArray[np.float64]:
        """For each call what the rollout is expected to be worth from there; not a number where it cannot say."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a critic learns from an update; arrays have an entry for each call."""

    packs: list[Pack]
    before: NDArray[np.float64]
    """Its values."""
    returns: NDArray[np.float64]
    """What came; not a number where there is no value."""


def penalise(groups: list[list[Sample]], reference: Reference, settings: Trainer) -> None:
    """With a KL term in the reward, note what it takes from each rollout's."""
    if not in_reward(settings.objective.kl):
        return
    packs, flat = by_rollout(groups, settings), list(chain.from_iterable(groups))
    for sample, divergence in zip(flat, reference.divergences(packs, len(flat)), strict=True):
        sample.penalty = settings.objective.kl.coefficient * divergence


def of_penalties(groups: list[list[Sample]], settings: Trainer) -> dict[str, float]:
    """Metrics of what `penalise` noted."""
    if not in_reward(settings.objective.kl):
        return {}
    flat = list(chain.from_iterable(groups))
    divergence = math.fsum(sample.penalty for sample in flat) / settings.objective.kl.coefficient
    return {"kl_reference": divergence / max(sum(sample.trained_tokens for sample in flat), 1)}


def select_by_critic(groups: list[list[Sample]], critic: Values, settings: Trainer) -> tuple[Taken, Lesson]:
    """All rollouts that have a reward, with an advantage for each call by GAE; groups are not compared."""
    members = [[sample for sample in group if sample.reward is not None] for group in groups]
    taken = list(chain.from_iterable(members))
    packs = by_call(members, settings)
    values = critic.values(packs, sum(len(sample.calls) for sample in taken))
    returns = np.full(len(values), np.nan)
    advantages: list[Advantages] = []
    begin = 0
    for sample in taken:
        span = slice(begin, begin + len(sample.calls))
        of_calls, returns[span] = _of_calls(sample, values[span].tolist(), settings)
        advantages.append(of_calls)
        begin = span.stop
    return Taken(taken, advantages, sum(map(bool, members))), Lesson(packs, values, returns)


def _of_calls(sample: Sample, values: list[float], settings: Trainer) -> tuple[dict[int, float], list[float]]:
    """The advantage of each node that answers a call with a value, and the return of each call.

    What a call without a value earned counts at the one before it that has one: that is the last to have brought it
    about.
    """
    assert sample.reward is not None
    known = [call for call, value in enumerate(values) if not math.isnan(value)]
    rewards = [0.0] * len(known)
    for call, reward in enumerate(with_reward(sample.call_rewards, sample.reward - sample.penalty)):
        place = sum(other <= call for other in known) - 1
        if place >= 0:
            rewards[place] += reward
    how = settings.advantage
    found, targets = gae(rewards, [values[call] for call in known], how.discount, how.gae_lambda)
    returns = dict(zip(known, targets, strict=True))
    nodes = {node: each for call, each in zip(known, found, strict=True) for node in sample.calls[call]}
    return nodes, [returns.get(call, math.nan) for call in range(len(values))]
