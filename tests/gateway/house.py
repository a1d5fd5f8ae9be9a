"""A gateway on a real socket with a scripted engine behind it: the fixture `house` of gateway and harness tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
from listening import listen
from policies import make_policy
from scripted_engine import ScriptedEngine
from sqlalchemy import URL, select
from texts import answer

from harnessed.client import AsyncClient, claim, create_groups, create_run, get_transcripts, register_engine
from harnessed.config import Gateway
from harnessed.gateway import peers
from harnessed.gateway.app import DATABASE, Server, gateway
from harnessed.gateway.keys import ADMIN, Keyring
from harnessed.gateway.store import Store
from harnessed.gateway.tables import gateways
from harnessed.records import Assignment, Dialect, EngineSpec, GroupSpec, History, Limits, RunSpec, Sampling


class House:
    """One gateway, its engine, and a run `r` with groups as the test makes them."""

    def __init__(self, folder, policy, engine: ScriptedEngine) -> None:
        self.folder = folder
        self.policy = policy
        self.engine = engine
        self.http = openai.DefaultAsyncHttpxClient(timeout=60, verify=False)
        self.anthropic_http = anthropic.DefaultAsyncHttpxClient(timeout=60, verify=False)
        """Of all SDK clients; without certificates, which take 20 ms to be read. A client that is left to the garbage
        collector closes its connections in whichever thread that runs in, the engine's for instance, and may cut off
        another client's."""
        self.settings = Gateway(generation_limit_s=20)
        """Takes effect with the next start."""
        self.world = ""
        """What a test has made of it, for all of its examples."""
        self._listener, self._other_listener = listen(), listen()
        self.urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (self._listener, self._other_listener)]
        """Of the gateways; there are two if the settings name a database."""
        self.url = self.urls[0]
        """Which of them clients are made for."""
        self.keys = Keyring.from_file(folder / "gateway.secret")
        self.admin = AsyncClient(self.url, self.keys.sign(ADMIN))
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        application = await self._serve(self._listener, "first")
        self.routes = application.routes
        self.exchange, self.store = application.state.exchange, application.state.store
        self.memory = application.state.attempts
        self.memories, self.exchanges = [self.memory], [self.exchange]
        self.operations = application.state.operations
        self.turnstiles = application.state.turnstiles
        self.url = self.urls[0]
        if self.settings.database:
            other = await self._serve(self._other_listener, "second")
            self.memories.append(other.state.attempts)
            self.exchanges.append(other.state.exchange)

    async def _serve(self, listener, name):
        application = await self._stack.enter_async_context(gateway(self.folder, self.settings, name))
        server = Server(application)
        serving = asyncio.create_task(server.serve(sockets=[listener.dup()]))

        async def stop() -> None:
            server.end()
            await serving

        self._stack.push_async_callback(stop)
        return application

    async def stop(self) -> None:
        await self._stack.aclose()

    async def restart(self) -> None:
        """As after a kill: everything in memory is gone. The listening socket stays."""
        await self.stop()
        self._stack = contextlib.AsyncExitStack()
        await self.start()

    async def engine_known(self) -> None:
        """Returns when all gateways know the engine: one that others share hears of it with a beat."""
        async with asyncio.timeout(30):
            while not all(each._engines._stored for each in self.memories):
                await asyncio.sleep(0.01)

    async def bury(self, name: str) -> None:
        """As the others do with a gateway that they take for dead."""

        def work(connection):
            ids = connection.execute(select(gateways.c.id).where(gateways.c.name == name)).scalars().all()
            peers._bury(connection, ids)

        await self.store.write(work)

    async def make_run(self, history=History.EXACT, speaks=Dialect.TOKENS, **limits) -> None:
        limits = Limits(**{"context": 2000} | limits)
        await self.admin(create_run(RunSpec(id="r", policy=str(self.policy), limits=limits, history=history)))
        await self.admin(register_engine(EngineSpec(id="e", url=self.engine.url, run="r", speaks=speaks, model="m")))

    async def attempts(self, n: int = 1, group: str = "g", **sampling) -> list[Assignment]:
        """A new group of n rollouts, all claimed."""
        spec = GroupSpec(id=group, run="r", task={"name": group}, n=n, sampling=Sampling(**sampling))
        await self.admin(create_groups([spec]))
        return await self.admin(claim("r", "controller", n, 3))

    def openai(self, key: str, **settings) -> openai.AsyncOpenAI:
        settings = {"max_retries": 0, "http_client": self.http} | settings
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **settings)

    def anthropic(self, key: str) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url=self.url, auth_token=key, max_retries=0, http_client=self.anthropic_http
        )

    @property
    def clients(self) -> int:
        """That wait for an answer, as far as the gateway knows."""
        return sum(pending.waiting for pending in self.calls_in_progress())

    def calls_in_progress(self):
        """Of all gateways."""
        sessions = [session for each in self.memories for session in each._sessions.values()]
        return [each for session in sessions for each in session.calls_in_progress() if not each.gateway]

    async def left(self, still: int = 0) -> None:
        """Returns when the gateway has seen all clients leave, but so many."""
        for _ in range(1000):
            if self.clients <= still:
                return
            await asyncio.sleep(0.01)
        raise TimeoutError("a client is still there")

    async def nodes(self, group: str = "g", index: int = 0):
        """Nodes of the last attempt of a rollout, as the trainer reads them."""
        transcripts = await self.admin(get_transcripts(group))
        return transcripts[index].attempts[-1].nodes


async def empty_database(folder) -> bytes:
    """An SQLite file with all tables: to make them takes ten times as long as to copy it."""
    if not _EMPTY:
        file = folder / "empty.db"
        await Store(URL.create("sqlite", database=str(file))).close()
        _EMPTY.append(file.read_bytes())
    return _EMPTY[0]


_EMPTY: list[bytes] = []


@contextlib.asynccontextmanager
async def open_house(tmp_path, **settings) -> AsyncIterator[House]:
    policy = make_policy(tmp_path / "policy")
    (tmp_path / DATABASE).write_bytes(await empty_database(tmp_path))
    with ScriptedEngine(lambda prompt, call: answer(f"answer {call}"), policy=policy) as engine:
        house = House(tmp_path, policy, engine)
        house.settings = house.settings.model_copy(update=settings)
        async with house.http, house.anthropic_http, house.admin:
            await house.start()
            try:
                await house.make_run()
                yield house
            finally:
                await house.stop()


@pytest.fixture
async def house(tmp_path) -> AsyncIterator[House]:
    async with open_house(tmp_path) as house:
        yield house
