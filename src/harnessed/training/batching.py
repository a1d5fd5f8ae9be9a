"""From samples with advantages to micro-batches that fit a token budget. `trainer.py` calls this.

The weights of the objective are fixed here, over the whole optimiser step, so that the loss does not depend on how
rows are cut into micro-batches. No row is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harnessed.training.samples import Row, Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, padded on the right; every array has shape [B, L]."""

    tokens: NDArray[np.int64]
    """Padding is 0."""
    present: NDArray[np.int64]
    """1 for tokens, 0 for padding: the attention mask."""
    trained: NDArray[np.bool_]
    engine_logprobs: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    """1 / (R * T_r) at trained tokens of rollout r, 0 elsewhere."""

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())


def micro_batches(
    samples: list[Sample], advantages: Sequence[float | Mapping[int, float]], budget: int
) -> list[MicroBatch]:
    """Cut the rows of an optimiser step (one advantage per sample) into micro-batches of at most `budget` tokens.

    Padding counts; a row that is longer alone makes a micro-batch of its own. R counts every sample, also one without
    trained tokens.
    """
    rollouts = len(samples)
    weighted = [
        (row, advantage, 1.0 / (rollouts * sample.trained_tokens))
        for sample, advantage in zip(samples, advantages, strict=True)
        for row in sample.rows
    ]
    weighted.sort(key=lambda item: len(item[0].tokens))  # neighbours of like length need little padding
    batches: list[list[tuple[Row, float | Mapping[int, float], float]]] = []
    for item in weighted:
        # Sorted: this row is the longest so far, so it sets the padded length.
        if not batches or (len(batches[-1]) + 1) * len(item[0].tokens) > budget:
            batches.append([])
        batches[-1].append(item)
    return [_stack(batch) for batch in batches]


def _stack(batch: list[tuple[Row, float | Mapping[int, float], float]]) -> MicroBatch:
    length = max(len(row.tokens) for row, _, _ in batch)

    def pad(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        stacked = np.zeros((len(arrays), length), dtype)
        for line, array in zip(stacked, arrays, strict=True):
            line[: len(array)] = array
        return stacked

    rows = [row for row, _, _ in batch]
    temperatures = pad([row.temperatures for row in rows], np.float32)
    temperatures[temperatures == 0] = 1  # padding
    return MicroBatch(
        tokens=pad([row.tokens for row in rows], np.int64),
        present=pad([np.ones(len(row.tokens)) for row in rows], np.int64),
        trained=pad([row.trained for row in rows], np.bool_),
        engine_logprobs=pad([row.logprobs for row in rows], np.float32),
        temperatures=temperatures,
        advantages=pad([np.full(len(row.tokens), a) for row, a, _ in batch], np.float32),
        weights=pad([row.trained * weight for row, _, weight in batch], np.float32),
    )
