"""The models of a backend: loading them, and LoRA adapters on a policy that an engine maps. `local.py` calls this."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from harnessed.config import ConfigError, Lora
from harnessed.training.backends.attention import attend_by_trees

ADAPTER = "default"
"""peft's name for a model's only adapter."""
ADAPTER_FILE = "adapter_model.safetensors"
"""As peft names it, beside its adapter_config.json."""
PREFIX = "base_model.model."
"""In front of every name in it."""
SAME = 1e-5
"""Merged weights that differ by less are those of the same model, computed on another machine perhaps."""


def load(folder: Path, setting: str) -> Any:
    """A causal language model in float32, ready for packs. Raises ConfigError, which names where `folder` came from."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{setting}: cannot load {folder}: {' '.join(str(error).split())}") from error
    model.eval()  # no dropout: the trained distribution has to be the sampled one
    attend_by_trees(model)
    return model


def check_shape(model: Any, folder: Path) -> None:
    """Raises ConfigError unless policy.model, in `folder`, has weights of the same names and shapes as the model."""
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    ours, theirs = ({name: each.shape for name, each in one.named_parameters()} for one in (model, other))
    if ours != theirs:
        raise ConfigError(
            f"policy.model: {folder} has another shape than the model in trainer.resume_from: set it as it was when "
            "that run began"
        )


def keep_layer_inputs_only(model: Any) -> None:
    """Gradient checkpointing (arXiv 1604.06174) of every layer. Raises ConfigError where the model cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its new name is not in all versions that we run with
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(f"trainer.gradient_checkpointing: {error}") from error
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # transformers does it in training mode only. What is inside of the layer stays without dropout.
            module.training = True


class Adapters:
    """LoRA (arXiv 2106.09685) on the linear layers of a model whose own weights stay as they are.

    The model's parameters may be mapped by an engine, which shall see W + alpha/rank B A. So a layer with an adapter
    computes with a private copy of W, and its mapped parameter becomes a place that `write` fills.
    """

    def __init__(self, model: Any, base: Any, settings: Lora, seed: int) -> None:
        """`base` has the weights W; it may be the model itself. Raises ConfigError."""
        from peft import LoraConfig, inject_adapter_in_model

        self._config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=settings.targets or "all-linear",
            task_type="CAUSAL_LM",
        )
        self._model = model
        places = {name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        weights = {name: dict(base.named_modules())[name].weight.detach().clone() for name in places}
        tied = model.get_input_embeddings().weight
        model.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                inject_adapter_in_model(self._config, model, ADAPTER)
            except ValueError as error:  # no layer has such a name, or one is not linear
                raise ConfigError(f"trainer.lora.targets: {' '.join(str(error).split())}") from error
        self._layers: list[tuple[Any, torch.Tensor]] = []
        for name, module in model.named_modules():
            if not hasattr(module, "get_delta_weight"):
                continue
            if name not in places or places[name] is tied:
                raise ConfigError(f"trainer.lora.targets: {name} is not a linear layer with weights of its own")
            module.base_layer.weight = torch.nn.Parameter(weights[name], requires_grad=False)
            self._layers.append((module, places[name]))

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def write(self) -> None:
        """Fill the places with the merged weights."""
        for layer, place in self._layers:
            place.data.copy_(_merged(layer))

    def distance(self) -> float:
        """Largest difference between the merged weights and what is in the places."""
        return max(float((_merged(layer) - place).abs().max()) for layer, place in self._layers)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model within computes with its own weights alone."""
        for layer, _ in self._layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer, _ in self._layers:
                layer.enable_adapters(True)

    def save(self, folder: Path) -> None:
        """As peft reads it."""
        from peft import get_peft_model_state_dict

        folder.mkdir()
        self._config.save_pretrained(folder)
        state = get_peft_model_state_dict(self._model, adapter_name=ADAPTER, save_embedding_layers=False)
        save_file({PREFIX + name: tensor.contiguous() for name, tensor in state.items()}, folder / ADAPTER_FILE)

    def load(self, folder: Path) -> None:
        """Raises ConfigError if the adapter in the folder is made otherwise than this one."""
        from peft import set_peft_model_state_dict

        try:
            found = json.loads((folder / "adapter_config.json").read_bytes())
            rank, alpha = int(found["r"]), float(found["lora_alpha"])
            state = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / ADAPTER_FILE).items()}
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise ConfigError(f"trainer.resume_from: cannot read the adapter in {folder}: {error}") from error
        if (rank, alpha) != (self._config.r, self._config.lora_alpha):
            raise ConfigError(
                f"trainer.resume_from: the adapter in {folder} has rank {rank} and alpha {alpha:g}: set trainer.lora "
                "to them"
            )
        result = set_peft_model_state_dict(self._model, state, adapter_name=ADAPTER)
        own = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        if result.unexpected_keys or set(own) & set(result.missing_keys):
            raise ConfigError(f"trainer.resume_from: {folder} adapts other layers: set trainer.lora.targets to its own")


def _merged(layer: Any) -> torch.Tensor:
    with torch.no_grad():
        return layer.base_layer.weight + layer.get_delta_weight(ADAPTER)
