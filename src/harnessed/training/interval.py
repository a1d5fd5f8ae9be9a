"""How far the mean over some tasks may be from that over all tasks of their kind: a confidence interval.

Rewards of one task are not independent of each other, so that what counts is how the means of tasks differ (standard
errors clustered by task: Miller, arXiv 2411.00640). Called by `evaluation.py`.
"""

import math
import statistics

Interval = tuple[float, float]


def interval(rewards: list[list[float]], confidence: float) -> Interval | None:
    """Of the mean of the means of tasks. `rewards`: of each task, one for each rollout that was judged, at least one.

    None: nothing can be said, since there is no task, or only one and its rewards are not all 0 or 1.
    """
    means = [statistics.fmean(each) for each in rewards]
    if not means or (len(means) < 2 and not _are_successes(rewards)):
        return None
    mean = statistics.fmean(means)
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    reach = 0.0
    if len(means) > 1:
        reach = _student(z, len(means) - 1) * statistics.stdev(means) / math.sqrt(len(means))
    if _are_successes(rewards):
        return _wilson(mean, _effective(mean, reach / z, rewards), z)
    return mean - reach, mean + reach


def _are_successes(rewards: list[list[float]]) -> bool:
    return all(reward in (0, 1) for each in rewards for reward in each)


def _effective(p: float, error: float, rewards: list[list[float]]) -> float:
    """So many independent rollouts would say as much: those with the same standard error, p (1 - p) / error^2 (Korn and
    Graubard, Survey Methodology 24, 1998; the error grows by what Student's quantile is above the normal one). At least
    one for each task, as if its rollouts always agreed; at most all, as if they had nothing in common."""
    tasks, rollouts = len(rewards), sum(map(len, rewards))
    if error == 0:
        return tasks if p in (0, 1) else rollouts
    return min(max(p * (1 - p) / error**2, tasks), rollouts)


def _wilson(p: float, n: float, z: float) -> Interval:
    """E. B. Wilson's score interval (1927), (p + z^2/2n -+ z sqrt(p (1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    It stays within 0 and 1, and is not empty where all succeed. With n as above it is one of those that do well for
    proportions in clusters (Franco, Little, Louis and Slud, J. Survey Statistics and Methodology 7, 2019).
    """
    middle = p + z * z / (2 * n)
    reach = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max((middle - reach) / scale, 0.0), min((middle + reach) / scale, 1.0)


def _student(z: float, freedom: int) -> float:
    """Student's quantile from the normal one, by the expansion of Abramowitz and Stegun, 26.7.5: within 1 % from five
    degrees of freedom on."""
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))
