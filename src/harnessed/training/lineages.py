"""How many updates lie between two versions of a policy, over the lives of a run: pure functions for the trainer.

Each life of a run is a lineage. It goes on from a checkpoint, so what an earlier life did after that checkpoint is a
branch that nothing follows; its tokens are in the store all the same. Updates are counted from the run's first weights,
along the lives; those that were skipped made no version and do not count.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harnessed.records import UNKNOWN_VERSION, Transcript, Version
from harnessed.training.samples import Sample


class Lineage(NamedTuple):
    """One life of a run."""

    lineage: int
    number: int
    """Of its first version, whose weights are those that it went on from."""
    updates: int
    """Between the run's first weights and those."""


def go_on(lineages: list[Lineage], first: Version, origin: Version | None) -> list[Lineage]:
    """The lineages with one that begins as `first`, with the weights of `origin`; None: with the run's first weights.

    An `origin` in none of the lineages is of another run, so its weights are this run's first ones.
    """
    mine = {each.lineage for each in lineages}
    updates = updates_at(origin, lineages) if origin is not None and origin.lineage in mine else 0
    return [*lineages, Lineage(first.lineage, first.number, updates)]


def updates_at(version: Version, lineages: list[Lineage]) -> int:
    """Updates between the run's first weights and these. Raises LookupError if no life of the run made them."""
    for each in lineages:
        if each.lineage == version.lineage and each.number <= version.number:
            return each.updates + version.number - each.number
    raise LookupError(f"no life of this run made version {version.lineage}.{version.number} of its policy")


def updates_between(token: Version, current: Version, lineages: list[Lineage]) -> int:
    """Updates between the weights that sampled a token and the current ones, which are of the last lineage.

    From a branch that was left they lead back to where it was left, and forth from there. `lineages` are in the order
    in which they began. Raises LookupError as `updates_at`.
    """
    sampled, now = updates_at(token, lineages), updates_at(current, lineages)
    left = (each.updates for each in lineages if token.lineage < each.lineage <= current.lineage)
    fork = min([sampled, now, *left])
    return (sampled - fork) + (now - fork)


def age_of(samples: Iterable[Sample], current: Version, lineages: list[Lineage]) -> int | None:
    """Updates since the oldest trained token; None: there is none, or the engine does not say what it served. Raises
    LookupError as `updates_at`."""
    rows = chain.from_iterable(sample.rows for sample in samples)
    return _age((row.versions[row.trained] for row in rows), current, lineages)


def age_so_far(transcripts: Iterable[Transcript], current: Version, lineages: list[Lineage]) -> int | None:
    """The same of rollouts that still run, over all their tokens."""
    attempts = (transcript.attempts[-1] for transcript in transcripts if transcript.attempts)
    nodes = chain.from_iterable(attempt.nodes for attempt in attempts)
    return _age((np.frombuffer(node.versions, np.int32) for node in nodes), current, lineages)


def _age(versions: Iterable[NDArray[np.int32]], current: Version, lineages: list[Lineage]) -> int | None:
    packed = {int(version) for each in versions for version in np.unique(each)} - {UNKNOWN_VERSION}
    return max((updates_between(Version.unpack(each), current, lineages) for each in packed), default=None)


def next_version(served: Iterable[Version]) -> Version:
    """The first version of a new life, given all that may ever have been served: above each in both of its numbers."""
    known = list(served)
    if not known:
        return Version(0, 0)
    return Version(max(each.lineage for each in known) + 1, max(each.number for each in known) + 1)
