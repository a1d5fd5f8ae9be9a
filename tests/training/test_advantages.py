"""Advantages against values worked out by hand, and from rewards of single calls."""

import math
import random
from statistics import fmean, stdev

import pytest

from harnessed.config import Advantage
from harnessed.training.advantages import advantages, all_equal, call_advantages, gae, returns, with_reward

GRPO, CENTRED = Advantage(), Advantage(normalise_deviation=False)
RLOO, BATCH = Advantage(kind="rloo"), Advantage(kind="reinforce_plus_plus")


def test_grpo_compares_with_the_group():
    assert advantages([[1, 0, 0, 1]], CENTRED) == [[0.5, -0.5, -0.5, 0.5]]
    high, low, *_ = advantages([[1, 0, 0, 1]], GRPO)[0]
    assert high == pytest.approx(0.5 / math.sqrt(1 / 3), rel=1e-5)
    assert low == -high


def test_rloo_compares_with_the_others():
    assert advantages([[1, 0, 0, 1], [4, 1]], RLOO) == [
        [pytest.approx(2 / 3), pytest.approx(-2 / 3), pytest.approx(-2 / 3), pytest.approx(2 / 3)],
        [3, -3],
    ]


def test_reinforce_plus_plus_divides_by_the_deviation_of_all_groups():
    groups = [[1.0, 0.0], [5.0, 1.0, 0.0]]
    centred = [reward - fmean(group) for group in groups for reward in group]
    found = [value for group in advantages(groups, BATCH) for value in group]
    assert found == pytest.approx([(value - fmean(centred)) / (stdev(centred) + 1e-6) for value in centred])
    assert [len(group) for group in advantages(groups, BATCH)] == [2, 3]


@pytest.mark.parametrize("settings", [GRPO, CENTRED, RLOO, BATCH])
def test_equal_rewards_have_no_advantage(settings):
    assert advantages([[3, 3, 3]], settings) == [[0, 0, 0]]
    assert advantages([[0.1] * 7], settings)[0] == pytest.approx([0] * 7, abs=1e-9)


@pytest.mark.parametrize("settings", [GRPO, CENTRED, RLOO])
def test_a_group_that_lost_a_member_is_who_is_left(settings):
    """No other group matters to it, and nothing stands in for the lost one, least of all a reward of 0."""
    assert advantages([[2, 5, 6], [1, 0]], settings)[0] == advantages([[2, 5, 6]], settings)[0]
    if settings is RLOO:
        assert advantages([[2, 5, 6]], RLOO)[0] == [-3.5, 1, 2.5]


@pytest.mark.parametrize("settings", [RLOO, CENTRED, GRPO, BATCH])
def test_a_group_of_one_has_nothing_to_compare(settings):
    assert advantages([[2]], settings) == [[0]]


def test_returns_add_up_from_the_end():
    assert returns([1, 0, 2], 10, 1.0) == [13, 12, 12]
    assert returns([1, 0, 2], 10, 0.5) == [4, 6, 12]
    assert returns([0, 0, 0], 1, 1.0) == [1, 1, 1]
    assert returns([], 7, 0.5) == [7]


@pytest.mark.parametrize("settings", [GRPO, CENTRED, RLOO, BATCH])
def test_calls_without_rewards_have_the_advantage_of_their_rollout(settings):
    rewards, calls = [[1, 0, 4], [2, 1]], [[1, 5, 2], [3, 1]]
    each = [
        [returns([0] * n, reward, 1.0) for reward, n in zip(*pair, strict=True)]
        for pair in zip(rewards, calls, strict=True)
    ]
    whole = advantages(rewards, settings)
    for group, group_whole in zip(call_advantages(each, settings), whole, strict=True):
        for rollout, value in zip(group, group_whole, strict=True):
            assert rollout == pytest.approx([value] * len(rollout))


def test_a_rollout_counts_once_however_many_calls_it_has():
    """A hundred calls worth 1 beside one call worth 0: the mean is a half, not a hundredth less than one."""
    (group,) = call_advantages([[[1.0] * 100, [0.0]]], CENTRED)
    assert group == [[0.5] * 100, [-0.5]]
    (group,) = call_advantages([[[1.0] * 100, [0.0]]], GRPO)
    assert group[1][0] == pytest.approx(-0.5 / (math.sqrt(0.5) + 1e-6))


def test_calls_that_differ_within_equal_rollouts_are_compared():
    group = [[2.0, 0.0], [2.0, 0.0]]
    assert not all_equal(group)
    assert call_advantages([group], CENTRED) == [[[1, -1], [1, -1]]]
    deviation = math.sqrt((1 + 1) / 1)  # both rollouts have a mean square of 1, divided by rollouts - 1
    assert call_advantages([group], GRPO)[0][0] == pytest.approx([1 / deviation, -1 / deviation], rel=1e-5)


def test_gae_with_lambda_1_is_the_return_less_the_value():
    rewards, values = with_reward([1, 0, 2], 10), [3.0, -1.0, 4.0]
    found, targets = gae(rewards, values, 0.5, 1.0)
    assert targets == pytest.approx(returns([1, 0, 2], 10, 0.5))
    assert found == pytest.approx([g - v for g, v in zip(targets, values, strict=True)])


def test_gae_with_lambda_0_is_the_surprise_of_one_call():
    assert gae([1, 2], [10, 4], 0.5, 0.0)[0] == [1 + 0.5 * 4 - 10, 2 - 4]


def test_gae_is_the_sum_of_its_definition():
    draw = random.Random(1)
    rewards, values = [draw.gauss(0, 1) for _ in range(6)], [draw.gauss(0, 1) for _ in range(6)]
    surprise = [r + 0.9 * v1 - v for r, v, v1 in zip(rewards, values, [*values[1:], 0], strict=True)]
    wanted = [sum((0.9 * 0.7) ** (later - k) * surprise[later] for later in range(k, 6)) for k in range(6)]
    assert gae(rewards, values, 0.9, 0.7)[0] == pytest.approx(wanted)


def test_gae_without_a_critic_says_so():
    with pytest.raises(ValueError, match="needs values of a critic"):
        advantages([[1, 0]], Advantage(kind="gae"))
