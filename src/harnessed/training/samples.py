"""From a transcript to training rows, with the ledger of every sampled token.

A row is a path through the transcript from a conversation's start to an answer that no later request repeats. What
rows of one rollout share is trained in the first of them and is context in the others, so no token is trained twice;
every trained token has in front of it exactly the tokens that the engine was given. `trainer.py` calls this.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from harnessed.records import TRAINED_OUTCOMES, Attempt, Fate, Node, Outcome, Overlong, Purpose, Transcript
from harnessed.training.calls import Calls, calls_of, spread
from harnessed.training.failures import RowTooLong

Fates = Counter[Fate]
"""Sampled tokens by fate."""
Ledger = dict[int, list[tuple[Fate, int]]]
"""Node -> the fates of its answer's tokens, in their order: so many with this fate, so many with that."""


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
    answers: NDArray[np.int32]
    """Number of the node whose answer the token belongs to; 0 for prompt tokens."""
    path: tuple[int, ...]
    """Numbers of its nodes, from the conversation's start."""
    begins: tuple[int, ...]
    """Where each node of the path begins in the row, its segment first. A node that takes the place of its parent's
    stop begins there: rows of one rollout that go through the same k nodes share the tokens before the next one."""


@dataclass(slots=True)
class Sample:
    """What one rollout gives to training."""

    rollout: str
    reward: float | None
    """None: the rollout has left its group."""
    rows: list[Row] = field(default_factory=list)
    fates: Fates = field(default_factory=Counter)
    """Adds up to all tokens sampled for the rollout. `trained` holds until the group or the update is skipped."""
    calls: Calls = field(default_factory=list)
    call_rewards: list[float] = field(default_factory=list)
    """One for each of the calls."""
    penalty: float = 0.0
    """What a KL term takes from the reward in training; reports show the reward as it was given."""

    @property
    def trained_tokens(self) -> int:
        return self.fates[Fate.TRAINED]

    def give_up(self, fate: Fate) -> None:
        """Its tokens are not trained after all."""
        self.fates[fate] += self.fates.pop(Fate.TRAINED, 0)
        self.rows = []


@dataclass(frozen=True, slots=True)
class Bound:
    """How long a row may be."""

    tokens: int | None = None
    """None: as long as the attempt made it."""
    overlong: Overlong = Overlong.TRUNCATE


UNBOUND = Bound()


def build(transcript: Transcript, bound: Bound = UNBOUND) -> Sample:
    """Rows and fates of a finished rollout. Raises RowTooLong where the bound says so."""
    rollout = transcript.rollout
    member = rollout.outcome in TRAINED_OUTCOMES and rollout.reward is not None
    sample = Sample(rollout.id, rollout.reward if member else None)
    for attempt in transcript.attempts:
        rows, ledger = account(transcript, attempt, bound)
        sample.rows += rows
        if attempt.number == rollout.attempt:
            sample.calls = calls_of(attempt)
            sample.call_rewards = spread(rollout.call_rewards, len(sample.calls))
        for portions in ledger.values():
            for fate, tokens in portions:
                sample.fates[fate] += tokens
    sample.fates += Counter()  # drops fates without tokens
    return sample


def account(transcript: Transcript, attempt: Attempt, bound: Bound = UNBOUND) -> tuple[list[Row], Ledger]:
    """The rows of one attempt, and what becomes of each of its tokens."""
    excluded = _excluded(transcript, attempt)
    if excluded is not None:
        return [], {node.number: [(excluded, node.sampled)] for node in attempt.nodes}
    return _rows(transcript.rollout.id, attempt.nodes, bound)


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


def _rows(rollout: str, nodes: list[Node], bound: Bound) -> tuple[list[Row], Ledger]:
    delivered = {node.number: node for node in nodes if node.delivered}
    ledger: Ledger = {node.number: [(Fate.UNDELIVERED, node.sampled)] for node in nodes if not node.delivered}
    open_ = set()
    """Answers that are to be trained and stand in no row yet."""
    for number, node in delivered.items():
        if node.apart:
            ledger[number] = [(Fate(node.apart), node.sampled)]
        elif node.logprobs:
            open_.add(number)
        else:
            ledger[number] = [(Fate.NO_LOGPROB, node.sampled)]
    starts, rows = _starts(delivered), []
    for leaf in sorted(delivered.keys() - {node.parent for node in delivered.values() if not node.cut}):
        path = path_to(delivered, leaf)
        # An answer whose stop is cut out of this row is trained where it stands whole.
        whole = [node.number for node, after in zip_longest(path, path[1:]) if after is None or not after.cut]
        if open_.isdisjoint(whole):
            continue
        length = starts[leaf] + delivered[leaf].sampled
        limit = bound.tokens or length
        if length > limit and bound.overlong == Overlong.FAIL:
            raise RowTooLong(
                f"rollout {rollout} gives a row of {length} tokens, and trainer.row_tokens is {limit}: raise it, or "
                "set trainer.overlong to truncate or drop"
            )
        if length > limit and bound.overlong == Overlong.DROP:
            continue
        mine = {number for number in whole if number in open_ and starts[number] < limit}
        if mine:
            rows.append(_row(rollout, path, mine, min(length, limit)))
            for number in mine:
                sampled = delivered[number].sampled
                kept = min(sampled, limit - starts[number])
                ledger[number] = [(Fate.TRAINED, kept), (Fate.OVERLONG, sampled - kept)]
            open_ -= mine
    return rows, ledger | {number: [(Fate.OVERLONG, delivered[number].sampled)] for number in open_}


def _starts(delivered: dict[int, Node]) -> dict[int, int]:
    """Node -> the tokens in front of its answer."""
    ends, starts = {0: 0}, {}
    for number, node in sorted(delivered.items()):
        starts[number] = ends[node.parent] - node.cut + len(node.segment) // 4
        ends[number] = starts[number] + node.sampled
    return starts


def path_to(by_number: dict[int, Node], leaf: int) -> list[Node]:
    """The nodes from a conversation's start to an answer."""
    path = []
    while leaf:
        path.append(by_number[leaf])
        leaf = by_number[leaf].parent
    return path[::-1]


def _row(rollout: str, path: list[Node], trained: set[int], length: int) -> Row:
    """The first `length` tokens of a path."""
    most = sum(len(node.segment) // 4 + node.sampled for node in path)
    tokens, mask = np.empty(most, np.int32), np.zeros(most, np.bool_)
    logprobs, versions = np.zeros(most, np.float32), np.full(most, -1, np.int32)
    temperatures, answers = np.ones(most, np.float32), np.zeros(most, np.int32)
    begins, end = [], 0
    for node in path:
        begin = end - node.cut
        start, end = begin + len(node.segment) // 4, begin + len(node.segment) // 4 + node.sampled
        begins.append(begin)
        tokens[begin:start] = np.frombuffer(node.segment, np.int32)
        tokens[start:end] = np.frombuffer(node.answer, np.int32)
        # From `begin`, because the segment may take the place of the parent's stop.
        mask[begin:start], mask[start:end] = False, node.number in trained
        logprobs[begin:start], logprobs[start:end] = 0, np.frombuffer(node.logprobs or b"\0" * 4, np.float32)
        versions[begin:start], versions[start:end] = -1, np.frombuffer(node.versions, np.int32)
        temperatures[begin:start], temperatures[start:end] = 1, node.temperature or 1
        answers[begin:start], answers[start:end] = 0, node.number
    kept = sum(begin < length for begin in begins)
    return Row(
        rollout=rollout,
        tokens=tokens[:length],
        trained=mask[:length],
        logprobs=logprobs[:length],
        versions=versions[:length],
        temperatures=temperatures[:length],
        answers=answers[:length],
        path=tuple(node.number for node in path[:kept]),
        begins=tuple(begins[:kept]),
    )
