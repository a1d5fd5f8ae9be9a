"""From transcripts and rewards to the loss of an optimiser step, in float64 to 1e-9 against the formula.

One side goes the way of the product: rows, fates, advantages, weights, packs. The other takes each delivered answer of
each judged rollout once, with the formula's R, T_r and A_r, rounded to float32 as rows store them. Every token id
occurs once in a step, so the policy's log-probability of a token is a function of its id, whatever row or pack it
stands in.
"""

import math
from dataclasses import fields
from statistics import fmean

import numpy as np
import pytest
import torch
from formula import written_down
from transcripts import node, transcript

from harnessed.config import Advantage, Importance, Kl, Objective
from harnessed.records import Outcome
from harnessed.training.batching import scored
from harnessed.training.losses import Terms, objective_loss
from harnessed.training.packing import pack
from harnessed.training.samples import build
from harnessed.training.selection import select

CENTRED = Advantage(normalise_deviation=False)


def rollout(place, reward, conversations, outcome=Outcome.OK, version=0):
    """A rollout with a conversation (and so a row) of its own for each list of answers; `[3, 2]` is one conversation
    with an answer of 3 tokens, then one of 2."""
    nodes, ids = [], iter(range(place * 1000 + 1, place * 1000 + 1000))
    for lengths in conversations:
        parent = 0
        for length in lengths:
            number = len(nodes) + 1
            logprobs = [-1.0 + 0.25 * math.sin(place + number + i) for i in range(length)]
            answer = [next(ids) for _ in range(length)]
            nodes.append(node(number, parent, [next(ids)], answer, logprobs=logprobs, version=version))
            parent = number
    return transcript(nodes, id=f"g{place // 10}.{place % 10}", reward=reward, outcome=outcome)


def policy(ids, kind):
    """Made-up log-probabilities of tokens, by their ids."""
    phase = {"now": 0.0, "old": 1.0, "reference": 2.0}[kind]
    return -1.0 + 0.3 * torch.sin(ids.double() * 1.7 + phase)


def terms(ids, engine, advantages, weights, answers):
    def real(values):
        return torch.as_tensor(np.asarray(values, np.float32)).double()

    ids = torch.as_tensor(ids)
    columns = (policy(ids, "old"), real(engine), real(advantages), real(weights), torch.as_tensor(answers))
    entropies = 0.5 + torch.cos(ids.double()) / 3
    return Terms(policy(ids, "now").requires_grad_(), *columns, entropies, policy(ids, "reference"))


def of_the_product(groups, advantage, objective, *, budget=12, share=True):
    """The sum over the step's packs; the gradient of each token by its id."""
    samples = [[build(each) for each in group] for group in groups]
    taken = select(samples, advantage)
    rows = scored(taken.samples, taken.advantages, objective.normalisation, objective.constant)
    loss, gradients = 0.0, {}
    for each in pack([rows], budget, share):
        made = terms(each.targets, each.engine_logprobs, each.advantages, each.weights, each.answers)
        part, _ = objective_loss(made, objective)
        part.backward()
        loss += part.item()
        gradients |= dict(zip(each.targets.tolist(), made.logprobs.grad.tolist(), strict=True))
    return loss, gradients


def of_the_formula(groups, compare, objective, kept=lambda rewards: True):
    """`compare`: from the rewards of a group to its advantages."""
    members = [[each for each in group if each.rollout.outcome == Outcome.OK] for group in groups]
    members = [group for group in members if len(group) > 1 and kept([each.rollout.reward for each in group])]
    everyone = [each for group in members for each in group]
    advantages = [a for group in members for a in compare([each.rollout.reward for each in group])]
    answers = [[a for a in each.attempts[0].nodes if a.delivered] for each in everyone]
    trained = [sum(a.sampled for a in mine) for mine in answers]
    weight = {
        "rollout": lambda r: 1 / (len(everyone) * trained[r]),
        "token": lambda r: 1 / sum(trained),
        "constant": lambda r: 1 / (len(everyone) * objective.constant),
    }[objective.normalisation]
    columns = [[], [], [], [], []]
    for r, mine in enumerate(answers):
        for number, answer in enumerate(mine):
            ids = np.frombuffer(answer.answer, np.int32).tolist()
            added = (ids, np.frombuffer(answer.logprobs, np.float32), advantages[r], weight(r), r * 100 + number)
            for column, values in zip(columns, added, strict=True):
                column += list(values) if np.ndim(values) else [values] * len(ids)
    made = terms(*columns)
    loss = -written_down(made, objective)
    if loss.requires_grad:
        loss.backward()
        return loss.item(), dict(zip(columns[0], made.logprobs.grad.tolist(), strict=True))
    return loss.item(), dict.fromkeys(columns[0], 0.0)


def centred(rewards):
    return [reward - fmean(rewards) for reward in rewards]


def leave_one_out(rewards):
    return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]


FIVE_BESIDE_ONE = [[rollout(0, 1.0, [[2, 1], [1], [3], [1, 1], [2]]), rollout(1, 0.0, [[3, 4]])]]
EQUAL = [[rollout(0, 1.0, [[2], [2]]), rollout(1, 1.0, [[1]])], [rollout(10, 1.0, [[2]]), rollout(11, 0.5, [[3, 1]])]]
FAILED = [
    [rollout(0, 1.0, [[2, 2]]), rollout(1, 0.0, [[5]], Outcome.INFRASTRUCTURE), rollout(2, 0.25, [[1], [2]])],
    [rollout(10, 1.0, [[2]]), rollout(11, 0.0, [[3]], Outcome.CANCELLED)],
]
SILENT = [[rollout(0, 1.0, [[2, 1], [1]]), rollout(1, 0.0, []), rollout(2, 0.5, [[4]])]]
STALE = [[rollout(0, 1.0, [[2, 2], [1]]), rollout(1, 0.0, [[3, 1]])]]
for answer in STALE[0][0].attempts[0].nodes[:2]:
    answer.versions = np.array([3, 4], np.int32).tobytes()

EVERYTHING = {
    "plain": Objective(),
    "dual clip": Objective(clip_low=0.1, clip_high=0.28, dual_clip=1.1),
    "gspo": Objective(loss="gspo", clip_low=0.05, clip_high=0.05, importance=Importance(level="sequence", cap=1.1)),
    "cispo": Objective(loss="cispo", clip_low=1.0, clip_high=0.2, importance=Importance(level="none")),
    "masked": Objective(importance=Importance(bound="mask", cap=1.05)),
    "masked answers": Objective(importance=Importance(level="sequence", bound="mask", cap=1.05)),
    "policy gradient": Objective(loss="policy_gradient", kl=Kl(coefficient=0.3, estimator="k1")),
    "of the engine": Objective(old="engine", kl=Kl(coefficient=0.3, estimator="k2")),
    "kl and entropy": Objective(kl=Kl(coefficient=0.3), entropy=0.1),
    "tokens": Objective(normalisation="token", entropy=0.1),
    "constant": Objective(normalisation="constant", constant=100, kl=Kl(coefficient=0.3)),
}


def check(groups, objective, advantage=CENTRED, compare=centred, **settings):
    loss, gradients = of_the_product(groups, advantage, objective)
    expected, wanted = of_the_formula(groups, compare, objective, **settings)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert gradients.keys() == wanted.keys()
    for token, gradient in gradients.items():
        assert gradient == pytest.approx(wanted[token], abs=1e-9), token
    return loss


@pytest.mark.parametrize("objective", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_a_rollout_with_five_rows_beside_one_with_a_single_row(objective):
    check(FIVE_BESIDE_ONE, objective)


@pytest.mark.parametrize("objective", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_groups_with_equal_rewards_are_skipped_or_count_with_an_advantage_of_zero(objective):
    check(EQUAL, objective, kept=lambda rewards: len(set(rewards)) > 1)
    check(EQUAL, objective, Advantage(normalise_deviation=False, equal_groups="keep"))


@pytest.mark.parametrize("objective", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_a_group_with_a_failed_member_is_who_is_left(objective):
    check(FAILED, objective)
    check(FAILED, objective, Advantage(kind="rloo"), leave_one_out)


@pytest.mark.parametrize("objective", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_a_rollout_without_trained_tokens_counts_in_its_group_and_in_R(objective):
    check(SILENT, objective)


@pytest.mark.parametrize("objective", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_versions_in_a_row_change_nothing(objective):
    """A stale token differs by what the engine recorded for it, and that alone is in the formula."""
    stale = check(STALE, objective)
    fresh = [[rollout(0, 1.0, [[2, 2], [1]]), rollout(1, 0.0, [[3, 1]])]]
    assert of_the_product(fresh, CENTRED, objective)[0] == stale


@pytest.mark.parametrize("objective", EVERYTHING.values(), ids=EVERYTHING.keys())
@pytest.mark.parametrize(("budget", "share"), [(1, False), (1000, False), (1, True), (1000, True)])
def test_how_rows_are_packed_changes_nothing(objective, budget, share):
    whole, wanted = of_the_product(FIVE_BESIDE_ONE, CENTRED, objective)
    loss, gradients = of_the_product(FIVE_BESIDE_ONE, CENTRED, objective, budget=budget, share=share)
    assert loss == pytest.approx(whole, abs=1e-12)
    assert gradients == pytest.approx(wanted, abs=1e-12)


def test_every_field_of_the_terms_matters_to_one_of_these_objectives():
    """So that no case above passes because what it is about has no part in it."""
    samples = [[build(each) for each in group] for group in FIVE_BESIDE_ONE]
    taken = select(samples, CENTRED)
    (each,) = pack([scored(taken.samples, taken.advantages, "rollout")], 1000, False)
    made = terms(each.targets, each.engine_logprobs, each.advantages, each.weights, each.answers)
    before = {name: objective_loss(made, objective)[0].item() for name, objective in EVERYTHING.items()}
    for field in fields(Terms):
        values = {other.name: getattr(made, other.name) for other in fields(Terms)}
        changed = values[field.name].detach().clone()
        changed[:2] = torch.flip(changed, [0])[:2] * (1 if changed.dtype == torch.int64 else 1.3)
        after = {n: objective_loss(Terms(**values | {field.name: changed}), o)[0].item() for n, o in EVERYTHING.items()}
        assert before != after, field.name
