"""Calls and nodes, as transactions on the store: admitted, answered, delivered; and what was recorded, read back.

Recording an answer is conditional on its attempt being live, in the same transaction, so a superseded or cancelled
attempt cannot add to its transcript. `exchange.py` writes through here; `api.py` reads.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import orjson
from sqlalchemy import Connection, and_, bindparam, delete, func, insert, select, update

from harnessed.gateway.lifecycle import Refused, get_rollout, members
from harnessed.gateway.store import attempts, calls, groups, nodes, rollouts, runs
from harnessed.gateway.wire.turn import Turn, Wanted
from harnessed.records import Attempt, History, Limits, Node, Purpose, Sampling, SideCall, Totals, Transcript

AttemptId = tuple[str, int]
"""(rollout, number)."""
Faults = dict[str, str]
"""The digest of a request, in hexadecimal -> why it was refused (`budget: ...`) or failed (`engine: ...`)."""

# What every call executes is built once: to build a statement costs several times as much as to execute it.
_ADMIT = insert(calls)
_ADVANCE = (
    update(attempts)
    .where(attempts.c.rollout == bindparam("of"), attempts.c.number == bindparam("attempt"), attempts.c.live)
    .where(attempts.c.nodes == bindparam("before"))
    .values(nodes=bindparam("last"), faults=bindparam("left"))
)
_KEEP = insert(nodes)
_END = update(calls).where(calls.c.id == bindparam("call")).values(state=bindparam("as"), ended=bindparam("at"))
_DELIVER = (
    update(nodes)
    .where(nodes.c.rollout == bindparam("of"), nodes.c.attempt == bindparam("in"), nodes.c.number == bindparam("node"))
    .values(delivered=True)
)


def load_attempt(connection: Connection, attempt: AttemptId) -> dict[str, Any] | None:
    """What serving an attempt needs to know, or None if there is no such attempt; its nodes are loaded apart."""
    query = (
        select(
            attempts.c.live,
            attempts.c.faults,
            attempts.c.nodes,
            rollouts.c.run,
            rollouts.c.index,
            groups.c.purpose,
            groups.c.sampling,
            groups.c.seed,
            runs.c.limits,
            runs.c.policy,
            runs.c.history,
            runs.c.side_calls,
            runs.c.created,
        )
        .join(rollouts, rollouts.c.id == attempts.c.rollout)
        .join(groups, groups.c.id == rollouts.c.group)
        .join(runs, runs.c.id == rollouts.c.run)
        .where(_is(attempts.c.rollout, attempts.c.number, attempt))
    )
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    parsed = {
        "purpose": Purpose(row["purpose"]),
        "sampling": Sampling.model_validate(row["sampling"]),
        "limits": Limits.model_validate(row["limits"]),
        "history": History(row["history"]),
        "side_calls": [SideCall.model_validate(each) for each in row["side_calls"]],
    }
    return dict(row) | parsed


def count_calls(connection: Connection, attempt: AttemptId) -> int:
    query = select(func.count()).select_from(calls).where(_is(calls.c.rollout, calls.c.attempt, attempt))
    return int(connection.execute(query).scalar_one())


def load_wanted(connection: Connection, ids: list[str]) -> dict[str, Wanted]:
    """How the answers of calls were wanted."""
    found: dict[str, Wanted] = {}
    for at in range(0, len(ids), 500):
        query = select(calls.c.id, calls.c.wanted).where(calls.c.id.in_(ids[at : at + 500]))
        for id, wanted in connection.execute(query):
            found[id] = Wanted(**wanted | {"stop": tuple(wanted["stop"])})
    return found


def admit(connection: Connection, attempt: AttemptId, call: str, turn: Turn, now: float) -> None:
    connection.execute(
        _ADMIT,
        {
            "id": call,
            "rollout": attempt[0],
            "attempt": attempt[1],
            "state": "admitted",
            "asked": turn.asked,
            "wanted": asdict(turn.wanted),
            "admitted": now,
        },
    )


def record_answers(
    connection: Connection, attempt: AttemptId, answers: list[Node], begun: list[int], faults: Faults, now: float
) -> None:
    """Store the answers of a call; their numbers must follow the attempt's last one. Raises Refused (409).

    `begun` are the numbers of broken-off answers that these hold whole. `faults` are the attempt's
    refused and failed requests that have not been overcome.
    """
    before, last = answers[0].number - 1, answers[-1].number
    of = {"of": attempt[0], "attempt": attempt[1], "before": before, "last": last, "left": faults}
    advanced = connection.execute(_ADVANCE, of)
    if advanced.rowcount != 1:
        raise Refused(409, f"attempt {attempt[1]} of rollout {attempt[0]} has ended; its answers are not kept")
    rows = [
        {
            "rollout": attempt[0],
            "attempt": attempt[1],
            "number": node.number,
            "parent": node.parent,
            "call": node.call,
            "segment": node.segment,
            "answer": node.answer,
            "logprobs": node.logprobs,
            "versions": node.versions,
            "sampled": node.sampled,
            "temperature": node.temperature,
            "finish": node.finish,
            "cut": node.cut,
            "delivered": node.delivered,
            "follows": node.follows,
            "broken_calls": node.broken_calls,
            "apart": node.apart,
            "split": node.split,
            "messages": orjson.dumps(node.messages),
            "message": orjson.dumps(node.message),
            "tools": orjson.dumps(node.tools),
        }
        for node in answers
    ]
    if begun:
        mine = _is(nodes.c.rollout, nodes.c.attempt, attempt)
        connection.execute(delete(nodes).where(and_(mine, nodes.c.number.in_(begun))))
    connection.execute(_KEEP, rows)
    connection.execute(_END, {"call": answers[0].call, "as": "answered", "at": now})


def record_failure(connection: Connection, call: str, now: float, *, failed: bool = True) -> None:
    """A call that was admitted and gets no answer: it failed, or nobody waited for it any more."""
    connection.execute(_END, {"call": call, "as": "failed" if failed else "interrupted", "at": now})


def fail_open_calls(connection: Connection, rollouts: Iterable[str], now: float) -> None:
    """Calls that will get no answer, because their rollout is cancelled."""
    open_ = and_(calls.c.rollout.in_(list(rollouts)), calls.c.state == "admitted")
    connection.execute(update(calls).where(open_).values(state="failed", ended=now))


def record_faults(connection: Connection, attempt: AttemptId, faults: Faults) -> None:
    """Why requests were refused or failed; it decides about the attempt's outcome."""
    mine = _is(attempts.c.rollout, attempts.c.number, attempt)
    connection.execute(update(attempts).where(mine).values(faults=faults))


def mark_delivered(connection: Connection, attempt: AttemptId, numbers: Iterable[int]) -> None:
    rows = [{"of": attempt[0], "in": attempt[1], "node": number} for number in numbers]
    if rows:
        connection.execute(_DELIVER, rows)


def mark_lost(connection: Connection) -> None:
    """At the gateway's start: calls that an earlier process admitted and did not answer."""
    connection.execute(update(calls).where(calls.c.state == "admitted").values(state="lost"))


def load_nodes(connection: Connection, attempt: AttemptId) -> list[Node]:
    query = select(nodes).where(_is(nodes.c.rollout, nodes.c.attempt, attempt)).order_by(nodes.c.number)
    return [_node(row) for row in connection.execute(query).mappings()]


def load_transcript(connection: Connection, rollout: str) -> Transcript:
    query = select(attempts.c.number).where(attempts.c.rollout == rollout).order_by(attempts.c.number)
    numbers = connection.execute(query).scalars().all()
    return Transcript(
        get_rollout(connection, rollout),
        [Attempt(number, load_nodes(connection, (rollout, number))) for number in numbers],
    )


def load_transcripts(connection: Connection, group: str) -> list[Transcript]:
    return [load_transcript(connection, member.id) for member in members(connection, group)]


def totals(connection: Connection, run: str) -> Totals:
    of_run = select(rollouts.c.id).where(rollouts.c.run == run)
    asked = select(calls.c.state, func.count()).where(calls.c.rollout.in_(of_run)).group_by(calls.c.state)
    by_state: dict[str, int] = {row[0]: row[1] for row in connection.execute(asked)}
    mine = nodes.c.rollout.in_(of_run)
    answers, sampled = connection.execute(
        select(func.count(), func.coalesce(func.sum(nodes.c.sampled), 0)).where(mine)
    ).one()
    undelivered = select(func.count()).where(and_(mine, nodes.c.delivered.is_(False)))
    return Totals(
        calls=sum(by_state.values()),
        answers=answers,
        sampled_tokens=sampled,
        lost=by_state.get("lost", 0) + by_state.get("failed", 0),
        interrupted=by_state.get("interrupted", 0),
        undelivered=connection.execute(undelivered).scalar_one(),
    )


def _node(row: Any) -> Node:
    return Node(
        number=row["number"],
        parent=row["parent"],
        segment=row["segment"],
        answer=row["answer"],
        logprobs=row["logprobs"],
        versions=row["versions"],
        temperature=row["temperature"],
        finish=row["finish"],
        cut=row["cut"],
        call=row["call"],
        delivered=row["delivered"],
        follows=row["follows"],
        broken_calls=row["broken_calls"],
        apart=row["apart"],
        split=row["split"],
        messages=orjson.loads(row["messages"]),
        message=orjson.loads(row["message"]),
        tools=orjson.loads(row["tools"]),
    )


def _is(rollout: Any, number: Any, attempt: AttemptId) -> Any:
    return and_(rollout == attempt[0], number == attempt[1])
