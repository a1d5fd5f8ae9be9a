"""Our objectives beside the loss of TRL 1.16.0's GRPOTrainer, where they mean the same; and where they differ, how.

The loss is a method of a trainer. It is called on a stand-in with the settings and the log-probabilities that it reads.
TRL's advantages are computed inside of the method that generates and are not called here; its formulas are those of
verl, but that 1e-4 instead of 1e-6 is added to the deviation.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from peer_batch import LENGTHS, MASK, B, T, assert_same, batch, terms
from trl.trainer.grpo_trainer import GRPOTrainer

from harnessed.config import Importance, Kl, Objective
from harnessed.training.losses import importance_weights, objective_loss

LOSSES = {"rollout": "grpo", "token": "dapo", "constant": "dr_grpo"}


def trl_loss(made, importance=None, **settings):
    """`importance`: the weights [B, T] that TRL computes when it generates."""
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (made.logprobs, made.entropies, None),
        _metrics={"eval": defaultdict(list)},
        _entropy_bonus_enabled=bool(settings.get("entropy_coef")),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=settings.pop("delta", None)),
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=importance is not None,
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        max_completion_length=10,
        **{
            "importance_sampling_level": "token",
            "beta": 0.0,
            "loss_type": "grpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            **settings,
        },
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": MASK,
        "advantages": made.advantages,
        "old_per_token_logps": made.old,
        "ref_per_token_logps": made.reference,
        "importance_sampling_ratio": importance,
        "num_items_in_batch": LENGTHS.sum(),
    }
    loss = GRPOTrainer._compute_loss(stand_in, None, inputs)
    return loss, {name: values[0] for name, values in stand_in._metrics["eval"].items()}


def ours(made, normalisation="rollout", **settings):
    return objective_loss(
        terms(made, normalisation), Objective(**({"importance": Importance(level="none")} | settings))
    )


@pytest.mark.parametrize("name", ["rollout", "token", "constant"])
@pytest.mark.parametrize(("loss", "level"), [("ppo", "token"), ("gspo", "sequence")])
def test_losses_are_the_same(loss, level, name):
    """TRL calls the normalisations by the methods that brought them: grpo, dapo, dr_grpo. Its `grpo` divides by rows:
    it is our `rollout` as long as each rollout has one row, and our `sample` otherwise."""
    made = batch()
    mine, sums = ours(made, name, loss=loss, clip_low=0.1, clip_high=0.3)
    other, metrics = trl_loss(
        made, loss_type=LOSSES[name], importance_sampling_level=level, epsilon_low=0.1, epsilon_high=0.3
    )
    assert_same(made, mine, other)
    if level == "token":
        for side in ("low", "high"):
            assert sums[f"clip_fraction_{side}"] > 0
            assert sums[f"clip_fraction_{side}"] / LENGTHS.sum() == pytest.approx(metrics[f"clip_ratio/{side}_mean"])


def test_cispo_is_the_same():
    """TRL has no lower bound (clip_low 1), and its epsilon_high is the cap itself, ours the distance from 1."""
    made = batch(spread=1.0)
    assert_same(
        made,
        ours(made, "token", loss="cispo", clip_low=1.0, clip_high=0.5)[0],
        trl_loss(made, loss_type="cispo", epsilon_high=1.5)[0],
    )


def test_the_dual_clip_is_the_same():
    """TRL's delta bounds the ratio, ours the objective: the same where delta is above 1 + clip_high."""
    made = batch(spread=2.0)
    mine, sums = ours(made, dual_clip=1.5)
    assert_same(made, mine, trl_loss(made, delta=1.5)[0])
    assert sums["clip_fraction_dual"] > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
def test_importance_weights_act_in_the_same_way(level, bound):
    """On the policy's term alone: the KL and entropy terms are not weighted."""
    made = batch()
    settings = {"importance": Importance(level=level, bound=bound, cap=1.3), "kl": Kl(coefficient=0.3)}
    flat = terms(made)
    weights = torch.zeros(B, T, dtype=torch.float64)
    weights[MASK.bool()] = importance_weights(
        flat.old_logprobs - flat.engine_logprobs, flat.answers, Objective(**settings)
    )[0]
    assert_same(made, ours(made, **settings)[0], trl_loss(made, weights, beta=0.3)[0])


def test_the_kl_term_is_the_same():
    made = batch()
    mine, sums = ours(made, kl=Kl(coefficient=0.3))
    other, metrics = trl_loss(made, beta=0.3)
    assert_same(made, mine, other)
    assert sums["kl_reference"].item() / LENGTHS.sum().item() == pytest.approx(metrics["kl"])


def test_the_entropy_bonus_is_the_same_over_tokens():
    """TRL's is a mean over tokens whatever the policy's normalisation is; ours has the weights of the policy's term."""
    made = batch()
    mine, sums = ours(made, "token", entropy=0.2)
    other, metrics = trl_loss(made, loss_type="dapo", entropy_coef=0.2)
    assert_same(made, mine, other)
    assert sums["entropy"].item() / LENGTHS.sum().item() == pytest.approx(metrics["entropy"])
