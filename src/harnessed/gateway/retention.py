"""Makes old runs small: what their rollouts said goes, how they ended stays.

`app.py` lets `keep_small` run; `browse/prune.py` does the same for the folder of one run, on request.
"""

import asyncio
import logging
import time
from functools import partial

from sqlalchemy import Connection, delete, func, select

from harnessed.gateway.store import Store
from harnessed.gateway.tables import calls, events, nodes, rollouts
from harnessed.records import State

log = logging.getLogger(__name__)
DAY_S = 24 * 3600
LOOK_S = 3600.0
AT_ONCE = 100
"""Rollouts in one transaction: others wait for it."""


async def keep_small(store: Store, days: float) -> None:
    """For ever. Runs in which nothing has happened for so many days lose calls, answers and events."""
    while True:
        try:
            await _look(store, days)
        except Exception:  # whatever the store's trouble is: it needs the room all the more
            log.exception("old runs could not be made small")
        await asyncio.sleep(LOOK_S)


async def _look(store: Store, days: float) -> None:
    for run in await store.read(partial(idle_runs, before=time.time() - days * DAY_S)):
        pruned = 0
        while ids := await store.read(partial(_with_answers, run=run)):
            await store.write(partial(forget, ids=ids))
            pruned += len(ids)
        if pruned:
            await store.shrink()
            log.warning("run %s rests since %g days: the transcripts of %d rollouts were deleted", run, days, pruned)


def idle_runs(connection: Connection, before: float) -> list[str]:
    """Runs in which nothing was created, started or finished since then, and nothing runs."""
    times = (rollouts.c.created, rollouts.c.started, rollouts.c.finished)
    latest = [func.max(func.coalesce(column, 0.0)) for column in times]
    rows = connection.execute(select(rollouts.c.run, *latest).group_by(rollouts.c.run))
    running = set(connection.execute(select(rollouts.c.run).where(rollouts.c.state == State.RUNNING)).scalars())
    return [run for run, *of_run in rows if max(of_run) < before and run not in running]


def forget(connection: Connection, ids: list[str]) -> int:
    """Delete what these rollouts said; how many answers that were."""
    count = connection.execute(select(func.count()).select_from(nodes).where(nodes.c.rollout.in_(ids))).scalar_one()
    for table in (nodes, calls, events):
        connection.execute(delete(table).where(table.c.rollout.in_(ids)))
    return int(count)


def _with_answers(connection: Connection, run: str) -> list[str]:
    """Some rollouts of a run that still hold something."""
    holds = rollouts.c.id.in_(select(calls.c.rollout)) | rollouts.c.id.in_(select(events.c.rollout))
    return list(connection.execute(select(rollouts.c.id).where(rollouts.c.run == run, holds).limit(AT_ONCE)).scalars())
