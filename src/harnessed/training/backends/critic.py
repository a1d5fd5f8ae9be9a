"""What a rollout is expected to be worth when it makes a call: a value head on a model of its own. For `local.py`.

It learns from the returns of calls (`advantages.gae`) with an optimiser of its own. Tokens of its packs carry the
number of their call in place of an advantage (`marking.by_call`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harnessed.config import ConfigError, Trainer
from harnessed.training.backends import checkpoint, models, optimiser
from harnessed.training.backends.attention import seen
from harnessed.training.packing import Pack


class Critic:
    """V of a call: a linear function of the hidden state of the token in front of the call's first sampled one."""

    def __init__(self, folder: Path, settings: Trainer) -> None:
        """It begins as the backbone of policy.model, in `folder`, with a head of zeros. Raises ConfigError."""
        self._settings = settings
        self._backbone = models.load(folder, "policy.model").base_model
        self._head = torch.nn.Linear(self._backbone.config.hidden_size, 1)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        if settings.gradient_checkpointing:
            models.keep_layer_inputs_only(self._backbone)
        self._parameters = [*self._backbone.parameters(), *self._head.parameters()]
        self._optimiser = optimiser.make(self._parameters, settings.critic.optimiser)
        self._updates = 0

    def values(self, packs: list[Pack], calls: int) -> NDArray[np.float64]:
        """V of each call, [calls], in units of reward; not a number where no answer of a call is in the packs."""
        found = np.full(calls, np.nan)
        with torch.no_grad():
            for pack in packs:
                numbers, values = self._values(pack)
                found[numbers] = values.double().numpy()
        return found

    def learn(self, packs: list[Pack], before: NDArray[np.float64], returns: NDArray[np.float64]) -> dict[str, float]:
        """`critic.epochs` optimiser steps towards the returns, [calls]; `before`: the values they were made from.

        The loss is the mean over calls of max((V - G)^2, (clip(V, before - c, before + c) - G)^2) / 2, with c the
        setting critic.clip (as in PPO's reference implementation, arXiv 2005.12729, section 3). A step that is not
        finite ends the learning.
        """
        rate = optimiser.learning_rate(self._settings.critic.optimiser, self._updates + 1, self._settings.steps)
        optimiser.set_learning_rate(self._optimiser, rate)
        calls, losses = int(np.isfinite(before).sum()), []
        for _ in range(self._settings.critic.epochs):
            self._optimiser.zero_grad(set_to_none=True)
            total = 0.0
            for loss in self._losses(packs, before, returns):
                (loss / calls).backward()
                total += loss.item() / calls
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.critic.optimiser.clip_norm)
            if not (np.isfinite(total) and torch.isfinite(norm)):
                break
            self._optimiser.step()
            losses.append(total)
        self._updates += 1
        known = np.isfinite(before)
        spread = returns[known].var()
        return {
            "value_loss": float(np.mean(losses)) if losses else float("nan"),
            "value_mean": float(before[known].mean()),
            "value_explained": float(1 - (returns - before)[known].var() / spread) if spread > 0 else 0.0,
        }

    def save(self, folder: Path) -> None:
        state = {
            "kind": self._settings.critic.optimiser.kind,
            "backbone": self._backbone.state_dict(),
            "head": self._head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "updates": self._updates,
        }
        torch.save(state, folder / checkpoint.CRITIC_FILE)

    def load(self, folder: Path) -> None:
        """Raises ConfigError."""
        settings = self._settings.critic.optimiser
        try:
            found = torch.load(folder / checkpoint.CRITIC_FILE, weights_only=True)
            if found["kind"] != settings.kind:
                raise ConfigError(f"trainer.resume_from: set trainer.critic.optimiser.kind to {found['kind']}")
            self._backbone.load_state_dict(found["backbone"])
            self._head.load_state_dict(found["head"])
            self._updates = int(found["updates"])
            moments = found["optimiser"]
        except checkpoint.UNREADABLE as error:
            raise ConfigError(f"trainer.resume_from: cannot read the critic in {folder}: {error}") from error
        optimiser.restore(self._optimiser, moments, settings)

    def _losses(self, packs: list[Pack], before: NDArray[np.float64], returns: NDArray[np.float64]) -> Iterator[Tensor]:
        """The loss of each pack, a sum over its calls. One with answers in several packs counts in the first."""
        counted = np.zeros(len(before), np.bool_)
        for pack in packs:
            numbers, values = self._values(pack)
            first = ~counted[numbers]
            counted[numbers] = True
            numbers, values = numbers[first], values[torch.from_numpy(first)]
            old, target = (torch.from_numpy(each[numbers]).float() for each in (before, returns))
            errors = (values - target).square()
            if (clip := self._settings.critic.clip) is not None:
                near = old + (values - old).clamp(-clip, clip)
                errors = torch.maximum(errors, (near - target).square())
            yield errors.sum() / 2

    def _values(self, pack: Pack) -> tuple[NDArray[np.int64], Tensor]:
        """Numbers of the calls whose answers are in the pack, and their values, each [calls of the pack]."""
        # Several answers of one call have the same tokens in front of them: one is enough.
        marks = pack.advantages.astype(np.int64)
        numbers, first = np.unique(marks, return_index=True)
        device = self._head.weight.device
        with torch.autocast("cpu", torch.bfloat16, enabled=self._settings.precision == "bfloat16"):
            output: Any = self._backbone(
                input_ids=torch.from_numpy(pack.tokens)[None],
                position_ids=torch.from_numpy(pack.positions)[None],
                attention_mask=None,
                use_cache=False,
                **seen(pack, device),
            )
        hidden = output.last_hidden_state[0, torch.from_numpy(pack.before[first])]
        values: Tensor = self._head(hidden.float())[:, 0]
        return numbers, values
