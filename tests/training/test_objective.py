"""Advantages, the loss and its weights: against values worked out by hand, and against cutting the batch otherwise."""

import pytest
from transcripts import node, transcript

from harnessed.training.batching import scored
from harnessed.training.samples import build


def three_samples():
    return [
        build(transcript([node(1, 0, [1, 2], [3, 9]), node(2, 1, [4], [5, 6, 9])], id="g.0")),
        build(transcript([node(1, 0, [1], [7, 9]), node(2, 0, [1, 1], [8, 8, 8, 9])], id="g.1", reward=0.0)),
        build(transcript([], id="g.2", reward=0.0)),
    ]


def test_each_rollout_weighs_the_same_however_many_rows_and_tokens_it_has():
    weights = [
        sum(float(row.weights.sum()) for row in rows) for rows in scored(three_samples(), [1.0, -1.0, 0.0], "rollout")
    ]
    # R counts the rollout without tokens: each of the others weighs a third
    assert weights == pytest.approx([1 / 3, 1 / 3, 0])
