"""Advantages, the loss and its weights: against values worked out by hand, and against cutting the batch otherwise."""

import numpy as np
import pytest
from transcripts import node, transcript

from harnessed.config import Advantage
from harnessed.records import Fate, Outcome
from harnessed.training.batching import micro_batches
from harnessed.training.groups import select
from harnessed.training.samples import build


def three_samples():
    return [
        build(transcript([node(1, 0, [1, 2], [3, 9]), node(2, 1, [4], [5, 6, 9])], id="g.0")),
        build(transcript([node(1, 0, [1], [7, 9]), node(2, 0, [1, 1], [8, 8, 8, 9])], id="g.1", reward=0.0)),
        build(transcript([], id="g.2", reward=0.0)),
    ]


def test_each_rollout_weighs_the_same_however_many_rows_and_tokens_it_has():
    samples = three_samples()
    for budget in (1, 8, 1000):
        batches = micro_batches(samples, [1.0, -1.0, 0.0], budget)
        assert sum(batch.trained_tokens for batch in batches) == 11
        by_advantage = dict.fromkeys((1.0, -1.0), 0.0)
        for batch in batches:
            for a in by_advantage:
                by_advantage[a] += float(batch.weights[batch.advantages == a].sum())
        # R counts the rollout without tokens: each of the others weighs a third
        assert by_advantage == pytest.approx({1.0: 1 / 3, -1.0: 1 / 3})


def test_micro_batches_keep_to_their_budget_and_drop_nothing():
    samples = three_samples()
    for budget in (1, 8, 12, 1000):
        batches = micro_batches(samples, [1.0, -1.0, 0.0], budget)
        assert sum(len(batch.tokens) for batch in batches) == 3
        for batch in batches:
            assert batch.tokens.size <= budget or len(batch.tokens) == 1
            assert (batch.temperatures == 1).all()
            assert np.array_equal(batch.trained, batch.weights > 0)


def test_groups_without_a_signal_or_without_members_are_not_taken():
    def group(name, rewards, outcome=Outcome.OK):
        return [
            build(transcript([node(1, 0, [1], [2, 9])], id=f"{name}.{i}", reward=reward, outcome=outcome))
            for i, reward in enumerate(rewards)
        ]

    equal, mixed, lost = group("a", [1, 1]), group("b", [1, 0]), group("c", [1, 1], Outcome.INFRASTRUCTURE)
    alone = [*group("d", [1]), *group("d", [0], Outcome.INFRASTRUCTURE)]
    taken = select([equal, mixed, lost, alone], Advantage(normalise_deviation=False))
    assert [sample.rollout for sample in taken.samples] == ["b.0", "b.1"]
    assert taken.advantages == [[0.5, -0.5]]
    assert [sample.fates for sample in equal] == [{Fate.GROUP_SKIPPED: 2}] * 2
    assert [sample.fates for sample in lost] == [{Fate.INFRASTRUCTURE: 2}] * 2
    assert [sample.fates for sample in alone] == [{Fate.GROUP_INCOMPLETE: 2}, {Fate.INFRASTRUCTURE: 2}]
