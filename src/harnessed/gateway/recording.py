"""Calls and nodes, as transactions on the store: admitted, answered, delivered; and what was recorded, read back.

Recording an answer is conditional on its attempt being live, in the same transaction, so a superseded or cancelled
attempt cannot add to its transcript. `exchange.py` writes through here; `api.py` reads.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, Integer, Text, and_, bindparam, cast, delete, func, insert, select, update

from harnessed.gateway.lifecycle import get_rollout, members
from harnessed.gateway.prepared import Prepared
from harnessed.gateway.store import Refused, Work
from harnessed.gateway.tables import attempts, calls, groups, nodes, rollouts, runs
from harnessed.gateway.wire.turn import Turn, Wanted
from harnessed.records import Attempt, CallState, History, Limits, Node, Purpose, Sampling, SideCall, Totals, Transcript

AttemptId = tuple[str, int]
"""(rollout, number)."""


def load_attempt(connection: Connection, attempt: AttemptId) -> dict[str, Any] | None:
    """What serving an attempt needs to know, or None if there is no such attempt; its nodes are loaded apart."""
    query = (
        select(
            attempts.c.live,
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
        .where(is_of(attempts.c.rollout, attempts.c.number, attempt))
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


def wanted_of(stored: dict[str, Any]) -> Wanted:
    """How the answers of a call were wanted."""
    return Wanted(**stored | {"stop": tuple(stored["stop"])})


@dataclass(frozen=True, slots=True)
class Admitted:
    """A call that may be answered."""

    call: str
    gateway: str
    """That has it."""
    prompt: bytes
    """Digest of the request, equal for identical ones."""
    most_tokens: int
    """That may be sampled for it."""
    time: float


_ADMIT = Prepared(insert(calls))
_ANSWERED = Prepared(
    update(calls)
    .where(calls.c.id == bindparam("call"), calls.c.state == CallState.ADMITTED)
    .values(state=CallState.ANSWERED, ended=bindparam("time"), generated=bindparam("generated"))
)
_ADVANCE = Prepared(
    update(attempts)
    .where(attempts.c.rollout == bindparam("of"), attempts.c.number == bindparam("attempt"), attempts.c.live)
    .values(nodes=attempts.c.nodes + bindparam("more", type_=Integer))
    .returning(attempts.c.nodes, cast(attempts.c.faults, Text))
)
_KEEP = Prepared(insert(nodes))
_DELIVERED = Prepared(
    update(nodes)
    .where(
        nodes.c.rollout == bindparam("of"),
        nodes.c.attempt == bindparam("of_attempt"),
        nodes.c.number == bindparam("node"),
    )
    .values(delivered=True)
)


def admit(connection: Connection, attempt: AttemptId, admitted: Admitted, turn: Turn) -> None:
    row = {
        "id": admitted.call,
        "rollout": attempt[0],
        "attempt": attempt[1],
        "gateway": admitted.gateway,
        "state": CallState.ADMITTED.value,
        "left": False,
        "prompt": admitted.prompt,
        "most_tokens": admitted.most_tokens,
        "asked": orjson.dumps(turn.asked).decode(),
        "wanted": orjson.dumps({name: getattr(turn.wanted, name) for name in Wanted.__slots__}).decode(),
        "admitted": admitted.time,
        "ended": None,
        "generated": None,
    }
    _ADMIT.execute(connection, row)


def living(connection: Connection, rollouts: list[str]) -> set[AttemptId]:
    """Of these rollouts the attempts that have not ended."""
    query = select(attempts.c.rollout, attempts.c.number).where(attempts.c.rollout.in_(rollouts), attempts.c.live)
    return {(rollout, number) for rollout, number in connection.execute(query)}


def admit_alone(connection: Connection, attempt: AttemptId, admitted: Admitted, turn: Turn, most: int) -> bool:
    """Admit a call where other gateways may end its attempt, or answer the same request; whether none of them does the
    latter now. Raises Refused: 403 if the attempt has ended, 429 if it has `most` calls."""
    mine = is_of(attempts.c.rollout, attempts.c.number, attempt)
    live = connection.execute(select(attempts.c.live, attempts.c.ending).where(mine)).one()
    if not live.live or live.ending:
        raise Refused(403, f"attempt {attempt[1]} of rollout {attempt[0]} has ended; its key is void")
    of_attempt = is_of(calls.c.rollout, calls.c.attempt, attempt)
    if connection.execute(select(func.count()).where(of_attempt)).scalar_one() >= most:
        raise Refused(429, f"attempt {attempt[1]} of rollout {attempt[0]} has its {most} calls")
    same = and_(of_attempt, calls.c.prompt == admitted.prompt)
    others = and_(same, calls.c.gateway != admitted.gateway, calls.c.state == CallState.ADMITTED)
    alone = connection.execute(select(calls.c.id).where(others).limit(1)).first() is None
    admit(connection, attempt, admitted, turn)
    return alone


def record_answers(
    connection: Connection,
    attempt: AttemptId,
    answers: list[Node],
    begun: list[int],
    overcome: str,
    note: Work[None],
    generated: bytes,
) -> None:
    """Store the answers of a call, and number them after the attempt's last one.

    `begun` are the numbers of broken-off answers that these hold whole; `overcome` is the request that has its answer
    now, if it had failed before; `note` admits the call, if that could not be written when it came; `generated`
    is when engines sampled them. Raises Refused: 409 if the attempt has ended, 503 if the call is not this gateway's
    any more.
    """
    if not _answer_call(connection, attempt, answers, note, generated):
        return
    bound = {"of": attempt[0], "attempt": attempt[1], "more": len(answers)}
    advanced = _ADVANCE.execute(connection, bound).fetchone()
    if advanced is None:
        raise Refused(409, f"attempt {attempt[1]} of rollout {attempt[0]} has ended; its answers are not kept")
    last, faults = advanced
    _number(answers, last)
    if overcome and overcome in faults:
        kept = {request: what for request, what in orjson.loads(faults).items() if request != overcome}
        _set_faults(connection, attempt, kept)
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
        theirs = and_(is_of(nodes.c.rollout, nodes.c.attempt, attempt), nodes.c.number.in_(begun))
        if connection.execute(delete(nodes).where(theirs)).rowcount != len(begun):
            raise Refused(503, "another gateway has gone on with this answer; this one is not kept")
    for row in rows:
        _KEEP.execute(connection, row)


def _answer_call(
    connection: Connection, attempt: AttemptId, answers: list[Node], note: Work[None], generated: bytes
) -> bool:
    """Whether these are its first answers: the database may have kept this transaction, and been away before it said
    so. Raises Refused (503)."""
    call = answers[0].call
    bound = {"call": call, "time": time.time(), "generated": generated}
    if _ANSWERED.execute(connection, bound).rowcount:
        return True
    if connection.execute(select(calls.c.id).where(calls.c.id == call)).first() is None:
        note(connection)
        _ANSWERED.execute(connection, bound)
        return True
    mine = is_of(nodes.c.rollout, nodes.c.attempt, attempt)
    numbers = connection.execute(select(nodes.c.number).where(mine, nodes.c.call == call)).scalars().all()
    if len(numbers) != len(answers):
        raise Refused(503, f"call {call} was given up for lost; its answer is not kept")
    _number(answers, max(numbers))
    return False


def _number(answers: list[Node], last: int) -> None:
    for number, node in enumerate(answers, last - len(answers) + 1):
        node.number = number


def record_failure(connection: Connection, call: str, now: float, generated: bytes, *, failed: bool = True) -> None:
    """A call that was admitted and gets no answer: it failed, or nobody waited for it any more."""
    state = CallState.FAILED if failed else CallState.INTERRUPTED
    mine = and_(calls.c.id == call, calls.c.state != CallState.LOST)
    connection.execute(update(calls).where(mine).values(state=state, ended=now, generated=generated))


def mark_left(connection: Connection, call: str) -> None:
    """Its client has gone away without the answer; the other gateways see by this that it may come to them."""
    connection.execute(update(calls).where(calls.c.id == call).values(left=True))


def fail_open_calls(connection: Connection, rollouts: Iterable[str], now: float) -> None:
    """Calls that will get no answer, because their rollout is cancelled."""
    open_ = and_(calls.c.rollout.in_(list(rollouts)), calls.c.state == CallState.ADMITTED)
    connection.execute(update(calls).where(open_).values(state=CallState.FAILED, ended=now))


def record_fault(connection: Connection, attempt: AttemptId, request: str, what: str) -> None:
    """Why a request was refused (`budget: ...`) or failed (`engine: ...`); it decides about the attempt's outcome.
    `request`: its digest, or what else names it."""
    mine = is_of(attempts.c.rollout, attempts.c.number, attempt)
    faults: dict[str, str] | None = connection.execute(select(attempts.c.faults).where(mine)).scalar_one_or_none()
    if faults is not None:
        _set_faults(connection, attempt, faults | {request: what})


def _set_faults(connection: Connection, attempt: AttemptId, faults: dict[str, str]) -> None:
    mine = is_of(attempts.c.rollout, attempts.c.number, attempt)
    connection.execute(update(attempts).where(mine).values(faults=faults))


def mark_delivered(connection: Connection, attempt: AttemptId, numbers: Iterable[int]) -> None:
    for number in numbers:
        _DELIVERED.execute(connection, {"of": attempt[0], "of_attempt": attempt[1], "node": number})


def nodes_of(connection: Connection, attempt: AttemptId, after: int = 0) -> list[Node]:
    """The nodes of an attempt with higher numbers than `after`, in their order."""
    mine = and_(is_of(nodes.c.rollout, nodes.c.attempt, attempt), nodes.c.number > after)
    return [_node(row) for row in connection.execute(select(nodes).where(mine).order_by(nodes.c.number)).mappings()]


def load_transcript(connection: Connection, rollout: str) -> Transcript:
    query = select(attempts.c.number).where(attempts.c.rollout == rollout).order_by(attempts.c.number)
    numbers = connection.execute(query).scalars().all()
    return Transcript(
        get_rollout(connection, rollout),
        [Attempt(number, nodes_of(connection, (rollout, number))) for number in numbers],
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
        lost=by_state.get(CallState.LOST, 0) + by_state.get(CallState.FAILED, 0),
        interrupted=by_state.get(CallState.INTERRUPTED, 0),
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


def is_of(rollout: Any, number: Any, attempt: AttemptId) -> Any:
    """The condition that two columns name an attempt."""
    return and_(rollout == attempt[0], number == attempt[1])
