"""The weights of the objective, the groups of each optimiser step, and what each rank computes."""

import numpy as np
import pytest
from packed import random_groups, scored_groups
from transcripts import node, transcript

from harnessed.training.batching import deal, optimiser_steps, scored
from harnessed.training.packing import pack
from harnessed.training.samples import build


def samples():
    """Rows with 3 and 2 trained tokens, one with 4, none."""
    return [
        build(transcript([node(1, 0, [1], [2, 9]), node(2, 1, [3], [9]), node(3, 1, [4], [8, 9])], id="g.0")),
        build(transcript([node(1, 0, [1], [2, 3, 4, 9])], id="g.1")),
        build(transcript([], id="g.2")),
    ]


@pytest.mark.parametrize(
    ("normalisation", "weights"),
    [
        ("rollout", [1 / 15, 1 / 15, 1 / 12]),
        ("token", [1 / 9] * 3),
        ("sample", [1 / 9, 1 / 6, 1 / 12]),
        ("constant", [1 / 30] * 3),
    ],
)
def test_what_a_trained_token_weighs(normalisation, weights):
    rows = [row for rows in scored(samples(), [1.0, -1.0, 0.0], normalisation, 10) for row in rows]
    assert len(rows) == 3
    for each, weight in zip(rows, weights, strict=True):
        assert each.weights.dtype == np.float32
        assert each.weights[each.row.trained] == pytest.approx(weight)
        assert not each.weights[~each.row.trained].any()


def test_answers_may_have_advantages_of_their_own():
    first, second = scored(samples()[:1], [{1: 1.0, 2: 2.0, 3: 3.0}], "rollout")[0]
    assert first.advantages[first.row.trained].tolist() == [1, 1, 2]
    assert second.advantages[second.row.trained].tolist() == [3, 3]
    with pytest.raises(KeyError):
        scored(samples()[:1], [{1: 1.0, 2: 2.0}], "rollout")


@pytest.mark.parametrize(("groups", "per_update", "epochs"), [(7, 3, 2), (4, 1, 3), (2, 5, 2), (0, 2, 1)])
def test_every_epoch_takes_every_group_once(groups, per_update, epochs):
    steps = optimiser_steps(groups, per_update, epochs, seed=1)
    each = min(per_update, groups)
    assert len(steps) == each * epochs
    for epoch in range(epochs):
        parts = steps[epoch * each : (epoch + 1) * each]
        assert sorted(number for part in parts for number in part) == list(range(groups))
        assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1
    assert steps == optimiser_steps(groups, per_update, epochs, seed=1)


def test_epochs_take_groups_in_different_orders():
    steps = optimiser_steps(20, 2, 2, seed=0)
    assert steps[0] != steps[2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
def test_ranks_have_as_many_packs_and_about_as_many_tokens(ranks):
    rng = np.random.default_rng(0)
    packs = pack(scored_groups(random_groups(rng, groups=10), rng.normal(size=30).tolist()), 60, share=True)
    dealt = deal(packs, ranks)
    assert len(dealt) == ranks
    assert len({len(mine) for mine in dealt}) == 1
    given = [each for mine in dealt for each in mine if each.trained_tokens]
    assert sorted(map(id, given)) == sorted(map(id, packs))
    loads = [sum(len(each.tokens) for each in mine) for mine in dealt]
    assert max(loads) - min(loads) <= max(len(each.tokens) for each in packs) + max(map(len, dealt))
