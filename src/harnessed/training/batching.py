"""From samples with advantages to optimiser steps, the weights of the objective, and the ranks that share the work.

The weights are fixed here, over the whole optimiser step, so that the loss depends neither on how rows are cut into
micro-batches (`packing.py`) nor on how these are dealt to ranks. No row is dropped. `trainer.py` calls this.
"""

import heapq
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harnessed.training.packing import Pack, Scored, blank
from harnessed.training.samples import Row, Sample

Normalisation = Literal["rollout", "token", "sample", "constant"]
Advantages = float | Mapping[int, float]
"""Of a rollout, or of each node whose answer it trains."""


def scored(
    samples: list[Sample], advantages: list[Advantages], normalisation: Normalisation, constant: int | None = None
) -> list[list[Scored]]:
    """The rows of each sample of one optimiser step. R samples, T_r trained tokens of sample r; a token weighs

    rollout   1 / (R * T_r)
    token     1 / sum of all T_r                       (DAPO, arXiv 2503.14476, equation 8)
    sample    1 / (rows of the step * tokens of its row that are trained)
    constant  1 / (R * constant)                       (Dr. GRPO, arXiv 2503.20783)

    R counts every sample, also one without trained tokens.
    """
    trained = [[int(row.trained.sum()) for row in sample.rows] for sample in samples]
    rows, tokens = sum(map(len, trained)), sum(map(sum, trained))
    result: list[list[Scored]] = []
    for sample, advantage, counts in zip(samples, advantages, trained, strict=True):
        result.append([])
        for row, count in zip(sample.rows, counts, strict=True):
            divisor = {
                "rollout": len(samples) * sum(counts),
                "token": tokens,
                "sample": rows * count,
                "constant": len(samples) * (constant or 0),
            }[normalisation]
            result[-1].append(Scored(row, _along(row, advantage), (row.trained / divisor).astype(np.float32)))
    return result


def _along(row: Row, advantage: Advantages) -> NDArray[np.float32]:
    """The advantage of each token [T]. Raises KeyError if an answer that the row trains has none."""
    if not isinstance(advantage, Mapping):
        return np.full(len(row.tokens), advantage, np.float32)
    by_node = np.zeros(max(row.path) + 1, np.float32)
    for node in np.unique(row.answers[row.trained]).tolist():
        by_node[node] = advantage[node]
    return by_node[row.answers]


def optimiser_steps(groups: int, per_update: int, epochs: int, seed: int) -> list[list[int]]:
    """Which of the groups 0, 1, ... each optimiser step takes: in every epoch each group once, cut into `per_update`
    steps of about as many groups, or as many steps as there are groups. Several steps take them in random order."""
    chance = np.random.default_rng(seed)
    steps: list[list[int]] = []
    for _ in range(epochs):
        order = chance.permutation(groups) if min(per_update, groups) > 1 else np.arange(groups)
        steps += [part.tolist() for part in np.array_split(order, min(per_update, groups))] if groups else []
    return steps


def deal(packs: list[Pack], ranks: int) -> list[list[Pack]]:
    """The packs of each rank: balanced by tokens, and as many for each, since ranks work in step; packs of weight zero
    fill up. Losses and gradients add up over ranks."""
    dealt: list[list[Pack]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for pack in sorted(packs, key=lambda pack: -len(pack.tokens)):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(pack)
        heapq.heappush(loads, (load + len(pack.tokens), rank))
    most = max(map(len, dealt))
    return [mine + [blank()] * (most - len(mine)) for mine in dealt]
