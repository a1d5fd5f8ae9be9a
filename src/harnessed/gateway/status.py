"""Who waits for whom, and since when: `GET /api/status`; and whether the gateway can serve: `GET /readyz`.

`api.py` and `probes.py` ask. Calls are those of this gateway alone; all else is what the store says of all of them.
"""

import os
import socket
import time
from collections import Counter

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from harnessed.gateway.engines import Engines
from harnessed.gateway.progress import Calls, Progress
from harnessed.gateway.store import Store, attempts, rollouts, runs
from harnessed.gateway.surroundings import STORE_LIMIT_S, Surroundings
from harnessed.records import ControllerStatus, Engine, GatewayStatus, RunStatus, State, Status, WaitingCall

MOST_WAITING = 1000
"""Calls in one answer: those that wait longest."""


class Board:
    """What one gateway can say of itself."""

    def __init__(self, calls: Calls, store: Store, engines: Engines, surroundings: Surroundings) -> None:
        self._calls = calls
        self._store = store
        self._engines = engines
        self._surroundings = surroundings
        self._gateway = GatewayStatus(id=f"{socket.gethostname()}-{os.getpid()}", since=time.time())

    async def status(self) -> Status:
        """As it is now. Engines are asked; one that says nothing takes a few seconds."""
        counts, controllers = await self._store.read(lambda connection: (_count(connection), _controllers(connection)))
        calls = list(self._calls)
        return Status(
            gateways=[self._gateway],
            turnstiles=[],
            runs=[_run(run, states, calls) for run, states in counts.items()],
            waiting=_waiting(calls),
            engines=await self._engines.list(),
            controllers=controllers,
        )

    async def trouble(self) -> str:
        """Why the gateway cannot serve what there is to do; empty: it can."""
        try:
            unfinished = await self._surroundings.unfinished()
        except TimeoutError:
            return f"the store did not answer within {STORE_LIMIT_S:.0f} s"
        except SQLAlchemyError as error:
            return f"the store is out of reach: {' '.join(str(error).split())}"
        return unserved(set(unfinished), await self._surroundings.engines())


def unserved(runs: set[str], engines: list[Engine]) -> str:
    """The first of these runs without a healthy engine, and why; empty: each has one."""
    for run in sorted(runs):
        serving = [engine for engine in engines if engine.run == run]
        if not serving:
            return f"run {run} has no engine: register one"
        if not any(engine.healthy for engine in serving):
            return f"run {run} has no healthy engine: {serving[0].id} says {serving[0].reason or 'nothing'}"
    return ""


def _count(connection: Connection) -> dict[str, Counter[str]]:
    """Run -> rollouts by state, in the order of the runs' creation."""
    found: dict[str, Counter[str]] = {
        run: Counter() for run in connection.execute(select(runs.c.id).order_by(runs.c.created)).scalars()
    }
    query = select(rollouts.c.run, rollouts.c.state, func.count()).group_by(rollouts.c.run, rollouts.c.state)
    for run, state, count in connection.execute(query):
        found.setdefault(run, Counter())[state] = count
    return found


def _controllers(connection: Connection) -> list[ControllerStatus]:
    query = (
        select(attempts.c.owner, func.count(), func.min(attempts.c.lease_until))
        .where(attempts.c.live)
        .group_by(attempts.c.owner)
        .order_by(attempts.c.owner)
    )
    return [
        ControllerStatus(owner=owner, attempts=count, lease_until=lease_until)
        for owner, count, lease_until in connection.execute(query)
    ]


def _run(run: str, states: Counter[str], calls: list[Progress]) -> RunStatus:
    mine = [progress for progress in calls if progress.run == run]
    held = sum(progress.held for progress in mine)
    return RunStatus(
        run=run,
        queued=states[State.QUEUED],
        running=states[State.RUNNING],
        finished=states[State.FINISHED],
        held=held,
        in_flight=len(mine) - held,
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
