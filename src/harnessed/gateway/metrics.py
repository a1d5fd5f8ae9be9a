"""What a trainer reports of its run, as transactions on the store: metrics by step, and the fates of tokens.

`api.py` calls this; the dashboard draws it. The trainer's own files stay the record of a run.
"""

from sqlalchemy import Connection, and_, delete, insert, select

from harnessed.gateway.store import Refused
from harnessed.gateway.tables import fates, metrics, rollouts, runs
from harnessed.records import Fate, Metrics

_AT_ONCE = 500
"""Rollouts in one statement."""


def append(connection: Connection, run: str, line: Metrics, now: float) -> None:
    """Raises Refused (404)."""
    if connection.execute(select(runs.c.id).where(runs.c.id == run)).first() is None:
        raise Refused(404, f"no run {run}: create it before its metrics")
    connection.execute(insert(metrics).values(run=run, step=line.step, values=line.values, time=now))


def after(connection: Connection, run: str, number: int) -> list[Metrics]:
    mine = and_(metrics.c.run == run, metrics.c.number > number)
    rows = connection.execute(select(metrics).where(mine).order_by(metrics.c.number)).mappings()
    return [Metrics.model_validate({k: v for k, v in row.items() if k != "run"}) for row in rows]


def forget(connection: Connection, run: str, above: int) -> None:
    """Lines of steps above this one."""
    connection.execute(delete(metrics).where(and_(metrics.c.run == run, metrics.c.step > above)))


def keep_fates(connection: Connection, run: str, booked: dict[str, dict[Fate, int]]) -> None:
    """What was kept for the same rollouts is replaced. Raises Refused (404)."""
    ids = list(booked)
    for at in range(0, len(ids), _AT_ONCE):
        part = ids[at : at + _AT_ONCE]
        mine = and_(rollouts.c.run == run, rollouts.c.id.in_(part))
        known = set(connection.execute(select(rollouts.c.id).where(mine)).scalars())
        if strangers := [id for id in part if id not in known]:
            raise Refused(404, f"no rollout {strangers[0]} in run {run}")
        rows = [{"rollout": id, "tokens": {str(fate): n for fate, n in booked[id].items()}} for id in part]
        connection.execute(delete(fates).where(fates.c.rollout.in_(part)))
        connection.execute(insert(fates), rows)
