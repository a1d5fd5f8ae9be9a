"""What the metrics of an update are made of: sums over the micro-batches of each optimiser step. For `local.py`."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from torch import Tensor


@dataclass(slots=True)
class Tally:
    """Of one optimiser step."""

    loss: float = 0.0
    gradient_norm: float = 0.0
    """Before clipping."""
    tokens: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    """Of names that end with _max."""

    def add(self, loss: Tensor, sums: dict[str, Tensor], tokens: int) -> None:
        """A micro-batch, with the loss and the sums of `objective_loss`."""
        self.loss += loss.item()
        self.tokens += tokens
        for name, value in sums.items():
            if name.endswith("_max"):
                # Not a number if one is not.
                self.largest[name] = float(np.maximum(self.largest.get(name, 0.0), value.item()))
            else:
                self.sums[name] += value.item()

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def means(steps: list[Tally]) -> dict[str, float]:
    """Means over the tokens of all steps, the largest of what is a maximum, loss and gradient norm of a mean step."""
    tokens = max(sum(step.tokens for step in steps), 1)
    sums: Counter[str] = Counter()
    for step in steps:
        sums.update(step.sums)
    names = dict.fromkeys(chain.from_iterable(step.largest for step in steps))
    return {
        **{name: total / tokens for name, total in sums.items()},
        **{name: float(np.max([step.largest[name] for step in steps if name in step.largest])) for name in names},
        "loss": statistics.fmean(step.loss for step in steps),
        "gradient_norm": statistics.fmean(step.gradient_norm for step in steps),
    }
