"""One call from arrival to stored record: the hot path. `app.py` mounts it under every route that serves the model.

Read `Exchange.__call__` from top to bottom. What can be refused is refused before the first byte; the answer is durable
before its last byte goes out; a generation belongs to the attempt, not to the connection: a client that goes away and
comes back with the same request gets the answer that was made for it.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from harnessed.gateway.engines import EngineFailed, Engines, Generated, Generation
from harnessed.gateway.keys import Key, Keyring
from harnessed.gateway.keys import Scope as KeyScope
from harnessed.gateway.lifecycle import Refused
from harnessed.gateway.recording import (
    AttemptId,
    admit,
    count_calls,
    load_attempt,
    load_nodes,
    mark_delivered,
    record_answers,
    record_failure,
    record_fault,
)
from harnessed.gateway.store import Store
from harnessed.gateway.template import ChatTemplate, TemplateError
from harnessed.gateway.transcript import Digest, Place, Segment, Tree
from harnessed.gateway.wire import chat
from harnessed.gateway.wire.turn import Choice, Reply, Turn, WireError, context_overflow
from harnessed.records import Limits, Node, Sampling

MOST_BODY_BYTES = 64 * 2**20
ANY_LENGTH = -1
"""In place of a max_tokens that is not known any more."""


@dataclass(slots=True, eq=False)
class Pending:
    """A call whose answer is being made, or made and not yet delivered."""

    id: str
    task: "asyncio.Task[list[Node]]"
    """The answers, once they are durable."""
    prompt_tokens: int
    wanted: tuple[int, int | None]
    """The request's n and max_tokens."""
    connected: bool = True
    """The client that waits for it has not been seen to leave."""


@dataclass(slots=True)
class Session:
    """An attempt in memory; can always be made again from the store."""

    attempt: AttemptId
    run: str
    index: int
    """Of the rollout in its group."""
    seed: int
    """Of the group."""
    sampling: Sampling
    limits: Limits
    template: ChatTemplate
    tree: Tree
    calls: int
    """Admitted so far."""
    next_number: int
    """Of the next node; handed out in the order in which writes are queued."""
    pending: dict[Digest, list[Pending]] = field(default_factory=dict)
    faults: dict[Digest, str] = field(default_factory=dict)
    """Requests that were refused or failed and have not been answered since."""
    ended: bool = False
    """Its attempt has ended; who still holds the session admits nothing more."""

    def calls_in_progress(self) -> list[Pending]:
        return [pending for waiting in self.pending.values() for pending in waiting]

    @property
    def fault(self) -> str:
        """The one that counts: an engine's failure before a limit."""
        return max(self.faults.values(), default="")  # `engine: ...` sorts after `budget: ...`


class Exchange:
    """All model calls of one gateway; an ASGI application for the Chat Completions route."""

    def __init__(self, store: Store, engines: Engines, keyring: Keyring) -> None:
        self._store = store
        self._engines = engines
        self._keyring = keyring
        self._sessions: dict[AttemptId, Session] = {}
        self._loading: dict[AttemptId, asyncio.Task[Session]] = {}
        self._templates: dict[str, ChatTemplate] = {}
        self._closing: Counter[str] = Counter()
        """Rollouts whose attempt is being ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            session = await self._session(self._key(scope))
            turn = chat.parse(await _read_body(receive))
            place = _place(session, turn)
            self._prove_delivered(session, place)
            pending = _retried(session, turn, place, _retry_count(scope)) or self._begin(session, turn, place)
            if not await _outlasts(receive, pending.task):
                pending.connected = False
                return
            body = chat.render(_reply(pending, turn, pending.task.result()))
        except WireError as error:
            await _send(send, error.status, chat.render_error(error))
        else:
            await _send(send, 200, body)
            self._delivered(session, place, pending)

    def policy(self, folder: str) -> ChatTemplate:
        """The template of a policy folder, read once. Raises ConfigError."""
        if folder not in self._templates:
            self._templates[folder] = ChatTemplate(Path(folder))
        return self._templates[folder]

    @contextlib.asynccontextmanager
    async def closing(self, rollouts: Sequence[str], limit_s: float) -> AsyncIterator[None]:
        """Around the end of attempts: their further calls are refused, and what the engine still generates for them is
        recorded first, so that the books hold every token. An engine that takes longer is left behind."""
        self._closing.update(rollouts)
        try:
            sessions = [session for attempt, session in self._sessions.items() if attempt[0] in set(rollouts)]
            if tasks := {pending.task for session in sessions for pending in session.calls_in_progress()}:
                await asyncio.wait(tasks, timeout=limit_s)
            for session in sessions:
                await self._blame_engine(session)
            yield
        finally:
            self._closing.subtract(rollouts)
            self._closing += Counter()
            for session in [session for attempt, session in self._sessions.items() if attempt[0] in set(rollouts)]:
                self._forget(session)
            for attempt, loading in self._loading.items():
                if attempt[0] in set(rollouts):  # what it has read may be older than the end
                    loading.add_done_callback(self._end)

    async def _blame_engine(self, session: Session) -> None:
        """An attempt that ends while its engine is out of reach did not fail by itself."""
        trouble = self._engines.trouble(session.run, session.attempt[0])
        if trouble and any(not pending.task.done() for pending in session.calls_in_progress()):
            fault = f"engine: {trouble}"
            await self._store.write(lambda connection: record_fault(connection, session.attempt, fault))

    def _end(self, loading: "asyncio.Task[Session]") -> None:
        if not loading.cancelled() and loading.exception() is None:
            self._forget(loading.result())

    def _forget(self, session: Session) -> None:
        session.ended = True
        self._sessions.pop(session.attempt, None)

    def _key(self, scope: Scope) -> Key:
        headers = Headers(scope=scope)
        text = scope["path_params"].get("key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        key = self._keyring.read(text or headers.get("x-api-key", ""))
        if key is None:
            raise WireError(401, "invalid_api_key", "this key was not made by this gateway; use the attempt's key")
        if key.scope != KeyScope.ATTEMPT:
            raise WireError(403, "wrong_key", f"a key of scope {key.scope} cannot call the model; use an attempt's key")
        return key

    async def _session(self, key: Key) -> Session:
        attempt = (key.rollout, key.attempt)
        if attempt not in self._sessions:
            loading = self._loading.get(attempt)
            if loading is None:
                loading = self._loading[attempt] = asyncio.create_task(self._load(attempt))
                loading.add_done_callback(lambda _: self._loading.pop(attempt))
            return await asyncio.shield(loading)
        return self._sessions[attempt]

    async def _load(self, attempt: AttemptId) -> Session:
        known = await self._store.read(lambda connection: load_attempt(connection, attempt))
        if known is None or not known["live"]:
            raise _ended(attempt)
        nodes = await self._store.read(lambda connection: load_nodes(connection, attempt))
        session = Session(
            attempt=attempt,
            run=known["run"],
            index=known["index"],
            seed=known["seed"],
            sampling=known["sampling"],
            limits=known["limits"],
            template=self.policy(known["policy"]),
            tree=Tree.of(nodes),
            calls=await self._store.read(lambda connection: count_calls(connection, attempt)),
            next_number=len(nodes) + 1,
            faults={b"": known["fault"]} if known["fault"] else {},
        )
        for prompt, call, answers in session.tree.undelivered():
            before = len(session.tree.context(answers[0].number)) // 4 - answers[0].sampled
            # What max_tokens was is not known any more: any request that is otherwise the same is taken for the retry.
            wanted = (len(answers), ANY_LENGTH)
            pending = Pending(call, asyncio.create_task(_done(answers)), before, wanted, connected=False)
            session.pending.setdefault(prompt, []).append(pending)
        self._sessions[attempt] = session  # before anybody who waits for it goes on
        return session

    def _prove_delivered(self, session: Session, place: Place) -> None:
        proven = session.tree.prove_delivered(place)
        if proven:
            self._store.write_soon(lambda connection: mark_delivered(connection, session.attempt, proven))
            for prompt, waiting in list(session.pending.items()):
                for pending in [pending for pending in waiting if _is_delivered(pending)]:
                    _drop(session, prompt, pending)

    def _begin(self, session: Session, turn: Turn, place: Place) -> Pending:
        """Admit a call within its limits and start to sample its answers."""
        if session.ended or session.attempt[0] in self._closing:
            raise _ended(session.attempt)
        if session.calls >= session.limits.calls:
            self._fault(session, place, f"budget: the limit of {session.limits.calls} calls was reached")
            raise WireError(403, "budget_exhausted", f"this attempt has used its {session.limits.calls} calls")
        segment = _encode(session, turn, place)
        prompt = array("i", session.tree.context(place.parent, segment.cut))
        prompt.extend(segment.ids)
        room = session.limits.context - len(prompt)
        if room < 1:
            self._fault(session, place, f"budget: the context limit of {session.limits.context} tokens was reached")
            raise context_overflow(len(prompt) + 1, session.limits.context)
        call, now = secrets.token_hex(8), time.time()
        session.calls += 1
        self._store.write_soon(lambda connection: admit(connection, session.attempt, call, turn.asked, now))
        generation = Generation(
            prompt=prompt.tolist(),
            max_tokens=min(room, session.sampling.max_tokens, turn.max_tokens or room),
            temperature=session.sampling.temperature,
            seed=0,
            stop=session.template.stop_ids,
        )
        task = asyncio.create_task(self._sample(session, turn, place, segment, generation, call))
        pending = Pending(call, task, len(prompt), _wanted(turn))
        session.pending.setdefault(place.prompt, []).append(pending)
        task.add_done_callback(lambda task: _drop_failed(session, place.prompt, pending))
        return pending

    async def _sample(
        self, session: Session, turn: Turn, place: Place, segment: Segment, generation: Generation, call: str
    ) -> list[Node]:
        """Ask the engine for every answer of the call and record them; they are durable when this returns."""
        wanted = [replace(generation, seed=_seed(session, choice)) for choice in range(turn.n)]
        given = await asyncio.gather(
            *(self._engines.generate(session.run, session.attempt[0], each) for each in wanted), return_exceptions=True
        )
        generated = [answer for answer in given if isinstance(answer, Generated)]
        failure = next((error for error in given if isinstance(error, BaseException)), None)
        if failure is None:
            session.faults.pop(place.prompt, None)
        nodes = [
            Node(
                number=session.next_number + choice,
                parent=place.parent,
                segment=array("i", segment.ids).tobytes(),
                answer=array("i", answer.tokens).tobytes(),
                logprobs=array("f", answer.logprobs).tobytes(),
                versions=array("i", answer.versions).tobytes(),
                temperature=generation.temperature,
                finish=answer.finish,
                cut=segment.cut,
                delivered=False,
                messages=place.new,
                message=_message(session.template, answer.tokens, stopped=answer.finish == "stop"),
                call=call,
                tools=[] if place.parent else turn.tools,
            )
            for choice, answer in enumerate(generated)
        ]
        session.next_number += len(nodes)
        if nodes:
            await self._record(session, place, nodes)
        if failure is not None:
            self._store.write_soon(lambda connection: record_failure(connection, call, time.time()))
            if not isinstance(failure, EngineFailed):
                raise failure
            self._fault(session, place, f"engine: {failure}")
            raise WireError(503, "engine_failed", str(failure)) from failure
        return nodes

    async def _record(self, session: Session, place: Place, nodes: list[Node]) -> None:
        fault = session.fault
        try:
            await self._store.write(
                lambda connection: record_answers(connection, session.attempt, nodes, fault, time.time())
            )
        except Refused as error:
            self._store.write_soon(lambda connection: record_failure(connection, nodes[0].call, time.time()))
            self._forget(session)
            raise WireError(403, "attempt_ended", str(error)) from error
        except SQLAlchemyError as error:
            self._forget(session)  # what memory holds is ahead of the store: load it again
            raise WireError(503, "store_failed", f"the answer could not be stored: {error}") from error
        for node in nodes:
            session.tree.add(node, place.prompt)

    def _delivered(self, session: Session, place: Place, pending: Pending) -> None:
        numbers = [node.number for node in pending.task.result()]
        for number in numbers:
            session.tree.nodes[number].delivered = True
        self._store.write_soon(lambda connection: mark_delivered(connection, session.attempt, numbers))
        _drop(session, place.prompt, pending)

    def _fault(self, session: Session, place: Place, what: str) -> None:
        session.faults[place.prompt] = what
        fault = session.fault
        self._store.write_soon(lambda connection: record_fault(connection, session.attempt, fault))


def _ended(attempt: AttemptId) -> WireError:
    return WireError(403, "attempt_ended", f"attempt {attempt[1]} of rollout {attempt[0]} has ended; its key is void")


def _retried(session: Session, turn: Turn, place: Place, retry_count: int) -> Pending | None:
    """The call that this request repeats because its answer did not arrive; None: the request is a new one.

    A call whose client was seen to leave comes first; one that a client still seems to wait for is only taken by a
    request that says that it is a retry.
    """
    n, max_tokens = _wanted(turn)
    same = [p for p in session.pending.get(place.prompt, []) if p.wanted in ((n, max_tokens), (n, ANY_LENGTH))]
    left = [pending for pending in same if not pending.connected]
    for pending in left or (same if retry_count > 0 else []):
        pending.connected = True
        return pending
    return None


def _wanted(turn: Turn) -> tuple[int, int | None]:
    return turn.n, turn.max_tokens


def _is_delivered(pending: Pending) -> bool:
    return pending.task.done() and all(node.delivered for node in pending.task.result())


def _drop_failed(session: Session, prompt: Digest, pending: Pending) -> None:
    """A call that failed is not waited for any more: the same request again is a new call."""
    if pending.task.cancelled() or pending.task.exception() is not None:
        _drop(session, prompt, pending)


def _drop(session: Session, prompt: Digest, pending: Pending) -> None:
    waiting = session.pending.get(prompt, [])
    if pending in waiting:
        waiting.remove(pending)
    if not waiting:
        session.pending.pop(prompt, None)


def _place(session: Session, turn: Turn) -> Place:
    try:
        return session.tree.place(turn.messages, turn.tools)
    except orjson.JSONEncodeError as error:  # nested deeper than can be written again
        raise WireError(400, "invalid_messages", f"the messages cannot be read: {error}") from error


def _encode(session: Session, turn: Turn, place: Place) -> Segment:
    try:
        return session.tree.segment(place, turn.tools, session.template)
    except TemplateError as error:
        raise WireError(400, "invalid_messages", str(error)) from error


def _message(template: ChatTemplate, answer: list[int], *, stopped: bool) -> dict[str, Any]:
    return {"role": "assistant", "content": template.text(answer, stopped=stopped)}


def _reply(pending: Pending, turn: Turn, nodes: list[Node]) -> Reply:
    choices = [Choice(node.message, node.finish, node.sampled) for node in nodes]
    return Reply(pending.id, turn.model, time.time(), pending.prompt_tokens, choices)


def _seed(session: Session, choice: int) -> int:
    """The same run on the same tasks draws the same numbers, whatever its ids and ports."""
    name = f"{session.seed}/{session.index}/{session.calls}/{choice}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())


def _retry_count(scope: Scope) -> int:
    """How often the client's SDK has sent this request before."""
    count = Headers(scope=scope).get("x-stainless-retry-count", "0")
    return int(count) if count.isdigit() else 0


async def _done(nodes: list[Node]) -> list[Node]:
    return nodes


async def _read_body(receive: Receive) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise WireError(400, "incomplete", "the connection was closed before the request was complete")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > MOST_BODY_BYTES:
            raise WireError(413, "too_large", f"the request is larger than {MOST_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(pieces)


async def _outlasts(receive: Receive, task: "asyncio.Task[list[Node]]") -> bool:
    """Wait for the task; False if the client left before."""
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return not gone.done()
    finally:
        gone.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
