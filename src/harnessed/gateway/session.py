"""An attempt in the gateway's memory: its transcript, and the calls whose answers are not delivered yet.

`exchange.py` asks it which call a request repeats. It can always be made again from the store (`catchup.py`).
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from harnessed.gateway.preview import Preview
from harnessed.gateway.progress import Stage, stage
from harnessed.gateway.recording import AttemptId
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.transcript import Digest, Place, Tree
from harnessed.gateway.wire import growing
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.turn import Turn, Wanted, WireError
from harnessed.records import History, Limits, Node, Sampling, SideCall

_BEGINNINGS = 4


@dataclass(slots=True, eq=False)
class Pending:
    """A call whose answer is being made, or made and not yet delivered."""

    id: str
    prompt: Digest
    answers: "asyncio.Future[list[Node]]"
    """Done once they are durable."""
    wanted: Wanted
    previews: list[Preview] = field(default_factory=list)
    """One for each answer, if the client that asked first streams."""
    most_tokens: int = 0
    """That can be sampled for it."""
    waiting: int = 1
    """Clients that wait for it and have not been seen to leave."""
    gateway: str = ""
    """That has it; empty: this one."""
    unseen: bool = False
    """That gateway has no connection to the store: perhaps it has died."""
    interrupted: bool = False
    """Its engine was told that nobody waits: what it has sampled is kept for the next who asks."""
    stage: Stage = field(default_factory=stage)
    """What it waits for."""

    @property
    def failed(self) -> bool:
        """It is about to be dropped: nobody can get its answers."""
        return self.answers.done() and (self.answers.cancelled() or self.answers.exception() is not None)

    @property
    def delivered(self) -> bool:
        return self.answers.done() and not self.failed and all(node.delivered for node in self.answers.result())


@dataclass(slots=True)
class Session:
    """One attempt."""

    attempt: AttemptId
    run: str
    index: int
    """Of the rollout in its group."""
    seed: int
    """Of the group."""
    sampling: Sampling
    limits: Limits
    history: History
    side_calls: list[SideCall]
    template: ChatTemplate
    tree: Tree
    calls: int = 0
    """Admitted so far."""
    admitted: int = 0
    """Of these by this session; grows by what it queues to be written."""
    seen: int = 0
    """Number of the last node in the store, when it was looked at last."""
    pending: dict[Digest, list[Pending]] = field(default_factory=dict)
    delivered: dict[Digest, Pending] = field(default_factory=dict)
    """Of each prompt the last call, if its answer was handed over whole: it may still be lost on its way."""
    refused: Counter[tuple[Digest, Wanted]] = field(default_factory=Counter)
    """Requests that were told to come again later: what their SDK takes for a retry is none."""
    interrupted: dict[tuple[Digest, Wanted], list[Node]] = field(default_factory=dict)
    """Answers that an engine broke off and nobody goes on with: the same request gets the rest."""
    beginnings: list[Beginning] = field(default_factory=list)
    """Of its last requests, the last one first: agents ask several questions at once, or in turns."""
    read_aside: int = 0
    """Requests that are read in a thread now; what comes behind one is read behind it."""
    ended: bool = False
    """Its attempt has ended; who still holds the session admits nothing more."""
    outdated: bool = False
    """It holds something else than the store, from which it is read again; who still holds it has to ask again."""

    def beginning(self, body: bytes, protocol: str) -> Beginning | None:
        """What is known of a request: each protocol asks for more than another does."""
        return next((each for each in self.beginnings if each.protocol == protocol and each.begins(body)), None)

    def remember(self, beginning: Beginning, known: Beginning | None) -> None:
        """A request was read, of which `known` was known."""
        if len(beginning.whole) <= growing.MOST_BYTES:
            self.beginnings = [beginning, *(each for each in self.beginnings if each is not known)][:_BEGINNINGS]

    @property
    def answers_at_once(self) -> int:
        return sum(pending.wanted.n for pending in self.calls_in_progress() if not pending.answers.done())

    def tokens_left(self) -> tuple[int, int]:
        """That the attempt may still sample, and of these so many that no call in progress may take."""
        if self.limits.tokens is None:
            return 2**31, 2**31
        left = self.limits.tokens - sum(node.sampled for node in self.tree.nodes.values())
        asked = sum(pending.most_tokens for pending in self.calls_in_progress() if not pending.answers.done())
        return left, left - asked

    def calls_in_progress(self) -> list[Pending]:
        return [pending for waiting in self.pending.values() for pending in waiting]

    def wait_for(self, pending: Pending) -> None:
        """Somebody will get this call's answers. A call that fails is not waited for any more: the same request again
        is a new call."""

        def drop_failed(answers: asyncio.Future[list[Node]]) -> None:
            if answers.cancelled() or answers.exception() is not None:
                self.drop(pending)

        self.pending.setdefault(pending.prompt, []).append(pending)
        self.delivered.pop(pending.prompt, None)
        pending.answers.add_done_callback(drop_failed)

    def drop(self, pending: Pending) -> None:
        """Nobody has to get its answers any more."""
        waiting = self.pending.get(pending.prompt, [])
        if pending in waiting:
            waiting.remove(pending)
        if not waiting:
            self.pending.pop(pending.prompt, None)

    def handed_over(self, pending: Pending) -> None:
        """Its last byte is on its way."""
        self.drop(pending)
        pending.previews.clear()
        self.delivered[pending.prompt] = pending

    def drop_delivered(self, nodes: list[int]) -> None:
        """These answers turned out to have arrived."""
        for prompt in {self.tree.prompt(number) for number in nodes}:
            for pending in [each for each in self.pending.get(prompt, []) if each.delivered]:
                self.drop(pending)

    def retried(self, turn: Turn, place: Place, retry_count: int) -> Pending | None:
        """The call that this request repeats because its answer did not arrive; None: the request is a new one.

        A call whose client was seen to leave comes first; one that a client still seems to wait for, or has got as far
        as can be seen from here, is only taken by a request that says that it is a retry.
        """
        asked = [pending for pending in self.pending.get(place.prompt, []) if not pending.failed]
        same = [pending for pending in asked if pending.wanted == turn.wanted]
        left = [pending for pending in same if not pending.waiting]
        for pending in left or (same if retry_count > 0 else []):
            pending.waiting += 1
            return pending
        lost = self.delivered.get(place.prompt)
        if lost is None or retry_count == 0 or lost.wanted != turn.wanted or self._repeated(lost):
            return None
        return lost

    def _repeated(self, pending: Pending) -> bool:
        """A later call goes on from its answer, so that somebody has it."""
        numbers = {node.number for node in pending.answers.result()}
        return any(node.follows in numbers for node in self.tree.nodes.values())

    def being_interrupted(self, turn: Turn, place: Place) -> "list[asyncio.Future[list[Node]]]":
        """The answers of calls like this one that nobody waited for, while they have not ended."""
        same = [pending for pending in self.pending.get(place.prompt, []) if pending.wanted == turn.wanted]
        return [pending.answers for pending in same if pending.interrupted and not pending.answers.done()]

    def begun_elsewhere(self, turn: Turn, place: Place) -> list[Pending]:
        """Calls like this one that other gateways have not answered yet."""
        same = [pending for pending in self.pending.get(place.prompt, []) if pending.wanted == turn.wanted]
        return [pending for pending in same if pending.gateway and not pending.answers.done()]

    def undelivered(self) -> list[int]:
        """Nodes of which the store may know more by now."""
        return [number for number, node in self.tree.nodes.items() if not node.delivered]

    def forget_interrupted(self, number: int) -> None:
        """An answer that was broken off; another one holds it whole now."""
        self.tree.nodes.pop(number, None)
        for key, kept in list(self.interrupted.items()):
            left = [node for node in kept if node.number != number]
            if left:
                self.interrupted[key] = left
            else:
                del self.interrupted[key]

    def retry_count(self, prompt: Digest, wanted: Wanted, said: int) -> int:
        """How often a request was sent before, and not refused."""
        if said and self.refused[prompt, wanted]:
            self.refused[prompt, wanted] -= 1
            return 0
        return said

    def take_interrupted(self, prompt: Digest, wanted: Wanted) -> list[Node]:
        """Answers to go on with; they are the caller's now."""
        found = self.interrupted.pop((prompt, wanted), [])
        if found[wanted.n :]:
            self.interrupted[prompt, wanted] = found[wanted.n :]
        return found[: wanted.n]


def read_again() -> WireError:
    return WireError(503, "store_failed", "the attempt is read from the store again; ask again")


def attempt_ended(attempt: AttemptId) -> WireError:
    return WireError(403, "attempt_ended", f"attempt {attempt[1]} of rollout {attempt[0]} has ended; its key is void")
