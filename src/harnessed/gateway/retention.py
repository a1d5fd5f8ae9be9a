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

log = logging.getLogger(__name__)
DAY_S = 24 * 3600
LOOK_S = 3600.0
AT_ONCE = 100
"""Rollouts in one transaction: others wait for it."""


async def keep_small(store: Store, days: float) -> None:
    """For ever. Runs in which nothing has happened for so many days lose calls, answers and events."""
    while True:
        for run in await store.read(partial(idle_runs, before=time.time() - days * DAY_S)):
            pruned = 0
            while ids := await store.read(partial(_with_answers, run=run)):
                await store.write(partial(forget, ids=ids))
                pruned += len(ids)
            if pruned:
                log.warning(
                    "run %s has rested for %g days: the transcripts of %d rollouts were deleted", run, days, pruned
                )
        await asyncio.sleep(LOOK_S)


def idle_runs(connection: Connection, before: float) -> list[str]:
    """Runs in which nothing was created, started or finished since then."""
    latest = [
        func.max(func.coalesce(column, 0.0)) for column in (rollouts.c.created, rollouts.c.started, rollouts.c.finished)
    ]
    rows = connection.execute(select(rollouts.c.run, *latest).group_by(rollouts.c.run))
    return [run for run, *times in rows if max(times) < before]


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
