"""The groups of a step: which an update takes, and with which advantages. For `trainer.py` and `metrics.py`."""

from dataclasses import dataclass
from itertools import chain

from harnessed.config import Advantage, Kl, Trainer
from harnessed.records import Fate, GroupSpec, Transcript
from harnessed.training.advantages import Returns, all_equal, call_advantages, returns, row_advantages
from harnessed.training.batching import Advantages
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
    """What an update takes: whole groups, an advantage for each sample, or for each node whose answer it trains."""

    samples: list[Sample]
    advantages: list[Advantages]
    groups: int


def why_not(group: list[Sample], settings: Advantage) -> Fate | None:
    """The fate of its tokens if a group is not taken, or None."""
    members = members_of(group)
    if len(members) < 2:
        return Fate.GROUP_INCOMPLETE
    if settings.equal_groups == "skip" and all_equal([_returns(sample, settings) for sample in members]):
        return Fate.GROUP_SKIPPED
    return None


def comparable(group: list[Sample], settings: Trainer) -> bool:
    """Whether an update will take the group, as far as is known before it."""
    fate = why_not(group, settings.advantage)
    # What a KL term takes from the rewards differs where the rewards do not.
    return fate is None or (fate == Fate.GROUP_SKIPPED and in_reward(settings.objective.kl))


def in_reward(kl: Kl) -> bool:
    """Whether the KL term is taken from the reward."""
    return kl.coefficient > 0 and kl.place == "reward"


def members_of(group: list[Sample]) -> list[Sample]:
    """Who ended by infrastructure has left the group."""
    return [sample for sample in group if sample.reward is not None]


def select(groups: list[list[Sample]], settings: Advantage) -> Taken:
    """Groups that can be compared, with their advantages; the others' tokens get the fate that says why not."""
    taken: list[list[Sample]] = []
    for group in groups:
        members = members_of(group)
        if fate := why_not(group, settings):
            for sample in members:
                sample.give_up(fate)
        else:
            taken.append(members)
    worth = [[_returns(sample, settings) for sample in group] for group in taken]
    found = call_advantages(worth, settings) if settings.per == "rollout" else _per_row(taken, worth, settings)
    samples, each = list(chain.from_iterable(taken)), chain.from_iterable(found)
    advantages = [_of(sample, compared, settings) for sample, compared in zip(samples, each, strict=True)]
    return Taken(samples, advantages, len(taken))


def _per_row(groups: list[list[Sample]], worth: list[list[Returns]], settings: Advantage) -> list[list[Returns]]:
    rewards = [[returned[0] for returned in group] for group in worth]
    rows = [[len(sample.rows) for sample in group] for group in groups]
    return [[[advantage] for advantage in group] for group in row_advantages(rewards, rows, settings)]


def _returns(sample: Sample, settings: Advantage) -> Returns:
    assert sample.reward is not None
    calls = sample.call_rewards if settings.per_call else []
    return returns(calls, sample.reward - sample.penalty, settings.discount)


def _of(sample: Sample, advantages: list[float], settings: Advantage) -> Advantages:
    if not settings.per_call:
        return advantages[0]
    pairs = zip(sample.calls, advantages, strict=False)  # one without calls has an advantage all the same
    return {node: advantage for nodes, advantage in pairs for node in nodes}
