"""Attention over a pack on CPUs, by blocks of queries. `attention.py` calls `blocks_of` for a pack, `attend` in layers.

torch has a fast kernel for queries that see all keys, or all up to their own place. A long run of a row is computed in
two such parts, over itself and over what stands before it, and these are put together by their normalisers; the kernel
of the backward pass takes each part with the result of the whole. So neither masks nor gathered keys are kept, and
nothing is computed twice. Short runs are computed together, with a mask.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LONG = 64
"""Tokens of a run that is a block of its own."""
QUERIES = 256
"""Most of a block of short runs. More waste time on keys that most of them do not see, fewer on calls."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Block:
    """The queries begin .. end."""

    begin: int
    end: int
    keys: slice | Tensor
    """Of a run: what all of its tokens see before it. Of a block of short runs: whatever one of its tokens sees."""
    masked: bool
    """It is a block of short runs."""


@dataclass(frozen=True, slots=True)
class Part:
    """One call of the kernel for a block."""

    keys: slice | Tensor
    causal: bool
    mask: Tensor | None
    """[queries, keys], 0 or minus infinity."""


def blocks_of(positions: NDArray[np.int64], reach: NDArray[np.int64]) -> list[Block]:
    """Blocks that cover a pack [S] in its order."""
    starts = np.flatnonzero(np.diff(positions) != 1) + 1
    blocks: list[Block] = []
    short = 0  # where the short runs begin that are in no block yet
    for begin, end in zip([0, *starts.tolist()], [*starts.tolist(), len(positions)], strict=True):
        long = end - begin >= LONG
        if short < begin and (long or end - short > QUERIES):
            blocks.append(Block(short, begin, _seen_by(reach, short, begin), True))
            short = begin
        if long:
            blocks.append(Block(begin, end, _seen_by(reach, begin, begin), False))
            short = end
    if short < len(positions):
        blocks.append(Block(short, len(positions), _seen_by(reach, short, len(positions)), True))
    return blocks


def _seen_by(reach: NDArray[np.int64], begin: int, end: int) -> slice | Tensor:
    """The tokens before `end` that a token from `begin` on sees; one piece as a slice, which copies nothing."""
    keys = np.flatnonzero(reach[:end] > begin)
    if len(keys) == 0:
        return slice(0, 0)
    if keys[-1] - keys[0] == len(keys) - 1:
        return slice(int(keys[0]), int(keys[-1]) + 1)
    return torch.from_numpy(keys)


def attend(query: Tensor, key: Tensor, value: Tensor, reach: Tensor, blocks: list[Block], scale: float) -> Tensor:
    """[1, heads, S, d] from query [1, heads, S, d], key and value [1, key heads, S, d]; each token i attends to the
    tokens j with j <= i < reach[j]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    attended: Tensor = _Attention.apply(query, key, value, reach, blocks, scale)
    return attended


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch's names are Any to mypy
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, reach: Tensor, blocks: list[Block], scale: float
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        result = torch.empty_like(query)
        normaliser = torch.empty(query.shape[:3], dtype=exact)  # log of the softmax's denominator, for each query
        for block in blocks:
            at = slice(block.begin, block.end)
            some, logs = None, None
            for part in _parts(block, reach, query.dtype):
                keys, values = _take(key, part.keys), _take(value, part.keys)
                mine, log = _forward(query[:, :, at], keys, values, 0.0, part.causal, attn_mask=part.mask, scale=scale)
                some, logs = (mine, log) if some is None else _together(some, logs, mine, log)
            result[:, :, at], normaliser[:, :, at] = some, logs
        ctx.save_for_backward(query, key, value, reach, result, normaliser)
        ctx.blocks, ctx.scale = blocks, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, reach, result, normaliser = ctx.saved_tensors
        by_query, by_key, by_value = (torch.zeros_like(each, dtype=normaliser.dtype) for each in (query, key, value))
        for block in ctx.blocks:
            at = slice(block.begin, block.end)
            whole = (result[:, :, at], normaliser[:, :, at])
            for part in _parts(block, reach, query.dtype):
                inputs = (query[:, :, at], _take(key, part.keys), _take(value, part.keys))
                of_query, of_key, of_value = _backward(
                    gradient[:, :, at], *inputs, *whole, 0.0, part.causal, attn_mask=part.mask, scale=ctx.scale
                )
                by_query[:, :, at] += of_query
                _add(by_key, part.keys, of_key)
                _add(by_value, part.keys, of_value)
        dtype = query.dtype
        return by_query.to(dtype), by_key.to(dtype), by_value.to(dtype), None, None, None


def _parts(block: Block, reach: Tensor, dtype: torch.dtype) -> list[Part]:
    if not block.masked:
        own = Part(slice(block.begin, block.end), True, None)
        before = block.keys.stop > block.keys.start if isinstance(block.keys, slice) else True
        return [Part(block.keys, False, None), own] if before else [own]
    queries = torch.arange(block.begin, block.end)[:, None]
    keys = torch.arange(len(reach))[block.keys]
    sees = (keys <= queries) & (queries < reach[block.keys])
    return [Part(block.keys, False, torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf))]


def _together(one: Tensor, log_one: Tensor, other: Tensor, log_other: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both parts: each weighs what it has of the denominator."""
    log = torch.logaddexp(log_one, log_other)
    both = one * (log_one - log).exp()[..., None] + other * (log_other - log).exp()[..., None]
    return both.to(one.dtype), log


def _take(values: Tensor, keys: slice | Tensor) -> Tensor:
    return values[:, :, keys] if isinstance(keys, slice) else values.index_select(2, keys)


def _add(sums: Tensor, keys: slice | Tensor, values: Tensor) -> None:
    if isinstance(keys, slice):
        sums[:, :, keys] += values
    else:
        sums.index_add_(2, keys, values.to(sums.dtype))
