"""The one-machine backend: torch, float32 weights, shared with the engine's process through a mapped file.

`trainer.py` gives it the packs of an update's optimiser steps; it knows nothing of rollouts, gateways or
schedules.
"""

import copy
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from harnessed.config import ConfigError, Objective, Trainer
from harnessed.records import Version
from harnessed.training.backends import checkpoint, models, optimiser
from harnessed.training.backends.critic import Critic
from harnessed.training.backends.policy import distributions
from harnessed.training.backends.tally import Tally, means
from harnessed.training.lineages import next_version
from harnessed.training.losses import Terms, objective_loss, rollout_kl
from harnessed.training.metrics import Clock
from harnessed.training.packing import Pack
from harnessed.weights import SharedWeights, WeightsError, read_state

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
    """What an update did."""

    steps: int
    """How many of its optimiser steps were taken, the first ones. 0: loss or gradient of the first were not finite, the
    weights are as before."""
    metrics: dict[str, float]

    @property
    def applied(self) -> bool:
        return self.steps > 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """What stays as it was before an update's first step, for the trained tokens of a pack; each [N]."""

    old_logprobs: Tensor | None
    """None: there is one step only, so pi_old is the current policy."""
    reference_logprobs: Tensor | None
    """None: there is no KL term."""


class LocalBackend:
    """A policy with its optimiser, and the weights in `weights_folder`, which the engine maps."""

    def __init__(
        self, folder: Path, weights_folder: Path, settings: Trainer, *, seed: int = 0, served: Iterable[Version] = ()
    ) -> None:
        """`folder` is policy.model; `served`: versions of earlier lives of the run. Raises ConfigError."""
        torch.set_num_threads(settings.threads)
        logging.disable_progress_bar()  # the terminal belongs to the display
        self._folder, self._settings = folder, settings
        resumed = checkpoint.read(settings.resume_from, settings) if settings.resume_from else None
        self.step = resumed.step if resumed else 0
        self.tasks = resumed.tasks if resumed else 0
        """Training tasks that were used up to it. Both are those of the checkpoint that this backend goes on from."""
        lora, compares = settings.lora, settings.objective.kl.coefficient > 0
        model = models.load(resumed.folder, "trainer.resume_from") if resumed else models.load(folder, "policy.model")
        if resumed:
            models.check_shape(model, folder)
        # With adapters the frozen weights are at hand; without, they are loaded once more to compare with.
        base = models.load(folder, "policy.model") if (resumed and lora) or (compares and not lora) else model
        # With devices of its own the engine serves one version while the next one is computed. With adapters it does so
        # anyway: they are written when they are complete.
        apart = settings.schedule.kind == "async" and lora is None
        mapped = copy.deepcopy(model) if apart else model
        try:
            self.version = next_version([*served, *_known(weights_folder, resumed)])
            self._weights = SharedWeights.create(weights_folder, mapped, self.version)
        except (OSError, WeightsError) as error:
            raise ConfigError(f"cannot write the policy into {weights_folder}: {error}") from error
        self._model = model
        self._served: dict[str, Tensor] = mapped.state_dict()
        """What the engine maps, by the names that transformers gives it."""
        self._in_place = lora is None and not apart
        """The optimiser changes what the engine maps."""
        self._adapters = models.Adapters(model, base, lora, seed) if lora else None
        self._reference = base.requires_grad_(False) if compares and not lora else None
        self._compares = compares
        self._parameters = self._adapters.parameters() if self._adapters else list(model.parameters())
        if settings.gradient_checkpointing:
            models.keep_layer_inputs_only(model)
        self._optimiser = optimiser.make(self._parameters, settings.optimiser)
        self._updates = 0
        self.critic = Critic(folder, settings) if settings.advantage.kind == "gae" else None
        self.whole = True
        """Nothing interrupted an update between its first write and its last."""
        if resumed:
            self._restore(resumed)

    def update(
        self, steps: list[list[Pack]], objective: Objective, standing_still: AbstractContextManager[None]
    ) -> Update:
        """One optimiser step over the packs of each list, and one new version.

        What the engine maps changes while `standing_still`, which begins before the first write and ends after the
        last: the engine must be paused meanwhile. A step whose loss or gradient are not finite ends the update.
        """
        clock = Clock()
        with clock.phase("recompute"):
            fixed = [[self._fixed(pack, several=len(steps) > 1) for pack in packs] for packs in steps]
        rate = optimiser.learning_rate(self._settings.optimiser, self._updates + 1, self._settings.steps)
        optimiser.set_learning_rate(self._optimiser, rate)
        following = Version(self.version.lineage, self.version.number + 1)
        taken: list[Tally] = []
        with ExitStack() as writing:
            for packs, before in zip(steps, fixed, strict=True):
                tally = self._gradient(packs, before, objective)
                if not tally.finite:
                    break
                if not taken and self._in_place:
                    self._begin_writing(writing, standing_still, following)
                self.whole = False
                self._optimiser.step()
                taken.append(tally)
            if taken and not self._in_place:
                self._begin_writing(writing, standing_still, following)
                self._write()
        if taken:
            self.version, self.whole = following, True
            self._updates += 1
        metrics = means(taken or [tally]) | {
            "optimiser_steps": len(taken),
            "optimiser_steps_skipped": len(steps) - len(taken),
            "learning_rate": rate,
            **clock.seconds,
        }
        return Update(len(taken), metrics)

    def divergences(self, packs: list[Pack], rollouts: int) -> list[float]:
        """Of each rollout from the reference, in nats: the estimates of its trained tokens, summed.

        Tokens carry the number of their rollout in place of an advantage (`marking.by_rollout`).
        """
        total = torch.zeros(rollouts)
        for pack in packs:
            with torch.no_grad():
                logprobs = self._distributions(self._model, pack)[0]
            of_pack = (logprobs, self._reference_logprobs(pack), torch.from_numpy(pack.advantages).long())
            total += rollout_kl(*of_pack, rollouts, self._settings.objective.kl.estimator)
        return [float(value) for value in total]

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write a checkpoint, with notes as harnessed.json. It appears whole or not at all."""
        training = {
            "kind": self._settings.optimiser.kind,
            "optimiser": self._optimiser.state_dict(),
            "updates": self._updates,
            "random": torch.get_rng_state(),
        }
        with checkpoint.appearing(folder) as unfinished:
            self._model.save_pretrained(unfinished, state_dict=self._copied_state())
            for name in POLICY_FILES:
                if (self._folder / name).is_file():
                    shutil.copyfile(self._folder / name, unfinished / name)
            if self._adapters is not None:
                self._adapters.save(unfinished / checkpoint.ADAPTER_FOLDER)
            if self.critic is not None:
                self.critic.save(unfinished)
            checkpoint.write_training(unfinished, notes, training)

    def _restore(self, resumed: checkpoint.Checkpoint) -> None:
        """What the weights alone do not say."""
        found = resumed.training
        if self._adapters is not None:
            self._adapters.load(resumed.folder / checkpoint.ADAPTER_FOLDER)
            if self._adapters.distance() > models.SAME:
                raise ConfigError(
                    f"policy.model: {self._folder} is not the model whose adapter {resumed.folder} holds: set it as it "
                    "was when that run began"
                )
        if self.critic is not None:
            self.critic.load(resumed.folder)
        optimiser.restore(self._optimiser, found["optimiser"], self._settings.optimiser)
        self._updates = found["updates"]
        torch.set_rng_state(found["random"])

    def _write(self) -> None:
        """Let the engine have what the optimiser has made."""
        if self._adapters is not None:
            self._adapters.write()
            return
        made = self._model.state_dict()
        for name, tensor in self._served.items():
            tensor.copy_(made[name])

    def _begin_writing(
        self, writing: ExitStack, standing_still: AbstractContextManager[None], following: Version
    ) -> None:
        writing.enter_context(standing_still)
        writing.enter_context(self._weights.writing(following))

    def _fixed(self, pack: Pack, *, several: bool) -> Fixed:
        in_loss = self._compares and self._settings.objective.kl.place == "loss"
        with torch.no_grad():
            old = self._distributions(self._model, pack)[0] if several else None
        return Fixed(old, self._reference_logprobs(pack) if in_loss else None)

    def _reference_logprobs(self, pack: Pack) -> Tensor:
        """[N]"""
        with torch.no_grad():
            if self._adapters is None:
                return self._distributions(self._reference, pack)[0]
            with self._adapters.off():
                return self._distributions(self._model, pack)[0]

    def _gradient(self, packs: list[Pack], fixed: list[Fixed], objective: Objective) -> Tally:
        """Leaves the clipped gradient of one optimiser step in the parameters."""
        self._optimiser.zero_grad(set_to_none=True)
        tally = Tally()
        for pack, before in zip(packs, fixed, strict=True):
            with tally.clock.phase("forward"):
                terms = self._terms(pack, before, entropy_trained=objective.entropy > 0)
                loss, sums = objective_loss(terms, objective)
            with tally.clock.phase("backward"):
                loss.backward()
            tally.add(loss, sums, pack.trained_tokens)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.optimiser.clip_norm)
        tally.gradient_norm = norm.item()
        return tally

    def _terms(self, pack: Pack, before: Fixed, *, entropy_trained: bool) -> Terms:
        logprobs, entropies = self._distributions(self._model, pack, entropy_trained=entropy_trained)
        return Terms(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if before.old_logprobs is None else before.old_logprobs,
            engine_logprobs=torch.from_numpy(pack.engine_logprobs),
            advantages=torch.from_numpy(pack.advantages),
            weights=torch.from_numpy(pack.weights),
            answers=torch.from_numpy(pack.answers),
            entropies=entropies,
            reference_logprobs=before.reference_logprobs,
        )

    def _distributions(self, model: Any, pack: Pack, *, entropy_trained: bool = False) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._settings.precision == "bfloat16"):
            return distributions(model, pack, entropy_trained=entropy_trained)

    def _copied_state(self) -> dict[str, Tensor]:
        """The weights outside of the mapped file, where all share one storage; tied ones stay one tensor."""
        copies: dict[int, Tensor] = {}
        return {
            name: copies.setdefault(tensor.data_ptr(), tensor.detach().clone()) for name, tensor in self._served.items()
        }


def _known(weights_folder: Path, resumed: checkpoint.Checkpoint | None) -> list[Version]:
    """Versions that were served: a new one is above them, since what goes on from them does so in a new lineage."""
    served = read_state(weights_folder)
    return [*([served.version] if served else []), *([resumed.version] if resumed else [])]
