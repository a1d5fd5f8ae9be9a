"""How many updates lie between two versions of the policy. For `flights.py` and `metrics.py`.

Numbers only grow, so a run that goes on from a checkpoint does so in a new lineage, with a number above all that were
served before, though its weights are those of the checkpoint. Updates are counted along the tree that this makes: a
token of an abandoned branch is as far away as the way back to the fork and from there to the current policy.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np

from harnessed.records import UNKNOWN_VERSION, Version
from harnessed.training.samples import Sample


class Fork(NamedTuple):
    """Where a lineage begins."""

    first: Version
    origin: Version
    """The version with the same weights."""


Forks = Mapping[int, Fork]
"""By lineage; the first one has none."""


def updates_between(one: Version, other: Version, forks: Forks) -> int:
    """Raises KeyError if they have no common origin."""
    ways = {version.lineage: (version.number, updates) for version, updates in _way_back(other, forks)}
    for version, updates in _way_back(one, forks):
        if version.lineage in ways:
            number, others = ways[version.lineage]
            return updates + others + abs(version.number - number)
    raise KeyError(one)


def _way_back(version: Version, forks: Forks) -> Iterator[tuple[Version, int]]:
    """A version and those from which its lineage and the ones before went on, with the updates on the way to them."""
    updates = 0
    yield version, updates
    while fork := forks.get(version.lineage):
        updates += version.number - fork.first.number
        version = fork.origin
        yield version, updates


def age_of(samples: Iterable[Sample], current: Version, forks: Forks) -> int | None:
    """Updates since the oldest trained token; None: there is none, or the engine does not say what it served. Raises
    KeyError for a version that the run never had."""
    rows = chain.from_iterable(sample.rows for sample in samples)
    packed = {int(version) for row in rows for version in np.unique(row.versions[row.trained])}
    versions = map(Version.unpack, packed - {UNKNOWN_VERSION})
    return max((updates_between(version, current, forks) for version in versions), default=None)
