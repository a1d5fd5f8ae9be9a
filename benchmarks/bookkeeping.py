"""What a trainer does beside the model: its share of the wall time with 256 rollouts in flight.

    python benchmarks/bookkeeping.py [FOLDER]

`make bookkeeping` runs it: the workload of `schedules.py`, collocated, with so many slots and groups that 256 rollouts
are in flight. Bookkeeping is all that the trainer's process computes outside of its updates (the journal, reading
transcripts, rows and fates, advantages, packs, books). The time in which the turnstile is closed and nothing is updated
is told as well: then neither agents nor engine nor update have the device. What gateway and controller compute for all
that, on the other core, stands beside it.
"""

import argparse
import math
import shutil
from pathlib import Path

import numpy as np
from figures import Figure, tell
from schedules import ROOT, Usage, make_policy, train

from harnessed.browse.timeline import read

IN_FLIGHT = [
    "trainer.schedule.kind=collocated",
    "trainer.schedule.groups_in_flight=48",
    "trainer.schedule.staleness=5",
    "controller.slots=256",
    "trainer.steps=12",
    "evaluation.tasks=16",
]
LIMIT = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a trainer's bookkeeping.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "runs" / "schedules")
    asked = parser.parse_args()
    folder: Path = asked.folder.absolute()
    run = folder / "bookkeeping"
    shutil.rmtree(run, ignore_errors=True)
    usage = train(run, "collocated", [*IN_FLIGHT, f"policy.model={make_policy(folder / 'policy')}"])
    tell(measured(run, usage))


def measured(run: Path, usage: list[Usage]) -> list[Figure]:
    """From the end of the first update, when as many are in flight as may be, to the end of the last."""
    timeline = read(run)
    updates = timeline.updates
    began, ended = updates[0][1], updates[-1][1]
    wall = ended - began
    at = [each.at for each in usage]

    def used(field: str, since: float, until: float) -> float:
        values = [getattr(each, field) for each in usage]
        return float(np.diff(np.interp((since, until), at, values))[0])

    beside = used("trainer", began, ended) - sum(used("trainer", *update) for update in updates[1:])
    updating = sum(until - since for since, until in updates[1:])
    closed = sum(until - since for since, until in timeline.closed if since >= began and until <= ended + 1)
    in_flight = max(sum(bar.began <= moment < bar.ended for bar in timeline.bars) for _, moment in updates)
    services = used("services", began, ended)
    return [
        Figure("rollouts in flight, most at the end of an update", in_flight, math.inf),
        Figure("trainer beside its updates: share of the wall time", beside / wall, math.inf, f"{wall:.0f} s"),
        Figure("turnstile closed, nothing updated: share of the wall time", (closed - updating) / wall, math.inf),
        Figure("both: share of the wall time", (beside + closed - updating) / wall, LIMIT),
        Figure("updates: share of the wall time", updating / wall, math.inf),
        Figure("gateway and controller: share of the other core", services / wall, math.inf),
    ]


if __name__ == "__main__":
    main()
