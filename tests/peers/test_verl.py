"""Our advantages and objectives beside those of verl 0.9.1, where they mean the same; and where they differ, how.

The two count different things. verl knows rows: a group, a mean, `seq-mean` are over rows (sequences). We know
rollouts, which have one row or more, and answers. With one row and one answer for each rollout both are the same.
"""

import numpy as np
import pytest
import torch
from peer_batch import LENGTHS, MASK, B, T, assert_same, batch, terms
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

from harnessed.config import Advantage, Importance, Kl, Objective
from harnessed.training.advantages import advantages, gae
from harnessed.training.losses import importance_weights, kl_estimate, objective_loss

NORMALISATIONS = {"rollout": "seq-mean-token-mean", "token": "token-mean", "constant": "seq-mean-token-sum-norm"}
TOLERANCE = 1e-8
"""verl adds 1e-8 to the tokens of a row before it divides by them."""
FAR = 1e6
"""verl's dual clip cannot be left out: so far away it does nothing."""


def actor(**settings):
    needed = {"strategy": "fsdp", "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1, "clip_ratio_c": FAR}
    config = ActorConfig(**(needed | settings))
    config.global_batch_info["loss_scale_factor"] = 10
    return config


def verl_loss(name, made, mode="seq-mean-token-mean", importance=None, **settings):
    loss = core_algos.get_policy_loss_fn(name)
    advantages = made.advantages[:, None].expand(B, T)
    config = actor(**settings)
    return loss(made.old, made.logprobs, advantages, MASK, mode, config, importance)


@pytest.mark.parametrize("name", ["rollout", "token", "constant"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("ppo", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo"), ("policy_gradient", "gpg")]
)
def test_losses_are_the_same(ours, theirs, name):
    """gspo: verl takes the gradient token by token (GSPO-token in its paper), we that of the ratio of the
    answer: they are the same as long as an answer has one advantage, and it always has here."""
    made = batch()
    settings = Objective(loss=ours, clip_low=0.1, clip_high=0.3, importance=Importance(level="none"))
    loss, _ = objective_loss(terms(made, name), settings)
    other, _ = verl_loss(theirs, made, NORMALISATIONS[name], clip_ratio_low=0.1, clip_ratio_high=0.3)
    assert_same(made, loss, other, TOLERANCE)


def test_the_dual_clip_is_the_same():
    made = batch(spread=2.0)
    settings = Objective(dual_clip=1.5, importance=Importance(level="none"))
    loss, sums = objective_loss(terms(made), settings)
    other, metrics = verl_loss("vanilla", made, clip_ratio_c=1.5)
    assert_same(made, loss, other, TOLERANCE)
    assert sums["clip_fraction_dual"] > 0
    tokens = LENGTHS.sum()
    assert sums["clip_fraction_dual"] / tokens == pytest.approx(metrics["actor/pg_clipfrac_lower"])
    clipped = (sums["clip_fraction_low"] + sums["clip_fraction_high"]) / tokens
    assert clipped == pytest.approx(metrics["actor/pg_clipfrac"])
    assert sums["kl"] / tokens == pytest.approx(metrics["actor/ppo_kl"])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("bound", "threshold"), [("truncate", 1.3), ("mask", "1e-9_1.3")])
def test_importance_weights_are_the_same(level, bound, threshold):
    """verl can mask small weights as well; we do not, for a small weight does no harm. A sequence is a row there, an
    answer here. verl bounds the logarithm to 20, we do not."""
    made = batch()
    theirs, _ = compute_rollout_correction_weights(made.old - made.engine, MASK, level, threshold)
    settings = Objective(importance=Importance(level=level, bound=bound, cap=1.3))
    flat = terms(made)
    ours, _ = importance_weights(flat.old_logprobs - flat.engine_logprobs, flat.answers, settings)
    torch.testing.assert_close(ours, theirs[MASK.bool()])
    assert (ours == (1.3 if bound == "truncate" else 0)).any()
    assert_same(made, objective_loss(flat, settings)[0], verl_loss("vanilla", made, importance=theirs)[0], TOLERANCE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_the_same(estimator):
    """verl keeps k3 below 10, we do not."""
    made = batch()
    theirs = core_algos.kl_penalty(made.logprobs, made.reference, estimator)
    torch.testing.assert_close(kl_estimate(made.logprobs, made.reference, estimator), theirs)
    settings = Objective(kl=Kl(coefficient=0.3, estimator=estimator), importance=Importance(level="none"))
    loss, _ = objective_loss(terms(made), settings)
    penalty = core_algos.agg_loss(theirs, MASK, "seq-mean-token-mean")
    assert_same(made, loss, verl_loss("vanilla", made)[0] + 0.3 * penalty, TOLERANCE)


def test_the_entropy_bonus_is_the_same():
    made = batch()
    loss, _ = objective_loss(terms(made, "token"), Objective(entropy=0.2, importance=Importance(level="none")))
    bonus = core_algos.agg_loss(made.entropies, MASK, "token-mean")
    assert_same(made, loss, verl_loss("vanilla", made, "token-mean")[0] - 0.2 * bonus, TOLERANCE)


def verl_advantages(kind, groups, lengths=None, **settings):
    """One row of so many tokens for each reward; the advantage of each row's first token."""
    rewards = [reward for group in groups for reward in group]
    lengths = lengths or [1] * len(rewards)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).double()
    scores = torch.zeros_like(mask)
    scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
    index = np.array([number for number, group in enumerate(groups) for _ in group])
    found, _ = core_algos.get_adv_estimator_fn(kind)(scores, mask, index=index, **settings)
    return found[:, 0].tolist()


GROUPS = [[1.0, 0.0, 0.0, 1.0], [5.0, 2.5], [3.0, 3.0, 3.0], [0.1, 0.7, -2.0]]
"""The second and the last have lost members, the third has nothing to compare."""


@pytest.mark.parametrize(
    ("settings", "kind", "theirs"),
    [
        (Advantage(), "grpo", {}),
        (Advantage(normalise_deviation=False), "grpo", {"norm_adv_by_std_in_grpo": False}),
        (Advantage(kind="rloo"), "rloo", {}),
    ],
)
def test_advantages_are_the_same(settings, kind, theirs):
    ours = [value for group in advantages(GROUPS, settings) for value in group]
    lengths = [1 + place % 5 for place in range(len(ours))]
    assert ours == pytest.approx(verl_advantages(kind, GROUPS, lengths, **theirs), rel=1e-5, abs=1e-9)


def test_a_group_of_one_is_taken_by_verl_and_not_by_us():
    """verl's advantage is then the reward itself, with no baseline. `select` leaves such a group out."""
    assert verl_advantages("grpo", [[0.7]]) == pytest.approx([0.7])
    assert advantages([[0.7]], Advantage()) == [[0]]


def test_reinforce_plus_plus_counts_rollouts_where_verl_counts_tokens():
    """verl whitens over the tokens of the batch, so that a long rollout moves mean and deviation more than a short one.
    We count each rollout once. With one token each, both are the same."""
    settings = Advantage(kind="reinforce_plus_plus")
    ours = [value for group in advantages(GROUPS, settings) for value in group]
    name = "reinforce_plus_plus_baseline"
    assert ours == pytest.approx(verl_advantages(name, GROUPS), rel=1e-5, abs=1e-9)
    assert ours != pytest.approx(verl_advantages(name, GROUPS, [9] + [1] * (len(ours) - 1)), rel=1e-2)


def test_a_rollout_of_two_rows_counts_twice_for_verl_and_once_for_us():
    """Rewards 1 and 0; the first rollout has two rows, which verl's group sees as two members."""
    assert advantages([[1, 0]], Advantage(normalise_deviation=False)) == [[0.5, -0.5]]
    theirs = verl_advantages("grpo", [[1.0, 1.0, 0.0]], norm_adv_by_std_in_grpo=False)
    assert theirs == pytest.approx([1 / 3, 1 / 3, -2 / 3])


def test_gae_is_the_same():
    """verl goes over tokens and we over calls: the recursion is one. verl whitens the advantages afterwards (over
    tokens), so what is compared is what it adds to the values: the returns."""
    draw = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 1, 7, generator=draw, dtype=torch.float64)
    _, theirs = core_algos.compute_gae_advantage_return(rewards, values, torch.ones(1, 7).double(), 0.9, 0.8)
    found, targets = gae(rewards[0].tolist(), values[0].tolist(), 0.9, 0.8)
    assert targets == pytest.approx(theirs[0].tolist())
    assert found == pytest.approx((theirs - values)[0].tolist())
