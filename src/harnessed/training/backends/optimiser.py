"""The optimiser of a backend, and the learning rate of each update. `local.py` and `critic.py` call this."""

import math
from collections.abc import Iterable

import torch

from harnessed.config import ConfigError, Optimiser


def make(parameters: Iterable[torch.nn.Parameter], settings: Optimiser) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) over float32 parameters. Raises ConfigError where its library is missing."""
    kind = torch.optim.AdamW if settings.kind == "adamw" else _in_8_bits()
    return kind(parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay)


def _in_8_bits() -> type[torch.optim.Optimizer]:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "trainer.optimiser.kind: adamw8bit needs bitsandbytes: pip install bitsandbytes, or take adamw"
        ) from error
    kind: type[torch.optim.Optimizer] = AdamW8bit
    return kind


def learning_rate(settings: Optimiser, number: int, updates: int) -> float:
    """Of update `number`, from 1, where `updates` are planned.

    It rises over the first `warmup` updates; the one after the last planned would be the first at 0.
    """
    if number <= settings.warmup:
        return settings.learning_rate * number / settings.warmup
    passed = min((number - 1 - settings.warmup) / max(updates - settings.warmup, 1), 1.0)
    share = {"constant": 1.0, "linear": 1 - passed, "cosine": (1 + math.cos(math.pi * passed)) / 2}
    return settings.learning_rate * share[settings.schedule]


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


def restore(optimiser: torch.optim.Optimizer, state: dict[str, object], settings: Optimiser) -> None:
    """Take over moments from a checkpoint, and leave the settings as they are now. Raises ConfigError."""
    try:
        optimiser.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"trainer.resume_from: it holds the moments of other weights: {error}") from error
    for group in optimiser.param_groups:
        group["betas"], group["weight_decay"] = settings.betas, settings.weight_decay
