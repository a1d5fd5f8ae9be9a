"""Closed turnstiles in the store, as transactions: who closed which, until when the owner has promised to be there.

`api.py` closes and opens, `peers.py` reads what holds now. What a gateway does about it is in `turnstile.py`.
"""

from sqlalchemy import Connection, delete, insert, select, update

from harnessed.gateway.store import Refused
from harnessed.gateway.tables import closings, past_closings, runs
from harnessed.records import Closing, Turnstile, TurnstileState


def close(connection: Connection, run: str, wanted: Closing, now: float) -> Turnstile:
    """Again by the same owner, the closing goes on with the new mode and lease; so it does by another one if the
    owner is gone. Raises Refused."""
    if connection.execute(select(runs.c.id).where(runs.c.id == run)).first() is None:
        raise Refused(404, f"no run {run}")
    before = find(connection, run)
    if before and before.owner != wanted.owner and (before.lease_until or 0) > now:
        raise Refused(409, f"the turnstile of run {run} is closed by {before.owner} already")
    values = {"owner": wanted.owner, "mode": wanted.mode, "lease_s": wanted.lease_s}
    values["lease_until"] = now + wanted.lease_s
    if before:
        connection.execute(update(closings).where(closings.c.run == run).values(values))
    else:
        connection.execute(insert(closings).values(run=run, since=now, **values))
    return _found(connection, run)


def renew(connection: Connection, run: str, owner: str, now: float) -> Turnstile:
    """Raises Refused (409): it is not closed by this owner."""
    _check_owner(connection, run, owner)
    lease_until = closings.c.lease_s + now
    connection.execute(update(closings).where(closings.c.run == run).values(lease_until=lease_until))
    return _found(connection, run)


def open_(connection: Connection, run: str, owner: str, now: float) -> Turnstile:
    """An open one stays open. Raises Refused (409): another one has closed it."""
    before = find(connection, run)
    if before is not None:
        _check_owner(connection, run, owner)
        _end(connection, before, now)
    return Turnstile(run=run)


def abandoned(connection: Connection, grace_s: float, now: float) -> list[Turnstile]:
    """Those whose owner has been gone for so long; they are open now."""
    gone = [each for each in list_closed(connection) if (each.lease_until or 0) + grace_s < now]
    for each in gone:
        _end(connection, each, now)
    return gone


def list_closed(connection: Connection) -> list[Turnstile]:
    return [_turnstile(row) for row in connection.execute(_ALL).mappings()]


def find(connection: Connection, run: str) -> Turnstile | None:
    row = connection.execute(_ALL.where(closings.c.run == run)).mappings().first()
    return _turnstile(row) if row else None


def closed_s(connection: Connection, run: str, now: float) -> float:
    """Seconds for which the turnstile of a run has been closed up to now, over all closings."""
    before: float = connection.execute(select(runs.c.closed_s).where(runs.c.id == run)).scalar_one()
    current = find(connection, run)
    return before + (now - (current.since or now) if current else 0)


_ALL = select(*(closings.c[name] for name in ("run", "owner", "mode", "since", "lease_until")))


def _turnstile(row: object) -> Turnstile:
    return Turnstile.model_validate(dict(row) | {"state": TurnstileState.CLOSING})  # type: ignore[call-overload]


def _found(connection: Connection, run: str) -> Turnstile:
    found = find(connection, run)
    assert found is not None
    return found


def _check_owner(connection: Connection, run: str, owner: str) -> None:
    found = find(connection, run)
    if found is None:
        raise Refused(409, f"the turnstile of run {run} is open")
    if found.owner != owner:
        raise Refused(409, f"the turnstile of run {run} is closed by {found.owner}, not by {owner}")


def _end(connection: Connection, closing: Turnstile, now: float) -> None:
    connection.execute(delete(closings).where(closings.c.run == closing.run))
    since = closing.since or now
    connection.execute(insert(past_closings).values(run=closing.run, since=since, until=now, owner=closing.owner))
    connection.execute(update(runs).where(runs.c.id == closing.run).values(closed_s=runs.c.closed_s + now - since))
