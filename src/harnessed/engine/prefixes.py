"""Keys and values of sequences that ended, for prompts that begin with them: the next turn of a conversation.

`generate.py` asks for a prompt's beginning when it admits it, and gives what a sequence has when it ends; `queue.py`
says which version generates, and forgets everything when it changes. Knows nothing of batches and their padding.

What is kept is copied once, when a sequence ends, and belongs to nobody else: a view would keep its whole batch alive.
A longer sequence takes the place of one that it continues, so a conversation is kept once, whatever its turns.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch

from harnessed.records import Version

LEAST_TOKENS = 16
"""A shorter beginning costs more to look for and to copy than to compute."""

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [head, column, dimension] of each layer."""


class Prefixes:
    """At most so many bytes, token ids included; the least recently used go first. 0 bytes: keeps nothing."""

    def __init__(self, most_bytes: int) -> None:
        self.reused_tokens = 0
        """Prompt tokens that were not computed, since the start."""
        self.size = 0
        """Bytes in use."""
        self._most = most_bytes
        self._version: Version | None = None
        self._kept: OrderedDict[bytes, Layers] = OrderedDict()
        """By their token ids (`_key`), least recently used first. None is the beginning of another."""
        self._order: list[bytes] = []
        """The same keys, sorted: whichever shares the longest beginning with a prompt is a neighbour of its place."""

    def __len__(self) -> int:
        return len(self._kept)

    def serve(self, version: Version) -> None:
        """Forget what other weights computed."""
        if version != self._version:
            self.clear()
        self._version = version

    def clear(self) -> None:
        self._kept.clear()
        self._order.clear()
        self.size = 0

    def takes(self, tokens: int) -> bool:
        """Whether so many may be worth keeping; `keep` weighs them."""
        return self._most > 0 and tokens >= LEAST_TOKENS

    def find(self, prompt: Iterable[int]) -> tuple[Layers, int]:
        """Layers of which the first so many columns are those of the prompt's first tokens; 0: there are none.

        Never all of the prompt, since something must be computed to have its logits.
        """
        if not self._order:
            return [], 0
        key = _key(prompt)
        place = bisect_left(self._order, key)
        nearest = max(self._order[max(place - 1, 0) : place + 1], key=lambda near: _common(key, near))
        longest = min(_common(key, nearest), len(key) // 4 - 1)
        if longest < LEAST_TOKENS:
            return [], 0
        self._kept.move_to_end(nearest)
        return self._kept[nearest], longest

    def keep(self, ids: list[int], columns: Layers) -> None:
        """Copy what was computed of these tokens, where it fits; `columns` may be views of something larger."""
        size = sum(tensor.nbytes for layer in columns for tensor in layer) + 4 * len(ids)
        if size > self._most or not self.takes(len(ids)):
            return
        key = _key(ids)
        place = bisect_left(self._order, key)
        # Since none is the beginning of another, only a neighbour can begin this one, or be begun by it.
        if place < len(self._order) and _begins(key, self._order[place]):
            self._kept.move_to_end(self._order[place])
            return
        if place and _begins(self._order[place - 1], key):
            self._drop(self._order[place - 1])
        while self.size + size > self._most:
            self._drop(next(iter(self._kept)))
        self._kept[key] = [(keys.clone(), values.clone()) for keys, values in columns]
        insort(self._order, key)
        self.size += size

    def _drop(self, key: bytes) -> None:
        layers = self._kept.pop(key)
        del self._order[bisect_left(self._order, key)]
        self.size -= sum(tensor.nbytes for layer in layers for tensor in layer) + len(key)


def _key(ids: Iterable[int]) -> bytes:
    """Four bytes for each token: keys begin with each other as their tokens do."""
    return np.fromiter(ids, np.int32).tobytes()


def _common(one: bytes, other: bytes) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other)) // 4
    differs = np.frombuffer(one, np.int32, length) != np.frombuffer(other, np.int32, length)
    return int(differs.argmax()) if differs.any() else length


def _begins(one: bytes, other: bytes) -> bool:
    return other.startswith(one)
