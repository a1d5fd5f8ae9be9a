"""Makes the folder of an ended run small: what its rollouts said goes, how they ended stays.

`harnessed rollouts prune` calls `prune`.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, Connection, create_engine, select

from harnessed.config import ConfigError
from harnessed.gateway.app import DATABASE
from harnessed.gateway.retention import DAY_S, forget
from harnessed.gateway.tables import nodes, rollouts

ENDED = ("summary.json", "evaluation.json")
"""One of them is written at the end of a run."""
AT_ONCE = 500
"""Rollouts in one statement."""


@dataclass(frozen=True, slots=True)
class Pruned:
    rollouts: int
    answers: int
    megabytes: float
    """By which the database has become smaller."""


def prune(folder: Path, run: str, *, days: float) -> Pruned:
    """Delete calls, answers and events of rollouts that ended that long ago, and their attempts' folders.

    Raises ConfigError while the run goes on: its trainer still needs them.
    """
    if not any((folder / name).is_file() for name in ENDED):
        raise ConfigError(
            f"{folder} holds a run that has not ended (no {' or '.join(ENDED)}): only ended runs are pruned"
        )
    database = folder / DATABASE
    before = database.stat().st_size
    engine = create_engine(URL.create("sqlite", database=str(database)))
    with engine.begin() as connection:
        old = _ended_before(connection, run, time.time() - days * DAY_S)
        answers = sum(forget(connection, old[at : at + AT_ONCE]) for at in range(0, len(old), AT_ONCE))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    for rollout in old:
        for attempt in (folder / "attempts").glob(f"{rollout}.*"):
            shutil.rmtree(attempt)
    return Pruned(len(old), answers, (before - database.stat().st_size) / 1e6)


def _ended_before(connection: Connection, run: str, time_s: float) -> list[str]:
    """Rollouts that hold something to prune."""
    query = select(rollouts.c.id).where(rollouts.c.run == run, rollouts.c.finished < time_s)
    return list(connection.execute(query.where(rollouts.c.id.in_(select(nodes.c.rollout)))).scalars())
