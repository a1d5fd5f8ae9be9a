"""The groups of a step: what was rolled out, and which of them can be compared. For `trainer.py` and `metrics.py`."""

from dataclasses import dataclass

from harnessed.config import Advantage
from harnessed.records import Fate, GroupSpec, Transcript
from harnessed.training.advantages import advantages, all_equal, row_advantages
from harnessed.training.samples import Sample


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task, all finished."""

    spec: GroupSpec
    transcripts: list[Transcript]
    samples: list[Sample]
    """One for each transcript."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What an update takes: whole groups, an advantage for each of their samples."""

    groups: list[list[Sample]]
    advantages: list[list[float]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]


def members_of(group: list[Sample]) -> tuple[list[Sample], list[float]]:
    """Those that can be compared, with their rewards: who ended by infrastructure has left the group."""
    judged = [(sample, sample.reward) for sample in group if sample.reward is not None]
    return [sample for sample, _ in judged], [reward for _, reward in judged]


def why_not(group: list[Sample], settings: Advantage) -> Fate | None:
    """The fate of its tokens if the group is not taken, or None."""
    members, rewards = members_of(group)
    if len(members) < 2:
        return Fate.GROUP_INCOMPLETE
    if settings.equal_groups == "skip" and all_equal([[reward] for reward in rewards]):
        return Fate.GROUP_SKIPPED
    return None


def select(groups: list[list[Sample]], settings: Advantage) -> Taken:
    """Groups that can be compared, with their advantages; the others' tokens get the fate that says why not."""
    taken: list[list[Sample]] = []
    compared: list[list[float]] = []
    for group in groups:
        members, rewards = members_of(group)
        if fate := why_not(group, settings):
            for sample in members:
                sample.give_up(fate)
        else:
            taken.append(members)
            compared.append(rewards)
    if settings.per == "row":
        return Taken(taken, row_advantages(compared, [[len(each.rows) for each in group] for group in taken], settings))
    return Taken(taken, advantages(compared, settings))
