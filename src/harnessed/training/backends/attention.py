"""How transformers models attend over a pack: each token sees its row's earlier tokens, and shared ones stand once.

A model that `attend_by_trees` has prepared is called with `seen(pack)`, beside its tokens and positions. What a token
sees follows from `Pack.reach`: token i sees j if and only if j <= i < reach[j]. On CPUs it is computed by `blocks.py`,
on CUDA by FlexAttention.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from harnessed.config import ConfigError
from harnessed.training.backends.blocks import Block, attend, blocks_of
from harnessed.training.packing import Pack, blank

NAME = "harnessed_tree"
SCALED_BY_LENGTH = {"dynamic", "longrope"}
"""Rotations of positions that change with the longest row of a forward pass, as transformers names them."""
TOLERANCE = 0.02
"""Of the hidden states' norm, in the probe of a model. bfloat16 differs by less, and a missing mask by far more."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pack's tokens see, ready for attention."""

    blocks: list[Block]
    """On CPUs."""
    mask: BlockMask | None
    """On CUDA."""


def seen(pack: Pack, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a prepared model's forward pass over the pack as a batch of one."""
    reach = torch.from_numpy(pack.reach).to(device)
    if device.type == "cuda":
        return {"reach": reach, "trees": Seen([], _block_mask(reach))}
    return {"reach": reach, "trees": Seen(blocks_of(pack.positions, pack.reach), None)}


def attend_by_trees(model: Any) -> None:
    """Prepare a transformers model for `seen`. Raises ConfigError if it does something else than attend to all that
    stands before a token in its row."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kinds.add("sliding_attention")
    if kinds:
        raise ConfigError(_refusal(model, f"it has layers of {' and '.join(sorted(kinds))}"))
    if scaled := SCALED_BY_LENGTH & _rope_types(config):
        raise ConfigError(
            _refusal(
                model, f"its positions ({', '.join(sorted(scaled))}) depend on the longest row computed with a token"
            )
        )
    device = next(model.parameters()).device
    rows = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]], device=device) % config.vocab_size
    with torch.no_grad():
        plain = model.base_model(input_ids=rows, use_cache=False).last_hidden_state  # [2, 4, hidden]
        logits, head = model(input_ids=rows, use_cache=False).logits, model.get_output_embeddings()
        if head is None or not torch.allclose(head(plain), logits, atol=1e-4, rtol=1e-3, equal_nan=True):
            raise ConfigError(_refusal(model, "it scales or bounds its logits"))
    AttentionInterface.register(NAME, tree_attention)
    try:
        model.set_attn_implementation(NAME)
        tree = _probe(model, device)
    except (KeyError, ValueError, TypeError) as error:  # by models that take no attention of ours, or none of its words
        raise ConfigError(_refusal(model, " ".join(str(error).split()))) from error
    expected = torch.cat([plain[0], plain[1, 2:]])
    if not (tree - expected).norm() <= TOLERANCE * expected.norm():
        raise ConfigError(_refusal(model, "a token's hidden state depends on more than the tokens that it may see"))


def _rope_types(config: Any) -> set[str]:
    """How the model scales its positions; some name a way for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    return {each.get("rope_type", "default") for each in (found, *found.values()) if isinstance(each, dict)}


def _probe(model: Any, device: torch.device) -> Tensor:
    """Hidden states [6, hidden] of the rows 0 1 2 3 and 0 1 4 5 as one tree."""
    positions, reach = np.array([0, 1, 2, 3, 2, 3]), np.array([6, 6, 4, 4, 6, 6])
    pack = replace(blank(), positions=positions, reach=reach, trees=np.array([0, 6]))
    tokens = torch.arange(6, device=device)[None] % model.config.vocab_size
    places = torch.from_numpy(positions).to(device)[None]
    with torch.no_grad():
        output = model.base_model(
            input_ids=tokens, position_ids=places, attention_mask=None, use_cache=False, **seen(pack, device)
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _refusal(model: Any, reason: str) -> str:
    return (
        f"policy.model: the one-machine trainer cannot compute {type(model).__name__} over packed rows: {reason}. It "
        "trains models whose layers all attend to everything before a token, such as Llama, Qwen2 and Qwen3"
    )


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    reach: Tensor | None = None,
    trees: Seen | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by each layer with query [1, heads, S, d], key and value [1, key heads, S, d]; gives [1, S, heads, d]."""
    if reach is None or trees is None:
        raise ValueError("its layers do not pass on what a token sees")
    if dropout:
        raise ValueError("it has dropout in its attention: set attention_dropout to 0 in its config.json")
    # Under autocast norms and rotations leave queries and keys wider than values, as they do for torch's own attention.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if trees.mask is not None:
        attended = _flex()(query, key, value, block_mask=trees.mask, scale=scaling, enable_gqa=True)
    else:
        attended = attend(query, key, value, reach, trees.blocks, scaling or query.shape[-1] ** -0.5)
    return attended.transpose(1, 2).contiguous(), None


def _block_mask(reach: Tensor) -> BlockMask:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < reach[key])

    return create_block_mask(sees, None, None, len(reach), len(reach), device=reach.device)


@functools.cache
def _flex() -> Callable[..., Tensor]:
    # Packs have any length.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled
