"""The durable records: one schema, and a writer thread that commits in groups.

All writes of the gateway go through one thread. It takes whatever has been queued, runs it in one transaction and
commits once, so a busy gateway pays for one commit per batch, not per call; a write whose function raises is rolled
back alone. `write` returns after the commit: what it recorded survives kill -9 of the process (and power loss with
`power_safe`). What the transactions do is in `lifecycle.py` (groups, rollouts, attempts) and `recording.py` (calls,
nodes); `api.py` and `exchange.py` call them through here.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    insert,
)

from harnessed.records import ChangeKind

log = logging.getLogger("harnessed.gateway.store")
T = TypeVar("T")

schema = MetaData()

runs = Table(
    "runs",
    schema,
    Column("id", String, primary_key=True),
    Column("policy", String, nullable=False),
    Column("limits", JSON, nullable=False),
    Column("history", String, nullable=False),
    Column("side_calls", JSON, nullable=False),
    Column("created", Float, nullable=False),
)

engines = Table(
    "engines",
    schema,
    Column("id", String, primary_key=True),
    Column("url", String, nullable=False),
    Column("run", String, nullable=False),
    Column("speaks", String, nullable=False),
    Column("model", String, nullable=False),
)

groups = Table(
    "groups",
    schema,
    Column("id", String, primary_key=True),
    Column("run", String, nullable=False, index=True),
    Column("task", JSON, nullable=False),
    Column("n", Integer, nullable=False),
    Column("purpose", String, nullable=False),
    Column("sampling", JSON, nullable=False),
    Column("seed", Integer, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created", Float, nullable=False),
)

rollouts = Table(
    "rollouts",
    schema,
    Column("id", String, primary_key=True),
    Column("run", String, nullable=False),
    Column("group", String, nullable=False, index=True),
    Column("index", Integer, nullable=False),
    Column("purpose", String, nullable=False),
    Column("state", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("outcome", String),
    Column("reason", String, nullable=False),
    Column("reward", Float),
    Column("parts", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("finished", Float),
    Index("rollouts_by_state", "state", "created"),
    Index("rollouts_by_age", "run", "created", "id"),
    Index("rollouts_by_outcome", "run", "purpose", "state", "outcome", "reward", "finished"),
)

attempts = Table(
    "attempts",
    schema,
    Column("rollout", String, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("owner", String, nullable=False),
    Column("lease_until", Float, nullable=False),
    Column("tries", Integer, nullable=False),  # attempts that the rollout may have in all, as the claim said
    Column("live", Boolean, nullable=False),  # calls are admitted and recorded only while this is true
    Column("nodes", Integer, nullable=False),  # number of the last node
    Column("faults", JSON, nullable=False),  # request -> why it was refused or failed: `budget: ...`, `engine: ...`
    Column("started", Float, nullable=False),
    Column("ended", Float),
    Index("attempts_by_lease", "live", "lease_until"),
)

calls = Table(
    "calls",
    schema,
    Column("id", String, primary_key=True),
    Column("rollout", String, nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("state", String, nullable=False),  # admitted, answered, failed; lost: its gateway died
    Column("asked", JSON, nullable=False),  # the request without messages and tools, as the harness sent it
    Column("wanted", JSON, nullable=False),  # what of it the gateway honours: wire.turn.Wanted
    Column("admitted", Float, nullable=False),
    Column("ended", Float),
)

nodes = Table(
    "nodes",
    schema,
    Column("rollout", String, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("parent", Integer, nullable=False),
    Column("call", String, nullable=False),
    Column("segment", LargeBinary, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", LargeBinary, nullable=False),
    Column("sampled", Integer, nullable=False),
    Column("temperature", Float, nullable=False),
    Column("finish", String, nullable=False),
    Column("cut", Integer, nullable=False),
    Column("delivered", Boolean, nullable=False),
    Column("follows", Integer, nullable=False),
    Column("broken_calls", Integer, nullable=False),
    Column("apart", String, nullable=False),
    Column("split", String, nullable=False),
    Column("messages", LargeBinary, nullable=False),  # JSON, not parsed again before somebody reads it
    Column("message", LargeBinary, nullable=False),
    Column("tools", LargeBinary, nullable=False),
    ForeignKeyConstraint(["rollout", "attempt"], ["attempts.rollout", "attempts.number"]),
)

events = Table(
    "events",
    schema,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("rollout", String, nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("type", String, nullable=False),
    Column("data", JSON, nullable=False),
    Column("time", Float, nullable=False),
)

metrics = Table(
    "metrics",
    schema,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("run", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("values", JSON, nullable=False),
    Column("time", Float, nullable=False),
    Index("metrics_by_run", "run", "number"),
)

changes = Table(
    "changes",
    schema,
    Column("cursor", Integer, primary_key=True, autoincrement=True),
    Column("kind", String, nullable=False),
    Column("id", String, nullable=False),
    Column("run", String, nullable=False),
    Column("state", String, nullable=False),
    Index("changes_by_run", "run", "cursor"),
)

Work = Callable[[Connection], T]


class Store:
    """The database of one gateway. `write` and `read` are for its event loop; close it before the loop ends."""

    def __init__(self, path: Path, *, power_safe: bool = False) -> None:
        self._engine = _sqlite(path, power_safe)
        schema.create_all(self._engine)
        self._queue: queue.SimpleQueue[tuple[Work[Any], asyncio.Future[Any] | None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._commit_groups, name="store", daemon=True)
        self._thread.start()

    async def write(self, work: Work[T]) -> T:
        """Run `work` in the next group commit; its result after the commit, or what it raised."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((work, future))
        # Shielded: a client that goes away must not cancel a future that the writer thread will resolve.
        return await asyncio.shield(future)

    def write_soon(self, work: Work[None]) -> None:
        """Run `work` in the next group commit, in the order of all writes, without waiting for it."""
        self._queue.put((work, None))

    async def read(self, work: Work[T]) -> T:
        """Run a query on a connection of its own, in a thread; it sees every write that was queued before."""
        await self.write(lambda connection: None)

        def query() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        return await asyncio.to_thread(query)

    def next_change(self) -> asyncio.Event:
        """Set when the journal grows. Take it before reading the journal, so that nothing falls between."""
        return self._changed

    def wake(self) -> None:
        """Let who waits for a change look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Commit what is queued and close the database."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, 30)
        self._engine.dispose()

    def _commit_groups(self) -> None:
        closing = False
        while not closing:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            closing = None in batch
            self._commit([item for item in batch if item is not None])

    def _commit(self, batch: list[tuple[Work[Any], asyncio.Future[Any] | None]]) -> None:
        done: list[tuple[asyncio.Future[Any] | None, Any, BaseException | None]] = []
        try:
            with self._engine.begin() as connection:
                connection.info.pop("journalled", None)
                for work, future in batch:
                    done.append((future, *_run_alone(connection, work)))
                journalled = connection.info.pop("journalled", False)
        except Exception as error:  # the commit itself failed (disk full, say): everybody in it has to know
            log.exception("a group commit of %d writes failed", len(batch))
            done = [(future, None, error) for _, future in batch]
            journalled = False
        self._loop.call_soon_threadsafe(self._resolve, done, journalled)

    def _resolve(self, done: list[tuple[asyncio.Future[Any] | None, Any, BaseException | None]], wake: bool) -> None:
        for future, result, error in done:
            if future is None:
                if error:
                    log.error("a write that nobody waits for failed: %s", error)
            elif not future.cancelled():
                if error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        if wake:
            self.wake()


def journal(connection: Connection, kind: ChangeKind, id: str, run: str, state: str) -> None:
    """Append a change to what the long-poll tells, in the transaction that makes the change."""
    connection.execute(insert(changes).values(kind=kind, id=id, run=run, state=state))
    connection.info["journalled"] = True


def _run_alone(connection: Connection, work: Work[Any]) -> tuple[Any, BaseException | None]:
    """Run one write so that its failure undoes itself only."""
    savepoint = connection.begin_nested()
    try:
        result = work(connection)
    except Exception as error:  # noqa: BLE001  # what a write raises belongs to its caller, not to its neighbours
        savepoint.rollback()
        return None, error
    savepoint.commit()
    return result, None


def _sqlite(path: Path, power_safe: bool) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        connect_args={"check_same_thread": False, "timeout": 30},
        json_serializer=lambda value: orjson.dumps(value).decode(),
        json_deserializer=orjson.loads,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes too late for savepoints
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if power_safe else 'NORMAL'}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine
