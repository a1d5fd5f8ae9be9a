"""The control routes: runs, engines, groups, rollouts, attempts, rewards, events, and the long-poll of changes.

Trainer, controller and people call them through `client.py`, which describes each route. Bodies and answers are the
records of `records.py` as JSON; transcripts are msgpack, so that arrays stay bytes.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgpack
import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harnessed.config import ConfigError
from harnessed.gateway import closings, lifecycle, recording
from harnessed.gateway.engines import Engines
from harnessed.gateway.examine import examine
from harnessed.gateway.exchange import Exchange
from harnessed.gateway.keys import ADMIN, Key, Keyring, Scope
from harnessed.gateway.peers import Peers
from harnessed.gateway.store import Refused, Store
from harnessed.records import (
    Assignment,
    Closing,
    Ending,
    EngineSpec,
    Event,
    GroupSpec,
    Record,
    Reward,
    Rollout,
    RunSpec,
)

T = TypeVar("T")
LONGEST_WAIT_S = 60.0
SETTLE_LIMIT_S = 30.0
"""How long the end of an attempt waits for what the engine still generates for it."""
CANCEL_LIMIT_S = 4.0
"""Somebody waits for a cancellation; what the engine does not finish within this is lost, and counted so."""
MOST_EVENT_BYTES = 2**16


class _Claim(Record):
    run: str
    owner: str
    most: int
    attempts: int
    wait_s: float


class _Renewal(Record):
    owner: str


class _AttemptEnding(Ending):
    attempts: int


class Api:
    """The control routes of one gateway."""

    def __init__(self, store: Store, engines: Engines, exchange: Exchange, peers: Peers, keyring: Keyring) -> None:
        self._store = store
        self._peers = peers
        self._engines = engines
        self._exchange = exchange
        self._keyring = keyring
        self._stopping = False

    def stop(self) -> None:
        """Let long-polls answer now: the gateway is about to end."""
        self._stopping = True
        self._store.wake()

    def routes(self) -> list[Route]:
        return [
            Route("/api/runs", self._admin(self.create_run), methods=["POST"]),
            Route("/api/runs/{run}/template", self._admin(self.template)),
            Route("/api/runs/{run}/totals", self._admin(self.totals)),
            Route("/api/runs/{run}/cancel", self._admin(self.cancel_run), methods=["POST"]),
            Route("/api/runs/{run}/turnstile", self._admin(self.turnstile)),
            Route("/api/runs/{run}/turnstile/close", self._admin(self.close_turnstile), methods=["POST"]),
            Route("/api/runs/{run}/turnstile/renew", self._admin(self.renew_turnstile), methods=["POST"]),
            Route("/api/runs/{run}/turnstile/open", self._admin(self.open_turnstile), methods=["POST"]),
            Route("/api/engines", self._admin(self.register_engine), methods=["POST"]),
            Route("/api/engines", self._admin(self.list_engines)),
            Route("/api/groups", self._admin(self.create_groups), methods=["POST"]),
            Route("/api/groups", self._admin(self.list_groups)),
            Route("/api/groups/{group}", self._admin(self.get_group)),
            Route("/api/groups/{group}/cancel", self._admin(self.cancel_group), methods=["POST"]),
            Route("/api/groups/{group}/transcripts", self._admin(self.transcripts)),
            Route("/api/rollouts", self._admin(self.list_rollouts)),
            Route("/api/rollouts/{rollout}", self._admin(self.get_rollout)),
            Route("/api/rollouts/{rollout}/cancel", self._admin(self.cancel_rollout), methods=["POST"]),
            Route("/api/rollouts/{rollout}/events", self._admin(self.list_events)),
            Route("/api/rollouts/{rollout}/reward", self._guarded(self.post_reward), methods=["POST"]),
            Route("/api/rollouts/{rollout}/attempts/{n:int}/end", self._admin(self.end_attempt), methods=["POST"]),
            Route("/api/rollouts/{rollout}/attempts/{n:int}/held", self._admin(self.held)),
            Route("/api/attempts/claim", self._admin(self.claim), methods=["POST"]),
            Route("/api/attempts/renew", self._admin(self.renew), methods=["POST"]),
            Route("/api/events", self._guarded(self.append_event), methods=["POST"]),
            Route("/api/changes", self._admin(self.changes)),
        ]

    async def create_run(self, request: Request) -> Response:
        run = await _body(request, RunSpec)
        await asyncio.to_thread(self._exchange.policy, run.policy)
        now = time.time()
        return _answer(await self._store.write(lambda connection: lifecycle.create_run(connection, run, now)))

    async def template(self, request: Request) -> Response:
        known = {run.id: run for run in await self._store.read(lifecycle.list_runs)}
        run = known.get(request.path_params["run"])
        if run is None:
            raise Refused(404, f"no run {request.path_params['run']}")
        template = await asyncio.to_thread(self._exchange.policy, run.policy)
        return _answer(await asyncio.to_thread(examine, template))

    async def totals(self, request: Request) -> Response:
        run = request.path_params["run"]
        return _answer(await self._store.read(lambda connection: recording.totals(connection, run)))

    async def turnstile(self, request: Request) -> Response:
        return _answer(await self._peers.turnstile(request.path_params["run"]))

    async def close_turnstile(self, request: Request) -> Response:
        """Waits for what runs."""
        wanted = await _body(request, Closing)
        return _answer(await self._peers.close(request.path_params["run"], wanted))

    async def renew_turnstile(self, request: Request) -> Response:
        run, owner = request.path_params["run"], (await _body(request, _Renewal)).owner
        return _answer(await self._store.write(lambda connection: closings.renew(connection, run, owner, time.time())))

    async def open_turnstile(self, request: Request) -> Response:
        owner = (await _body(request, _Renewal)).owner
        return _answer(await self._peers.open(request.path_params["run"], owner))

    async def register_engine(self, request: Request) -> Response:
        engine = await _body(request, EngineSpec)
        await self._store.write(lambda connection: lifecycle.register_engine(connection, engine))
        self._engines.register(engine)
        return _answer(await self._engines.health(engine.id))

    async def list_engines(self, request: Request) -> Response:
        return _answer(await self._engines.list())

    async def create_groups(self, request: Request) -> Response:
        specs = await _body(request, list[GroupSpec])
        return _answer(
            await self._store.write(lambda connection: lifecycle.create_groups(connection, specs, time.time()))
        )

    async def list_groups(self, request: Request) -> Response:
        run = _query(request, "run")
        return _answer(await self._store.read(lambda connection: lifecycle.list_groups(connection, run)))

    async def get_group(self, request: Request) -> Response:
        group = request.path_params["group"]
        return _answer(await self._store.read(lambda connection: lifecycle.get_group(connection, group)))

    async def cancel_group(self, request: Request) -> Response:
        group = request.path_params["group"]
        known = await self._store.read(lambda connection: lifecycle.get_group(connection, group))
        await self._cancel([f"{group}.{index}" for index in range(known.n)])
        return _answer(await self._store.read(lambda connection: lifecycle.get_group(connection, group)))

    async def cancel_run(self, request: Request) -> Response:
        run = request.path_params["run"]
        rollouts = await self._store.read(lambda connection: lifecycle.unfinished(connection, run))
        await self._cancel(rollouts)
        return _answer(rollouts)

    async def _cancel(self, rollouts: list[str]) -> None:
        def cancel(connection: Connection) -> None:
            for rollout in rollouts:
                lifecycle.cancel_rollout(connection, rollout, time.time())
            recording.fail_open_calls(connection, rollouts, time.time())

        async with self._ending(rollouts, CANCEL_LIMIT_S):
            await self._store.write(cancel)

    @contextlib.asynccontextmanager
    async def _ending(self, rollouts: list[str], limit_s: float) -> AsyncIterator[None]:
        """Around the end of attempts, at this gateway and at the others."""
        async with self._exchange.closing(rollouts, limit_s), self._peers.ending(rollouts, limit_s):
            yield

    async def transcripts(self, request: Request) -> Response:
        group = request.path_params["group"]

        def pack(connection: Connection) -> bytes:
            packed: bytes = msgpack.packb([each.pack() for each in recording.load_transcripts(connection, group)])
            return packed

        return Response(await self._store.read(pack), media_type="application/msgpack")

    async def list_rollouts(self, request: Request) -> Response:
        run = _query(request, "run")
        return _answer(await self._store.read(lambda connection: lifecycle.list_rollouts(connection, run)))

    async def get_rollout(self, request: Request) -> Response:
        rollout = request.path_params["rollout"]
        return _answer(await self._store.read(lambda connection: lifecycle.get_rollout(connection, rollout)))

    async def cancel_rollout(self, request: Request) -> Response:
        rollout = request.path_params["rollout"]
        await self._store.read(lambda connection: lifecycle.get_rollout(connection, rollout))
        await self._cancel([rollout])
        return _answer(await self._store.read(lambda connection: lifecycle.get_rollout(connection, rollout)))

    async def list_events(self, request: Request) -> Response:
        rollout = request.path_params["rollout"]
        return _answer(await self._store.read(lambda connection: lifecycle.list_events(connection, rollout)))

    async def post_reward(self, request: Request, key: Key) -> Response:
        rollout = request.path_params["rollout"]
        if key != ADMIN and key != Key(Scope.EVALUATOR, rollout):
            raise Refused(403, f"only the evaluator of rollout {rollout} may post its reward")
        reward = await _body(request, Reward, MOST_EVENT_BYTES)
        return _answer(await self._store.write(lambda connection: lifecycle.post_reward(connection, rollout, reward)))

    async def end_attempt(self, request: Request) -> Response:
        rollout, attempt = request.path_params["rollout"], request.path_params["n"]
        ending = await _body(request, _AttemptEnding)

        def end(connection: Connection) -> Rollout:
            return lifecycle.end_attempt(connection, rollout, attempt, ending, ending.attempts, time.time())

        if (await self._store.read(lambda connection: lifecycle.get_rollout(connection, rollout))).attempt != attempt:
            return _answer(await self._store.write(end))  # refuses, and leaves alone the attempt that lives
        async with self._ending([rollout], SETTLE_LIMIT_S):
            return _answer(await self._store.write(end))

    async def claim(self, request: Request) -> Response:
        """Waits for the first queued rollout: a slot that is free starts work as soon as there is some."""
        wanted = await _body(request, _Claim)
        deadline = time.monotonic() + min(wanted.wait_s, LONGEST_WAIT_S)
        while True:
            changed = self._store.next_change()
            if await request.is_disconnected():  # nobody would run what is claimed
                return _answer([])
            claimed = await self._store.write(
                lambda connection: lifecycle.claim(
                    connection, wanted.run, wanted.owner, wanted.most, wanted.attempts, time.time()
                )
            )
            if claimed or self._stopping or not await _set_before(changed, deadline):
                break
        return _answer([self._assignment(rollout, task) for rollout, task in claimed])

    async def renew(self, request: Request) -> Response:
        owner = (await _body(request, _Renewal)).owner
        return _answer(await self._store.write(lambda connection: lifecycle.renew(connection, owner, time.time())))

    async def held(self, request: Request) -> Response:
        rollout, attempt = request.path_params["rollout"], request.path_params["n"]
        return _answer(
            await self._store.read(lambda connection: lifecycle.held_seconds(connection, rollout, attempt, time.time()))
        )

    async def append_event(self, request: Request, key: Key) -> Response:
        event = await _body(request, Event, MOST_EVENT_BYTES)
        if key != ADMIN and key != Key(Scope.ATTEMPT, event.rollout, event.attempt):
            raise Refused(403, "an attempt's key can append events of its own attempt only")
        try:
            orjson.dumps(event.data)
        except orjson.JSONEncodeError as error:
            raise Refused(400, f"the event's data cannot be kept: {error}") from None
        await self._store.write(
            lambda connection: lifecycle.append_event(connection, event, time.time(), live=key != ADMIN)
        )
        return _answer({})

    async def changes(self, request: Request) -> Response:
        run, after = _query(request, "run"), int(_query(request, "after"))
        deadline = time.monotonic() + min(float(_query(request, "wait_s")), LONGEST_WAIT_S)
        while True:
            changed = self._store.next_change()
            found = await self._store.read(lambda connection: lifecycle.list_changes(connection, run, after))
            if found or self._stopping or not await _set_before(changed, deadline):
                return _answer(found)

    def _assignment(self, rollout: Rollout, task: dict[str, Any]) -> Assignment:
        return Assignment(
            rollout=rollout.id,
            attempt=rollout.attempt,
            run=rollout.run,
            task=task,
            key=self._keyring.sign(Key(Scope.ATTEMPT, rollout.id, rollout.attempt)),
            evaluator_key=self._keyring.sign(Key(Scope.EVALUATOR, rollout.id)),
        )

    def _admin(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request, key: Key) -> Response:
            if key != ADMIN:
                raise Refused(403, f"this route needs the admin key; a key of scope {key.scope} was sent")
            return await handler(request)

        return self._guarded(checked)

    def _guarded(
        self, handler: Callable[[Request, Key], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Read the key, and turn what handlers raise into answers that say why."""

        async def guarded(request: Request) -> Response:
            key = self._keyring.read(request.headers.get("authorization", "").removeprefix("Bearer ").strip())
            if key is None:
                return _error(401, "send a key that this gateway made as `Authorization: Bearer KEY`")
            try:
                return await handler(request, key)
            except Refused as error:
                return _error(error.status, str(error))
            except (ConfigError, ValueError) as error:
                return _error(400, " ".join(str(error).split()))

        return guarded


async def _body(request: Request, type_: type[T], most: int | None = None) -> T:
    """The request's body as a record. Raises ValueError (400), or Refused for more than `most` bytes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if most is not None and len(body) > most:
            raise Refused(413, f"this request has at most {most} bytes")
    try:
        return TypeAdapter(type_).validate_json(body)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}") from None


def _query(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise ValueError(f"the query needs {name}=")
    return value


async def _set_before(event: asyncio.Event, deadline: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), deadline - time.monotonic())
    except TimeoutError:
        return False
    return True


def _answer(value: Any) -> Response:
    return Response(orjson.dumps(value, default=_as_json), media_type="application/json")


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} does not cross the wire")


def _error(status: int, message: str) -> Response:
    return Response(orjson.dumps({"error": {"message": message}}), status, media_type="application/json")
