"""What a trainer needs to know of the earlier lives of its run. `run.py` finds it out, `trainer.py` goes on from it."""

from dataclasses import dataclass
from pathlib import Path

from harnessed.records import Version


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run that is resumed goes on."""

    times: int
    """How often it was resumed, this time included."""
    checkpoint: Path | None
    """Its own newest one, or that which it had begun from (`trainer.resume_from`); None: the first weights."""
    step: int
    """Of the checkpoint. What is in the books of later steps has not happened."""
    version: Version | None
    """Of the checkpoint; None: the first weights."""
    groups: frozenset[str]
    """Ids of the run's groups that were consumed up to it. All others of the run are in flight."""
    served: tuple[Version, ...]
    """Some versions of the policy that were served; a new one is above all of them and above what the folder of the
    weights says (`lineages.next_version`)."""
