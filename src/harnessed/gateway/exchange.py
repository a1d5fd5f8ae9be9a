"""One call from arrival to stored record: the hot path. `routes.py` calls it for every protocol.

Read `Exchange.serve` from top to bottom. What can be refused is refused before the first byte; the answer is durable
before its last byte goes out; a generation belongs to the attempt, not to the connection: a client that goes away and
comes back with the same request gets the answer that was made for it.
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from harnessed.config import ConfigError
from harnessed.gateway.catchup import catch_up, load
from harnessed.gateway.delivery import RESET, deliver, leaving, send_json
from harnessed.gateway.engines import Engines
from harnessed.gateway.keys import Key, Keyring
from harnessed.gateway.keys import Scope as KeyScope
from harnessed.gateway.peers import LostCall
from harnessed.gateway.preview import Preview
from harnessed.gateway.progress import ENCODER, STORE, current, waits_for
from harnessed.gateway.recording import Admitted, AttemptId, admit, mark_delivered, mark_left, record_faults
from harnessed.gateway.sampling import LIMIT, Sampler, generations
from harnessed.gateway.session import Pending, Session, attempt_ended
from harnessed.gateway.splits import by_ids, by_text, by_written
from harnessed.gateway.store import Store
from harnessed.gateway.template import ChatTemplate, TemplateError
from harnessed.gateway.transcript import Place, Segment, Tree
from harnessed.gateway.turnstile import Turnstiles
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.turn import REFERENCE, Address, Turn, Wire, WireError
from harnessed.records import Dialect, EngineSpec, History

T = TypeVar("T")
SIGHT_S = 0.1
"""The store shows within this time that a gateway has died, or what another one has done."""
ASIDE_BYTES = 32 * 2**10
"""Requests from this size on are read and encoded in a thread, so that they slow nobody else."""


class Exchange:
    """All model calls of one gateway."""

    def __init__(
        self,
        store: Store,
        engines: Engines,
        keyring: Keyring,
        turnstiles: Turnstiles,
        gateway: str,
        most_body_bytes: int,
    ) -> None:
        """`gateway`: the id of this process among those of the store."""
        self._store = store
        self._gateway = gateway
        self._most_body_bytes = most_body_bytes
        self._engines = engines
        self._sampler = Sampler(store, engines, turnstiles)
        self._keyring = keyring
        self._sessions: dict[AttemptId, Session] = {}
        self._loading: dict[AttemptId, asyncio.Task[Session]] = {}
        self._templates: dict[str, ChatTemplate] = {}
        self._closing: Counter[str] = Counter()
        """Rollouts whose attempt is being ended."""
        self._encoder = ThreadPoolExecutor(1, "encode")
        """One thread: what came first is read first, so that a retry meets the call that it repeats."""

    async def serve(self, wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of a protocol."""
        progress = current()
        try:
            session = await self._session(self.key(scope))
            progress.of(session.run, session.attempt)
            body, at = await _read_body(receive, self._most_body_bytes), _address(scope)
            await self._catch_up(session)
            known = session.beginning(body)
            turn, place, proven, segment, chat_length = await self._read(wire, session, body, at, known)
            session.remember(turn.beginning, known)
            progress.streamed = turn.stream
            self._note_delivered(session, proven)
            async with leaving(receive) as gone:
                pending = await self._repeated(session, turn, place, _retry_count(scope), gone)
                if gone.done():
                    if pending:
                        pending.waiting -= 1
                    return
                pending = pending or self._begin(session, turn, place, segment, chat_length)
                progress.joins(pending.id, pending.stage)
                arrived = await deliver(send, gone, wire, session, pending, turn)
                if not (arrived or gone.done()):
                    progress.breaks(pending.answers)
                    scope["extensions"][RESET]["do"]()
        except WireError as error:
            progress.error = error
            await send_json(send, error.status, wire.render_error(error))
            return
        if arrived:
            self._delivered(session, pending)
        else:
            await self._left(session, pending)

    async def count_tokens(self, wire: Wire, scope: Scope, receive: Receive) -> int:
        """How long the prompt of a request would be. Nothing is recorded. Raises WireError."""
        session = await self._session(self.key(scope))
        body, at = await _read_body(receive, self._most_body_bytes), _address(scope)

        def count() -> int:
            turn = _parse(wire, session, body, at, None)
            segment = self._encode(session, turn, session.tree.place(turn.messages, turn.tools))
            return session.tree.length(segment.parent) - segment.cut + len(segment.ids) // 4

        return count() if _is_short(body, None) else await self._aside(session, count)

    @property
    def sessions(self) -> int:
        """Attempts in memory."""
        return len(self._sessions)

    def close(self) -> None:
        self._encoder.shutdown(wait=False)

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
            if unfinished := _unanswered(sessions):
                interrupting = [asyncio.create_task(self._sampler.interrupt(*each)) for each in unfinished]
                await asyncio.wait({call.answers for _, call in unfinished}, timeout=limit_s)
                for each in interrupting:
                    each.cancel()
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
        if trouble and any(not pending.answers.done() for pending in session.calls_in_progress()):
            faults = session.faults | {"": f"engine: {trouble}"}
            await self._store.write(lambda connection: record_faults(connection, session.attempt, faults))

    async def interrupt_run(self, run: str) -> None:
        """Running generations stop, and go on from their tokens when the run's turnstile opens."""
        sessions = [session for session in self._sessions.values() if session.run == run]
        await asyncio.gather(*(self._sampler.suspend(*each) for each in _unanswered(sessions)))

    async def interrupt_rollout(self, rollout: str) -> None:
        """Another gateway is about to end its attempt: what is generated for it ends, and is recorded."""
        sessions = [session for attempt, session in self._sessions.items() if attempt[0] == rollout]
        await asyncio.gather(*(self._sampler.interrupt(*each) for each in _unanswered(sessions)))

    async def stop_lost(self, calls: list[LostCall]) -> None:
        """Let engines end what they generate for a gateway that died."""
        asked = (self._engines.abandon(each.run, generations(each.call, each.answers)) for each in calls)
        await asyncio.gather(*asked)

    async def know_engines(self, engines: list[EngineSpec]) -> None:
        """These are registered, by whichever gateway."""
        await self._engines.keep(engines)

    def forget_all(self) -> None:
        """Read every attempt from the store again."""
        for session in list(self._sessions.values()):
            self._forget(session)

    def _end(self, loading: "asyncio.Task[Session]") -> None:
        if not loading.cancelled() and loading.exception() is None:
            self._forget(loading.result())

    def _forget(self, session: Session) -> None:
        session.ended = True
        self._sessions.pop(session.attempt, None)
        self._engines.forget(session.attempt[0])

    def key(self, scope: Scope) -> Key:
        """Of the attempt that calls. Raises WireError."""
        headers = Headers(scope=scope)
        text = scope["path_params"].get("key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        text = text or headers.get("x-api-key") or headers.get("x-goog-api-key") or _address(scope).get("key", "")
        key = self._keyring.read(text)
        if key is None:
            raise WireError(401, "invalid_api_key", "this key was not made by this gateway; use the attempt's key")
        if key.scope != KeyScope.ATTEMPT:
            raise WireError(403, "wrong_key", f"a key of scope {key.scope} cannot call the model; use an attempt's key")
        return key

    async def _session(self, key: Key) -> Session:
        attempt = (key.rollout, key.attempt)
        if attempt not in self._sessions or self._sessions[attempt].ended:
            loading = self._loading.get(attempt)
            if loading is None:
                loading = self._loading[attempt] = asyncio.create_task(self._load(attempt))
                loading.add_done_callback(lambda _: self._loading.pop(attempt))
            waits_for(STORE)
            return await asyncio.shield(loading)
        return self._sessions[attempt]

    async def _load(self, attempt: AttemptId) -> Session:
        try:
            session = await load(self._store, attempt, self._gateway, self.policy)
        except ConfigError as error:
            raise WireError(503, "policy_unusable", str(error)) from error
        if session is None:
            raise attempt_ended(attempt)
        self._sessions[attempt] = session  # before anybody who waits for it goes on
        return session

    async def _aside(self, session: Session, work: Callable[[], T]) -> T:
        session.read_aside += 1
        waits_for(ENCODER)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
        finally:
            session.read_aside -= 1

    async def _read(
        self, wire: Wire, session: Session, body: bytes, at: Address, known: Beginning | None
    ) -> tuple[Turn, Place, list[int], Segment | None, int]:
        """The request, its place, the answers that it proves to have arrived, and its new tokens; or none and the
        length of its prompt, where the engine makes them. Done at once if there is little to do, else in a thread."""

        def place() -> tuple[Turn, Place, list[int]]:
            turn = _parse(wire, session, body, at, known)
            place = session.tree.place(turn.messages, turn.tools)
            return turn, place, session.tree.prove_delivered(place)

        def encode(turn: Turn, at: Place, proven: list[int]) -> tuple[Turn, Place, list[int], Segment | None, int]:
            segment, chat_length = self._segment(session, turn, at)
            if turn.prompt is not None and segment is not None:
                proven = session.tree.prove_repeated(segment.parent)
            return turn, at, proven, segment, chat_length

        if session.read_aside or not _is_short(body, known):
            return await self._aside(session, lambda: encode(*place()))
        placed = place()
        if session.history == History.TEMPLATE or not _are_short(placed[1].new):
            return await self._aside(session, lambda: encode(*placed))
        return encode(*placed)

    def _segment(self, session: Session, turn: Turn, place: Place) -> tuple[Segment | None, int]:
        if self._engines.speaks(session.run) == Dialect.CHAT:
            if turn.prompt is not None:
                raise WireError(400, "chat_only", "the engine only speaks chat: it takes messages, and no bare prompt")
            return None, self._chat_length(session, turn, place)
        if turn.wanted.grammar:
            why = "this engine samples under no grammar: leave out `response_format` (`text.format`)"
            raise WireError(400, "no_grammar", why)
        return self._encode(session, turn, place), 0

    def _chat_length(self, session: Session, turn: Turn, place: Place) -> int:
        """About how long an engine that speaks chat will make a prompt: it makes it itself, of the messages."""
        try:
            segment = session.tree.segment(place, turn.tools, session.template)
        except TemplateError:  # the engine's own may take it
            return session.tree.length(place.follows)
        return session.tree.length(segment.parent) - segment.cut + len(segment.ids) // 4

    async def _catch_up(self, session: Session) -> None:
        """See what other gateways have done to the attempt. Raises WireError if they have ended it."""
        if not self._store.shared:
            return
        waits_for(STORE)
        if not await catch_up(self._store, session, self._gateway):
            session.ended = True
            raise attempt_ended(session.attempt)

    async def _repeated(
        self, session: Session, turn: Turn, place: Place, retry_count: int, gone: "asyncio.Future[None]"
    ) -> Pending | None:
        """The call that this request repeats; its gateway, if that is another one, has answered it. None: the request
        is a new one, or its client is gone."""
        if session.begun_elsewhere(turn, place):
            await asyncio.sleep(SIGHT_S)
            await self._catch_up(session)
        while not gone.done():
            await self._end_of_interruption(session, turn, place, gone)
            elsewhere = session.begun_elsewhere(turn, place)
            if not any(pending.unseen or retry_count or not pending.waiting for pending in elsewhere):
                return session.retried(turn, place, retry_count)
            waits_for(f"gateway {elsewhere[0].gateway}")
            await asyncio.sleep(SIGHT_S)
            await self._catch_up(session)
        return None

    async def _end_of_interruption(
        self, session: Session, turn: Turn, place: Place, gone: "asyncio.Future[None]"
    ) -> None:
        """Returns when no call that this request may repeat is being interrupted: it may yet end whole, or with tokens
        to go on from; or when the client is gone."""
        while ending := session.being_interrupted(turn, place):
            waits_for("the end of its interrupted generation")
            waited: set[asyncio.Future[Any]] = {gone, *ending}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return

    async def _left(self, session: Session, pending: Pending) -> None:
        """A client has gone away."""
        pending.waiting -= 1
        if pending.waiting:
            return
        if self._store.shared and not pending.gateway:
            self._store.write_soon(lambda connection: mark_left(connection, pending.id))
        if not pending.answers.done():
            await self._sampler.interrupt(session, pending)

    def _note_delivered(self, session: Session, proven: list[int]) -> None:
        if proven:
            self._store.write_soon(lambda connection: mark_delivered(connection, session.attempt, proven))
            session.drop_delivered(proven)

    def _check_admission(self, session: Session, n: int) -> None:
        if session.ended or session.attempt[0] in self._closing:
            raise attempt_ended(session.attempt)
        if self._store.trouble:
            raise WireError(503, "store_failed", f"nothing can be stored now: {self._store.trouble}")
        if session.calls >= session.limits.calls:
            self._sampler.fault(session, LIMIT, f"budget: the limit of {session.limits.calls} calls was reached")
            raise WireError(403, "budget_exhausted", f"this attempt has used its {session.limits.calls} calls")
        at_once = f"at most {session.limits.at_once} answers are sampled for an attempt at once"
        if n > session.limits.at_once:
            raise WireError(400, "too_many_answers", f"{n} answers were asked for: {at_once}")
        if session.answers_at_once + n > session.limits.at_once:
            raise WireError(429, "rate_limit_exceeded", f"{at_once}: ask again when some have arrived")

    def _encode(self, session: Session, turn: Turn, place: Place) -> Segment:
        """The prompt's new tokens."""
        if turn.prompt is not None:
            return prompted(session.tree, place, turn.prompt, session.template)
        try:
            if session.history == History.TEMPLATE:
                return by_text(session.tree, place, turn.messages, turn.tools, session.template)
            return session.tree.segment(place, turn.tools, session.template)
        except TemplateError as error:
            raise WireError(400, "invalid_messages", str(error)) from error

    def _begin(self, session: Session, turn: Turn, place: Place, segment: Segment | None, chat_length: int) -> Pending:
        """Admit a call within its limits and start to sample its answers."""
        self._check_admission(session, turn.wanted.n)
        call, now = secrets.token_hex(8), time.time()
        choices = self._sampler.choices(session, turn, place, segment, chat_length, call)
        session.calls += 1
        most_tokens = sum(each.generation.max_tokens for each in choices)
        admitted = Admitted(call, self._gateway, place.prompt, most_tokens, now)
        self._store.write_soon(lambda connection: admit(connection, session.attempt, admitted, turn))
        previews = [Preview() for _ in choices] if turn.stream else []
        answers = asyncio.create_task(self._sampler.sample(session, turn, place, choices, call, previews))
        pending = Pending(call, place.prompt, answers, turn.wanted, previews, most_tokens)
        session.wait_for(pending)
        return pending

    def _delivered(self, session: Session, pending: Pending) -> None:
        numbers = [node.number for node in pending.answers.result()]
        for number in numbers:
            session.tree.nodes[number].delivered = True
        self._store.write_soon(lambda connection: mark_delivered(connection, session.attempt, numbers))
        session.handed_over(pending)


def _unanswered(sessions: list[Session]) -> list[tuple[Session, Pending]]:
    """The calls of this gateway that have no answer yet."""
    open_ = [(session, call) for session in sessions for call in session.calls_in_progress()]
    return [(session, call) for session, call in open_ if not (call.gateway or call.answers.done())]


def _address(scope: Scope) -> Address:
    return {**QueryParams(scope["query_string"]), **scope["path_params"]}


def _is_short(body: bytes, known: Beginning | None) -> bool:
    """Whether a request is read at once: what is new of it is small, and it says all itself."""
    new = len(body) - (len(known.whole) if known else 0)
    return new < ASIDE_BYTES and not any(name in body for name in (b"item_reference", b"previous_response_id"))


def _are_short(messages: list[dict[str, Any]]) -> bool:
    """Whether messages are encoded at once. Those of a known beginning are new where a request changes its tools."""
    contents = [message.get("content") for message in messages]
    return (
        len(messages) < 100
        and sum(len(each) if isinstance(each, str) else len(repr(each)) for each in contents) < ASIDE_BYTES
    )


def _parse(wire: Wire, session: Session, body: bytes, at: Address, known: Beginning | None) -> Turn:
    """The request, with the history that it leaves to the gateway. Raises WireError."""
    turn = wire.parse(body, at, known)
    if any(REFERENCE in message for message in turn.messages[turn.known :]):
        turn = replace(turn, messages=[_referred(session, message) for message in turn.messages])
    if not turn.after:
        return turn
    history = session.tree.said(turn.after)
    if history is None:
        raise WireError(400, "previous_response_not_found", f"this attempt has had no response resp_{turn.after}")
    return turn.following(history)


def _referred(session: Session, message: dict[str, Any]) -> dict[str, Any]:
    """The answer that stands in the place of a reference to it."""
    if REFERENCE not in message:
        return message
    answer = session.tree.answer(str(message[REFERENCE]))
    if answer is None:
        raise WireError(400, "item_not_found", f"this attempt has had no item with the id {message[REFERENCE]}")
    return answer


def prompted(tree: Tree, place: Place, prompt: str | list[int], template: ChatTemplate) -> Segment:
    """A context that the harness wrote itself. Where it repeats one with its answer, it goes on from there. Raises
    WireError (400)."""
    if isinstance(prompt, str):
        segment = by_written(tree, place, prompt, template, bare=True)
        if not (segment.ids or segment.parent):
            raise WireError(400, "invalid_request", "`prompt` has no tokens")
        return segment
    if max(prompt) >= template.size:
        raise WireError(400, "invalid_request", f"`prompt` holds a token id that is not below {template.size}")
    return by_ids(tree, place, prompt, template, bare=True)


def _retry_count(scope: Scope) -> int:
    """How often the client's SDK has sent this request before."""
    count = Headers(scope=scope).get("x-stainless-retry-count", "0")
    return int(count) if re.fullmatch("[0-9]{1,4}", count) else 0


async def _read_body(receive: Receive, most: int) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise WireError(400, "incomplete", "the connection was closed before the request was complete")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most:
            raise WireError(413, "too_large", f"the request is larger than {most} bytes, the setting gateway.body_mb")
        if not message.get("more_body"):
            return b"".join(pieces)
