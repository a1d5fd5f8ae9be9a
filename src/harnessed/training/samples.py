"""From a transcript to training rows, with the ledger of every sampled token.

A row is a path through the transcript from a conversation's start to an answer that no later request repeats. What
rows of one rollout share is trained in the first of them and is context in the others, so no token is trained twice;
every trained token has in front of it exactly the tokens that the engine was given. `trainer.py` calls this.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harnessed.records import TRAINED_OUTCOMES, Attempt, Fate, Node, Outcome, Purpose, Transcript

Fates = Counter[Fate]
"""Sampled tokens by fate."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence; all arrays have its length T."""

    rollout: str
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    """The loss mask: sampled tokens whose fate is `trained` in this row."""
    logprobs: NDArray[np.float32]
    """Of the engine's distribution for the sampled tokens; 0 elsewhere."""
    versions: NDArray[np.int32]
    """Packed `Version` that sampled the token; -1 for prompt tokens."""
    temperatures: NDArray[np.float32]
    """The logits are divided by it; 1 for prompt tokens and greedy answers."""


@dataclass(slots=True)
class Sample:
    """What one rollout gives to training."""

    rollout: str
    reward: float | None
    """None: the rollout has left its group."""
    rows: list[Row] = field(default_factory=list)
    fates: Fates = field(default_factory=Counter)
    """Adds up to all tokens sampled for the rollout. `trained` holds until the group or the update is skipped."""

    @property
    def trained_tokens(self) -> int:
        return self.fates[Fate.TRAINED]

    def give_up(self, fate: Fate) -> None:
        """Its tokens are not trained after all."""
        self.fates[fate] += self.fates.pop(Fate.TRAINED, 0)
        self.rows = []


def build(transcript: Transcript) -> Sample:
    """Rows and fates of a finished rollout."""
    rollout = transcript.rollout
    member = rollout.outcome in TRAINED_OUTCOMES and rollout.reward is not None
    sample = Sample(rollout.id, rollout.reward if member else None)
    for attempt in transcript.attempts:
        excluded = _excluded(transcript, attempt)
        if excluded is None:
            sample.rows, fates = _rows(rollout.id, attempt.nodes)
            sample.fates += fates
        else:
            sample.fates[excluded] += sum(node.sampled for node in attempt.nodes)
    sample.fates += Counter()  # drops fates without tokens
    return sample


def _excluded(transcript: Transcript, attempt: Attempt) -> Fate | None:
    """The fate of a whole attempt that is not trained, or None."""
    rollout = transcript.rollout
    if attempt.number != rollout.attempt:
        return Fate.SUPERSEDED_ATTEMPT
    if rollout.purpose == Purpose.EVALUATION:
        return Fate.EVALUATION
    if rollout.outcome == Outcome.CANCELLED:
        return Fate.CANCELLED
    if rollout.outcome not in TRAINED_OUTCOMES or rollout.reward is None:
        return Fate.INFRASTRUCTURE
    return None


def _rows(rollout: str, nodes: list[Node]) -> tuple[list[Row], Fates]:
    fates: Fates = Counter()
    by_number = {node.number: node for node in nodes if node.delivered}
    fates[Fate.UNDELIVERED] = sum(node.sampled for node in nodes if not node.delivered)
    trainable = {number for number, node in by_number.items() if node.logprobs}
    fates[Fate.NO_LOGPROB] = sum(node.sampled for number, node in by_number.items() if number not in trainable)
    fates[Fate.TRAINED] = sum(by_number[number].sampled for number in trainable)
    repeated = {node.parent for node in by_number.values() if not node.cut}
    rows = []
    for leaf in sorted(by_number.keys() - repeated):
        path = path_to(by_number, leaf)
        mine = {node.number for node in path} & trainable
        if mine:
            rows.append(_row(rollout, path, mine))
            trainable -= mine
    return rows, fates


def path_to(by_number: dict[int, Node], leaf: int) -> list[Node]:
    """The nodes from a conversation's start to an answer."""
    path = []
    while leaf:
        path.append(by_number[leaf])
        leaf = by_number[leaf].parent
    return path[::-1]


def _row(rollout: str, path: list[Node], trained: set[int]) -> Row:
    segments = [np.frombuffer(node.segment, np.int32) for node in path]
    lengths = [node.sampled - following.cut for node, following in pairwise(path)] + [path[-1].sampled]

    def lay(prompt: list[np.ndarray], sampled: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        """Prompt values and answer values in turns."""
        pieces = []
        for values, answer, length in zip(prompt, sampled, lengths, strict=True):
            pieces += [values.astype(dtype, copy=False), answer[:length].astype(dtype, copy=False)]
        return np.concatenate(pieces)

    def everywhere(value: float) -> list[np.ndarray]:
        return [np.full(len(segment), value) for segment in segments]

    return Row(
        rollout=rollout,
        tokens=lay(segments, [np.frombuffer(n.answer, np.int32) for n in path], np.int32),
        trained=lay(everywhere(0), [np.full(n.sampled, n.number in trained) for n in path], np.bool_),
        logprobs=lay(everywhere(0), [_logprobs(n) for n in path], np.float32),
        versions=lay(everywhere(-1), [np.frombuffer(n.versions, np.int32) for n in path], np.int32),
        temperatures=lay(everywhere(1), [np.full(n.sampled, n.temperature or 1.0) for n in path], np.float32),
    )


def _logprobs(node: Node) -> NDArray[np.float32]:
    return np.frombuffer(node.logprobs, np.float32) if node.logprobs else np.zeros(node.sampled, np.float32)
