"""Rows that count in place of rollouts: what the ablation compares with."""

import pytest
from pydantic import ValidationError
from transcripts import node, transcript

from harnessed.config import Advantage
from harnessed.training.advantages import advantages, row_advantages
from harnessed.training.samples import build
from harnessed.training.selection import select

PER_ROW = Advantage(per="row")


def test_a_rollout_counts_as_often_as_it_has_rows():
    # over 1, 1, 1, 0: mean 3/4, deviation sqrt((3/16 + 9/16) / 3) = 1/2
    ((won, lost),) = row_advantages([[1.0, 0.0]], [[3, 1]], PER_ROW)
    assert (won, lost) == pytest.approx((0.5, -1.5), rel=1e-5)
    assert row_advantages([[1.0, 0.0]], [[3, 1]], Advantage(per="row", normalise_deviation=False)) == [[0.25, -0.75]]


def test_with_one_row_for_each_rollout_nothing_changes():
    groups = [[1.0, 0.0, 0.5], [0.0, 2.0]]
    assert row_advantages(groups, [[1, 1, 1], [1, 1]], PER_ROW) == advantages(groups, Advantage())


def test_a_rollout_without_rows_still_has_an_advantage():
    assert row_advantages([[1.0, 0.0]], [[0, 0]], PER_ROW) == advantages([[1.0, 0.0]], Advantage())


def test_the_rows_are_those_that_are_trained():
    two_rows = build(transcript([node(1, 0, [1], [2, 9]), node(2, 0, [3], [4, 9])], id="g.0", reward=1.0))
    one_row = build(transcript([node(1, 0, [1], [5, 9]), node(2, 1, [3], [4, 9])], id="g.1", reward=0.0))
    taken = select([[two_rows, one_row]], Advantage(per="row", normalise_deviation=False))
    assert taken.advantages == [pytest.approx(1 / 3), pytest.approx(-2 / 3)]


@pytest.mark.parametrize("other", [{"kind": "gae"}, {"per_call": True}])
def test_rows_have_no_advantages_for_each_call(other):
    with pytest.raises(ValidationError, match=r"trainer\.advantage\.per"):
        Advantage(per="row", **other)
