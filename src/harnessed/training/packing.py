"""From scored rows to micro-batches: packed tokens within a budget, without padding, shared prefixes computed once.

Rows of one rollout share what their paths through the transcript share, and conversations of one group what their first
segments begin with. Such rows are packed as one *tree*, depth first: a row's own tokens follow those of the row before
it, without what both begin with. Which tokens a token sees is then one number for each of them, `Pack.reach`.
`trainer.py` calls `pack`; `batching.deal` gives the packs to ranks, `backends/attention.py` computes with them.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from harnessed.training.samples import Row

WORTH = 0.1
"""A tree shares prefixes if that saves so much of its tokens: attention over branches costs more than over one row."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A row with what the objective multiplies its tokens by; both arrays have its length T."""

    row: Row
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    """0 where the row does not train."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass: S packed tokens, N of their successors trained."""

    tokens: NDArray[np.int64]
    """[S]"""
    positions: NDArray[np.int64]
    """[S] in its row."""
    reach: NDArray[np.int64]
    """[S] end, exclusive, of the packed tokens that see it: token i sees j if and only if j <= i < reach[j]."""
    trees: NDArray[np.int64]
    """[trees + 1] where each tree begins, and S. No token sees one of another tree."""
    before: NDArray[np.int64]
    """[N] the packed token in front of a trained one: its logits give the trained one's distribution."""
    targets: NDArray[np.int64]
    """[N] the trained tokens."""
    engine_logprobs: NDArray[np.float32]
    """[N]"""
    temperatures: NDArray[np.float32]
    """[N]"""
    advantages: NDArray[np.float32]
    """[N]"""
    weights: NDArray[np.float32]
    """[N]"""
    answers: NDArray[np.int64]
    """[N] which answer of the pack the token belongs to, from 0. No answer stands in two packs."""
    versions: NDArray[np.int32]
    """[N]"""

    @property
    def trained_tokens(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True)
class Branch:
    """A row in the order of packing."""

    scored: Scored
    conversation: int
    """Rows of one rollout that begin with the same node have the same number."""
    shared: int
    """Its first tokens that the branch before it begins with as well."""

    @property
    def length(self) -> int:
        return len(self.scored.row.tokens)


Tree = list[Branch]


def pack(groups: list[list[list[Scored]]], budget: int, share: bool) -> list[Pack]:
    """Packs of at most `budget` tokens from groups of samples of rows; a row that is longer is a pack of its own.

    With `share`, a group is one tree. One that is over the budget is cut between conversations, or where a single one
    is over it between rows; what does not gain by sharing is cut into rows. No row is cut, none is left out.
    """
    if share:
        trees = [tree for group in groups for cut in _cut(_ordered(group), budget) for tree in _worthwhile(cut)]
    else:
        trees = [[Branch(row, 0, 0)] for group in groups for sample in group for row in sample]
    return [_packed(chosen) for chosen in _filled(trees, budget)]


def blank() -> Pack:
    """A pack of weight zero: one prompt token, and nothing is trained."""
    zero, whole, real = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
    one, version = np.ones(1, np.int64), np.zeros(0, np.int32)
    return Pack(zero, zero, one, np.array([0, 1]), whole, whole, real, real, real, real, whole, version)


def _ordered(group: list[list[Scored]]) -> Tree:
    """The rows of a group depth first, with what each shares with the one before it."""
    conversations: dict[tuple[int, int], list[Scored]] = {}
    for number, sample in enumerate(group):
        for each in sample:
            conversations.setdefault((number, each.row.path[0]), []).append(each)
    # Sorted by their ids (big-endian bytes sort as numbers do), first segments stand beside those they share most with.
    by_start = sorted(
        ((_first_segment(rows[0].row), rows) for rows in conversations.values()),
        key=lambda item: item[0].astype(">i4").tobytes(),
    )
    branches: Tree = []
    start = np.empty(0, np.int32)
    for number, (segment, rows) in enumerate(by_start):
        rows.sort(key=_place)
        common = _common(start, segment)
        shared = [min(common, branches[-1].length, len(rows[0].row.tokens))] if branches else [0]
        shared += [_shared(one.row, other.row) for one, other in pairwise(rows)]
        branches += [Branch(row, number, tokens) for row, tokens in zip(rows, shared, strict=True)]
        start = segment
    return branches


def _first_segment(row: Row) -> NDArray[np.int32]:
    """The prompt in front of its first answer, which may have no token in the row: a stop alone, and that cut off."""
    answered = row.answers != 0
    end = int(answered.argmax()) if answered.any() else len(answered)
    return row.tokens[: min([end, *row.begins[1:2]])]


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most


def _place(scored: Scored) -> list[tuple[int, int]]:
    """Sorts rows of one conversation depth first. What follows a whole answer comes before what cuts its stop off."""
    return [(-begin, node) for begin, node in zip(scored.row.begins, scored.row.path, strict=True)]


def _shared(one: Row, other: Row) -> int:
    """How many tokens two rows of one rollout begin with in common: those of the nodes that both go through."""
    both = 0
    for a, b in zip(one.path, other.path, strict=False):
        if a != b:
            break
        both += 1
    ends = [row.begins[both] for row in (one, other) if both < len(row.begins)]
    return min([*ends, len(one.tokens), len(other.tokens)])


def _cut(branches: Tree, budget: int) -> list[Tree]:
    """Trees within the budget, where single rows are."""
    trees: list[Tree] = []
    size = 0
    for _, each in groupby(branches, key=lambda branch: branch.conversation):
        conversation = list(each)
        parts = [conversation] if _size(conversation) <= budget else [[branch] for branch in conversation]
        for part in parts:
            added = _size(part) - part[0].shared
            if trees and size + added <= budget:
                trees[-1] += part
                size += added
            else:
                trees.append(part)
                size = _size(part)
    return trees


def _size(tree: Tree) -> int:
    """Packed tokens; what the first branch shares with one outside of the tree stands in the tree itself."""
    return sum(branch.length - branch.shared for branch in tree) + tree[0].shared


def _worthwhile(tree: Tree) -> list[Tree]:
    """The tree, or its rows where sharing saves too little."""
    whole = sum(branch.length for branch in tree)
    return [tree] if whole - _size(tree) >= WORTH * whole else [[branch] for branch in tree]


def _filled(trees: list[Tree], budget: int) -> list[list[Tree]]:
    """Trees for each pack: the longest first, each into the fullest pack that has room."""
    sized = sorted(((_size(tree), tree) for tree in trees), key=lambda item: -item[0])
    packs: list[list[Tree]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, pack), sorted
    for size, tree in sized:
        at = bisect_left(rooms, (size, 0))
        if at < len(rooms):
            room, number = rooms.pop(at)
            packs[number].append(tree)
        else:
            room, number = budget, len(packs)
            packs.append([tree])
        insort(rooms, (room - size, number))
    return packs


def _packed(trees: list[Tree]) -> Pack:
    """The arrays of a pack."""
    sizes = [_size(tree) for tree in trees]
    bounds = np.array([0, *accumulate(sizes)])
    tokens, positions, reach = (np.empty(bounds[-1], np.int64) for _ in range(3))
    before, trained, rows = [], [], []
    for tree, end in zip(trees, bounds[1:].tolist(), strict=True):
        place = np.empty(max(branch.length for branch in tree), np.int64)  # packed index of each token of the path
        at, length = end - _size(tree), 0
        for branch in tree:
            row, shared = branch.scored.row, branch.shared if branch is not tree[0] else 0
            reach[place[shared:length]] = at  # the path goes on without them
            length = branch.length
            own = slice(at, at + length - shared)
            place[shared:length] = np.arange(own.start, own.stop)
            tokens[own], positions[own] = row.tokens[shared:], np.arange(shared, length)
            # A token with nothing in front of it has no distribution.
            targets = np.flatnonzero(row.trained[1:]) + 1
            before.append(place[targets - 1])
            trained.append(targets)
            rows.append(branch.scored)
            at = own.stop
        reach[place[:length]] = end
    taken = list(zip(rows, trained, strict=True))

    def of_rows(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        return np.concatenate(arrays).astype(dtype, copy=False)

    # An answer is trained in one row.
    answers = of_rows(
        [scored.row.answers[at].astype(np.int64) + (row << 32) for row, (scored, at) in enumerate(taken)], np.int64
    )
    return Pack(
        tokens=tokens,
        positions=positions,
        reach=reach,
        trees=bounds,
        before=np.concatenate(before),
        targets=of_rows([scored.row.tokens[at] for scored, at in taken], np.int64),
        engine_logprobs=of_rows([scored.row.logprobs[at] for scored, at in taken], np.float32),
        temperatures=of_rows([scored.row.temperatures[at] for scored, at in taken], np.float32),
        advantages=of_rows([scored.advantages[at] for scored, at in taken], np.float32),
        weights=of_rows([scored.weights[at] for scored, at in taken], np.float32),
        answers=np.unique(answers, return_inverse=True)[1],
        versions=of_rows([scored.row.versions[at] for scored, at in taken], np.int32),
    )
