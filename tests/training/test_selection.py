"""Which groups an update takes, and how rewards of single calls reach the answers that they belong to."""

import pytest
from transcripts import node, transcript

from harnessed.config import Advantage
from harnessed.records import Fate, Outcome
from harnessed.training.samples import build
from harnessed.training.selection import select

CENTRED = Advantage(normalise_deviation=False)


def member(name, reward, outcome=Outcome.OK, nodes=None, call_rewards=()):
    made = transcript(nodes or [node(1, 0, [1], [2, 9])], id=name, reward=reward, outcome=outcome)
    made.rollout.call_rewards = list(call_rewards)
    return build(made)


def group(name, rewards, outcome=Outcome.OK):
    return [member(f"{name}.{i}", reward, outcome) for i, reward in enumerate(rewards)]


def test_groups_without_a_signal_or_without_members_are_not_taken():
    equal, mixed, lost = group("a", [1, 1]), group("b", [1, 0]), group("c", [1, 1], Outcome.INFRASTRUCTURE)
    alone = [*group("d", [1]), *group("d", [0], Outcome.INFRASTRUCTURE)]
    taken = select([equal, mixed, lost, alone], CENTRED)
    assert [sample.rollout for sample in taken.samples] == ["b.0", "b.1"]
    assert taken.advantages == [0.5, -0.5]
    assert taken.groups == 1
    assert [sample.fates for sample in equal] == [{Fate.GROUP_SKIPPED: 2}] * 2
    assert [sample.fates for sample in lost] == [{Fate.INFRASTRUCTURE: 2}] * 2
    assert [sample.fates for sample in alone] == [{Fate.GROUP_INCOMPLETE: 2}, {Fate.INFRASTRUCTURE: 2}]


def test_a_failed_member_is_not_a_reward_of_0():
    three = [*group("a", [1, 0.5]), *group("b", [0], Outcome.INFRASTRUCTURE)]
    taken = select([three], Advantage(kind="rloo"))
    assert [sample.rollout for sample in taken.samples] == ["a.0", "a.1"]
    assert taken.advantages == [0.5, -0.5]


def test_equal_groups_are_kept_where_the_setting_says_so():
    taken = select([group("a", [1, 1]), group("b", [1, 0])], Advantage(equal_groups="keep", normalise_deviation=False))
    assert [sample.rollout for sample in taken.samples] == ["a.0", "a.1", "b.0", "b.1"]
    assert taken.advantages == [0, 0, 0.5, -0.5]
    assert [sample.fates for sample in taken.samples] == [{Fate.TRAINED: 2}] * 4


def calls(*ids, undelivered=()):
    """An answer for each id, each in a conversation of its own; the same id twice is one call with two answers."""
    nodes = []
    for number, call in enumerate(ids, 1):
        nodes.append(node(number, 0, [number], [2, 9], delivered=number not in undelivered))
        nodes[-1].call = call
    return nodes


def per_call(*members, **settings):
    return select([list(members)], CENTRED.model_copy(update={"per_call": True} | settings)).advantages


def test_each_call_has_the_advantage_of_what_came_after_it():
    first = member("g.0", 1.0, nodes=calls("x", "y", "z"), call_rewards=[4, 0, 2])
    second = member("g.1", 0.0, nodes=calls("x"))
    # Returns of the first: 7, 3, 3 (mean 13/3); of the second: 0. The mean of both rollouts is 13/6.
    found = per_call(first, second)
    assert found[0] == pytest.approx({1: 7 - 13 / 6, 2: 3 - 13 / 6, 3: 3 - 13 / 6})
    assert found[1] == pytest.approx({1: -13 / 6})


def test_a_discount_makes_later_rewards_worth_less():
    first = member("g.0", 4.0, nodes=calls("x", "y", "z"))
    found = per_call(first, member("g.1", 0.0, nodes=calls("x")), discount=0.5)
    mean = (1 + 2 + 4) / 3 / 2
    assert found[0] == pytest.approx({1: 1 - mean, 2: 2 - mean, 3: 4 - mean})


def test_calls_are_the_answers_that_the_harness_got():
    """Of two answers to one request both have the call's reward; an answer that got lost is no call."""
    first = member("g.0", 0.0, nodes=calls("x", "x", "lost", "y", undelivered=(3,)), call_rewards=[1, 5])
    assert first.calls == [[1, 2], [4]]
    found = per_call(first, member("g.1", 0.0, nodes=calls("x")))
    mean = (6 + 5) / 2 / 2
    assert found[0] == pytest.approx({1: 6 - mean, 2: 6 - mean, 4: 5 - mean})


@pytest.mark.parametrize(("given", "kept"), [([], [0, 0]), ([1], [1, 0]), ([1, 2], [1, 2]), ([1, 2, 3, 4], [1, 9])])
def test_there_is_one_reward_for_each_call_and_none_is_lost(given, kept):
    assert member("g.0", 0.0, nodes=calls("x", "y"), call_rewards=given).call_rewards == kept


def test_rewards_of_calls_are_for_the_eye_where_the_setting_does_not_say_otherwise():
    first = member("g.0", 1.0, nodes=calls("x", "y"), call_rewards=[4, 0])
    assert select([[first, *group("g", [0.0])]], CENTRED).advantages == [0.5, -0.5]


def test_a_rollout_without_calls_counts_in_its_group():
    silent = build(transcript([], id="g.1", reward=0.0))
    assert per_call(member("g.0", 1.0, nodes=calls("x")), silent) == [{1: 0.5}, {}]
