"""Advantages from rewards: each rollout counts once in its group, however many rows and calls it has.

Pure functions of numbers; `trainer.py` calls them. Rewards have any unit; advantages have the same one, or none where a
deviation divides. A group is its members that have a reward: one whose infrastructure failed has left it, so means and
deviations are those of who is left.
"""

import math
from itertools import accumulate

from harnessed.config import Advantage

SMALLEST_DEVIATION = 1e-6

Returns = list[float]
"""What one rollout was worth, once for each call that is compared; at least one entry."""


def advantages(groups: list[list[float]], settings: Advantage) -> list[list[float]]:
    """One for each reward of the groups of an optimiser step; shapes as given. Kind `gae` needs a critic: see `gae`."""
    compared = call_advantages([[[reward] for reward in group] for group in groups], settings)
    return [[values[0] for values in group] for group in compared]


def row_advantages(groups: list[list[float]], rows: list[list[int]], settings: Advantage) -> list[list[float]]:
    """The same as if each training row were a member of its group: a published mistake, only to compare with.

    `rows`: how many each rollout gave, shape as the groups'. One without any counts once.
    """
    repeated = [
        [reward for reward, n in zip(*pair, strict=True) for _ in range(max(n, 1))]
        for pair in zip(groups, rows, strict=True)
    ]
    found = advantages(repeated, settings)
    ends = [accumulate(max(n, 1) for n in counts) for counts in rows]
    return [[values[end - 1] for end in group] for values, group in zip(found, ends, strict=True)]


def call_advantages(groups: list[list[Returns]], settings: Advantage) -> list[list[Returns]]:
    """The same with a return for each call, and an advantage for each: groups -> rollouts -> calls.

    In means and deviations a rollout counts once: each of its n calls counts 1/n.

    grpo: (G - mean) / deviation, of the group (DeepSeekMath, arXiv 2402.03300, section 4.1.2). The deviation is the
    sample's (divided by rollouts - 1). Without `normalise_deviation`: G - mean (Dr. GRPO, 2503.20783, section 3.2).
    rloo: G - mean of the other rollouts (arXiv 2402.14740, the RLOO estimator of section 2.3); 0 in a group of one.
    reinforce_plus_plus: A = G - mean of the group, then (A - mean) / deviation over all groups of the update
    (REINFORCE++ with baseline, arXiv 2501.03262).
    """
    if settings.kind == "gae":
        raise ValueError("trainer.advantage.kind: gae needs values of a critic; call advantages.gae for each rollout")
    if settings.kind == "rloo":
        return [_leave_one_out(group) for group in groups]
    centred = [_centred(group) for group in groups]
    if settings.kind == "reinforce_plus_plus":
        flat = iter(_divided(_centred([rollout for group in centred for rollout in group])))
        return [[next(flat) for _ in group] for group in centred]
    return [_divided(group) for group in centred] if settings.normalise_deviation else centred


def returns(calls: list[float], reward: float, discount: float) -> Returns:
    """G_k = r_k + discount * G_k+1 over a rollout's calls in the order of time; its reward is added at the last call.

    A rollout without calls is worth its reward: one entry.
    """
    worth: Returns = []
    for own in reversed(with_reward(calls, reward)):
        worth.append(own + discount * worth[-1] if worth else own)
    return worth[::-1]


def with_reward(calls: list[float], reward: float) -> list[float]:
    """The rewards of a rollout's calls, its own added at the last one."""
    return [*calls[:-1], calls[-1] + reward] if calls else [reward]


def gae(rewards: list[float], values: list[float], discount: float, gae_lambda: float) -> tuple[list[float], Returns]:
    """Advantages and returns of a rollout's calls (generalised advantage estimation, arXiv 1506.02438, equation 16).

    `rewards` [K]: of each call, the rollout's own added at the last (`with_reward`). `values` [K]: what the critic
    expects when the call is made; after the last call it is 0, for the rollout is over. With d_k = r_k + discount *
    V_k+1 - V_k: A_k = d_k + discount * lambda * A_k+1. The returns, the critic's targets, are A + V.
    """
    found: list[float] = []
    for reward, value, following in reversed(list(zip(rewards, values, [*values[1:], 0.0], strict=True))):
        later = found[-1] if found else 0.0
        found.append(reward + discount * following - value + discount * gae_lambda * later)
    found.reverse()
    return found, [advantage + value for advantage, value in zip(found, values, strict=True)]


def all_equal(group: list[Returns]) -> bool:
    """Nothing to compare: the group has no signal."""
    flat = [value for rollout in group for value in rollout]
    return max(flat) - min(flat) < SMALLEST_DEVIATION


def _mean(values: list[float]) -> float:
    return math.fsum(values) / max(len(values), 1)


def _centred(group: list[Returns]) -> list[Returns]:
    mean = _mean([_mean(rollout) for rollout in group])
    return [[value - mean for value in rollout] for rollout in group]


def _divided(centred: list[Returns]) -> list[Returns]:
    squares = math.fsum(_mean([value * value for value in rollout]) for rollout in centred)
    deviation = math.sqrt(squares / max(len(centred) - 1, 1))
    return [[value / (deviation + SMALLEST_DEVIATION) for value in rollout] for rollout in centred]


def _leave_one_out(group: list[Returns]) -> list[Returns]:
    means = [_mean(rollout) for rollout in group]
    if len(group) == 1:
        return [[0.0] * len(group[0])]
    others = [(math.fsum(means) - mean) / (len(means) - 1) for mean in means]
    return [[value - baseline for value in rollout] for rollout, baseline in zip(group, others, strict=True)]
