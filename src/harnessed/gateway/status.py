"""Who waits for whom, and since when: `GET /api/status`; and whether the gateway can serve: `GET /readyz`.

`api.py` and `probes.py` ask. Calls are those of this gateway alone; all else is what the store says of all of them.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from sqlalchemy import Connection, and_, func, select
from sqlalchemy.exc import SQLAlchemyError

from harnessed.gateway import closings, controllers
from harnessed.gateway.engines import Engines
from harnessed.gateway.lifecycle import count_rollouts
from harnessed.gateway.peers import as_seen, look
from harnessed.gateway.progress import Calls, Progress
from harnessed.gateway.store import Store
from harnessed.gateway.surroundings import STORE_LIMIT_S, Fresh, Surroundings
from harnessed.gateway.tables import attempts, gateways, rollouts
from harnessed.gateway.turnstile import Turnstiles
from harnessed.records import (
    ControllerStatus,
    Engine,
    GatewayStatus,
    RunStatus,
    State,
    Status,
    Turnstile,
    WaitingCall,
)

MOST_WAITING = 1000
"""Calls in one answer: those that wait longest."""


@dataclass(frozen=True)
class _Stored:
    """What the store says now."""

    gateways: list[GatewayStatus]
    turnstiles: list[tuple[Turnstile, bool]]
    """The closed ones, and whether the other gateways generate nothing for their runs."""
    controllers: list[ControllerStatus]


@dataclass(frozen=True)
class _Counted:
    """Of all runs; asked for once in some seconds."""

    states: dict[str, Counter[str]]
    """Run -> its rollouts by state, in the order of the runs' creation."""
    queued_since: dict[str, float]
    running_since: dict[str, float]


class Board:
    """What one gateway can say of itself and of what is around it."""

    def __init__(
        self,
        id: str,
        calls: Calls,
        store: Store,
        engines: Engines,
        turnstiles: Turnstiles,
        surroundings: Surroundings,
    ) -> None:
        """`id`: of this gateway."""
        self._self = GatewayStatus(id=id, since=time.time())
        self._calls = calls
        self._store = store
        self._engines = engines
        self._turnstiles = turnstiles
        self._surroundings = surroundings
        self._rollouts = Fresh(lambda: store.read(_count), STORE_LIMIT_S)

    async def status(self) -> Status:
        """As it is now; counts of rollouts and what engines say may be a few seconds old. While the store is out of
        reach, nothing of what it says."""
        trouble = self._store.trouble
        try:
            async with asyncio.timeout(STORE_LIMIT_S):
                stored = await self._store.read(lambda connection: _read(connection, self._self.id))
            counted = await self._rollouts()
        except (SQLAlchemyError, TimeoutError) as error:
            trouble = trouble or _said(error)
            stored, counted = _Stored([self._self], [], []), _Counted({}, {}, {})
        calls = list(self._calls)
        return Status(
            store=trouble,
            gateways=stored.gateways,
            turnstiles=[as_seen(each, quiet, self._turnstiles) for each, quiet in stored.turnstiles],
            runs=[_run(run, counted, calls) for run in counted.states],
            waiting=_waiting(calls),
            engines=self._engines.known,
            controllers=stored.controllers,
        )

    async def trouble(self) -> str:
        """Why the gateway cannot serve what there is to do; empty: it can."""
        if self._store.trouble:
            return f"the store is out of reach: {self._store.trouble}"
        try:
            unfinished = await self._surroundings.unfinished()
        except TimeoutError as error:
            return f"the store {_said(error)}"
        except SQLAlchemyError as error:
            return f"the store is out of reach: {_said(error)}"
        # A run that only waits may be that of a trainer that was killed: nobody misses its engine.
        going = {run for run, states in unfinished.items() if states[State.RUNNING]}
        return unserved(going, self._engines.known)


def unserved(runs: set[str], engines: list[Engine]) -> str:
    """The first of these runs without a healthy engine, and why; empty: each has one."""
    for run in sorted(runs):
        serving = [engine for engine in engines if engine.run == run]
        if not serving:
            return f"run {run} has no engine: register one"
        if not any(engine.healthy for engine in serving):
            return f"run {run} has no healthy engine: {serving[0].id} says {serving[0].reason or 'nothing'}"
    return ""


def _read(connection: Connection, gateway: str) -> _Stored:
    living = select(gateways.c.id, gateways.c.started).where(gateways.c.lease_until > time.time())
    return _Stored(
        [
            GatewayStatus(id=id, since=started)
            for id, started in connection.execute(living.order_by(gateways.c.started, gateways.c.id))
        ],
        [(each, look(connection, each.run, gateway)[1]) for each in closings.list_closed(connection)],
        controllers.list_all(connection),
    )


def _count(connection: Connection) -> _Counted:
    run = rollouts.c.run
    queued = select(run, func.min(rollouts.c.created)).where(rollouts.c.state == State.QUEUED).group_by(run)
    of_live = and_(attempts.c.live, attempts.c.rollout == rollouts.c.id)
    running = select(run, func.min(attempts.c.started)).join(attempts, of_live).group_by(run)
    return _Counted(  # rows are no pairs to `dict`
        states=count_rollouts(connection),
        queued_since={of: since for of, since in connection.execute(queued)},  # noqa: C416
        running_since={of: since for of, since in connection.execute(running)},  # noqa: C416
    )


def _said(error: SQLAlchemyError | TimeoutError) -> str:
    if isinstance(error, TimeoutError):
        return f"did not answer within {STORE_LIMIT_S:.0f} s"
    return " ".join(str(error).split())


def _run(run: str, counted: _Counted, calls: list[Progress]) -> RunStatus:
    states = counted.states[run]
    mine = [progress for progress in calls if progress.run == run]
    held = sum(progress.held for progress in mine)
    return RunStatus(
        run=run,
        queued=states[State.QUEUED],
        running=states[State.RUNNING],
        finished=states[State.FINISHED],
        held=held,
        in_flight=len(mine) - held,
        queued_since=counted.queued_since.get(run),
        running_since=counted.running_since.get(run),
    )


def _waiting(calls: list[Progress]) -> list[WaitingCall]:
    longest = sorted(((progress.waits, progress) for progress in calls), key=lambda each: each[0][1])[:MOST_WAITING]
    return [
        WaitingCall(
            run=progress.run,
            rollout=progress.rollout,
            attempt=progress.attempt,
            call=progress.call,
            since=since,
            what=what,
        )
        for (what, since), progress in longest
    ]
