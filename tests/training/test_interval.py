"""Confidence intervals, against values worked out by hand and against their own promise."""

import random

import pytest

from harnessed.training.interval import interval


def ones(successes, tasks):
    return [[1.0]] * successes + [[0.0]] * (tasks - successes)


@pytest.mark.parametrize(
    ("rewards", "confidence", "expected"),
    [
        # z = 1.959964, z^2 = 3.841459: (0.5 + 0.192073 -+ 1.959964 sqrt(0.025 + 0.009604)) / 1.384146
        (ones(5, 10), 0.95, (0.236593, 0.763407)),
        # all: 10 / (10 + z^2) to 1
        (ones(10, 10), 0.95, (0.722467, 1.0)),
        (ones(0, 10), 0.95, (0.0, 0.277533)),
        (ones(1, 1), 0.95, (0.206549, 1.0)),
        # z = 1.644854 and z^2 = 2.705543, 50 of 100
        (ones(50, 100), 0.90, (0.418848, 0.581152)),
        # rollouts of a task always agree: 10 tasks, not 40 rollouts
        ([each * 4 for each in ones(5, 10)], 0.95, (0.236593, 0.763407)),
        # every task alike: as many as there are rollouts, 10 of 20
        ([[0.0, 1.0]] * 10, 0.95, (0.299298, 0.700702)),
    ],
)
def test_successes_have_intervals_worked_out_by_hand(rewards, confidence, expected):
    assert interval(rewards, confidence) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # means 1 to 6: 3.5 -+ 2.570582 * sqrt(3.5 / 6), with Student's quantile of 5 as tables have it
        ([[1.0], [1.0, 3.0], [3.0], [4.0], [5.0], [6.0]], (1.5367, 5.4633)),
        # 0.5 -+ 4.302653 * 0.1 / sqrt(3); the quantile of 2 comes out 3 % too small
        ([[0.4], [0.5], [0.6]], (0.2516, 0.7484)),
        ([[0.5]] * 4, (0.5, 0.5)),
    ],
)
def test_other_rewards_have_intervals_worked_out_by_hand(rewards, expected):
    assert interval(rewards, 0.95) == pytest.approx(expected, abs=8e-3)


def test_nothing_is_said_where_nothing_can_be():
    assert interval([], 0.95) is None
    assert interval([[0.5, 0.7]], 0.95) is None


def test_what_is_more_sure_is_narrower():
    def width(rewards, confidence=0.95):
        low, high = interval(rewards, confidence)
        return high - low

    assert width(ones(20, 40)) < width(ones(10, 20))
    assert width(ones(10, 20), 0.8) < width(ones(10, 20))


def covered(draw_task, truth, tasks, times=2000):
    """How often the true mean lies within."""
    found = 0
    for _ in range(times):
        low, high = interval([draw_task() for _ in range(tasks)], 0.95)
        found += low <= truth <= high
    return found / times


@pytest.mark.parametrize(
    ("alpha", "beta", "samples", "tasks"),
    [(1, 1, 4, 32), (0.3, 0.3, 4, 64), (9, 1, 4, 64), (9, 1, 1, 64), (50, 50, 8, 32), (0.5, 4.5, 2, 16), (1, 1, 4, 8)],
)
def test_tasks_of_any_difficulty_are_covered(alpha, beta, samples, tasks):
    """Chances of tasks are drawn from a beta distribution, successes with these."""
    draw = random.Random(5)

    def task():
        chance = draw.betavariate(alpha, beta)
        return [float(draw.random() < chance) for _ in range(samples)]

    assert 0.925 <= covered(task, alpha / (alpha + beta), tasks) <= 0.985


def test_rewards_of_any_size_are_covered():
    draw = random.Random(6)

    def task():
        middle = draw.gauss(-3, 2)
        return [draw.gauss(middle, 1) for _ in range(3)]

    assert 0.935 <= covered(task, -3, 8) <= 0.965
