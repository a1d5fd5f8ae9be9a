"""Which groups an update takes, and with which advantages. `trainer.py` calls `select`."""

from dataclasses import dataclass
from itertools import chain

from harnessed.config import Advantage
from harnessed.records import Fate
from harnessed.training.advantages import Returns, all_equal, call_advantages, returns
from harnessed.training.batching import Advantages
from harnessed.training.samples import Sample


@dataclass(frozen=True, slots=True)
class Taken:
    """What an update takes: whole groups, an advantage for each sample, or for each node whose answer it trains."""

    samples: list[Sample]
    advantages: list[Advantages]
    groups: int


def select(groups: list[list[Sample]], settings: Advantage) -> Taken:
    """Groups that can be compared, with their advantages; the others' tokens get the fate that says why not."""
    taken: list[list[Sample]] = []
    worth: list[list[Returns]] = []
    for group in groups:
        members = [sample for sample in group if sample.reward is not None]
        compared = [_returns(sample, settings) for sample in members]
        alone = len(members) < 2
        if alone or (settings.equal_groups == "skip" and all_equal(compared)):
            for sample in members:
                sample.give_up(Fate.GROUP_INCOMPLETE if alone else Fate.GROUP_SKIPPED)
            continue
        taken.append(members)
        worth.append(compared)
    samples = list(chain.from_iterable(taken))
    found = chain.from_iterable(call_advantages(worth, settings))
    return Taken(
        samples, [_of(sample, each, settings) for sample, each in zip(samples, found, strict=True)], len(taken)
    )


def _returns(sample: Sample, settings: Advantage) -> Returns:
    assert sample.reward is not None
    calls = sample.call_rewards if settings.per_call else []
    return returns(calls, sample.reward - sample.penalty, settings.discount)


def _of(sample: Sample, advantages: list[float], settings: Advantage) -> Advantages:
    if not settings.per_call:
        return advantages[0]
    pairs = zip(sample.calls, advantages, strict=False)  # one without calls has an advantage all the same
    return {node: advantage for nodes, advantage in pairs for node in nodes}
