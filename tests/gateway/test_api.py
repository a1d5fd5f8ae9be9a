"""Groups, rollouts and attempts through the control routes of a real gateway."""

import asyncio
import time

import pytest

from harnessed.client import (
    ApiError,
    AsyncClient,
    Unreachable,
    cancel_group,
    cancel_rollout,
    claim,
    create_groups,
    create_run,
    end_attempt,
    get_group,
    get_rollout,
    list_changes,
    list_engines,
    list_events,
    list_groups,
    list_rollouts,
    post_reward,
    register_engine,
    renew,
)
from harnessed.gateway import lifecycle
from harnessed.records import Ending, EngineSpec, GroupSpec, Outcome, Reward, RunSpec, State

OK = Ending(outcome=Outcome.OK, reward=1.0, parts={"tests": 1.0})
LOST = Ending(outcome=Outcome.INFRASTRUCTURE, reason="the machine went away")


def spec(id="g", n=2, **fields):
    return GroupSpec(id=id, run="r", task={"name": id}, n=n, **fields)


async def test_a_rollout_lives_from_queued_to_finished(house):
    await house.admin(create_groups([spec(n=1)]))
    assert (await house.admin(get_rollout("g.0"))).state == State.QUEUED
    (attempt,) = await house.admin(claim("r", "me", 5, 3))
    assert (attempt.rollout, attempt.attempt, attempt.task) == ("g.0", 1, {"name": "g"})
    assert (await house.admin(get_rollout("g.0"))).state == State.RUNNING
    finished = await house.admin(end_attempt("g.0", 1, OK, 3))
    assert (finished.state, finished.outcome, finished.reward) == (State.FINISHED, Outcome.OK, 1.0)
    assert finished == await house.admin(get_rollout("g.0"))
    assert finished.created <= finished.started <= finished.finished


async def test_a_group_of_higher_priority_is_started_before_older_ones(house):
    created = await house.admin(create_groups([spec("low", priority=-1), spec("old"), spec("high", priority=5)]))
    assert [group.priority for group in created] == [-1, 0, 5]
    started = [each.rollout for each in await house.admin(claim("r", "me", 5, 3))]
    assert started == ["high.0", "high.1", "old.0", "old.1", "low.0"]


async def test_creating_a_group_again_changes_nothing(house):
    """A trainer whose first request was answered into the void asks again."""
    first = await house.admin(create_groups([spec(), spec("h")]))
    again = await house.admin(create_groups([spec(), spec("h")]))
    assert first == again == await house.admin(list_groups("r"))
    assert [rollout.id for rollout in await house.admin(list_rollouts("r"))] == ["g.0", "g.1", "h.0", "h.1"]


async def test_a_group_is_complete_when_its_last_member_is(house):
    await house.admin(create_groups([spec()]))
    await house.admin(claim("r", "me", 2, 3))
    await house.admin(end_attempt("g.0", 1, OK, 3))
    assert not (await house.admin(get_group("g"))).complete
    await house.admin(end_attempt("g.1", 1, LOST, 1))
    assert (await house.admin(get_group("g"))).complete
    states = [(change.id, change.state) for change in await house.admin(list_changes("r", 0))]
    assert states[-3:] == [("g.0", "ok"), ("g.1", "infrastructure"), ("g", "complete")]


async def test_an_infrastructure_failure_makes_another_attempt_up_to_the_limit(house):
    await house.admin(create_groups([spec(n=1)]))
    for number in (1, 2):
        (attempt,) = await house.admin(claim("r", "me", 1, 2))
        assert attempt.attempt == number
        await house.admin(end_attempt("g.0", number, LOST, 2))
    rollout = await house.admin(get_rollout("g.0"))
    assert (rollout.outcome, rollout.reward, rollout.attempt) == (Outcome.INFRASTRUCTURE, None, 2)
    assert rollout.reason == "the machine went away"


async def test_the_first_ending_wins_and_may_be_repeated(house):
    await house.admin(create_groups([spec(n=1)]))
    await house.admin(claim("r", "me", 1, 3))
    first = await house.admin(end_attempt("g.0", 1, OK, 3))
    late = Ending(outcome=Outcome.AGENT_EXIT, reward=0.0)
    assert await house.admin(end_attempt("g.0", 1, late, 3)) == first


async def test_an_attempt_that_was_superseded_cannot_end_its_rollout(house):
    await house.admin(create_groups([spec(n=1)]))
    await house.admin(claim("r", "me", 1, 3))
    await house.admin(end_attempt("g.0", 1, LOST, 3))
    await house.admin(claim("r", "me", 1, 3))
    with pytest.raises(ApiError) as refusal:
        await house.admin(end_attempt("g.0", 1, OK, 3))
    assert refusal.value.status == 409


async def test_a_posted_reward_is_kept_and_the_first_wins(house):
    await house.admin(create_groups([spec(n=1)]))
    await house.admin(claim("r", "me", 1, 3))
    await house.admin(post_reward("g.0", Reward(reward=0.25)))
    with pytest.raises(ApiError):
        await house.admin(post_reward("g.0", Reward(reward=0.75)))
    assert (await house.admin(end_attempt("g.0", 1, OK, 3))).reward == 0.25


async def test_rewards_for_calls_are_kept_beside_the_reward(house):
    await house.admin(create_groups([spec()]))
    await house.admin(claim("r", "me", 2, 3))
    posted = Reward(reward=0.25, call_rewards=[1.0, -0.5])
    await house.admin(post_reward("g.0", posted))
    assert await house.admin(post_reward("g.0", posted)) == await house.admin(get_rollout("g.0"))
    with pytest.raises(ApiError):
        await house.admin(post_reward("g.0", Reward(reward=0.25)))
    await house.admin(end_attempt("g.1", 1, OK.model_copy(update={"call_rewards": [0.5]}), 3))
    kept = [rollout.call_rewards for rollout in await house.admin(list_rollouts("r"))]
    assert kept == [[1.0, -0.5], [0.5]]


async def test_a_reward_of_a_failed_attempt_is_forgotten(house):
    await house.admin(create_groups([spec(n=1)]))
    await house.admin(claim("r", "me", 1, 3))
    await house.admin(post_reward("g.0", Reward(reward=0.25, call_rewards=[1.0])))
    await house.admin(end_attempt("g.0", 1, LOST, 3))
    await house.admin(claim("r", "me", 1, 3))
    ended = await house.admin(end_attempt("g.0", 2, OK, 3))
    assert (ended.reward, ended.call_rewards) == (1.0, [])


async def test_a_cancelled_rollout_has_no_reward_and_its_controller_learns_of_it(house):
    await house.admin(create_groups([spec()]))
    await house.admin(claim("r", "me", 1, 3))
    assert await house.admin(renew("me")) == ["g.0/1"]
    await house.admin(cancel_rollout("g.0"))
    assert await house.admin(renew("me")) == []
    await house.admin(cancel_group("g"))
    outcomes = [(rollout.outcome, rollout.reward) for rollout in await house.admin(list_rollouts("r"))]
    assert outcomes == [(Outcome.CANCELLED, None)] * 2
    assert (await house.admin(get_group("g"))).complete
    assert await house.admin(claim("r", "me", 5, 3)) == []


async def test_a_claim_waits_for_work_and_gets_it_at_once(house):
    waiting = asyncio.create_task(house.admin(claim("r", "me", 4, 3, wait_s=10)))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    began = time.monotonic()
    await house.admin(create_groups([spec()]))
    assert [attempt.rollout for attempt in await waiting] == ["g.0", "g.1"]
    assert time.monotonic() - began < 5  # not the 10 s of the wait


async def test_two_controllers_never_get_the_same_attempt(house):
    await house.admin(create_groups([spec(n=20)]))
    claims = await asyncio.gather(*(house.admin(claim("r", f"controller-{i}", 3, 3)) for i in range(10)))
    rollouts = [attempt.rollout for claimed in claims for attempt in claimed]
    assert len(rollouts) == len(set(rollouts)) == 20


async def test_attempts_of_a_controller_that_stopped_renewing_are_queued_again(house, monkeypatch):
    monkeypatch.setattr(lifecycle, "LEASE_S", -1.0)
    await house.admin(create_groups([spec(n=1)]))
    await house.admin(claim("r", "gone", 1, 2))
    monkeypatch.setattr(lifecycle, "LEASE_S", 30.0)
    for _ in range(100):
        if await house.admin(claim("r", "here", 1, 2, wait_s=1)):
            break
    rollout = await house.admin(get_rollout("g.0"))
    assert (rollout.state, rollout.attempt) == (State.RUNNING, 2)


async def test_changes_are_told_once_each_from_a_cursor(house):
    await house.admin(create_groups([spec()]))
    seen = await house.admin(list_changes("r", 0))
    assert [change.state for change in seen] == ["queued", "queued"]
    assert await house.admin(list_changes("r", seen[-1].cursor)) == []
    waiting = asyncio.create_task(house.admin(list_changes("r", seen[-1].cursor, wait_s=10)))
    await asyncio.sleep(0.1)
    await house.admin(claim("r", "me", 1, 3))
    assert [(change.id, change.state) for change in await waiting] == [("g.0", "running")]


async def test_the_journal_and_the_records_outlive_a_restart(house):
    await house.admin(create_groups([spec()]))
    await house.admin(claim("r", "me", 1, 3))
    before = await house.admin(list_changes("r", 0)), await house.admin(list_rollouts("r"))
    await house.restart()
    assert (await house.admin(list_changes("r", 0)), await house.admin(list_rollouts("r"))) == before
    assert await house.admin(renew("me")) == ["g.0/1"]


async def test_an_engine_is_replaced_at_once_and_its_health_is_asked_now(house):
    gone = EngineSpec(id="e", url="http://127.0.0.1:9", run="r")
    assert not (await house.admin(register_engine(gone))).healthy
    (engine,) = await house.admin(list_engines())
    assert (engine.healthy, engine.url) == (False, gone.url)
    assert "Connect" in engine.reason
    back = await house.admin(register_engine(gone.model_copy(update={"url": house.engine.url})))
    assert (back.healthy, back.sampled_tokens, back.version) == (True, 0, 0)


@pytest.mark.parametrize(
    ("call", "status", "complaint"),
    [
        (create_groups([GroupSpec(id="x", run="nowhere", task={}, n=1)]), 404, "no run nowhere"),
        (create_run(RunSpec(id="x", policy="/nowhere")), 400, "/nowhere"),
        (get_group("x"), 404, "no group x"),
        (get_rollout("x"), 404, "no rollout x"),
        (end_attempt("x", 1, OK, 3), 404, "no rollout x"),
        (cancel_rollout("x"), 404, "no rollout x"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason(house, call, status, complaint):
    with pytest.raises(ApiError, match=complaint) as refusal:
        await house.admin(call)
    assert refusal.value.status == status


async def test_control_routes_need_a_key(house):
    for key in ("", "nonsense"):
        async with AsyncClient(house.url, key) as client:
            with pytest.raises(ApiError) as refusal:
                await client(list_rollouts("r"))
        assert refusal.value.status == 401


async def test_a_gateway_that_is_not_there_is_unreachable():
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
            await client(list_rollouts("r"))


async def test_events_of_an_unknown_rollout_are_an_empty_list(house):
    assert await house.admin(list_events("x")) == []


async def test_a_controller_gets_the_rollouts_of_its_own_run_only(house):
    """Two runs on one gateway have harnesses and evaluators of their own."""
    for run in ("demo-1a2b3c", "demo-4d5e6f", "demolition"):
        await house.admin(create_run(RunSpec(id=run, policy=str(house.policy))))
        await house.admin(create_groups([GroupSpec(id=f"{run}.g", run=run, task={}, n=1)]))
    assert [a.run for a in await house.admin(claim("demo-4d5e6f", "me", 9, 3))] == ["demo-4d5e6f"]
    assert await house.admin(claim("demo-4d5e", "me", 9, 3)) == []
    assert [a.run for a in await house.admin(claim("demo", "me", 9, 3))] == ["demo-1a2b3c"]
