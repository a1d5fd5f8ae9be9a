"""Rollout-level advantages: each rollout counts once in its group, however many rows it has. For `trainer.py`."""

import math

SMALLEST_DEVIATION = 1e-6


def group_relative(rewards: list[float], *, normalise: bool) -> list[float]:
    """GRPO's advantages of one group: A_i = (r_i - mean r) / std r (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The deviation is the sample's (divided by n - 1). Without `normalise` the division is left out (Dr. GRPO, arXiv
    2503.20783). Equal rewards give zeros.
    """
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalise:
        return centred
    deviation = math.sqrt(math.fsum(x * x for x in centred) / max(len(rewards) - 1, 1))
    return [x / (deviation + SMALLEST_DEVIATION) for x in centred]


def all_equal(rewards: list[float]) -> bool:
    """Nothing to compare: the group has no signal."""
    return max(rewards) - min(rewards) < SMALLEST_DEVIATION
