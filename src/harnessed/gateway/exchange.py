"""One call from arrival to stored record: the hot path. `routes.py` calls it for every protocol.

Read `Exchange.serve` from top to bottom. What can be refused is refused before the first byte; the answer is durable
before its last byte goes out; a generation belongs to the attempt, not to the connection: a client that goes away and
comes back with the same request gets the answer that was made for it.
"""

import asyncio
import re
import secrets
import time
from functools import partial
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from harnessed.gateway.attempts import Attempts
from harnessed.gateway.delivery import CONNECTION, Connection, deliver, send_json
from harnessed.gateway.intake import Asked, Intake
from harnessed.gateway.keys import Key, Keyring, bearer_key
from harnessed.gateway.keys import Scope as KeyScope
from harnessed.gateway.preview import Preview
from harnessed.gateway.progress import STORE, current, waits_for
from harnessed.gateway.recording import Admitted, admit, admit_alone, mark_delivered, mark_left
from harnessed.gateway.sampling import LIMIT, Sampler
from harnessed.gateway.session import Pending, Session, attempt_ended
from harnessed.gateway.store import Refused, Store
from harnessed.gateway.transcript import Place
from harnessed.gateway.wire.turn import Address, Turn, Wire, WireError

SIGHT_S = 0.1
"""The store shows within this time that a gateway has died, or what another one has done."""


class Exchange:
    """All model calls of one gateway."""

    def __init__(
        self, store: Store, attempts: Attempts, intake: Intake, sampler: Sampler, keyring: Keyring, gateway: str
    ) -> None:
        """`gateway`: the id of this process among those of the store."""
        self._store = store
        self._attempts = attempts
        self._intake = intake
        self._sampler = sampler
        self._keyring = keyring
        self._gateway = gateway

    async def serve(self, wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of a protocol."""
        progress = current()
        try:
            session = await self._session(scope)
            progress.of(session.run, session.attempt)
            body = await self._intake.body(receive)
            connection: Connection = scope["extensions"][CONNECTION]["of"]
            connection.watch()
            if session.outdated:  # while the body came
                session = await self._session(scope)
            await self._attempts.catch_up(session)
            asked = await self._intake.read(wire, session, body, _address(scope))
            progress.streamed = asked.turn.stream
            self._note_delivered(session, asked.proven)
            gone = connection.gone
            retry_count = session.retry_count(asked.place.prompt, asked.turn.wanted, _retry_count(scope))
            pending = await self._repeated(session, asked.turn, asked.place, retry_count, gone)
            if gone.done():
                if pending:
                    pending.waiting -= 1
                return
            pending = pending or await self._begin(session, asked)
            progress.joins(pending.id, pending.stage)
            arrived = await deliver(send, gone, wire, session, pending, asked.turn)
            if not (arrived or gone.done()):
                progress.breaks(pending.answers)
                connection.reset()
        except WireError as error:
            progress.error = error
            if error.code == "store_failed":
                self._attempts.failed_by_store((progress.rollout, progress.attempt), error.message)
            await send_json(send, error.status, wire.render_error(error))
            return
        if arrived:
            self._delivered(session, pending)
        else:
            await self._left(session, pending)

    async def count_tokens(self, wire: Wire, scope: Scope, receive: Receive) -> int:
        """How long the prompt of a request would be. Nothing is recorded. Raises WireError."""
        session = await self._session(scope)
        return await self._intake.count(wire, session, await self._intake.body(receive), _address(scope))

    async def _session(self, scope: Scope) -> Session:
        """Of the attempt that calls. Raises WireError."""
        key = self.key(scope)
        return await self._attempts.session((key.rollout, key.attempt))

    def key(self, scope: Scope) -> Key:
        """Of the attempt that calls. Raises WireError."""
        headers = Headers(scope=scope)
        text = scope["path_params"].get("key") or bearer_key(headers.get("authorization", ""))
        text = text or headers.get("x-api-key") or headers.get("x-goog-api-key") or _address(scope).get("key", "")
        key = self._keyring.read(text)
        if key is None:
            raise WireError(401, "invalid_api_key", "this key was not made by this gateway; use the attempt's key")
        if key.scope != KeyScope.ATTEMPT:
            raise WireError(403, "wrong_key", f"a key of scope {key.scope} cannot call the model; use an attempt's key")
        return key

    async def _repeated(
        self, session: Session, turn: Turn, place: Place, retry_count: int, gone: "asyncio.Future[None]"
    ) -> Pending | None:
        """The call that this request repeats; its gateway, if that is another one, has answered it. None: the request
        is a new one, or its client is gone."""
        if session.begun_elsewhere(turn, place):
            await asyncio.sleep(SIGHT_S)
            await self._attempts.catch_up(session)
        while not gone.done():
            await self._end_of_interruption(session, turn, place, gone)
            elsewhere = session.begun_elsewhere(turn, place)
            if not any(pending.unseen or retry_count or not pending.waiting for pending in elsewhere):
                return session.retried(turn, place, retry_count)
            waits_for(f"gateway {elsewhere[0].gateway}")
            await asyncio.sleep(SIGHT_S)
            await self._attempts.catch_up(session)
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
            self._store.write_later(lambda connection: mark_delivered(connection, session.attempt, proven))
            session.drop_delivered(proven)

    def _check_admission(self, session: Session, asked: Asked) -> None:
        n, key = asked.turn.wanted.n, (asked.place.prompt, asked.turn.wanted)
        self._attempts.check(session)
        if self._store.trouble:
            raise WireError(503, "store_failed", f"nothing can be stored now: {self._store.trouble}")
        if session.calls >= session.limits.calls:
            raise self._no_more_calls(session)
        at_once = f"at most {session.limits.at_once} answers are sampled for an attempt at once"
        if n > session.limits.at_once:
            raise WireError(400, "too_many_answers", f"{n} answers were asked for: {at_once}")
        if session.answers_at_once + n > session.limits.at_once:
            session.refused[key] += 1
            raise WireError(429, "rate_limit_exceeded", f"{at_once}: ask again when some have arrived")

    async def _begin(self, session: Session, asked: Asked) -> Pending:
        """Admit a call within its limits and start to sample its answers."""
        turn, place = asked.turn, asked.place
        self._check_admission(session, asked)
        call, now = secrets.token_hex(8), time.time()
        begun = [] if asked.segment is None else session.take_interrupted(place.prompt, turn.wanted)
        choices = self._sampler.choices(session, asked, call, begun)
        session.calls += 1
        session.admitted += 1
        most_tokens = sum(each.generation.max_tokens for each in choices)
        admitted = Admitted(call, self._gateway, place.prompt, most_tokens, now)
        note = partial(admit, attempt=session.attempt, admitted=admitted, turn=turn)
        if not self._store.shared:
            self._store.write_soon(note)
        elif not await self._admit_alone(session, admitted, turn):
            choices = self._sampler.choices(session, asked, call, [])
        previews = [Preview() for _ in choices] if turn.stream else []
        answers = asyncio.create_task(self._sampler.sample(session, turn, place, choices, call, previews, note))
        pending = Pending(call, place.prompt, answers, turn.wanted, previews, most_tokens)
        session.wait_for(pending)
        return pending

    async def _admit_alone(self, session: Session, admitted: Admitted, turn: Turn) -> bool:
        """Where other gateways serve the attempt too: whether none of them goes on with what was begun of this answer.
        Raises WireError."""
        waits_for(STORE)
        try:
            return await self._store.write(
                partial(admit_alone, attempt=session.attempt, admitted=admitted, turn=turn, most=session.limits.calls)
            )
        except Refused as error:
            if error.status == 403:
                raise attempt_ended(session.attempt) from error
            raise self._no_more_calls(session) from error

    def _no_more_calls(self, session: Session) -> WireError:
        self._sampler.fault(session, LIMIT, f"budget: the limit of {session.limits.calls} calls was reached")
        return WireError(403, "budget_exhausted", f"this attempt has used its {session.limits.calls} calls")

    def _delivered(self, session: Session, pending: Pending) -> None:
        numbers = [node.number for node in pending.answers.result()]
        for number in numbers:
            session.tree.nodes[number].delivered = True
        self._store.write_later(lambda connection: mark_delivered(connection, session.attempt, numbers))
        session.handed_over(pending)
        self._attempts.overcame_store(session.attempt)


def _address(scope: Scope) -> Address:
    query = scope["query_string"]
    return {**QueryParams(query), **scope["path_params"]} if query else dict(scope["path_params"])


def _retry_count(scope: Scope) -> int:
    """How often the client's SDK has sent this request before."""
    count = Headers(scope=scope).get("x-stainless-retry-count", "0")
    return int(count) if re.fullmatch("[0-9]{1,4}", count) else 0
