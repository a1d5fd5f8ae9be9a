"""The one-machine backend: torch, float32, weights shared with the engine's process through a mapped file.

`trainer.py` gives it the packs of each optimiser step; it knows nothing of rollouts, gateways or schedules.
"""

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from harnessed.config import ConfigError, Objective, Optimiser
from harnessed.records import Version
from harnessed.training.backends.attention import attend_by_trees
from harnessed.training.backends.policy import distributions
from harnessed.training.losses import Terms, clipped_policy_loss
from harnessed.training.packing import Pack
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
    """What the optimiser steps between two versions did."""

    applied: bool
    """False: loss or gradient of no step were finite, the weights are as before."""
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
        attend_by_trees(self._model)
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
        self, steps: list[list[Pack]], objective: Objective, standing_still: AbstractContextManager[None]
    ) -> Update:
        """The optimiser steps of an update, in order. The weights change in place, `standing_still` from the first
        change to the last: that is when the engine must be paused. A step that is not finite changes nothing."""
        started = time.monotonic()
        # In a single step pi_old is the current policy.
        olds = [[self._old_logprobs(pack) if len(steps) > 1 else None for pack in packs] for packs in steps]
        following = Version(self.version.lineage, self.version.number + 1)
        sums: Counter[str] = Counter()
        differences, norms, applied = [0.0], [], False
        with ExitStack() as still:
            for packs, step_olds in zip(steps, olds, strict=True):
                loss = self._gradients(packs, step_olds, objective, sums, differences)
                norms.append(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm).item())
                if not (math.isfinite(norms[-1]) and math.isfinite(loss)):
                    sums["steps_skipped"] += 1
                    continue
                if not applied:
                    still.enter_context(standing_still)
                    still.enter_context(self._weights.writing(following))
                    applied = True
                self._optimiser.step()
        if applied:
            self.version = following
        tokens = max(sum(pack.trained_tokens for packs in steps for pack in packs), 1)
        metrics = {name: total / tokens for name, total in sums.items() if name not in ("loss", "steps_skipped")}
        metrics |= {
            "loss": sums["loss"] / len(steps),
            "steps_skipped": sums["steps_skipped"],
            "gradient_norm": float(np.mean(norms)),
            "logprob_difference_max": float(np.max(differences)),  # not a number if one is not
            "update_seconds": time.monotonic() - started,
        }
        return Update(applied, metrics)

    def _gradients(
        self,
        packs: list[Pack],
        olds: Sequence[Tensor | None],
        objective: Objective,
        sums: Counter[str],
        differences: list[float],
    ) -> float:
        """Leave the gradients of one optimiser step in the model; its loss. Adds to the sums for the metrics."""
        self._optimiser.zero_grad(set_to_none=True)
        total = 0.0
        for pack, old in zip(packs, olds, strict=True):
            terms, entropies = self._terms(pack, old)
            loss, pack_sums = clipped_policy_loss(terms, clip=objective.clip, importance_cap=objective.importance_cap)
            loss.backward()
            total += loss.item()
            pack_sums |= {"loss": loss, "entropy": entropies.detach().sum()}
            sums.update({name: value.item() for name, value in pack_sums.items()})
            if pack.trained_tokens:
                differences.append((terms.old_logprobs - terms.engine_logprobs).abs().max().item())
        return total

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

    def _terms(self, pack: Pack, old: Tensor | None) -> tuple[Terms, Tensor]:
        """What the objective takes, and the entropies [N] in nats. Without `old`, pi_old is the current policy."""
        logprobs, entropies = distributions(self._model, pack, entropy_trained=False)
        terms = Terms(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old,
            engine_logprobs=torch.from_numpy(pack.engine_logprobs),
            advantages=torch.from_numpy(pack.advantages),
            weights=torch.from_numpy(pack.weights),
        )
        return terms, entropies

    def _old_logprobs(self, pack: Pack) -> Tensor:
        with torch.no_grad():
            return distributions(self._model, pack, entropy_trained=False)[0]

    def _copied_state(self) -> dict[str, Tensor]:
        """The weights outside of the mapped file, where all share one storage; tied ones stay one tensor."""
        copies: dict[int, Tensor] = {}
        state = self._model.state_dict()
        return {name: copies.setdefault(tensor.data_ptr(), tensor.detach().clone()) for name, tensor in state.items()}
