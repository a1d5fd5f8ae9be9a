"""What a trainer reports of its run, as transactions on the store: metrics by step, and the fates of tokens.

`api.py` calls this; the dashboard draws it. The trainer's own files stay the record of a run.
"""

from sqlalchemy import Connection, and_, insert, select

from harnessed.gateway.store import Refused
from harnessed.gateway.tables import events, metrics, rollouts, runs
from harnessed.records import Fate, Metrics

FATES = "fates"
"""Type of the events that hold the sampled tokens of a rollout by fate."""
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


def append_fates(connection: Connection, run: str, fates: dict[str, dict[Fate, int]], now: float) -> None:
    """As events of the rollouts' last attempts. Raises Refused (404)."""
    last: dict[str, int] = {}
    ids = list(fates)
    for at in range(0, len(ids), _AT_ONCE):
        mine = and_(rollouts.c.run == run, rollouts.c.id.in_(ids[at : at + _AT_ONCE]))
        found = connection.execute(select(rollouts.c.id, rollouts.c.attempt).where(mine))
        last |= {row.id: row.attempt for row in found}
    if strangers := [id for id in ids if id not in last]:
        raise Refused(404, f"no rollout {strangers[0]} in run {run}")
    rows = []
    for id, by_fate in fates.items():
        data = {str(fate): tokens for fate, tokens in by_fate.items()}
        rows.append({"rollout": id, "attempt": last[id], "type": FATES, "data": data, "time": now})
    if rows:
        connection.execute(insert(events), rows)
