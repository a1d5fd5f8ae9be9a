"""What the store knows of an attempt and this process does not: from before it, or from the other gateways.

`attempts.py` loads attempts with it and, where several gateways share the store, brings them up to date before it uses
their transcripts. What has begun elsewhere is mirrored by a `Pending` with the name of its gateway, so that a
retry finds it, and limits count it.
"""

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from harnessed.gateway.peers import connected
from harnessed.gateway.recording import AttemptId, is_of, load_attempt, nodes_of, wanted_of
from harnessed.gateway.session import Pending, Session
from harnessed.gateway.store import Store
from harnessed.gateway.tables import attempts, calls, gateways, nodes
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.transcript import INTERRUPTED, Tree
from harnessed.gateway.wire.turn import Wanted
from harnessed.records import CallState, Node

AT_ONCE = 1000
"""Ids in one statement."""
LATEST = 64
"""Answers that were handed over, and may still be lost on their way, are looked for among so many."""


@dataclass(frozen=True, slots=True)
class Call:
    """One that another gateway has, or an earlier process had."""

    id: str
    gateway: str
    state: CallState
    left: bool
    prompt: bytes
    wanted: Wanted
    most_tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    gateway: str
    """That asks."""
    live: bool
    ending: bool
    last: int
    """Number of the attempt's last node."""
    calls: int
    nodes: list[Node]
    """Those that were asked for."""
    delivered: list[int]
    """Of the undelivered ones that were named."""
    gone: list[int]
    """Likewise: answers that were broken off, and others hold now whole."""
    open: list[Call]
    """Not of this gateway: not answered yet, or answered by the nodes above."""
    alive: set[str]
    """Other gateways."""
    unseen: set[str]
    """Of these the ones without a connection to the database."""


def find(
    connection: Connection, attempt: AttemptId, gateway: str, after: int, undelivered: list[int], shared: bool
) -> Found:
    """What is new since the node `after`; `undelivered` are the earlier ones that are not known to have arrived."""
    mine = is_of(attempts.c.rollout, attempts.c.number, attempt)
    row = connection.execute(select(attempts).where(mine)).mappings().one()
    new = nodes_of(connection, attempt, after) if row["nodes"] > after else []
    of_attempt = is_of(nodes.c.rollout, nodes.c.attempt, attempt)
    named = select(nodes.c.number, nodes.c.delivered).where(of_attempt, nodes.c.number.in_(undelivered))
    still = {row.number: row.delivered for row in connection.execute(named)} if undelivered else {}
    wanted = {node.call for node in new if not node.delivered} | {node.call for node in new[-LATEST:]}
    asked = _open(connection, attempt, gateway, {*wanted, *_calls_of(connection, attempt, list(still))})
    alive = set(connection.execute(select(gateways.c.id).where(gateways.c.id != gateway)).scalars())
    unseen = alive - connected(connection) if shared and any(c.state == CallState.ADMITTED for c in asked) else set()
    return Found(
        gateway=gateway,
        live=row["live"],
        ending=row["ending"],
        last=row["nodes"],
        calls=_count(connection, attempt),
        nodes=new,
        delivered=[number for number, delivered in still.items() if delivered],
        gone=[number for number in undelivered if number not in still],
        open=asked,
        alive=alive,
        unseen=unseen,
    )


async def load(store: Store, attempt: AttemptId, gateway: str, policy: Callable[[str], ChatTemplate]) -> Session | None:
    """The session of a live attempt; None: there is none."""

    def query(connection: Connection) -> tuple[dict[str, Any], Found] | None:
        known = load_attempt(connection, attempt)
        if known is None or not known["live"]:
            return None
        return known, find(connection, attempt, gateway, 0, [], store.shared)

    read = await store.read(query)
    if read is None:
        return None
    known, found = read
    session = Session(
        attempt=attempt,
        run=known["run"],
        index=known["index"],
        seed=known["seed"],
        sampling=known["sampling"],
        limits=known["limits"],
        history=known["history"],
        side_calls=known["side_calls"],
        template=policy(known["policy"]).at(known["created"]),
        tree=await asyncio.to_thread(Tree.of, found.nodes),
    )
    take(session, found)
    return session


async def catch_up(store: Store, session: Session, gateway: str) -> bool:
    """Bring a session up to date; whether its attempt goes on."""
    after, undelivered, shared, before = session.seen, session.undelivered(), store.shared, session.admitted
    found = await store.write(lambda c: find(c, session.attempt, gateway, after, undelivered, shared))
    take(session, found, known=set(session.tree.nodes))
    session.calls += session.admitted - before  # since the store was asked
    return found.live and not found.ending


def take(session: Session, found: Found, known: Container[int] = ()) -> None:
    """Bring a session up to date; `known` are the nodes that it had before."""
    session.calls, session.seen = found.calls, found.last
    own = {pending.id for pending in session.calls_in_progress() if not pending.gateway}
    new = [node for node in found.nodes if node.call not in own and node.number not in known]
    for node in new:
        if node.number not in session.tree.nodes:
            session.tree.restore(node)
    for number in found.gone:
        session.forget_interrupted(number)
    # What this gateway itself has done meanwhile may have come first.
    delivered = [number for number in found.delivered if number in session.tree.nodes]
    for number in delivered:
        session.tree.nodes[number].delivered = True
    session.drop_delivered(delivered)
    # A call of our own is only of interest if this session is younger than it.
    own |= {call.id for call in found.open if call.gateway == found.gateway} - {node.call for node in new}
    open_ = {call.id: call for call in found.open if call.id not in own}
    _mirror(session, open_, found)
    for node in new:
        if node.finish == INTERRUPTED and node.call in open_:
            key = (session.tree.prompt(node.number), open_[node.call].wanted)
            session.interrupted.setdefault(key, []).append(node)


def _mirror(session: Session, open_: dict[str, Call], found: Found) -> None:
    """Pending calls of others, as they are now."""
    known = {pending.id: pending for pending in session.calls_in_progress() if pending.gateway}
    for pending in known.values():
        if not pending.answers.done() and pending.id not in open_:  # it failed, or was lost
            session.drop(pending)
            pending.answers.cancel()
    for call in open_.values():
        given = session.tree.answers(call.id)
        whole = len(given) == call.wanted.n
        pending = known.get(call.id) or _pending(call)
        if call.id not in known and (whole or call.state == CallState.ADMITTED):
            session.pending.setdefault(call.prompt, []).append(pending)
        pending.unseen = call.gateway in found.unseen
        if not (whole or call.state == CallState.ADMITTED):
            session.drop(pending)  # it was broken off, and can be gone on with
            pending.answers.cancel()
            continue
        if whole and not pending.answers.done():
            pending.answers.set_result(given)
        if call.left or (pending.answers.done() and call.gateway not in found.alive):
            pending.waiting = 0
        if pending.delivered:
            session.handed_over(pending)


def _pending(call: Call) -> Pending:
    future: asyncio.Future[list[Node]] = asyncio.get_running_loop().create_future()
    return Pending(call.id, call.prompt, future, call.wanted, most_tokens=call.most_tokens, gateway=call.gateway)


def _open(connection: Connection, attempt: AttemptId, gateway: str, answered: set[str]) -> list[Call]:
    columns = [calls.c[name] for name in ("id", "gateway", "state", "left", "prompt", "wanted", "most_tokens")]
    query = select(*columns).where(is_of(calls.c.rollout, calls.c.attempt, attempt))
    others = select(gateways.c.id).where(gateways.c.id != gateway)
    unanswered = query.where(calls.c.gateway.in_(others), calls.c.state == CallState.ADMITTED)
    rows = list(connection.execute(unanswered))
    ids = sorted(answered)
    for at in range(0, len(ids), AT_ONCE):
        rows += connection.execute(query.where(calls.c.id.in_(ids[at : at + AT_ONCE])))
    return [_call(row._mapping) for row in rows]


def _call(row: Any) -> Call:
    return Call(**{**row, "state": CallState(row["state"]), "wanted": wanted_of(row["wanted"])})


def _calls_of(connection: Connection, attempt: AttemptId, numbers: list[int]) -> list[str]:
    """The calls that nodes answer."""
    if not numbers:
        return []
    of_attempt = is_of(nodes.c.rollout, nodes.c.attempt, attempt)
    return list(connection.execute(select(nodes.c.call).where(of_attempt, nodes.c.number.in_(numbers))).scalars())


def _count(connection: Connection, attempt: AttemptId) -> int:
    query = select(func.count()).select_from(calls).where(is_of(calls.c.rollout, calls.c.attempt, attempt))
    return int(connection.execute(query).scalar_one())
