"""Advantages from a critic, and what a KL term takes from rewards."""

import math

import numpy as np
import pytest
import torch
from policies import add_model, make_policy
from transcripts import node, transcript
from transformers import AutoModelForCausalLM
from updates import rollouts, step, take, train

from harnessed.config import Advantage, Critic, Kl, Lora, Objective, Optimiser, Trainer
from harnessed.training.backends.local import LocalBackend
from harnessed.training.marking import by_call, by_rollout
from harnessed.training.samples import build
from harnessed.training.selection import select
from harnessed.training.valuing import penalise, select_by_critic

FAST = Optimiser(learning_rate=1e-3)
GAE = Advantage(kind="gae", discount=0.9, gae_lambda=0.8)
IN_REWARD = Objective(kl=Kl(coefficient=0.1, place="reward", estimator="k1"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_model(make_policy(tmp_path_factory.mktemp("policy")))


def backend_of(model, folder, **settings):
    return LocalBackend(model, folder, Trainer(**{"optimiser": FAST} | settings))


def with_critic(model, folder, **settings):
    return backend_of(model, folder, advantage=GAE, critic=Critic(optimiser=FAST, **settings))


class Known:
    """A critic whose values are given."""

    def __init__(self, values):
        self._values = values

    def values(self, packs, calls):
        assert calls == len(self._values)
        return np.array(self._values)


def two_calls(id="g.0", reward=1.0, **settings):
    return build(transcript([node(1, 0, [1], [2, 9]), node(2, 1, [4], [5, 9], **settings)], id=id, reward=reward))


def test_advantages_are_those_of_gae_over_the_calls_in_order():
    lost = two_calls("g.1", reward=None)
    taken, lesson = select_by_critic([[two_calls(), lost]], Known([0.5, 0.25]), Trainer(advantage=GAE))
    second = 1.0 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * second
    assert [sample.rollout for sample in taken.samples] == ["g.0"]
    assert taken.advantages == [{1: pytest.approx(first), 2: pytest.approx(second)}]
    assert taken.groups == 1
    assert lesson.returns.tolist() == pytest.approx([first + 0.5, 1.0])


def test_what_a_call_without_a_value_earned_counts_at_the_one_before_it():
    taken, lesson = select_by_critic([[two_calls()]], Known([0.5, math.nan]), Trainer(advantage=GAE))
    assert taken.advantages == [{1: pytest.approx(0.5)}]
    assert lesson.returns[0] == pytest.approx(1.0)
    assert math.isnan(lesson.returns[1])


def test_groups_are_not_compared_by_a_critic():
    groups = [[two_calls("a.0"), two_calls("a.1")], [two_calls("b.0")]]
    taken, _ = select_by_critic(groups, Known([0.0] * 6), Trainer(advantage=GAE))
    assert (len(taken.samples), taken.groups) == (3, 2)


def test_a_value_is_read_in_front_of_the_first_sampled_token(model, tmp_path):
    critic = with_critic(model, tmp_path / "w").critic
    torch.nn.init.normal_(critic._head.weight)
    samples, _ = rollouts()
    packs = by_call([samples], Trainer())
    values = critic.values(packs, 4)
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    expected = {}
    for first, sample in zip((0, 3), samples, strict=True):
        for row in sample.rows:
            for number, nodes in enumerate(sample.calls):
                places = np.flatnonzero(np.isin(row.answers, nodes))
                if len(places):
                    before = torch.from_numpy(row.tokens[: places[0]].astype(np.int64))[None]
                    hidden = plain.model(input_ids=before).last_hidden_state[0, -1]
                    expected[first + number] = critic._head(hidden).item()
    assert values.tolist() == pytest.approx([expected[call] for call in range(4)], abs=1e-5)
    assert len(set(values.round(4))) == 4
    assert np.isnan(critic.values(packs, 5)[4])


def test_a_critic_learns_what_rollouts_are_worth(model, tmp_path):
    critic = with_critic(model, tmp_path / "w", epochs=5, clip=None).critic
    samples, _ = rollouts()
    packs, returns = by_call([samples], Trainer()), np.array([1.0, 0.0, 0.5, 0.0])
    assert critic.values(packs, 4).tolist() == [0.0] * 4
    errors = []
    for _ in range(12):
        before = critic.values(packs, 4)
        errors.append(np.mean((before - returns) ** 2))
        metrics = critic.learn(packs, before, returns)
    assert errors[-1] < errors[0] / 10
    assert metrics["value_explained"] > 0.8
    assert metrics["value_loss"] == pytest.approx(errors[-1] / 2, rel=0.5)


def test_a_value_gains_nothing_beyond_the_clip(model, tmp_path):
    """The gradient is zero for a call whose value has moved past the clip towards its return."""
    critic = with_critic(model, tmp_path / "w", clip=0.2).critic
    samples, _ = rollouts()
    packs = by_call([samples], Trainer())
    torch.nn.init.constant_(critic._head.bias, 0.3)  # values are now 0.3, and were 0
    before, returns = np.zeros(4), np.ones(4)
    (loss,) = critic._losses(packs, before, returns)
    loss.backward()
    assert loss.item() == pytest.approx(4 * 0.8**2 / 2)
    assert critic._head.bias.grad.item() == 0
    (back,) = critic._losses(packs, before, -returns)
    critic._head.bias.grad = None
    back.backward()
    assert critic._head.bias.grad.item() == pytest.approx(4 * 1.3)


def test_the_policy_is_not_touched_by_its_critic(model, tmp_path):
    backend = with_critic(model, tmp_path / "w")
    before = [parameter.detach().clone() for parameter in backend._parameters]
    samples, _ = rollouts()
    backend.critic.learn(by_call([samples], Trainer()), np.zeros(4), np.ones(4))
    assert all(torch.equal(a, b) for a, b in zip(before, backend._parameters, strict=True))


def test_a_critic_goes_on_from_a_checkpoint(model, tmp_path):
    def learn(critic, times):
        samples, _ = rollouts()
        packs = by_call([samples], Trainer())
        for _ in range(times):
            critic.learn(packs, critic.values(packs, 4), np.array([1.0, 0.0, 0.5, 0.0]))
        return critic.values(packs, 4)

    first = with_critic(model, tmp_path / "w")
    learn(first.critic, 2)
    train(first, [0])
    first.save(tmp_path / "c", {"step": 1, "version": [0, 1], "tasks": 8})
    whole = learn(first.critic, 2)
    settings = Trainer(optimiser=FAST, advantage=GAE, critic=Critic(optimiser=FAST), resume_from=tmp_path / "c")
    second = LocalBackend(model, tmp_path / "w2", settings)
    assert learn(second.critic, 2).tolist() == whole.tolist()


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_a_divergence_is_taken_from_the_reward(model, tmp_path, lora):
    settings = Trainer(optimiser=FAST, objective=IN_REWARD, lora=lora)
    backend = LocalBackend(model, tmp_path / "w", settings)
    samples, _ = rollouts()
    penalise([samples], backend, settings)
    assert [sample.penalty for sample in samples] == [0.0, 0.0]
    assert take(backend, [step()], IN_REWARD).applied
    penalise([samples], backend, settings)
    fresh = backend_of(model, tmp_path / "fresh")
    for sample in samples:
        (only,) = by_rollout([[sample]], Trainer())
        now, start = (one._distributions(one._model, only)[0].sum().item() for one in (backend, fresh))
        assert sample.penalty == pytest.approx(0.1 * (now - start), abs=1e-5)
        assert sample.penalty != 0


def test_without_a_term_in_the_reward_nothing_is_taken():
    samples, _ = rollouts()
    penalise([samples], None, Trainer(objective=Objective(kl=Kl(coefficient=0.1))))
    assert [sample.penalty for sample in samples] == [0.0, 0.0]


def test_a_penalty_counts_in_advantages():
    pair = [two_calls("g.0", reward=1.0), two_calls("g.1", reward=1.0)]
    pair[1].penalty = 0.5
    taken = select([pair], Advantage(normalise_deviation=False))
    assert taken.advantages == [0.25, -0.25]
    _, lesson = select_by_critic([pair], Known([0.0] * 4), Trainer(advantage=Advantage(kind="gae")))
    assert lesson.returns.tolist() == [1.0, 1.0, 0.5, 0.5]
