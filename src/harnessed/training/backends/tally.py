"""What the metrics of an update are made of: sums over the micro-batches of each optimiser step. For `local.py`."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from torch import Tensor

from harnessed.training.metrics import Clock


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
    clock: Clock = field(default_factory=Clock)
    """Phases `forward` and `backward`."""

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
    """Means over the tokens of all steps, the largest of what is a maximum, loss and gradient norm of a mean step.

    `importance_ess` is the effective sample size of the importance weights, as a share of the tokens: (sum w)^2 / (n
    sum w^2).
    """
    tokens = max(sum(step.tokens for step in steps), 1)
    sums: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for step in steps:
        sums.update(step.sums)
        seconds.update(step.clock.seconds)
    weight, squared = sums["importance_weight"], sums.pop("importance_weight_squared", 0.0)
    names = dict.fromkeys(chain.from_iterable(step.largest for step in steps))
    return {
        **{name: total / tokens for name, total in sums.items()},
        **seconds,
        **{name: float(np.max([step.largest[name] for step in steps if name in step.largest])) for name in names},
        "importance_ess": weight**2 / (tokens * squared) if squared else 0.0,
        "loss": statistics.fmean(step.loss for step in steps),
        "grad_norm": statistics.fmean(step.gradient_norm for step in steps),
    }
