"""The gateways of one store: who is alive, what they owe each other, and which turnstiles are closed for all.

Each gateway writes down from time to time that it is alive (its lease), reads what holds for all, and does its part: it
holds the calls of closed runs, records the tokens of attempts that another gateway ends, and buries gateways that died:
the calls that they had admitted and not answered are lost. `app.py` makes one and runs it; `api.py` closes turnstiles
through it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection, and_, delete, func, insert, select, text, update

from harnessed.gateway import closings, hints
from harnessed.gateway.hints import Listener
from harnessed.gateway.lifecycle import list_engines
from harnessed.gateway.store import Store, Work
from harnessed.gateway.tables import attempts, calls, changes, gateways, nodes, rollouts
from harnessed.gateway.turnstile import Turnstiles
from harnessed.records import CallState, CloseMode, Closing, EngineSpec, Turnstile, TurnstileState

log = logging.getLogger(__name__)
LEASE_S = 10.0
"""A gateway that has not written for so long is dead to the others, and admits nothing itself."""
MISSING_S = 1.0
"""So is one that has had no connection to the database for so long. Both have to be seen for this time."""
BEAT_S = 2.0
SHARED_BEAT_S = 0.25
"""Of gateways that have to notice what others do."""
AT_ONCE = 1000
"""Rollouts in one statement."""
MARK_S = 1.0
"""Within this time of its last byte an answer is marked as delivered."""
OWNER_GRACE_S = 600.0
"""How long a turnstile stays closed after its owner has gone: it may come back, or its run may be resumed."""


@dataclass(frozen=True)
class LostCall:
    run: str
    rollout: str
    call: str
    answers: int


@dataclass(frozen=True)
class Beat:
    """What holds now, as the store says."""

    buried: bool
    """This gateway was dead to the others: what it had admitted is lost."""
    closed: list[Turnstile]
    lost: list[LostCall]
    """Of gateways that were buried now."""
    missing: set[str]
    """Gateways without a connection to the database, or with a lease that is over."""
    ending: list[str]
    """Rollouts with calls of ours, whose attempt another gateway is about to end."""
    engines: list[EngineSpec]
    """All that are registered, if there are other gateways that may have done so."""
    cursor: int
    """Of the journal."""


class Calls(Protocol):
    """What the calls of this gateway have to suffer."""

    async def interrupt_run(self, run: str) -> None:
        """Its generations stop, and go on when its turnstile opens."""

    async def interrupt_rollout(self, rollout: str) -> None:
        """Its generations end, and what they have is recorded."""

    async def stop_lost(self, calls: list[LostCall]) -> None:
        """What an engine still generates for a gateway that died ends."""

    async def know_engines(self, engines: list[EngineSpec]) -> None:
        """These are registered and no others."""

    def forget_all(self) -> None:
        """What is in memory is not what is stored."""


class Peers:
    """One gateway among those of its store. `join` it first, and let `run` run."""

    def __init__(self, store: Store, id: str, name: str, turnstiles: Turnstiles, calls: Calls) -> None:
        """`id` names this process, `name` all that take each other's place."""
        self._id = id
        self._name = name
        self._store = store
        self._turnstiles = turnstiles
        self._calls = calls
        self._told: dict[str, float] = {}
        """Which closed turnstiles the others know to be quiet here."""
        self._hinted = False
        """Another gateway has written something since the last beat."""
        self._listener: Listener | None = None
        self._missed: dict[str, float] = {}
        """Gateway -> when it was first seen to be without a connection; in seconds of `time.monotonic`."""
        self._cursor = 0
        self._working: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        """In place of an earlier process of that name."""
        lost = await self._store.write(partial(_join, id=self._id, name=self._name, alone=not self._store.shared))
        if self._store.shared:
            loop = asyncio.get_running_loop()
            self._listener = Listener(self._store, partial(loop.call_soon_threadsafe, self._hint))
        await self.beat()
        self._begin(self._calls.stop_lost(lost))

    async def run(self) -> None:
        """Beat for ever."""
        period = SHARED_BEAT_S if self._store.shared else BEAT_S
        while True:
            next_beat = time.monotonic() + period
            # The owner of a closing waits until all are quiet.
            while self._up_to_date and await self._turnstiles.change(next_beat):
                pass
            try:
                await self.beat()
            except Exception:  # whatever the store's trouble is: it is not over if nobody tries again
                log.exception("this gateway cannot say that it is alive")
                await asyncio.sleep(period)

    @property
    def _up_to_date(self) -> bool:
        return self._turnstiles.quiet() == self._told and not self._hinted

    def _hint(self) -> None:
        self._hinted = True
        self._turnstiles.wake()

    async def beat(self) -> None:
        """Say that this gateway is alive, and do what the store says."""
        began, quiet = time.monotonic(), self._turnstiles.quiet()
        self._hinted = False
        dead = [id for id, since in self._missed.items() if began - since > MISSING_S]
        work = partial(_beat, id=self._id, name=self._name, quiet=quiet, dead=dead, shared=self._store.shared)
        if quiet != self._told:
            self._store.write_soon(hints.give)  # in the same commit
        found = await self._store.write(work)
        self._told = quiet
        self._missed = {id: self._missed.get(id, began) for id in found.missing}
        if self._store.shared:
            self._turnstiles.good_until = began + LEASE_S
            self._begin(self._calls.know_engines(found.engines))
        self._turnstiles.set_closed(found.closed)
        if found.buried:
            log.error("the other gateways took this one for dead: the calls that it had admitted are lost")
            self._calls.forget_all()
        for closed in found.closed:
            if closed.mode == CloseMode.INTERRUPT and self._turnstiles.in_flight(closed.run):
                self._begin(self._calls.interrupt_run(closed.run))
        for rollout in found.ending:
            self._begin(self._calls.interrupt_rollout(rollout))
        if found.lost:
            self._begin(self._calls.stop_lost(found.lost))
        if found.cursor != self._cursor:
            self._cursor = found.cursor
            self._store.wake()

    async def close(self, run: str, wanted: Closing) -> Turnstile:
        """Returns when nothing is generated for the run at any gateway, or after `drain_s`. Raises Refused."""
        deadline = time.monotonic() + wanted.drain_s
        # The lease counts from the answer.
        waiting = wanted.model_copy(update={"lease_s": wanted.drain_s + wanted.lease_s})
        await asyncio.gather(self._store.write(partial(_close, run=run, wanted=waiting)), self.beat())  # in one commit
        while True:
            late = time.monotonic() > deadline
            if late or run in self._turnstiles.quiet() or not self._turnstiles.is_closed(run):
                found = await self._store.write(partial(self._settle, run=run, wanted=wanted, late=late))
                if late or found.state != TurnstileState.CLOSING:
                    return found
            # Hints of the others may be lost.
            others = min(deadline, time.monotonic() + 0.05) if self._store.shared else deadline
            await self._turnstiles.change(others)

    def _settle(self, connection: Connection, run: str, wanted: Closing, late: bool) -> Turnstile:
        """What has become of a closing that this gateway waits for; as soon as it is answered its lease counts."""
        found, quiet = look(connection, run, self._id)
        seen = as_seen(found or Turnstile(run=run), quiet, self._turnstiles)
        if found and (late or seen.state == TurnstileState.CLOSED):
            renewed = closings.close(connection, run, wanted, time.time())
            return seen.model_copy(update={"lease_until": renewed.lease_until})
        return seen

    async def open(self, run: str, owner: str) -> Turnstile:
        """Raises Refused."""
        self._store.write_soon(hints.give)
        opened = await self._store.write(lambda connection: closings.open_(connection, run, owner, time.time()))
        await self.beat()
        return opened

    async def may_go_on(self, run: str) -> bool:
        """Whether a generation that its engine broke off may be asked for again: perhaps the others took this gateway
        for dead and ended what it had begun."""
        if self._store.shared and not self._turnstiles.is_closed(run):
            await self.beat()
        return not self._turnstiles.is_closed(run)

    async def turnstile(self, run: str) -> Turnstile:
        found, quiet = await self._store.write(partial(look, run=run, id=self._id))
        return as_seen(found or Turnstile(run=run), quiet, self._turnstiles)

    @contextlib.asynccontextmanager
    async def ending(self, attempts_of: list[str], limit_s: float) -> AsyncIterator[None]:
        """Around the end of attempts: first the other gateways record what they generate for them."""
        if not self._store.shared:
            yield
            return
        await self._store.write(partial(_set_ending, ids=attempts_of, value=True))
        if not await self._over(partial(_in_progress_elsewhere, ids=attempts_of, id=self._id), limit_s):
            log.warning("another gateway did not end its calls of %s within %.0f s", attempts_of, limit_s)
        # What another one has just handed over is marked so at once; if not, no client took it.
        await self._over(partial(_unmarked_elsewhere, ids=attempts_of, id=self._id), MARK_S)
        try:
            yield
        finally:
            self._store.write_soon(partial(_set_ending, ids=attempts_of, value=False))

    async def _over(self, query: Work[bool], limit_s: float) -> bool:
        """Returns when this does not hold any more; False: it still does after so long."""
        deadline = time.monotonic() + limit_s
        while await self._store.write(query):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def leave(self) -> None:
        """What this gateway has not answered it never will."""
        if self._listener:
            self._listener.end()
        await self._store.write(partial(_bury, ids=[self._id]))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)


def _close(connection: Connection, run: str, wanted: Closing) -> None:
    closings.close(connection, run, wanted, time.time())
    hints.give(connection)


def _join(connection: Connection, id: str, name: str, alone: bool) -> list[LostCall]:
    earlier = select(gateways.c.id).where(gateways.c.id != id)
    if not alone:
        earlier = earlier.where(gateways.c.name == name)
    lost = _bury(connection, list(connection.execute(earlier).scalars()))
    _insert(connection, id, name, {})
    return lost


def _insert(connection: Connection, id: str, name: str, quiet: dict[str, float]) -> None:
    now = time.time()
    connection.execute(insert(gateways).values(id=id, name=name, started=now, lease_until=now + LEASE_S, quiet=quiet))


def _beat(connection: Connection, id: str, name: str, quiet: dict[str, float], dead: list[str], shared: bool) -> Beat:
    now = time.time()
    mine = update(gateways).where(gateways.c.id == id).values(lease_until=now + LEASE_S, quiet=quiet)
    buried = connection.execute(mine).rowcount == 0
    if buried:
        _insert(connection, id, name, quiet)
    lost, missing = _bury_dead(connection, id, dead, now) if shared else ([], set())
    for each in closings.abandoned(connection, OWNER_GRACE_S, now):
        log.warning("the turnstile of run %s is open again: its owner %s is gone", each.run, each.owner)
    return Beat(
        buried=buried,
        closed=closings.list_closed(connection),
        lost=lost,
        missing=missing,
        ending=_ending(connection, id) if shared else [],
        engines=list_engines(connection) if shared else [],
        cursor=connection.execute(select(func.coalesce(func.max(changes.c.cursor), 0))).scalar_one() if shared else 0,
    )


def _bury_dead(connection: Connection, id: str, dead: list[str], now: float) -> tuple[list[LostCall], set[str]]:
    """`dead` were missing for long; those of them that are still missing are buried. A lease that is over is no death
    by itself: the database may have stood still for all."""
    others = connection.execute(select(gateways).where(gateways.c.id != id)).mappings().all()
    seen = connected(connection)
    missing = {row["id"] for row in others if row["id"] not in seen or row["lease_until"] < now}
    return _bury(connection, [id for id in dead if id in missing]), missing


def connected(connection: Connection) -> set[str]:
    """The gateways that have a connection to the (PostgreSQL) database."""
    return set(connection.execute(_CONNECTED).scalars())


_CONNECTED = text("SELECT DISTINCT application_name FROM pg_stat_activity")


def _bury(connection: Connection, ids: list[str]) -> list[LostCall]:
    if not ids:
        return []
    theirs = and_(calls.c.gateway.in_(ids), calls.c.state == CallState.ADMITTED)
    query = select(rollouts.c.run, calls.c.rollout, calls.c.id, calls.c.wanted).join(
        rollouts, rollouts.c.id == calls.c.rollout
    )
    lost = [LostCall(run, of, call, wanted["n"]) for run, of, call, wanted in connection.execute(query.where(theirs))]
    connection.execute(update(calls).where(theirs).values(state=CallState.LOST, ended=time.time()))
    connection.execute(delete(gateways).where(gateways.c.id.in_(ids)))
    return lost


def as_seen(turnstile: Turnstile, quiet: bool, turnstiles: Turnstiles) -> Turnstile:
    """By the gateway of these turnstiles; `quiet`: the others have acknowledged it and generate nothing."""
    state = turnstile.state
    if state != TurnstileState.OPEN:
        here = turnstiles.quiet().get(turnstile.run) == turnstile.since
        state = TurnstileState.CLOSED if quiet and here else TurnstileState.CLOSING
    return turnstile.model_copy(update={"state": state, "in_flight": turnstiles.in_flight(turnstile.run)})


def look(connection: Connection, run: str, id: str) -> tuple[Turnstile | None, bool]:
    """The closing of a run, and whether nothing is generated at the other gateways."""
    found = closings.find(connection, run)
    if found is None:
        return None, True
    others = connection.execute(select(gateways.c.quiet).where(gateways.c.id != id)).scalars()
    return found, all(quiet.get(run) == found.since for quiet in others)


def _ending(connection: Connection, id: str) -> list[str]:
    mine = and_(calls.c.gateway == id, calls.c.state == CallState.ADMITTED, attempts.c.ending)
    same = and_(attempts.c.rollout == calls.c.rollout, attempts.c.number == calls.c.attempt)
    return list(connection.execute(select(calls.c.rollout).join(attempts, same).where(mine).distinct()).scalars())


def _set_ending(connection: Connection, ids: list[str], value: bool) -> None:
    for at in range(0, len(ids), AT_ONCE):
        live = and_(attempts.c.rollout.in_(ids[at : at + AT_ONCE]), attempts.c.live)
        connection.execute(update(attempts).where(live).values(ending=value))


def _unmarked_elsewhere(connection: Connection, ids: list[str], id: str) -> bool:
    """Whether another gateway has answers that may be on their way to their clients."""
    theirs = and_(calls.c.rollout.in_(ids), calls.c.gateway != id, calls.c.gateway.in_(select(gateways.c.id)))
    on_its_way = and_(
        theirs, calls.c.state == CallState.ANSWERED, calls.c.left.is_(False), nodes.c.delivered.is_(False)
    )
    query = select(calls.c.id).join(nodes, and_(nodes.c.rollout == calls.c.rollout, nodes.c.call == calls.c.id))
    return connection.execute(query.where(on_its_way).limit(1)).first() is not None


def _in_progress_elsewhere(connection: Connection, ids: list[str], id: str) -> bool:
    theirs = and_(calls.c.rollout.in_(ids), calls.c.gateway != id, calls.c.state == CallState.ADMITTED)
    return connection.execute(select(calls.c.id).where(theirs).limit(1)).first() is not None
