"""What a step reports, from values made by hand."""

import math

import pytest
import torch
from transcripts import node, transcript

from harnessed.config import Advantage
from harnessed.records import GroupSpec, Outcome, Version
from harnessed.training.backends.tally import Tally, means
from harnessed.training.lineages import Lineage
from harnessed.training.metrics import of_groups, of_taken
from harnessed.training.samples import build
from harnessed.training.selection import Group, Taken, select


def group(*transcripts) -> Group:
    spec = GroupSpec(id="g", run="r", task={}, n=len(transcripts))
    return Group(spec, list(transcripts), [build(each) for each in transcripts])


def with_parts(one, **parts):
    one.rollout.parts = parts
    return one


def test_rewards_and_their_parts_are_those_of_rollouts_that_count():
    line = of_groups(
        [
            group(
                with_parts(transcript([node(1, 0, [1], [2, 9])], id="g.0", reward=1.0), tests=1.0, style=0.5),
                with_parts(transcript([node(1, 0, [1], [2, 3, 9])], id="g.1", reward=0.0), tests=0.0),
                with_parts(transcript([], id="g.2", reward=5.0, outcome=Outcome.INFRASTRUCTURE), tests=9.0),
            )
        ],
        1,
    )
    assert (line["reward_mean"], line["reward_std"]) == (0.5, 0.5)
    assert (line["reward/tests"], line["reward/style"]) == (0.5, 0.5)
    assert (line["rollouts"], line["rollouts_judged"]) == (3, 2)
    assert (line["sampled_tokens"], line["tokens_per_rollout"]) == (5, 5 / 3)


def test_a_step_in_which_nothing_could_be_judged_has_no_reward():
    line = of_groups([group(transcript([node(1, 0, [1], [2])], outcome=Outcome.INFRASTRUCTURE))], 1)
    assert line["reward_mean"] is line["reward_std"] is None
    assert line["fates/infrastructure"] == line["sampled_tokens"] == 1


def test_a_skipped_group_counts_also_without_tokens():
    silent = group(*(transcript([], id=f"g.{i}", reward=0.0) for i in range(2)))
    select([silent.samples], Advantage())
    line = of_groups([silent], 1)
    assert (line["groups_skipped"], line["sampled_tokens"]) == (1, 0)
    assert not [name for name in line if name.startswith("fates/")]


def test_staleness_counts_from_the_oldest_trained_token_of_a_rollout_over_lineages():
    def sample(*versions):
        return build(
            transcript([node(i, i - 1, [1], [2, 9], version=version) for i, version in enumerate(versions, 1)])
        )

    # The second lineage went on from the weights of 0.5 as 1.6.
    lineages = [Lineage(0, 0, 0), Lineage(1, 6, 5)]
    fresh, mixed = sample(Version(1, 7).pack()), sample(Version(0, 4).pack(), Version(1, 6).pack())
    line = of_taken(Taken([fresh, mixed], [1.0, -1.0], 1), Version(1, 7), lineages)
    assert (line["staleness_mean"], line["staleness_max"]) == (1.0, 2)
    context = node(1, 0, [1], [2, 9], version=Version(0, 2).pack(), logprobs=[])  # cannot be trained
    behind = build(transcript([context, node(2, 1, [1], [2, 9], version=Version(1, 6).pack())]))
    assert of_taken(Taken([behind], [1.0], 1), Version(1, 7), lineages)["staleness_max"] == 1
    unknown = of_taken(Taken([sample(-1)], [1.0], 1), Version(1, 7), lineages)
    assert unknown["staleness_mean"] is unknown["staleness_max"] is None


def tally(*micro_batches, tokens):
    step = Tally(loss=0.5, gradient_norm=2.0)
    for sums in micro_batches:
        step.add(torch.tensor(0.0), {name: torch.tensor(value) for name, value in sums.items()}, tokens)
    return step


def test_the_effective_sample_size_says_how_many_equal_weights_would_do_as_well():
    # weights 3/2, 3/2, 1/2, 1/2 in two optimiser steps
    first = {"importance_weight": 3.0, "importance_weight_squared": 4.5, "logprob_difference_max": 0.5}
    second = {"importance_weight": 1.0, "importance_weight_squared": 0.5, "logprob_difference_max": 0.25}
    line = means([tally(first, tokens=2), tally(second, tokens=2)])
    assert line == {
        "importance_weight": 1.0,
        "importance_ess": pytest.approx(4**2 / (4 * 5)),
        "logprob_difference_max": 0.5,
        "loss": 0.5,
        "grad_norm": 2.0,
    }
    equal = {"importance_weight": 10.0, "importance_weight_squared": 10.0}
    assert means([tally(equal, tokens=10)])["importance_ess"] == 1
    masked = {"importance_weight": 0.0, "importance_weight_squared": 0.0}
    assert means([tally(masked, tokens=10)])["importance_ess"] == 0


def test_what_is_not_a_number_once_is_seen():
    line = means([tally({"logprob_difference_max": math.nan}, {"logprob_difference_max": 0.5}, tokens=1)])
    assert math.isnan(line["logprob_difference_max"])
