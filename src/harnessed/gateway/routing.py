"""Which engine serves a rollout: the engines of every run, their health, and how much runs on each.

`engines.py` asks here before each generation and says which engine it lost. A rollout stays on its engine, whose cache
knows its beginning, while that is healthy; one that had to move stays where it is. For a new one, a hash of both ids
ranks the run's healthy engines, and the first takes it that does not have more than its share of what runs now. So load
is spread, and gateways that do not know of each other mostly choose alike.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import orjson

from harnessed.records import Dialect, Engine, EngineSpec

log = logging.getLogger("harnessed.gateway.routing")

HEALTH_LIMIT_S = 5.0
HEALTHY_EVERY_S, UNHEALTHY_EVERY_S = 2.0, 0.5
"""How often an engine is asked for its health."""
SHARE = 1.25
"""Of the mean number of generations: an engine that has as many gets no new rollout."""


@dataclass(slots=True, eq=False)
class Server:
    """An engine as this gateway sees it."""

    spec: EngineSpec
    health: Engine
    """As last heard; until then it is taken for healthy."""
    in_flight: int = 0
    """Generations of this gateway."""
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to be asked for its health now."""
    watch: "asyncio.Task[None] | None" = None

    @property
    def record(self) -> Engine:
        return self.health.model_copy(update={"in_flight": self.in_flight})


class Routing:
    """The engines of all runs. `close` it before its HTTP session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._servers: dict[str, Server] = {}
        self._homes: dict[str, str] = {}
        """Rollout -> id of the engine where it is."""
        self._changed = asyncio.Event()

    def register(self, spec: EngineSpec) -> None:
        """The same id replaces."""
        known = self._servers.get(spec.id)
        if known and known.spec == spec:
            return
        self.remove(spec.id)
        server = self._servers[spec.id] = Server(spec, Engine(**spec.model_dump(), healthy=True, since=time.time()))
        server.watch = asyncio.create_task(self._watch(server))
        self.wake()

    def remove(self, id: str) -> Server | None:
        """What runs there is the caller's to end."""
        server = self._servers.pop(id, None)
        if server and server.watch:
            server.watch.cancel()
            self.wake()
        return server

    def servers(self, run: str | None = None) -> list[Server]:
        """Of one run, or all."""
        return [server for server in self._servers.values() if run in (None, server.spec.run)]

    def choose(self, run: str, rollout: str, lost: Collection[str]) -> Server | None:
        """Where the rollout's next generation runs; None: no engine of the run is healthy now. `lost`: engines that
        failed this generation, the last ones to be asked again."""
        at_home = self._servers.get(self._homes.get(rollout, ""))
        if at_home and at_home.spec.run == run and at_home.health.healthy and at_home.spec.id not in lost:
            return at_home
        healthy = [server for server in self.servers(run) if server.health.healthy]
        fit = [server for server in healthy if server.spec.id not in lost] or healthy
        if not fit:
            return None
        by_id = {server.spec.id: server for server in fit}
        home = self._homes.get(rollout, "")
        if home not in by_id:
            home = self._homes[rollout] = pick(rollout, {id: server.in_flight for id, server in by_id.items()})
        return by_id[home]

    def forget(self, rollout: str) -> None:
        self._homes.pop(rollout, None)

    def doubt(self, server: Server, reason: str) -> None:
        """A generation has lost its engine: nobody else is sent there before it says that it is healthy."""
        self._hear(server, Engine(**server.spec.model_dump(), healthy=False, reason=reason))
        server.doubted.set()

    def trouble(self, run: str, rollout: str) -> str:
        """Why the engine of the rollout is out of reach; empty if it is not."""
        if not any(server.health.healthy for server in self.servers(run)):
            return self.troubles(run)
        home = self._servers.get(self._homes.get(rollout, ""))
        return "" if home is None or home.health.healthy else f"engine {home.spec.id}: {home.health.reason}"

    def troubles(self, run: str) -> str:
        """What is wrong with each engine of a run that has no healthy one."""
        each = [f"engine {server.spec.id}: {server.health.reason}" for server in self.servers(run)]
        return "; ".join(each) or f"run {run} has no engine: register one"

    def wake(self) -> None:
        """Let those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed_before(self, deadline: float) -> bool:
        """Waits until an engine has become healthy, or come or gone; false: not before that time of the loop."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def ask(self, server: Server) -> Engine:
        """Its health, now."""
        self._hear(server, await ask_health(self._session, server.spec))
        return server.record

    async def ask_all(self) -> list[Engine]:
        return list(await asyncio.gather(*(self.ask(server) for server in self.servers())))

    async def close(self) -> None:
        watches = [server.watch for server in self.servers() if server.watch]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        while True:
            await self.ask(server)
            with suppress(TimeoutError):
                # Not `wait_for`: that of Python 3.11 misses its cancellation if the event is set in the same moment.
                async with asyncio.timeout(HEALTHY_EVERY_S if server.health.healthy else UNHEALTHY_EVERY_S):
                    await server.doubted.wait()
            server.doubted.clear()

    def _hear(self, server: Server, health: Engine) -> None:
        before = server.health
        since = before.since if before.healthy == health.healthy else time.time()
        server.health = health.model_copy(update={"since": since})
        if before.healthy and not health.healthy:
            log.warning("engine %s of run %s is not healthy: %s", server.spec.id, server.spec.run, health.reason)
        elif health.healthy and not before.healthy:
            log.info("engine %s of run %s is healthy again", server.spec.id, server.spec.run)
            self.wake()


def pick(rollout: str, in_flight: Mapping[str, int]) -> str:
    """The id of the engine for a new rollout: rendezvous hashing with bounded loads."""
    most = SHARE * (sum(in_flight.values()) + 1) / len(in_flight)
    free = [id for id, running in in_flight.items() if running < most]  # the least busy one always is
    return max(free, key=lambda id: hashlib.blake2b(f"{rollout} {id}".encode(), digest_size=8).digest())


async def ask_health(session: aiohttp.ClientSession, spec: EngineSpec) -> Engine:
    fields = spec.model_dump()
    try:
        limit = aiohttp.ClientTimeout(total=HEALTH_LIMIT_S)
        async with session.get(f"{spec.url}/health", timeout=limit, allow_redirects=False) as response:
            body = await response.read()
        if response.status != 200:
            return Engine(**fields, healthy=False, reason=reason_in(body, response.status))
        if spec.speaks == Dialect.CHAT:  # it says nothing but that it is there
            return Engine(**fields, healthy=True)
        health = orjson.loads(body)
        return Engine(
            **fields,
            healthy=health["status"] == "ok",
            reason=health["reason"],
            sampled_tokens=health["sampled_tokens"],
            version=health["version"],
            running=health.get("running"),
            waiting=health.get("waiting"),
            paused=health.get("paused", False),
        )
    except TimeoutError:
        return Engine(**fields, healthy=False, reason=f"no answer to GET /health within {HEALTH_LIMIT_S:.0f} s")
    except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
        return Engine(**fields, healthy=False, reason=f"{type(error).__name__} {error}".strip())


def reason_in(body: bytes, status: int) -> str:
    """The engine's own words, where it speaks our protocol; else the beginning of what it said."""
    if 300 <= status < 400:
        return f"status {status}: redirects are not followed; register it with the address that they lead to"
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"status {status} {body[:200].decode(errors='replace')}".rstrip()
