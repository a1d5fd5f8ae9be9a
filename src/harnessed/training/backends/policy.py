"""From a pack to the log-probabilities of its trained tokens. `local.py` calls `distributions` for every pack."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harnessed.training.backends.attention import seen
from harnessed.training.packing import Pack

MOST_LOGITS = 2**26
"""At once: what log_softmax and its gradient hold of them is a few times 256 MB in float32."""


def distributions(model: Any, pack: Pack, *, entropy_trained: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the trained tokens [N], and the entropies [N] in nats of what they were drawn from.

    `model` is a transformers model for causal language modelling that `attend_by_trees` has prepared. The results are
    float32, or float64 where the model is. Entropies have a gradient if `entropy_trained`.
    """
    device = next(model.parameters()).device

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    output = model.base_model(
        input_ids=there(pack.tokens)[None],
        position_ids=there(pack.positions)[None],
        attention_mask=None,
        use_cache=False,
        **seen(pack, device),
    )
    hidden = output.last_hidden_state[0, there(pack.before)]  # [N, width]
    inputs = (hidden, there(pack.targets), there(pack.temperatures))
    return distributions_at(model.get_output_embeddings(), *inputs, entropy_trained=entropy_trained)


def distributions_at(
    head: torch.nn.Module, hidden: Tensor, targets: Tensor, temperatures: Tensor, *, entropy_trained: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` [N], and entropies [N] in nats, of the distributions softmax(head(hidden) / T).

    hidden [N, width], targets int64 [N], temperatures T [N]. Above MOST_LOGITS the logits are computed in parts, and
    again in the backward pass, so that the whole [N, vocabulary] never stands in memory.
    """
    vocabulary = head.weight.shape[0]
    part = max(MOST_LOGITS // vocabulary, 1)
    if len(targets) <= part:
        return _at(head, hidden, targets, temperatures, entropy_trained)
    parts = [
        checkpoint(_at, head, *some, entropy_trained, use_reentrant=False, preserve_rng_state=False)
        for some in zip(hidden.split(part), targets.split(part), temperatures.split(part), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _at(
    head: torch.nn.Module, hidden: Tensor, targets: Tensor, temperatures: Tensor, entropy_trained: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)  # [N, vocabulary]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    distribution = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_trained and torch.is_grad_enabled()):
        entropies = -(distribution.exp() * distribution).sum(dim=-1)
    return logprobs, entropies
