"""The control routes: runs, engines, groups, rollouts, attempts, rewards, events, and the long-poll of changes.

Trainer, controller and people call them through `client.py`, which describes each route. Bodies and answers are the
records of `records.py` as JSON; transcripts are msgpack, so that arrays stay bytes.
"""

import asyncio
import re
import time
from functools import partial
from typing import Any

import msgpack
from pydantic import Field
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.routing import Route

from harnessed.gateway import closings, controllers, lifecycle, metrics, recording
from harnessed.gateway.attempts import Attempts
from harnessed.gateway.engines import Engines
from harnessed.gateway.examine import examine
from harnessed.gateway.keys import ADMIN, Key, Keyring, Scope
from harnessed.gateway.openapi import description_routes
from harnessed.gateway.operations import Operation, Packed, number, query
from harnessed.gateway.peers import Peers
from harnessed.gateway.status import Board
from harnessed.gateway.store import Refused, Store
from harnessed.records import (
    NAME,
    Assignment,
    Change,
    Closing,
    Ending,
    Engine,
    EngineSpec,
    Event,
    Examination,
    Fate,
    Group,
    GroupSpec,
    Metrics,
    Presence,
    Record,
    Reward,
    Rollout,
    RunSpec,
    Status,
    Totals,
    Turnstile,
)

LONGEST_WAIT_S = 60.0
SETTLE_LIMIT_S = 30.0
"""How long the end of an attempt waits for what the engine still generates for it."""
CANCEL_LIMIT_S = 4.0
"""Somebody waits for a cancellation; what the engine does not finish within this is lost, and counted so."""
AT_ONCE = 1000
"""Rollouts that are cancelled in one transaction."""
MOST_EVENT_BYTES = 2**16


class Claim(Record):
    run: str
    owner: str
    most: int = Field(ge=0, lt=2**31)
    attempts: int = Field(ge=1, lt=2**31)
    wait_s: float


class Renewal(Record):
    owner: str


class ControllerRenewal(Renewal):
    presence: Presence | None = None


class AttemptEnding(Ending):
    attempts: int = Field(lt=2**31)


class Api:
    """The control routes of one gateway."""

    def __init__(
        self, store: Store, engines: Engines, attempts: Attempts, peers: Peers, keyring: Keyring, board: Board
    ) -> None:
        self._store = store
        self._peers = peers
        self._engines = engines
        self._attempts = attempts
        self._keyring = keyring
        self._board = board
        self._stopping = False

    def stop(self) -> None:
        """Let long-polls answer now: the gateway is about to end."""
        self._stopping = True
        self._store.wake()

    def operations(self) -> list[Operation]:
        """The table of control routes."""
        attempt = (Scope.ADMIN, Scope.ATTEMPT)
        evaluator = (Scope.ADMIN, Scope.EVALUATOR)
        run, wait = {"run": str}, {"run": str, "after": int, "wait_s": float}
        return [
            Operation("POST", "/api/runs", self.create_run),
            Operation("GET", "/api/runs/{run}/template", self.examine_template),
            Operation("GET", "/api/runs/{run}/totals", self.get_totals),
            Operation("POST", "/api/runs/{run}/cancel", self.cancel_run),
            Operation("POST", "/api/runs/{run}/metrics", self.post_metrics),
            Operation("GET", "/api/runs/{run}/metrics", self.list_metrics, query={"after": int}),
            Operation("DELETE", "/api/runs/{run}/metrics", self.forget_metrics, query={"above": int}),
            Operation("POST", "/api/runs/{run}/fates", self.post_fates),
            Operation("GET", "/api/runs/{run}/turnstile", self.get_turnstile),
            Operation("POST", "/api/runs/{run}/turnstile/close", self.close_turnstile),
            Operation("POST", "/api/runs/{run}/turnstile/renew", self.renew_turnstile),
            Operation("POST", "/api/runs/{run}/turnstile/open", self.open_turnstile),
            Operation("POST", "/api/engines", self.register_engine),
            Operation("GET", "/api/engines", self.list_engines),
            Operation("DELETE", "/api/engines/{engine}", self.remove_engine),
            Operation("POST", "/api/groups", self.create_groups),
            Operation("GET", "/api/groups", self.list_groups, query=run),
            Operation("GET", "/api/groups/{group}", self.get_group),
            Operation("POST", "/api/groups/{group}/cancel", self.cancel_group),
            Operation("GET", "/api/groups/{group}/transcripts", self.get_transcripts),
            Operation("GET", "/api/rollouts", self.list_rollouts, query=run),
            Operation("GET", "/api/rollouts/{rollout}", self.get_rollout),
            Operation("POST", "/api/rollouts/{rollout}/cancel", self.cancel_rollout),
            Operation("GET", "/api/rollouts/{rollout}/events", self.list_events),
            Operation(
                "POST", "/api/rollouts/{rollout}/reward", self.post_reward, evaluator, most_bytes=MOST_EVENT_BYTES
            ),
            Operation("POST", "/api/rollouts/{rollout}/attempts/{n:int}/end", self.end_attempt),
            Operation("GET", "/api/rollouts/{rollout}/attempts/{n:int}/held", self.get_held_seconds),
            Operation("POST", "/api/attempts/claim", self.claim),
            Operation("POST", "/api/attempts/renew", self.renew),
            Operation("POST", "/api/events", self.append_event, attempt, most_bytes=MOST_EVENT_BYTES),
            Operation("GET", "/api/changes", self.list_changes, query=wait),
            Operation("GET", "/api/status", self.get_status),
        ]

    def routes(self) -> list[Route]:
        operations = self.operations()
        return [*(each.route(self._keyring) for each in operations), *description_routes(operations)]

    async def create_run(self, request: Request, body: RunSpec) -> RunSpec:
        if not re.fullmatch(NAME, body.id):
            raise Refused(400, f"a run's id is its name in addresses, and fits {NAME}: {body.id[:150]!r} does not")
        await asyncio.to_thread(self._attempts.policy, body.policy)
        return await self._store.write(lambda connection: lifecycle.create_run(connection, body, time.time()))

    async def examine_template(self, request: Request) -> Examination:
        known = {run.id: run for run in await self._store.read(lifecycle.list_runs)}
        run = known.get(request.path_params["run"])
        if run is None:
            raise Refused(404, f"no run {request.path_params['run']}")
        template = await asyncio.to_thread(self._attempts.policy, run.policy)
        return await asyncio.to_thread(examine, template)

    async def get_totals(self, request: Request) -> Totals:
        run = request.path_params["run"]
        return await self._store.read(lambda connection: recording.totals(connection, run))

    async def post_metrics(self, request: Request, body: Metrics) -> None:
        run = request.path_params["run"]
        await self._store.write(lambda connection: metrics.append(connection, run, body, time.time()))

    async def list_metrics(self, request: Request) -> list[Metrics]:
        run, after = request.path_params["run"], number(request, "after")
        return await self._store.read(lambda connection: metrics.after(connection, run, after))

    async def forget_metrics(self, request: Request) -> None:
        run, above = request.path_params["run"], number(request, "above")
        await self._store.write(lambda connection: metrics.forget(connection, run, above))

    async def post_fates(self, request: Request, body: dict[str, dict[Fate, int]]) -> None:
        run = request.path_params["run"]
        await self._store.write(lambda connection: metrics.keep_fates(connection, run, body))

    async def get_turnstile(self, request: Request) -> Turnstile:
        return await self._peers.turnstile(request.path_params["run"])

    async def close_turnstile(self, request: Request, body: Closing) -> Turnstile:
        """Waits for what runs."""
        return await self._peers.close(request.path_params["run"], body)

    async def renew_turnstile(self, request: Request, body: Renewal) -> Turnstile:
        run = request.path_params["run"]
        return await self._store.write(lambda connection: closings.renew(connection, run, body.owner, time.time()))

    async def open_turnstile(self, request: Request, body: Renewal) -> Turnstile:
        return await self._peers.open(request.path_params["run"], body.owner)

    async def register_engine(self, request: Request, body: EngineSpec) -> Engine:
        await self._store.write(lambda connection: lifecycle.register_engine(connection, body))
        self._engines.register(body)
        return await self._engines.health(body.id)

    async def list_engines(self, request: Request) -> list[Engine]:
        return await self._engines.ask_all()

    async def remove_engine(self, request: Request) -> None:
        engine = request.path_params["engine"]
        await self._store.write(lambda connection: lifecycle.remove_engine(connection, engine))
        await self._engines.remove(engine)

    async def create_groups(self, request: Request, body: list[GroupSpec]) -> list[Group]:
        return await self._store.write(lambda connection: lifecycle.create_groups(connection, body, time.time()))

    async def list_groups(self, request: Request) -> list[Group]:
        run = query(request, "run")
        return await self._store.read(lambda connection: lifecycle.list_groups(connection, run))

    async def get_group(self, request: Request) -> Group:
        group = request.path_params["group"]
        return await self._store.read(lambda connection: lifecycle.get_group(connection, group))

    async def cancel_group(self, request: Request) -> Group:
        group = request.path_params["group"]
        known = await self._store.read(lambda connection: lifecycle.get_group(connection, group))
        await self._cancel([f"{group}.{index}" for index in range(known.n)])
        return await self._store.read(lambda connection: lifecycle.get_group(connection, group))

    async def cancel_run(self, request: Request) -> list[str]:
        run = request.path_params["run"]
        rollouts = await self._store.read(lambda connection: lifecycle.unfinished(connection, run))
        await self._cancel(rollouts)
        return rollouts

    async def _cancel(self, rollouts: list[str]) -> None:
        for at in range(0, len(rollouts), AT_ONCE):
            part = rollouts[at : at + AT_ONCE]
            async with self._attempts.ending(part, CANCEL_LIMIT_S):
                await self._store.write(partial(_cancel, rollouts=part))

    async def get_transcripts(self, request: Request) -> Packed:
        group = request.path_params["group"]

        def pack(connection: Connection) -> bytes:
            packed: bytes = msgpack.packb([each.pack() for each in recording.load_transcripts(connection, group)])
            return packed

        return Packed(await self._store.read(pack))

    async def list_rollouts(self, request: Request) -> list[Rollout]:
        run = query(request, "run")
        return await self._store.read(lambda connection: lifecycle.list_rollouts(connection, run))

    async def get_rollout(self, request: Request) -> Rollout:
        rollout = request.path_params["rollout"]
        return await self._store.read(lambda connection: lifecycle.get_rollout(connection, rollout))

    async def cancel_rollout(self, request: Request) -> Rollout:
        rollout = request.path_params["rollout"]
        await self._store.read(lambda connection: lifecycle.get_rollout(connection, rollout))
        await self._cancel([rollout])
        return await self._store.read(lambda connection: lifecycle.get_rollout(connection, rollout))

    async def list_events(self, request: Request) -> list[Event]:
        rollout = request.path_params["rollout"]
        return await self._store.read(lambda connection: lifecycle.list_events(connection, rollout))

    async def post_reward(self, request: Request, key: Key, body: Reward) -> Rollout:
        rollout = request.path_params["rollout"]
        if key != ADMIN and key != Key(Scope.EVALUATOR, rollout):
            raise Refused(403, f"only the evaluator of rollout {rollout} may post its reward")
        return await self._store.write(lambda connection: lifecycle.post_reward(connection, rollout, body))

    async def end_attempt(self, request: Request, body: AttemptEnding) -> Rollout:
        rollout, attempt = request.path_params["rollout"], request.path_params["n"]

        def end(connection: Connection) -> Rollout:
            recording.fail_open_calls(connection, [rollout], time.time())
            return lifecycle.end_attempt(connection, rollout, attempt, body, body.attempts, time.time())

        if (await self._store.read(lambda connection: lifecycle.get_rollout(connection, rollout))).attempt != attempt:
            return await self._store.write(end)  # refuses, and leaves alone the attempt that lives
        async with self._attempts.ending([rollout], SETTLE_LIMIT_S):
            return await self._store.write(end)

    async def claim(self, request: Request, body: Claim) -> list[Assignment]:
        """Waits for the first queued rollout: a slot that is free starts work as soon as there is some."""
        deadline = time.monotonic() + min(body.wait_s, LONGEST_WAIT_S)
        while True:
            changed = self._store.next_change()
            if await request.is_disconnected():  # nobody would run what is claimed
                return []
            claimed = await self._store.write(
                lambda connection: lifecycle.claim(
                    connection, body.run, body.owner, body.most, body.attempts, time.time()
                )
            )
            if claimed or self._stopping or not await _set_before(changed, deadline):
                break
        return [self._assignment(rollout, task) for rollout, task in claimed]

    async def renew(self, request: Request, body: ControllerRenewal) -> list[str]:
        def renew(connection: Connection) -> list[str]:
            now = time.time()
            controllers.keep(connection, body.owner, body.presence, now)
            return lifecycle.renew(connection, body.owner, now)

        return await self._store.write(renew)

    async def get_held_seconds(self, request: Request) -> float:
        rollout, attempt = request.path_params["rollout"], request.path_params["n"]
        return await self._store.read(
            lambda connection: lifecycle.held_seconds(connection, rollout, attempt, time.time())
        )

    async def append_event(self, request: Request, key: Key, body: Event) -> None:
        if key != ADMIN and key != Key(Scope.ATTEMPT, body.rollout, body.attempt):
            raise Refused(403, "an attempt's key can append events of its own attempt only")
        await self._store.write(
            lambda connection: lifecycle.append_event(connection, body, time.time(), live=key != ADMIN)
        )

    async def list_changes(self, request: Request) -> list[Change]:
        run, after = query(request, "run"), number(request, "after")
        deadline = time.monotonic() + min(float(query(request, "wait_s")), LONGEST_WAIT_S)
        while True:
            changed = self._store.next_change()
            found = await self._store.read(lambda connection: lifecycle.list_changes(connection, run, after))
            if found or self._stopping or not await _set_before(changed, deadline):
                return found

    async def get_status(self, request: Request) -> Status:
        return await self._board.status()

    def _assignment(self, rollout: Rollout, task: dict[str, Any]) -> Assignment:
        return Assignment(
            rollout=rollout.id,
            attempt=rollout.attempt,
            run=rollout.run,
            task=task,
            key=self._keyring.sign(Key(Scope.ATTEMPT, rollout.id, rollout.attempt)),
            evaluator_key=self._keyring.sign(Key(Scope.EVALUATOR, rollout.id)),
        )


async def _set_before(event: asyncio.Event, deadline: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), deadline - time.monotonic())
    except TimeoutError:
        return False
    return True


def _cancel(connection: Connection, rollouts: list[str]) -> None:
    for rollout in rollouts:
        lifecycle.cancel_rollout(connection, rollout, time.time())
    recording.fail_open_calls(connection, rollouts, time.time())
