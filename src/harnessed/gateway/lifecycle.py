"""The life of groups, rollouts and attempts, as transactions on the store.

A rollout is queued, running (under an attempt with an owner and a lease), then finished with an outcome; its group is
complete when all members are finished. Every function here runs inside one transaction of `store.py`, changes state
only from the state that it expects, and writes what changed to the journal. Called by `api.py`.
"""

from collections import Counter
from typing import Any, cast

from sqlalchemy import Connection, RowMapping, and_, delete, func, insert, or_, select, update

from harnessed.gateway import closings
from harnessed.gateway.store import Refused, journal
from harnessed.gateway.tables import attempts, calls, changes, engines, events, groups, rollouts, runs
from harnessed.records import (
    TRAINED_OUTCOMES,
    CallState,
    Change,
    ChangeKind,
    Ending,
    EngineSpec,
    Event,
    Group,
    GroupSpec,
    Outcome,
    Reward,
    Rollout,
    RunSpec,
    State,
    Task,
)

MOST_EVENTS = 10_000
"""Of an attempt, from its agent."""
NO_REWARD: dict[str, Any] = {"reward": None, "parts": {}, "call_rewards": []}
"""The columns that an evaluator fills, when none has."""

LEASE_S = 30.0
"""How long a controller keeps its attempts without renewing."""


def create_run(connection: Connection, run: RunSpec, now: float) -> RunSpec:
    """Again with the same id, all is replaced but the time: the dates in its prompts stay."""
    values = run.model_dump(mode="json", exclude={"id"})
    if connection.execute(update(runs).where(runs.c.id == run.id).values(values)).rowcount == 0:
        connection.execute(insert(runs).values(id=run.id, created=now, closed_s=0.0, **values))
    return run


_RUN = [runs.c[name] for name in RunSpec.model_fields]
_ROLLOUT = [rollouts.c[name] for name in Rollout.model_fields]


def list_runs(connection: Connection) -> list[RunSpec]:
    return [RunSpec.model_validate(dict(row)) for row in connection.execute(select(*_RUN)).mappings()]


def register_engine(connection: Connection, engine: EngineSpec) -> None:
    mine = and_(engines.c.run == engine.run, engines.c.id != engine.id)
    for other, speaks in connection.execute(select(engines.c.id, engines.c.speaks).where(mine)):
        if speaks != engine.speaks:
            raise Refused(
                409,
                f"engine {engine.id} speaks {engine.speaks}, but engine {other} of the same run {engine.run} speaks "
                f"{speaks}: a run's engines speak the same, so remove that one first",
            )
    values = engine.model_dump(mode="json", exclude={"id"})
    if connection.execute(update(engines).where(engines.c.id == engine.id).values(values)).rowcount == 0:
        connection.execute(insert(engines).values(id=engine.id, **values))


def remove_engine(connection: Connection, id: str) -> None:
    if connection.execute(delete(engines).where(engines.c.id == id)).rowcount == 0:
        raise Refused(404, f"no engine {id}")


def list_engines(connection: Connection) -> list[EngineSpec]:
    return [EngineSpec.model_validate(dict(row)) for row in connection.execute(select(engines)).mappings()]


def create_groups(connection: Connection, specs: list[GroupSpec], now: float) -> list[Group]:
    known = {run.id for run in list_runs(connection)}
    for spec in specs:
        if spec.run not in known:
            raise Refused(404, f"no run {spec.run}: create it before its groups")
        if _find(connection, groups, groups.c.id == spec.id) is None:
            _create_group(connection, spec, now)
    return [get_group(connection, spec.id) for spec in specs]


def _create_group(connection: Connection, spec: GroupSpec, now: float) -> None:
    connection.execute(insert(groups).values(spec.model_dump(mode="json") | {"complete": False, "created": now}))
    members = [
        {
            "id": f"{spec.id}.{index}",
            "run": spec.run,
            "group": spec.id,
            "index": index,
            "purpose": spec.purpose,
            "rank": -spec.priority,
            "state": State.QUEUED,
            "attempt": 0,
            "reason": "",
            **NO_REWARD,
            "created": now,
        }
        for index in range(spec.n)
    ]
    connection.execute(insert(rollouts), members)
    for member in members:
        journal(connection, ChangeKind.ROLLOUT, cast(str, member["id"]), spec.run, State.QUEUED)


def get_group(connection: Connection, id: str) -> Group:
    row = _find(connection, groups, groups.c.id == id)
    if row is None:
        raise Refused(404, f"no group {id}")
    return Group.model_validate(dict(row))


def list_groups(connection: Connection, run: str) -> list[Group]:
    rows = connection.execute(select(groups).where(groups.c.run == run).order_by(groups.c.created)).mappings()
    return [Group.model_validate(dict(row)) for row in rows]


def get_rollout(connection: Connection, id: str) -> Rollout:
    row = connection.execute(select(*_ROLLOUT).where(rollouts.c.id == id)).mappings().first()
    if row is None:
        raise Refused(404, f"no rollout {id}")
    return Rollout.model_validate(dict(row))


def list_rollouts(connection: Connection, run: str) -> list[Rollout]:
    query = select(*_ROLLOUT).where(rollouts.c.run == run).order_by(rollouts.c.created, rollouts.c.id)
    return [Rollout.model_validate(dict(row)) for row in connection.execute(query).mappings()]


def members(connection: Connection, group: str) -> list[Rollout]:
    query = select(*_ROLLOUT).where(rollouts.c.group == group).order_by(rollouts.c.index)
    return [Rollout.model_validate(dict(row)) for row in connection.execute(query).mappings()]


def claim(
    connection: Connection, run: str, owner: str, most: int, tries: int, now: float
) -> list[tuple[Rollout, Task]]:
    """Start the next attempt of up to `most` queued rollouts of the runs of that id or name: the highest priority
    first, the oldest among equals.

    Each comes with its task.
    """
    query = (
        select(*_ROLLOUT, groups.c.task)
        .join(groups, groups.c.id == rollouts.c.group)
        .where(rollouts.c.state == State.QUEUED)
        .where(or_(rollouts.c.run == run, rollouts.c.run.startswith(f"{run}-", autoescape=True)))
        .order_by(rollouts.c.rank, rollouts.c.created, rollouts.c.group, rollouts.c.index)
        .limit(most)
    )
    claimed = []
    for row in connection.execute(query).mappings().all():
        fields = dict(row)
        task = fields.pop("task")
        changed = {"state": State.RUNNING, "attempt": fields["attempt"] + 1}
        if fields["started"] is None:
            changed["started"] = now
        connection.execute(update(rollouts).where(rollouts.c.id == fields["id"]).values(changed))
        connection.execute(
            insert(attempts).values(
                rollout=fields["id"],
                number=changed["attempt"],
                owner=owner,
                lease_until=now + LEASE_S,
                tries=tries,
                live=True,
                ending=False,
                nodes=0,
                faults={},
                closed_s=closings.closed_s(connection, fields["run"], now),
                started=now,
            )
        )
        journal(connection, ChangeKind.ROLLOUT, fields["id"], fields["run"], State.RUNNING)
        claimed.append((Rollout.model_validate(fields | changed), task))
    return claimed


def renew(connection: Connection, owner: str, now: float) -> list[str]:
    """Prolong the owner's leases; its live attempts as `rollout/attempt`."""
    mine = and_(attempts.c.owner == owner, attempts.c.live)
    connection.execute(update(attempts).where(mine).values(lease_until=now + LEASE_S))
    rows = connection.execute(select(attempts.c.rollout, attempts.c.number).where(mine))
    return [f"{rollout}/{number}" for rollout, number in rows]


def held_seconds(connection: Connection, rollout: str, number: int, now: float) -> float:
    """For how long the turnstile of its run has been closed since an attempt started."""
    run = get_rollout(connection, rollout).run
    attempt = _find(connection, attempts, and_(attempts.c.rollout == rollout, attempts.c.number == number))
    if attempt is None:
        raise Refused(404, f"rollout {rollout} has no attempt {number}")
    return closings.closed_s(connection, run, now) - float(attempt["closed_s"])


def end_attempt(connection: Connection, rollout: str, number: int, ending: Ending, tries: int, now: float) -> Rollout:
    """Record how a live attempt ended; the rollout is finished, or queued again after an infrastructure failure.

    Outcome, reward and final state are one transaction. A repeated report of the same ending is accepted: its first
    answer may have been lost.
    """
    record = get_rollout(connection, rollout)
    attempt = _find(connection, attempts, and_(attempts.c.rollout == rollout, attempts.c.number == number))
    if attempt is None:
        raise Refused(404, f"rollout {rollout} has no attempt {number}")
    faults = attempt["faults"]
    if _last_call_was_lost(connection, rollout, number):
        faults = faults | {"lost": "engine: its gateway died before it had answered the last call"}
    outcome, reason = _outcome(ending, faults)
    if not attempt["live"]:
        if record.attempt == number and _is_told_again(record, outcome):
            return record
        raise Refused(409, f"attempt {number} of rollout {rollout} has ended already")
    _retire(connection, rollout, number, now)
    if outcome == Outcome.INFRASTRUCTURE and number < tries:
        return _queue_again(connection, record)
    judged: Rollout | Ending = record
    if outcome not in (Outcome.INFRASTRUCTURE, Outcome.CANCELLED) and record.reward is None:
        judged = ending
    return _finish(connection, record, outcome, reason, _reward(judged), now)


def _is_told_again(record: Rollout, outcome: Outcome) -> bool:
    """Whether the last attempt has ended so that this may be its report again."""
    if record.state == State.QUEUED:
        return outcome == Outcome.INFRASTRUCTURE
    return record.state == State.FINISHED and record.outcome != Outcome.CANCELLED


def _last_call_was_lost(connection: Connection, rollout: str, number: int) -> bool:
    """An agent that asks again makes another call."""
    mine = and_(calls.c.rollout == rollout, calls.c.attempt == number)
    last = select(calls.c.state).where(mine).order_by(calls.c.admitted.desc()).limit(1)
    return connection.execute(last).scalar() == CallState.LOST


def _outcome(ending: Ending, faults: dict[str, str]) -> tuple[Outcome, str]:
    """An agent that failed after the gateway had failed it did not fail by itself."""
    worst = max(faults.values(), default="")  # `engine: ...` sorts after `budget: ...`
    kind, _, what = worst.partition(": ")
    said = f"{what}; then {ending.reason or ending.outcome}"
    if kind == "engine" and ending.outcome in TRAINED_OUTCOMES:
        return Outcome.INFRASTRUCTURE, said  # also if it ended well: it never got the answer that it asked for
    if kind == "budget" and ending.outcome in (Outcome.AGENT_EXIT, Outcome.AGENT_TIMEOUT):
        return Outcome.BUDGET, said
    return ending.outcome, ending.reason


def overdue(connection: Connection, now: float) -> list[str]:
    """Rollouts whose controller has stopped renewing."""
    query = select(attempts.c.rollout).where(and_(attempts.c.live, attempts.c.lease_until < now))
    return list(connection.execute(query).scalars())


def expire(connection: Connection, rollouts: list[str], now: float) -> None:
    """Attempts whose controller is gone make room for the next attempt, or end their rollout by infrastructure. That
    their controller has renewed since it was found to be gone does not help: their calls were ended."""
    gone = select(attempts).where(and_(attempts.c.live, attempts.c.rollout.in_(rollouts)))
    for attempt in connection.execute(gone).mappings().all():
        ending = Ending(outcome=Outcome.INFRASTRUCTURE, reason=f"controller {attempt['owner']} stopped renewing")
        end_attempt(connection, attempt["rollout"], attempt["number"], ending, attempt["tries"], now)


def cancel_rollout(connection: Connection, id: str, now: float) -> Rollout:
    record = get_rollout(connection, id)
    if record.state == State.FINISHED:
        return record
    _retire(connection, id, record.attempt, now)
    return _finish(connection, record, Outcome.CANCELLED, "cancelled on request", NO_REWARD, now)


def unfinished(connection: Connection, run: str) -> list[str]:
    """Rollouts of a run that have not ended."""
    query = select(rollouts.c.id).where(and_(rollouts.c.run == run, rollouts.c.state != State.FINISHED))
    return list(connection.execute(query).scalars())


def count_unfinished(connection: Connection) -> dict[str, Counter[str]]:
    """Run -> its queued and running rollouts, of runs that have any."""
    query = (
        select(rollouts.c.run, rollouts.c.state, func.count())
        .where(rollouts.c.state.in_((State.QUEUED, State.RUNNING)))
        .group_by(rollouts.c.run, rollouts.c.state)
    )
    found: dict[str, Counter[str]] = {}
    for run, state, count in connection.execute(query):
        found.setdefault(run, Counter())[state] = count
    return found


def count_rollouts(connection: Connection) -> dict[str, Counter[str]]:
    """Run -> its rollouts by state, in the order of the runs' creation. Takes 80 ms with 100,000 rollouts."""
    found: dict[str, Counter[str]] = {
        run: Counter() for run in connection.execute(select(runs.c.id).order_by(runs.c.created)).scalars()
    }
    query = select(rollouts.c.run, rollouts.c.state, func.count()).group_by(rollouts.c.run, rollouts.c.state)
    for run, state, count in connection.execute(query):
        found.setdefault(run, Counter())[state] = count
    return found


def post_reward(connection: Connection, id: str, reward: Reward) -> Rollout:
    """Keep the first reward that is posted while the rollout is not finished. The same one again is accepted: its first
    answer may have been lost."""
    record = get_rollout(connection, id)
    if _reward(record) == _reward(reward):
        return record
    if record.state == State.FINISHED or record.reward is not None:
        raise Refused(409, f"rollout {id} has its reward or is finished already")
    connection.execute(update(rollouts).where(rollouts.c.id == id).values(_reward(reward)))
    return get_rollout(connection, id)


def append_event(connection: Connection, event: Event, now: float, *, live: bool) -> None:
    """`live`: only while the attempt runs."""
    get_rollout(connection, event.rollout)
    mine = and_(attempts.c.rollout == event.rollout, attempts.c.number == event.attempt)
    attempt = _find(connection, attempts, mine)
    if live and (attempt is None or not attempt["live"]):
        raise Refused(403, f"attempt {event.attempt} of rollout {event.rollout} has ended; its key is void")
    told = select(func.count()).where(and_(events.c.rollout == event.rollout, events.c.attempt == event.attempt))
    if live and connection.execute(told).scalar_one() >= MOST_EVENTS:
        raise Refused(403, f"attempt {event.attempt} of rollout {event.rollout} has appended its {MOST_EVENTS} events")
    connection.execute(insert(events).values(event.model_dump() | {"time": now}))


def list_events(connection: Connection, rollout: str) -> list[Event]:
    query = select(events).where(events.c.rollout == rollout).order_by(events.c.number)
    rows = connection.execute(query).mappings()
    return [Event.model_validate({k: v for k, v in row.items() if k != "number"}) for row in rows]


def list_changes(connection: Connection, run: str, after: int, most: int = 10_000) -> list[Change]:
    query = select(changes).where(and_(changes.c.run == run, changes.c.cursor > after)).order_by(changes.c.cursor)
    return [Change.model_validate(dict(row)) for row in connection.execute(query.limit(most)).mappings()]


def _retire(connection: Connection, rollout: str, number: int, now: float) -> None:
    mine = and_(attempts.c.rollout == rollout, attempts.c.number == number)
    connection.execute(update(attempts).where(mine).values(live=False, ended=now))


def _queue_again(connection: Connection, record: Rollout) -> Rollout:
    # A reward that was posted belongs to the attempt that failed.
    values: dict[str, Any] = {"state": State.QUEUED, **NO_REWARD}
    connection.execute(update(rollouts).where(rollouts.c.id == record.id).values(values))
    journal(connection, ChangeKind.ROLLOUT, record.id, record.run, State.QUEUED)
    return record.model_copy(update=values)


def _finish(
    connection: Connection,
    record: Rollout,
    outcome: Outcome,
    reason: str,
    reward: dict[str, Any],
    now: float,
) -> Rollout:
    values = {"state": State.FINISHED, "outcome": outcome, "reason": reason, "finished": now} | reward
    connection.execute(update(rollouts).where(rollouts.c.id == record.id).values(values))
    journal(connection, ChangeKind.ROLLOUT, record.id, record.run, outcome)
    unfinished = select(func.count()).where(and_(rollouts.c.group == record.group, rollouts.c.state != State.FINISHED))
    if connection.execute(unfinished).scalar_one() == 0:
        connection.execute(update(groups).where(groups.c.id == record.group).values(complete=True))
        journal(connection, ChangeKind.GROUP, record.group, record.run, "complete")
    return record.model_copy(update=values)


def _reward(judged: Rollout | Ending | Reward) -> dict[str, Any]:
    """The columns that an evaluator fills."""
    return {"reward": judged.reward, "parts": judged.parts, "call_rewards": judged.call_rewards}


def _find(connection: Connection, table: Any, condition: Any) -> RowMapping | None:
    return connection.execute(select(table).where(condition)).mappings().first()
