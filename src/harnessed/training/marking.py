"""Packs in which each trained token carries, in place of an advantage, the number of its rollout or of its call.

What a backend computes from them is a number for each: the divergence of a rollout, the value of a call. `valuing.py`
calls this.
"""

from itertools import chain, count

from harnessed.config import Trainer
from harnessed.training.batching import Advantages, scored
from harnessed.training.packing import Pack, pack
from harnessed.training.samples import Sample


def by_rollout(groups: list[list[Sample]], settings: Trainer) -> list[Pack]:
    """Numbered 0, 1, ... through the groups."""
    return _packs(groups, [float(number) for number in range(sum(map(len, groups)))], settings)


def by_call(groups: list[list[Sample]], settings: Trainer) -> list[Pack]:
    """Numbered 0, 1, ... through the calls of each rollout, rollout after rollout."""
    marks: list[Advantages] = []
    numbers = count()
    for sample in chain.from_iterable(groups):
        marks.append({node: float(mark) for nodes in sample.calls for mark in [next(numbers)] for node in nodes})
    return _packs(groups, marks, settings)


def _packs(groups: list[list[Sample]], marks: list[Advantages], settings: Trainer) -> list[Pack]:
    rows = iter(scored(list(chain.from_iterable(groups)), marks, "rollout"))
    grouped = [[next(rows) for _ in group] for group in groups]
    return pack(grouped, settings.micro_batch_tokens, settings.share_prefixes)
