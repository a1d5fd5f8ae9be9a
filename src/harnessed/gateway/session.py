"""An attempt in the gateway's memory: its transcript, and the calls whose answers are not delivered yet.

`exchange.py` makes one for each attempt that calls, with `load`, and asks it which call a request repeats. It can
always be made again from the store.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from harnessed.gateway.preview import Preview
from harnessed.gateway.recording import AttemptId, Faults, count_calls, load_attempt, load_nodes, load_wanted
from harnessed.gateway.store import Store
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.transcript import INTERRUPTED, Digest, Place, Tree
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.turn import Turn, Wanted, WireError
from harnessed.records import History, Limits, Node, Sampling, SideCall

_BEGINNINGS = 4


@dataclass(slots=True, eq=False)
class Pending:
    """A call whose answer is being made, or made and not yet delivered."""

    id: str
    answers: "asyncio.Future[list[Node]]"
    """Done once they are durable."""
    wanted: Wanted
    previews: list[Preview] = field(default_factory=list)
    """One for each answer, if the client that asked first streams."""
    most_tokens: int = 0
    """That can be sampled for it."""
    waiting: int = 1
    """Clients that wait for it and have not been seen to leave."""
    interrupted: bool = False
    """Its engine was told that nobody waits: what it has sampled is kept for the next who asks."""

    @property
    def delivered(self) -> bool:
        return self.answers.done() and all(node.delivered for node in self.answers.result())


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
    calls: int
    """Admitted so far."""
    next_number: int
    """Of the next node; handed out in the order in which writes are queued."""
    pending: dict[Digest, list[Pending]] = field(default_factory=dict)
    delivered: dict[Digest, Pending] = field(default_factory=dict)
    """Of each prompt the last call, if its answer was handed over whole: it may still be lost on its way."""
    interrupted: dict[tuple[Digest, Wanted], list[Node]] = field(default_factory=dict)
    """Answers that an engine broke off and nobody goes on with: the same request gets the rest."""
    faults: Faults = field(default_factory=dict)
    """Requests that were refused or failed and have not been answered since."""
    beginnings: list[Beginning] = field(default_factory=list)
    """Of its last requests, the last one first: agents ask several questions at once, or in turns."""
    read_aside: int = 0
    """Requests that are read in a thread now; what comes behind one is read behind it."""
    ended: bool = False
    """Its attempt has ended; who still holds the session admits nothing more."""

    def beginning(self, body: bytes) -> Beginning | None:
        """What is known of a request."""
        return next((each for each in self.beginnings if each.begins(body)), None)

    def remember(self, beginning: Beginning | None, known: Beginning | None) -> None:
        """A request was read, of which `known` was known."""
        if beginning:
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

    def wait_for(self, prompt: Digest, pending: Pending) -> None:
        """Somebody will get this call's answers. A call that fails is not waited for any more: the same request again
        is a new call."""

        def drop_failed(answers: asyncio.Future[list[Node]]) -> None:
            if answers.cancelled() or answers.exception() is not None:
                self.drop(prompt, pending)

        self.pending.setdefault(prompt, []).append(pending)
        self.delivered.pop(prompt, None)
        pending.answers.add_done_callback(drop_failed)

    def drop(self, prompt: Digest, pending: Pending) -> None:
        """Nobody has to get its answers any more."""
        waiting = self.pending.get(prompt, [])
        if pending in waiting:
            waiting.remove(pending)
        if not waiting:
            self.pending.pop(prompt, None)

    def handed_over(self, prompt: Digest, pending: Pending) -> None:
        """Its last byte is on its way."""
        self.drop(prompt, pending)
        pending.previews.clear()
        self.delivered[prompt] = pending

    def drop_delivered(self, nodes: list[int]) -> None:
        """These answers turned out to have arrived."""
        for prompt in {self.tree.prompt(number) for number in nodes}:
            for pending in [each for each in self.pending.get(prompt, []) if each.delivered]:
                self.drop(prompt, pending)

    def retried(self, turn: Turn, place: Place, retry_count: int) -> Pending | None:
        """The call that this request repeats because its answer did not arrive; None: the request is a new one.

        A call whose client was seen to leave comes first; one that a client still seems to wait for, or has got as far
        as can be seen from here, is only taken by a request that says that it is a retry.
        """
        same = [pending for pending in self.pending.get(place.prompt, []) if pending.wanted == turn.wanted]
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

    def take_interrupted(self, prompt: Digest, wanted: Wanted) -> list[Node]:
        """Answers to go on with; they are the caller's now."""
        found = self.interrupted.pop((prompt, wanted), [])
        if found[wanted.n :]:
            self.interrupted[prompt, wanted] = found[wanted.n :]
        return found[: wanted.n]


def attempt_ended(attempt: AttemptId) -> WireError:
    return WireError(403, "attempt_ended", f"attempt {attempt[1]} of rollout {attempt[0]} has ended; its key is void")


async def load(store: Store, attempt: AttemptId, policy: Callable[[str], ChatTemplate]) -> Session | None:
    """The session of a live attempt; None: there is none."""
    known = await store.read(lambda connection: load_attempt(connection, attempt))
    if known is None or not known["live"]:
        return None

    nodes = await store.read(lambda connection: load_nodes(connection, attempt))
    session = Session(
        attempt=attempt,
        run=known["run"],
        index=known["index"],
        seed=known["seed"],
        sampling=known["sampling"],
        limits=known["limits"],
        history=known["history"],
        side_calls=known["side_calls"],
        template=policy(known["policy"]).at(known["created"]),
        tree=await asyncio.to_thread(Tree.of, nodes),
        calls=await store.read(lambda connection: count_calls(connection, attempt)),
        next_number=known["nodes"] + 1,
        faults=known["faults"],
    )
    await _open_calls(store, session, nodes)
    return session


async def _open_calls(store: Store, session: Session, nodes: list[Node]) -> None:
    """Put back what nobody got: whole answers, to be replayed, and broken-off ones, to be gone on with."""
    by_call: dict[str, list[Node]] = {}
    for node in nodes:
        if not node.delivered:
            by_call.setdefault(node.call, []).append(node)
    wanted_by = await store.read(lambda connection: load_wanted(connection, list(by_call)))
    for call, answers in by_call.items():
        wanted, prompt = wanted_by[call], session.tree.prompt(answers[0].number)
        broken_off = [node for node in answers if node.finish == INTERRUPTED]
        if broken_off:
            session.interrupted.setdefault((prompt, wanted), []).extend(broken_off)
        elif len(answers) == wanted.n:
            done = asyncio.get_running_loop().create_future()
            done.set_result(answers)
            session.pending.setdefault(prompt, []).append(Pending(call, done, wanted, waiting=0))
