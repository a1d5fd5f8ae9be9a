"""Advantages, the loss and its weights: against values worked out by hand, and against cutting the batch otherwise."""

import math

import pytest
import torch
from transcripts import node, transcript

from harnessed.records import Fate, Outcome
from harnessed.training.advantages import group_relative
from harnessed.training.batching import scored
from harnessed.training.losses import Terms, clipped_policy_loss
from harnessed.training.samples import build
from harnessed.training.trainer import select


def test_advantages_are_relative_to_the_group():
    assert group_relative([1, 0, 0, 1], normalise=False) == [0.5, -0.5, -0.5, 0.5]
    assert group_relative([3, 3, 3], normalise=True) == [0, 0, 0]


def test_normalised_advantages_divide_by_the_sample_deviation():
    high, low, *_ = group_relative([1, 0, 0, 1], normalise=True)
    assert high == pytest.approx(0.5 / math.sqrt(1 / 3), rel=1e-5)
    assert low == -high


def terms(logprobs, old, engine, advantages, weights):
    return Terms(
        *(
            torch.tensor(x, dtype=torch.float64, requires_grad=False)
            for x in (logprobs, old, engine, advantages, weights)
        )
    )


def test_the_ratio_is_clipped_on_the_side_that_would_gain():
    loss, sums = clipped_policy_loss(
        terms([math.log(2), math.log(0.5), math.log(2)], [0, 0, 0], [0, 0, 0], [1, -1, -1], [1, 1, 1]),
        clip=0.2,
        importance_cap=2.0,
    )
    # ratio 2, A 1: clipped to 1.2; ratio 0.5, A -1: clipped to 0.8; ratio 2, A -1: not clipped, it is the worse one
    assert loss.item() == pytest.approx(-(1.2 - 0.8 - 2.0))
    assert sums["clip_fraction"].item() == 3


def test_the_weight_between_engine_and_trainer_is_capped_and_has_no_gradient():
    logprobs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    rest = terms([0, 0], [0, 0], [-5, 1], [1, 1], [1, 1])
    inputs = Terms(logprobs, logprobs.detach(), rest.engine_logprobs, rest.advantages, rest.weights)
    loss, _ = clipped_policy_loss(inputs, clip=0.2, importance_cap=2.0)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -math.exp(-1)])


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


def test_groups_without_a_signal_or_without_members_are_not_taken():
    def group(name, rewards, outcome=Outcome.OK):
        return [
            build(transcript([node(1, 0, [1], [2, 9])], id=f"{name}.{i}", reward=reward, outcome=outcome))
            for i, reward in enumerate(rewards)
        ]

    equal, mixed, lost = group("a", [1, 1]), group("b", [1, 0]), group("c", [1, 1], Outcome.INFRASTRUCTURE)
    alone = [*group("d", [1]), *group("d", [0], Outcome.INFRASTRUCTURE)]
    taken = select([equal, mixed, lost, alone], normalise=False)
    assert [sample.rollout for sample in taken.samples] == ["b.0", "b.1"]
    assert taken.advantages == [0.5, -0.5]
    assert taken.groups == 1
    assert [sample.fates for sample in equal] == [{Fate.GROUP_SKIPPED: 2}] * 2
    assert [sample.fates for sample in lost] == [{Fate.INFRASTRUCTURE: 2}] * 2
    assert [sample.fates for sample in alone] == [{Fate.GROUP_INCOMPLETE: 2}, {Fate.INFRASTRUCTURE: 2}]
