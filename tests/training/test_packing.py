"""Packs hold every row, each token sees its row's earlier tokens alone, and what is shared stands once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import random_groups, scored_groups
from transcripts import node, transcript

from harnessed.training.packing import blank, pack
from harnessed.training.samples import Bound, build


def trained_by_packs(packs):
    """Every trained token with all that belongs to it, its context from the definition of `reach`."""
    found = Counter()
    for each in packs:
        for i, token in enumerate(each.before):
            seen = np.flatnonzero((np.arange(len(each.tokens)) <= token) & (token < each.reach))
            assert each.positions[seen].tolist() == list(range(len(seen)))
            context = tuple(each.tokens[seen].tolist())
            parts = (each.engine_logprobs, each.temperatures, each.advantages, each.weights, each.versions)
            found[(context, int(each.targets[i]), *(float(part[i]) for part in parts))] += 1
    return found


def trained_by_rows(groups):
    found = Counter()
    for each in (row for group in groups for sample in group for row in sample):
        row = each.row
        parts = (row.logprobs, row.temperatures, each.advantages, each.weights, row.versions)
        for at in np.flatnonzero(row.trained):
            context = tuple(row.tokens[:at].tolist())
            found[(context, int(row.tokens[at]), *(float(part[at]) for part in parts))] += 1
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 40, 100, 10_000]), st.booleans())
def test_each_trained_token_stands_once_and_sees_exactly_its_rows_earlier_tokens(seed, budget, share):
    rng = np.random.default_rng(seed)
    groups = random_groups(rng)
    weighted = scored_groups(groups, rng.normal(size=6).tolist())
    packs = pack(weighted, budget, share)
    assert trained_by_packs(packs) == trained_by_rows(weighted)
    longest = max((len(row.tokens) for group in groups for sample in group for row in sample.rows), default=0)
    for each in packs:
        assert len(each.tokens) <= max(budget, longest)
        assert each.trees[0] == 0
        assert each.trees[-1] == len(each.tokens)
        # No token sees one of another tree, and the others see what their own row begins with.
        owner = np.searchsorted(each.trees, np.arange(len(each.tokens)), side="right")
        assert (each.reach <= each.trees[owner]).all()
        for i in range(len(each.tokens)):
            seen = np.flatnonzero((np.arange(len(each.tokens)) <= i) & (i < each.reach))
            assert each.positions[seen].tolist() == list(range(each.positions[i] + 1))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_answers_are_told_apart_and_stand_in_one_pack(seed):
    rng = np.random.default_rng(seed)
    weighted = scored_groups(random_groups(rng), [1.0] * 6)
    rows = [each.row for group in weighted for sample in group for each in sample]
    answers = sum(len(np.unique(row.answers[row.trained])) for row in rows)
    packs = pack(weighted, 50, share=True)
    assert sum(len(np.unique(each.answers)) for each in packs) == answers
    for each in packs:
        assert np.array_equal(np.unique(each.answers), np.arange(each.answers.max() + 1))


def two_samples(*transcripts):
    samples = [build(transcript(nodes, id=f"g.{i}")) for i, nodes in enumerate(transcripts)]
    return [samples], scored_groups([samples], [1.0] * len(samples))


BRANCHES = [
    node(1, 0, [1, 2, 3, 4], [5, 9]),
    node(2, 1, [6], [7, 9]),
    node(3, 1, [8], [9]),
]


def test_what_rows_share_stands_once():
    _, groups = two_samples(BRANCHES)
    (only,) = pack(groups, 100, share=True)
    assert only.tokens.tolist() == [1, 2, 3, 4, 5, 9, 6, 7, 9, 8, 9]
    assert only.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 6, 7]
    assert only.reach.tolist() == [11] * 6 + [9] * 3 + [11] * 2
    assert only.before.tolist() == [3, 4, 6, 7, 9]
    assert only.targets.tolist() == [5, 9, 7, 9, 9]
    assert only.answers.tolist() == [0, 0, 1, 1, 2]
    assert only.trees.tolist() == [0, 11]


def test_what_rollouts_of_a_group_begin_with_stands_once_and_nothing_of_other_groups_is_shared():
    other = [node(1, 0, [1, 2, 3, 5], [5, 9])]
    _, groups = two_samples(BRANCHES, other)
    (only,) = pack(groups, 100, share=True)
    assert only.tokens.tolist() == [1, 2, 3, 4, 5, 9, 6, 7, 9, 8, 9, 5, 5, 9]
    assert only.reach.tolist() == [14] * 3 + [11] * 3 + [9] * 3 + [11] * 2 + [14] * 3
    (apart,) = pack([[groups[0][0]], [groups[0][1]]], 100, share=True)
    assert apart.trees.tolist() == [0, 11, 17]


def test_a_stop_that_is_cut_off_is_no_part_of_the_context_that_goes_on():
    """Node 2 takes the place of the stop, node 3 goes on behind it."""
    nodes = [node(1, 0, [1], [2, 3, 99]), node(2, 1, [4], [5], cut=1), node(3, 1, [6], [7])]
    samples, groups = two_samples(nodes)
    assert [row.path for row in samples[0][0].rows] == [(1, 2), (1, 3)]
    (only,) = pack(groups, 100, share=True)
    assert only.tokens.tolist() == [1, 2, 3, 99, 6, 7, 4, 5]
    assert only.positions.tolist() == [0, 1, 2, 3, 4, 5, 3, 4]
    assert only.reach.tolist() == [8, 8, 8, 6, 6, 6, 8, 8]


def test_the_place_of_each_node_in_its_row():
    nodes = [node(1, 0, [1], [2, 3, 99]), node(2, 1, [4], [5], cut=1)]
    whole, cut = build(transcript(nodes)).rows
    assert (whole.path, whole.begins) == ((1,), (0,))
    assert (cut.path, cut.begins) == ((1, 2), (0, 3))
    assert cut.answers.tolist() == [0, 1, 1, 0, 2]
    (short,) = build(transcript(BRANCHES[:2]), Bound(5)).rows
    assert (short.path, short.begins, short.answers.tolist()) == ((1,), (0,), [0, 0, 0, 0, 1])


def test_a_tree_over_the_budget_is_cut_at_rollouts_and_then_at_rows():
    one = [node(1, 0, [1] * 20, [2, 9])]
    many = [node(1, 0, [1] * 20, [2, 9])] + [node(i, 1, [3], [4] * 9) for i in range(2, 8)]
    _, groups = two_samples(one, one, many, one)
    assert len(pack(groups, 1000, share=True)) == 1
    # 20 tokens in common, to which the rollouts add 2, 2, 62 and 2
    assert sorted(len(each.tokens) for each in pack(groups, 84, share=True)) == [24, 84]
    # the long one is over 45 as well: the first of its six rows adds 12, the others 10
    assert sorted(len(each.tokens) for each in pack(groups, 45, share=True)) == [34, 36, 42, 42]


def test_a_row_that_alone_is_over_the_budget_is_a_pack_of_its_own():
    _, groups = two_samples([node(1, 0, [1] * 50, [9])], [node(1, 0, [2], [9])])
    assert [len(each.tokens) for each in pack(groups, 10, share=True)] == [51, 2]


def test_what_would_save_less_than_a_tenth_is_not_shared():
    def group(common):
        return two_samples(*([node(1, 0, [1] * common + [i] * (100 - common), [9])] for i in (2, 3)))[1]

    assert len(pack(group(19), 1000, share=True)[0].trees) == 3
    assert len(pack(group(21), 1000, share=True)[0].trees) == 2


@pytest.mark.parametrize("share", [True, False])
def test_packs_are_filled(share):
    groups = scored_groups(
        [[build(transcript([node(1, 0, [i] * 24, [9])], id=f"g{i}.0"))] for i in range(40)], [1.0] * 40
    )
    assert len(pack(groups, 100, share)) == 10


def test_a_blank_pack_trains_nothing():
    assert blank().trained_tokens == 0
    assert len(blank().tokens) == 1
