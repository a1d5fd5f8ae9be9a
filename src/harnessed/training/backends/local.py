"""The one-machine backend: torch, float32, weights shared with the engine's process through a mapped file.

`trainer.py` gives it the micro-batches of an optimiser step; it knows nothing of rollouts, gateways or schedules.
"""

import json
import math
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from harnessed.config import ConfigError, Objective, Optimiser
from harnessed.records import Version
from harnessed.training.batching import MicroBatch
from harnessed.training.losses import Terms, objective_loss
from harnessed.training.metrics import Clock, of_micro_batches
from harnessed.weights import SharedWeights, read_state

POLICY_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What a checkpoint takes over from the model folder, beside the weights and config.json."""


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimiser step did."""

    applied: bool
    """False: loss or gradient were not finite, the weights are as before."""
    metrics: dict[str, float]


class LocalBackend:
    """A policy with its optimiser. Its weights live in `weights_folder`, mapped by the engine as well."""

    def __init__(self, model_folder: Path, weights_folder: Path, optimiser: Optimiser, *, threads: int) -> None:
        torch.set_num_threads(threads)
        logging.disable_progress_bar()  # the terminal belongs to the display
        self._model_folder = model_folder
        try:
            model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"policy.model: cannot load {model_folder}: {' '.join(str(error).split())}") from error
        self._model = model
        self._model.eval()  # no dropout: the trained distribution has to be the sampled one
        self._clip_norm = optimiser.clip_norm
        served = read_state(weights_folder)
        # No version is used twice: an engine that served an earlier run goes on in a new lineage.
        self.version = Version(served.version.lineage + 1, served.version.number + 1) if served else Version(0, 0)
        self._weights = SharedWeights.create(weights_folder, self._model, self.version)
        self._optimiser = torch.optim.AdamW(
            self._model.parameters(),
            lr=optimiser.learning_rate,
            betas=optimiser.betas,
            weight_decay=optimiser.weight_decay,
        )

    def update(
        self, batches: list[MicroBatch], objective: Objective, standing_still: AbstractContextManager[None]
    ) -> Update:
        """One optimiser step over all micro-batches. The weights change in place, `standing_still`: that is when the
        engine must be paused."""
        self._optimiser.zero_grad(set_to_none=True)
        clock = Clock()
        sums: list[dict[str, float]] = []
        loss_of_step = 0.0
        for batch in batches:
            with clock.phase("forward"):
                loss, batch_sums = objective_loss(self._terms(batch), objective)
            with clock.phase("backward"):
                loss.backward()
            loss_of_step += loss.item()
            sums.append({name: value.item() for name, value in batch_sums.items()})
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm).item()
        applied = math.isfinite(norm) and math.isfinite(loss_of_step)
        if applied:
            following = Version(self.version.lineage, self.version.number + 1)
            with standing_still, self._weights.writing(following):
                self._optimiser.step()
            self.version = following
        metrics = of_micro_batches(sums, sum(batch.trained_tokens for batch in batches))
        metrics |= {"loss": loss_of_step, "grad_norm": norm, "learning_rate": self._optimiser.param_groups[0]["lr"]}
        metrics |= clock.seconds
        return Update(applied, metrics)

    @property
    def whole(self) -> bool:
        """Nothing interrupted a write of the weights."""
        return self._weights.readable() is not None

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write a folder that transformers loads, with notes as harnessed.json. It appears whole or not at all."""
        unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self._model.save_pretrained(unfinished, state_dict=self._copied_state())
        for name in POLICY_FILES:
            if (self._model_folder / name).is_file():
                shutil.copyfile(self._model_folder / name, unfinished / name)
        (unfinished / "harnessed.json").write_text(json.dumps(notes, indent=1), encoding="utf-8")
        for file in unfinished.iterdir():
            file.chmod(0o644)  # safetensors makes its file private
        unfinished.rename(folder)

    def _terms(self, batch: MicroBatch) -> Terms:
        tokens = torch.from_numpy(batch.tokens)  # [B, L]
        present = torch.from_numpy(batch.present)  # [B, L]
        trained = torch.from_numpy(batch.trained)[:, 1:]  # [B, L-1]: the logits at t are for the token at t+1
        hidden = self._model.model(input_ids=tokens, attention_mask=present).last_hidden_state[:, :-1]
        logits = self._model.lm_head(hidden[trained]).float()  # [N, V], N trained tokens
        distribution = torch.log_softmax(logits / _of(batch.temperatures, trained)[:, None], dim=-1)
        logprobs = distribution.gather(1, tokens[:, 1:][trained][:, None])[:, 0]  # [N]
        return Terms(
            logprobs=logprobs,
            # One optimiser step per update: when it starts, pi_old is the current policy.
            old_logprobs=logprobs.detach(),
            engine_logprobs=_of(batch.engine_logprobs, trained),
            advantages=_of(batch.advantages, trained),
            weights=_of(batch.weights, trained),
            answers=trained.nonzero()[:, 0],
            entropies=-(distribution.exp() * distribution).sum(dim=-1),
        )

    def _copied_state(self) -> dict[str, Tensor]:
        """The weights outside of the mapped file, where all share one storage; tied ones stay one tensor."""
        copies: dict[int, Tensor] = {}
        state = self._model.state_dict()
        return {name: copies.setdefault(tensor.data_ptr(), tensor.detach().clone()) for name, tensor in state.items()}


def _of(values: NDArray[np.float32], trained: Tensor) -> Tensor:
    """The entries [N] of a [B, L] array that belong to the trained tokens."""
    return torch.from_numpy(values)[:, 1:][trained]
