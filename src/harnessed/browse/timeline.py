"""Engine, trainer and rollouts of a run over time, from its records; and how busy they were.

`compare.py` and `picture.py` show it to people; benchmarks call `read` and `busy`. When engines sampled is in the
gateway's database, call by call, whatever kind of engine that was; what the trainer did is in timeline.jsonl. All times
are seconds since the epoch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from sqlalchemy import Connection, inspect, select

from harnessed.browse.opening import opened
from harnessed.config import ConfigError
from harnessed.gateway.tables import attempts, calls, closings, past_closings, rollouts
from harnessed.records import Purpose, State
from harnessed.training.timeline import FILE, NAMES

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Period = tuple[float, float]
"""Begin and end."""

TRIED_AGAIN = "tried again"
"""In place of an outcome: of an attempt that another one followed, or will."""
RUNNING = "running"
"""In place of an outcome."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How many of some periods run, as a step function."""

    times: Floats
    """[n], ascending."""
    counts: Counts
    """[n]: from this time to the next. 0 before the first, and from the last on."""

    def at(self, moments: Floats) -> Counts:
        """[m], from each of these moments on."""
        found: Counts = np.concatenate(([0], self.counts))[np.searchsorted(self.times, moments, side="right")]
        return found

    def means(self, edges: Floats) -> Floats:
        """[m - 1]: the mean between each of these moments and the next."""
        if not self.times.size:
            return np.zeros(len(edges) - 1)
        areas = np.concatenate(([0.0], np.cumsum(self.counts[:-1] * np.diff(self.times))))
        return np.diff(np.interp(edges, self.times, areas)) / np.diff(edges)


@dataclass(frozen=True, slots=True)
class Phase:
    """What the trainer did."""

    name: str
    """One of `training.timeline.Name`."""
    began: float
    ended: float
    step: int


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt of a rollout: it had a slot."""

    began: float
    ended: float
    """Of one that runs: the end of the records."""
    outcome: str
    """Of its rollout; or TRIED_AGAIN, RUNNING."""
    evaluation: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    run: str
    began: float
    """The first of all that is recorded, as `ended` is the last."""
    ended: float
    batch: Steps
    """Generations that run at engines."""
    phases: list[Phase]
    """In their order; over all trainers, where one went on with the run of another."""
    bars: list[Bar]
    """In the order of their begin."""
    closed: list[Period]
    """When the turnstile of the run was closed, or about to be."""

    @property
    def updates(self) -> list[Period]:
        return [(phase.began, phase.ended) for phase in self.phases if phase.name == "update"]


@dataclass(frozen=True, slots=True)
class Shares:
    """What became of the time of a run. The shares are of all of it, but for `busy`."""

    wall_s: float
    updates: int
    generating: float
    """At least one generation runs."""
    updating: float
    idle: float
    """Neither."""
    waiting: float
    """The trainer waits for groups."""
    mean_batch: float
    """Generations that run, while any does."""
    usual_batch: int
    busy: float | None
    """`busy`, which leaves the warm-up out."""


def read(folder: Path) -> Timeline:
    """What is recorded of the run in this folder so far. Raises ConfigError.

    A generation is recorded when its call ends: what runs now, and what ran for a gateway that was killed, is missing.
    """
    with opened(folder) as (connection, run):
        if "generated" not in {column["name"] for column in inspect(connection).get_columns(calls.name)}:
            raise ConfigError(f"{folder} was recorded by an earlier version, which did not keep when engines sampled")
        periods = _generations(connection, run.id)
        rows = _attempts(connection, run.id)
        closed = _closed(connection, run.id)
    phases = _phases(folder / FILE)
    known = [row.started for row in rows] + [row.ended for row in rows if row.ended is not None]
    known += [moment for period in closed for moment in period if moment is not None]
    known += [moment for phase in phases for moment in (phase.began, phase.ended)]
    known += [float(periods.min()), float(periods.max())] if periods.size else []
    began, ended = (min(known), max(known)) if known else (0.0, 0.0)
    return Timeline(
        run.id,
        began,
        ended,
        running(periods),
        phases,
        [_bar(row, ended) for row in rows],
        [(since, ended if until is None else until) for since, until in closed],
    )


def running(periods: Floats) -> Steps:
    """How many of the periods, [n, 2], run at a time."""
    begins, ends = periods[:, 0], np.maximum(periods[:, 0], periods[:, 1])  # a clock may have been set back
    times, places = np.unique(np.concatenate((begins, ends)), return_inverse=True)
    changes = np.zeros(len(times), dtype=np.int64)
    np.add.at(changes, places, np.repeat([1, -1], len(periods)))
    return Steps(times, np.cumsum(changes))


def busy(timeline: Timeline) -> float | None:
    """The share of the time after warm-up in which the device generates with at least a quarter of the usual batch, or
    updates the policy.

    After warm-up: from the end of the first update to the end of the last one; None where that is nothing. The usual
    batch is the median number of running generations over that time, as far as any runs.
    """
    updates = timeline.updates
    if len(updates) < 2 or updates[-1][1] <= updates[0][1]:
        return None
    seconds, batch, updating = _pieces(timeline, (updates[0][1], updates[-1][1]))
    usual = _usual(seconds, batch)
    return float(seconds[updating | ((batch > 0) & (batch >= usual / 4))].sum() / seconds.sum())


def shares(timeline: Timeline) -> Shares:
    wall_s = timeline.ended - timeline.began
    seconds, batch, updating = _pieces(timeline, (timeline.began, timeline.ended))
    generating_s = float(seconds[batch > 0].sum())

    def share(part_s: float) -> float:
        return part_s / wall_s if wall_s else 0.0

    return Shares(
        wall_s,
        len(timeline.updates),
        share(generating_s),
        share(float(seconds[updating].sum())),
        share(float(seconds[~updating & (batch == 0)].sum())),
        share(sum(phase.ended - phase.began for phase in timeline.phases if phase.name == "wait")),
        float((batch * seconds).sum()) / generating_s if generating_s else 0.0,
        _usual(seconds, batch),
        busy(timeline),
    )


def _pieces(timeline: Timeline, window: Period) -> tuple[Floats, Counts, npt.NDArray[np.bool_]]:
    """The window, cut wherever something changes: seconds of each piece, generations that run, whether the trainer
    updates; [n] each."""
    updating = running(np.array(timeline.updates).reshape(-1, 2))
    moments = np.concatenate((timeline.batch.times, updating.times, window))
    moments = np.unique(moments[(moments >= window[0]) & (moments <= window[1])])
    begins = moments[:-1]
    return np.diff(moments), timeline.batch.at(begins), updating.at(begins) > 0


def _usual(seconds: Floats, batch: Counts) -> int:
    """The median of the batch over the seconds in which it is not 0; 0: there are none."""
    order = np.argsort(batch, kind="stable")
    order = order[batch[order] > 0]
    if not order.size:
        return 0
    passed = np.cumsum(seconds[order])
    return int(batch[order[np.searchsorted(passed, passed[-1] / 2)]])


def _generations(connection: Connection, run: str) -> Floats:
    """[n, 2]"""
    query = select(calls.c.generated).join(rollouts, rollouts.c.id == calls.c.rollout)
    found = connection.execute(query.where(rollouts.c.run == run, calls.c.generated.is_not(None))).scalars()
    return np.frombuffer(b"".join(found)).reshape(-1, 2)


def _attempts(connection: Connection, run: str) -> list[Any]:
    """Rows with what `_bar` needs."""
    of = (attempts.c.number, attempts.c.started, attempts.c.ended)
    columns = (*of, rollouts.c.attempt, rollouts.c.state, rollouts.c.outcome, rollouts.c.purpose)
    query = select(*columns).join(rollouts, rollouts.c.id == attempts.c.rollout).where(rollouts.c.run == run)
    return list(connection.execute(query.order_by(attempts.c.started)))


def _bar(row: Any, end: float) -> Bar:
    outcome = row.outcome
    if row.ended is None:
        outcome = RUNNING
    elif row.number < row.attempt or row.state != State.FINISHED:
        outcome = TRIED_AGAIN
    return Bar(row.started, end if row.ended is None else row.ended, outcome, row.purpose == Purpose.EVALUATION)


def _closed(connection: Connection, run: str) -> list[tuple[float, float | None]]:
    """None: until now."""
    past = select(past_closings.c.since, past_closings.c.until).where(past_closings.c.run == run)
    found = [(row.since, row.until) for row in connection.execute(past.order_by(past_closings.c.since))]
    now = connection.execute(select(closings.c.since).where(closings.c.run == run)).scalars()
    return [*found, *((since, None) for since in now)]


def _phases(path: Path) -> list[Phase]:
    """Lines that a trainer was killed over, or that are of no phase, are left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            read = orjson.loads(line)
            phase = Phase(read["phase"], float(read["began"]), float(read["ended"]), int(read["step"]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
        if phase.name in NAMES:
            found.append(phase)
    return found
