"""Assembles the gateway's ASGI application and serves it. The command line calls `serve`."""

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from sqlalchemy import URL
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from harnessed.config import Gateway
from harnessed.gateway import lifecycle
from harnessed.gateway.api import CANCEL_LIMIT_S, Api
from harnessed.gateway.attempts import Attempts
from harnessed.gateway.delivery import CONNECTION
from harnessed.gateway.engines import Engines
from harnessed.gateway.exchange import Exchange
from harnessed.gateway.instruments import Instruments, Readings
from harnessed.gateway.intake import Intake
from harnessed.gateway.keys import SECRET, Keyring
from harnessed.gateway.peers import Peers
from harnessed.gateway.probes import probe_routes
from harnessed.gateway.progress import Calls
from harnessed.gateway.retention import keep_small
from harnessed.gateway.routes import model_calls, model_routes
from harnessed.gateway.sampling import Sampler
from harnessed.gateway.status import Board
from harnessed.gateway.store import Store
from harnessed.gateway.surroundings import Surroundings
from harnessed.gateway.turnstile import Turnstiles
from harnessed.gateway.web.pages import Pages

log = logging.getLogger(__name__)
DATABASE = "gateway.db"
_EXPIRY_S = 5.0
KEEP_ALIVE_S = 3600
"""Agents are silent for long between two calls; a connection closed under them would cost them a failed request."""
SHUTDOWN_S = 1
"""How long calls and long-polls have to end after SIGTERM; harnesses ask again."""


def serve(listener: socket.socket, folder: Path, settings: Gateway) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT. The folder holds the database and the secret."""
    # A thread that reads and encodes a giant gives way to the event loop sooner than by default (5 ms), and the
    # collector looks neither at all young objects at once (10 ms) nor, as by default, at old ones all the time: each
    # is a wait of every other call.
    sys.setswitchinterval(0.00005)
    gc.set_threshold(5_000, 5, 1000)

    async def run() -> None:
        host, port = listener.getsockname()[:2]
        async with gateway(folder, settings, f"{socket.gethostname()}:{host}:{port}") as application:
            server = Server(application)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, server.end)
            await server.serve(sockets=[listener])

    uvloop.run(run())


class Connection(HttpToolsProtocol):
    """Known to the application by an extension of the scope: `delivery.Connection`."""

    gone: asyncio.Future[None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.gone = self.loop.create_future()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # of one that broke too, which the timer would keep
        # Nor is it kept by what points back to it: old cycles are hardly ever looked for.
        self.pipeline.clear()
        self.scope = self.cycle = None  # type: ignore[assignment]

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # the application begins after this
        self.scope["extensions"] = {CONNECTION: {"of": self}}

    def watch(self) -> None:
        self.flow.resume_reading()

    def reset(self) -> None:
        at_once = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()


class Application(Starlette):
    """Calls of the model find their way by their path alone: to try each route costs more than to find one."""

    def __init__(self, calls: dict[str, ASGIApp], routes: list[BaseRoute]) -> None:
        """`calls`: what is served by POST at a path."""
        super().__init__(routes=routes)
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._calls.get(scope["path"]) if scope["method"] == "POST" else None
        if call is None:
            await super().__call__(scope, receive, send)
            return
        scope["path_params"] = {}
        await call(scope, receive, send)


class Server(uvicorn.Server):
    """Lets long-polls answer before it waits for connections to end."""

    def __init__(self, application: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                http=Connection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                log_level="warning",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._application = application

    def end(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `serve`. uvicorn would raise them again when it has ended, before the store is closed."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._application.state.stop()
        await super().shutdown(sockets)


@contextlib.asynccontextmanager
async def gateway(folder: Path, settings: Gateway, name: str = "gateway") -> AsyncIterator[Starlette]:
    """The application, with its store and engines open. `name`: what takes the place of what, among the gateways of a
    store."""
    keyring = Keyring.from_file(folder / SECRET)
    id = f"{name}-{secrets.token_hex(4)}"[-60:]  # PostgreSQL knows its clients by no longer names
    instruments = Instruments()
    calls = Calls(instruments.ended)
    store = Store(
        settings.database or URL.create("sqlite", database=str(folder / DATABASE)),
        instruments.committed,
        power_safe=settings.power_safe,
        client=id,
    )
    engines = Engines(settings.generation_limit_s)
    await engines.keep(await store.read(lifecycle.list_engines))
    turnstiles = Turnstiles()
    sampler = Sampler(store, engines, turnstiles)
    attempts = Attempts(store, engines, sampler, id)
    intake = Intake(engines, settings.body_mb << 20)
    exchange = Exchange(store, attempts, intake, sampler, keyring, id)
    peers = Peers(store, id, name, turnstiles, attempts)
    if store.shared:
        attempts.elsewhere = peers.ending

    async def may_go_on(run: str, rollout: str) -> bool:
        return await peers.may_go_on(run) and attempts.has(rollout)

    engines.may_go_on = may_go_on
    await peers.join()
    surroundings = Surroundings(store)
    board = Board(id, calls, store, engines, turnstiles, surroundings)
    readings = Readings(calls, attempts, store, engines, turnstiles, surroundings)
    instruments.registry.register(readings)
    api = Api(store, engines, attempts, peers, keyring, board)
    tasks = [peers.run(), _expire(store, attempts), keep_small(store, settings.keep_days)]
    running = [asyncio.create_task(task) for task in tasks]
    try:
        application = Application(
            model_calls(exchange, calls),
            [
                *model_routes(exchange, calls),
                *api.routes(),
                *Pages(store, attempts, keyring).routes(),
                *probe_routes(board, instruments, readings, keyring),
            ],
        )
        application.state.stop = api.stop
        application.state.exchange, application.state.store = exchange, store
        application.state.attempts = attempts
        application.state.operations = api.operations()
        application.state.turnstiles = turnstiles
        yield application
    finally:
        for task in running:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(attempts.stop_all(), SHUTDOWN_S)
        intake.close()
        await engines.close()
        await peers.leave()
        await store.close()


async def _expire(store: Store, attempts: Attempts) -> None:
    """Take attempts from controllers that no longer renew, and forget those that other gateways have ended."""
    while True:
        await asyncio.sleep(_EXPIRY_S)
        try:
            if overdue := await store.read(lambda connection: lifecycle.overdue(connection, time.time())):
                async with attempts.ending(overdue, CANCEL_LIMIT_S):
                    await store.write(partial(lifecycle.expire, rollouts=overdue, now=time.time()))
            if store.shared:
                await attempts.forget_ended()
        except Exception:  # whatever the store's trouble is: leases end also after it
            log.exception("attempts could not be taken from controllers that are gone")
