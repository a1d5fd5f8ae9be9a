"""What a run warns of, and what ends it, from metrics and batches made by hand."""

import math

import pytest
from transcripts import node, transcript

from harnessed.config import Safety as Settings
from harnessed.records import GroupSpec, Outcome
from harnessed.training.batches import Alike, all_alike, check_remade, infrastructure
from harnessed.training.failures import AllAlike, NotFinite, RunFailed, TooManyFailed
from harnessed.training.metrics import equal_share, truncated_share
from harnessed.training.safety import Safety
from harnessed.training.samples import build
from harnessed.training.selection import Group

ENTROPY, EQUAL, CUT = "the entropy fell", "of the groups of the last 5 steps", "of the answers were cut"
WARNINGS = {
    "entropy": ([2.0, 0.21, 0.19, 0.1, 0.3, 0.1], ENTROPY, [2, 5]),
    "entropy that is not known": ([None, math.nan, 2.0, None, 0.1, None, 0.1], ENTROPY, [4]),
    "entropy that rises": ([0.1, 2.0, 0.05], ENTROPY, []),
    "equal_groups_share": ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], EQUAL, [4, 11]),
    "equal_groups_share at its limit": ([0.9] * 7, EQUAL, []),
    "equal_groups_share of which one is not known": ([1.0, None, 1.0, 1.0, 1.0, 1.0], EQUAL, [5]),
    "truncated_share": ([0.5, 0.6, 0.9, None, 0.9, 0.5, 0.6], CUT, [1, 6]),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_a_warning_comes_once_until_what_it_tells_of_is_better(case):
    values, says, expected = WARNINGS[case]
    safety = Safety(Settings(equal_groups=0.9))
    told = []
    for number, value in enumerate(values):
        warnings = safety.note({case.split()[0]: value})
        assert all(says in warning and "\n" not in warning for warning in warnings) and len(warnings) <= 1
        told += [number] * len(warnings)
        assert safety.note({"timing_s/checkpoint": 1.0}) == []
    assert told == expected


def test_each_metric_has_its_own_warning():
    safety = Safety(Settings())
    assert safety.note({"entropy": 1.0, "truncated_share": 0.0}) == []
    both = safety.note({"entropy": 0.05, "truncated_share": 0.75})
    assert both[0].startswith("the entropy fell from 1 to 0.05") and both[1].startswith("75% of the answers")


def test_updates_that_are_not_finite_are_counted_and_end_the_run_in_a_row():
    safety = Safety(Settings(skipped_updates=3))
    for skipped in (True, True, False, True, True):
        safety.skipped(skipped)
    assert safety.updates_skipped == 4
    with pytest.raises(NotFinite, match=r"the last 3 updates were skipped .* look at logprob_difference_max"):
        safety.skipped(True)
    assert issubclass(NotFinite, RunFailed) and safety.updates_skipped == 5


def test_what_it_remembers_follows_from_the_lines():
    lines = [
        {"step": 0, "held_out": 0.5},
        {"step": 1, "entropy": 2.0, "optimiser_steps": 1, "update_applied": True, "equal_groups_share": 1.0},
        *({"step": n, "equal_groups_share": 1.0, "update_applied": False} for n in (2, 3, 4)),
        {"step": 5, "entropy": 0.1, "optimiser_steps": 0, "update_applied": False, "equal_groups_share": 1.0},
        {"step": 6, "update_applied": False},
        {"step": 7, "entropy": math.nan, "optimiser_steps": 0, "update_applied": False, "equal_groups_share": 1.0},
    ]
    safety = Safety(Settings(skipped_updates=3))
    safety.replay(lines)
    assert safety.updates_skipped == 2
    assert safety.note({"entropy": 0.1, "equal_groups_share": 1.0}) == []  # both were told
    with pytest.raises(NotFinite):
        safety.skipped(True)


def test_a_run_that_goes_on_after_its_last_try_gets_another():
    safety = Safety(Settings(skipped_updates=2))
    safety.replay([{"optimiser_steps": 0, "update_applied": False}] * 2)
    safety.skipped(False)
    safety.replay([{"optimiser_steps": 0, "update_applied": False}] * 2)
    with pytest.raises(NotFinite, match="the last 2 updates"):
        safety.skipped(True)


def ended(outcome, reason="", reward=None, calls=(), tokens=(2, 9)):
    nodes = [node(1, 0, [1], list(tokens))] if tokens else []

    def make(id):
        one = transcript(nodes, id=id, outcome=outcome, reward=reward)
        one.rollout.reason, one.rollout.call_rewards = reason, list(calls)
        return one

    return make


def batch(*groups):
    made = []
    for number, group in enumerate(groups):
        transcripts = [each(f"r.train.{number:06d}.{index}") for index, each in enumerate(group)]
        spec = GroupSpec(id=f"r.train.{number:06d}", run="r", task={}, n=len(transcripts))
        made.append(Group(spec, transcripts, [build(each) for each in transcripts]))
    return made


OK, BAD = ended(Outcome.OK, reward=1.0), ended(Outcome.INFRASTRUCTURE, "no room\nleft")
GONE = ended(Outcome.CANCELLED)


@pytest.mark.parametrize(
    ("groups", "failed"),
    [
        ([[OK, OK, OK, OK]], 0),
        ([[OK, OK, OK, BAD]], 0),
        ([[OK, OK], [OK, BAD, GONE, GONE]], 0),
        ([[BAD, OK], [OK, BAD], [OK, OK]], 2),
        ([[BAD, BAD]], 2),
    ],
)
def test_a_batch_of_which_too_much_failed_by_infrastructure_is_made_again(groups, failed):
    why = infrastructure(batch(*groups), 0.25)
    count = sum(map(len, groups))
    expected = f"{failed} of {count} rollouts failed by infrastructure, most often: no room left"
    assert why == (expected if failed else "")


def test_a_batch_is_made_again_so_often_and_then_the_run_ends():
    settings = Settings(remake=2)
    check_remade("it burns", 0, settings)
    check_remade("it burns", 1, settings)
    with pytest.raises(TooManyFailed, match=r"also after it was made again \(2 of .*remake\), it burns$"):
        check_remade("it burns", 2, settings)
    with pytest.raises(TooManyFailed, match=r"not fit to be trained: it burns$"):
        check_remade("it burns", 0, Settings(remake=0))


def exits(reason, reward=0.0, **settings):
    return ended(Outcome.AGENT_EXIT, reason, reward, **settings)


ALIKE = {
    "the same, up to ids, numbers and paths": (
        [
            [exits("exit status 1: no /tmp/a/x1 at 12"), exits("exit status 1: no /tmp/b/y at 7")],
            [exits("exit status 2: no /c at 7")],
        ],
        "all 3 rollouts ended alike: agent_exit: exit status 1: no /tmp/a/x1 at 12",
    ),
    "its own name": (
        [[ended(Outcome.INFRASTRUCTURE, f"no folder for r.train.000000.{n}") for n in range(2)]],
        "all 2 rollouts ended alike: infrastructure: no folder for r.train.000000.0",
    ),
    "other reasons": ([[exits("no key"), exits("no room")]], None),
    "other outcomes": ([[exits("no key"), ended(Outcome.AGENT_TIMEOUT, "no key", 0.0)]], None),
    "another reward in another group": ([[exits("no key")], [exits("no key", 1.0)]], None),
    "other rewards of calls": ([[exits("no key"), exits("no key", calls=[1.0])]], None),
    "all ok": ([[OK, OK]], None),
    "all cancelled": ([[GONE, GONE]], None),
    "timeouts after answers": ([[ended(Outcome.AGENT_TIMEOUT, "ran longer than 3 s", 0.0)] * 2], None),
    "budgets after answers": ([[ended(Outcome.BUDGET, "too many calls", 0.0)] * 2], None),
    "timeouts without a token": (
        [[ended(Outcome.AGENT_TIMEOUT, "ran longer than 3 s", 0.0, tokens=())] * 2],
        "all 2 rollouts ended alike, before a token was sampled: agent_timeout: ran longer than 3 s",
    ),
    "no reason": (
        [[ended(Outcome.INFRASTRUCTURE, tokens=())]],
        "all 1 rollouts ended alike, before a token was sampled: infrastructure: no reason was given",
    ),
}


@pytest.mark.parametrize("case", ALIKE)
def test_a_batch_that_failed_alike_is_told_from_one_that_may_be_learnt_from(case):
    groups, expected = ALIKE[case]
    assert all_alike(batch(*groups)) == expected


def test_what_the_policy_may_have_caused_gets_more_batches():
    alike, other = batch([exits("no key")] * 2), batch([exits("no key"), OK])
    checks = Alike(Settings(alike_steps=3))
    for groups in (alike, alike, other, alike, alike):
        checks.check(groups)
    with pytest.raises(AllAlike, match="all 2 rollouts ended alike: agent_exit: no key in 3 steps in a row; nothing"):
        checks.check(alike)


@pytest.mark.parametrize("one", [BAD, exits("no key", tokens=()), ended(Outcome.BUDGET, "too long", 0.0, tokens=())])
def test_what_the_policy_has_no_part_in_ends_the_run_at_once(one):
    with pytest.raises(AllAlike, match=r"^all 2 rollouts ended alike.*; nothing can be learnt"):
        Alike(Settings()).check(batch([one, one]))


def test_an_answer_of_an_earlier_attempt_is_one():
    one = transcript([node(1, 0, [1], [2])], outcome=Outcome.AGENT_EXIT, reward=0.0, attempt=2)
    spec = GroupSpec(id="g", run="r", task={}, n=1)
    assert "before a token" not in all_alike([Group(spec, [one], [build(one)])])


def test_the_share_of_truncated_answers_is_that_of_the_last_attempts():
    one, two = batch([OK, OK])[0].transcripts
    one.attempts[-1].nodes = [node(n, n - 1, [1], [2]) for n in (1, 2, 3, 4)]
    for each, finish in zip(one.attempts[-1].nodes, ("length", "length", "stop", "interrupted"), strict=True):
        each.finish = finish
    two.attempts = []
    spec = GroupSpec(id="g", run="r", task={}, n=2)
    assert truncated_share([Group(spec, [one, two], [build(one), build(two)])]) == 2 / 3
    assert truncated_share(batch([ended(Outcome.INFRASTRUCTURE, tokens=())])) is None


def test_groups_with_equal_rewards_are_counted_whatever_becomes_of_them():
    zero = ended(Outcome.OK, reward=0.0)
    assert equal_share(batch([OK, OK, BAD], [OK, zero], [zero, zero], [OK, BAD])) == 2 / 3
    assert equal_share(batch([OK, BAD])) is None
