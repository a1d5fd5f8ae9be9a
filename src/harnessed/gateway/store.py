"""The durable records: one writer thread that commits in groups, on SQLite or PostgreSQL.

All writes of the gateway go through one thread. It takes whatever has been queued, runs it in one transaction and
commits once, so a busy gateway pays for one commit per batch, not per call; a write whose function raises is undone
alone. `write` returns after the commit: what it recorded survives kill -9 of the process (and power loss with
`power_safe`). Several gateways may share a PostgreSQL database: their transactions come one after the other, under one
lock, so that none sees half of another's and the cursor of the journal grows in the order of the commits.

What the transactions do is in `lifecycle.py` (groups, rollouts, attempts), `recording.py` (calls, nodes),
`closings.py` (turnstiles) and `peers.py` (gateways); `api.py` and `exchange.py` call them through here. The tables are
in `tables.py`.
"""

import asyncio
import fcntl
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import orjson
from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from harnessed.config import ConfigError
from harnessed.gateway.migrations import migrate
from harnessed.gateway.tables import changes
from harnessed.records import ChangeKind

log = logging.getLogger("harnessed.gateway.store")
T = TypeVar("T")
Work = Callable[[Connection], T]
"""It may run more than once, each time in a transaction of its own of which only the last one is kept."""
Queued = tuple[Work[Any], asyncio.Future[Any] | None]
Result = tuple[asyncio.Future[Any] | None, Any, BaseException | None]

AWAY_LIMIT_S = 60.0
"""How long writes wait for a database that does not answer."""
AWAY_PAUSE_S = 0.2
LATER_S = 0.01
"""How long a write that nobody waits for may wait for others."""
LEAST_FREE_BYTES = 64 << 20
"""What was admitted can still be answered, and an update of the records begun, with so much."""
_WRITERS_LOCK = 0x6861726E
"""Any number that nobody else locks."""


class Refused(Exception):
    """The request contradicts the records; `status` is the HTTP status that says how."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Store:
    """A database, of one gateway or of several. `write` and `read` are for its event loop; close it before the loop
    ends."""

    def __init__(
        self,
        url: str | URL,
        committed: Callable[[int, float], None] = lambda writes, seconds: None,
        *,
        power_safe: bool = False,
        client: str = "harnessed",
    ) -> None:
        """`committed` is told the writes and seconds of each group commit, in the writer's thread; `client` names the
        process to the database. Raises ConfigError."""
        self._committed = committed
        self.shared = _address(url).get_backend_name() == "postgresql"
        """Whether other gateways may use it too."""
        self.trouble = ""
        """Why the last commit failed; empty if it did not."""
        self.waiting = 0
        """Writes that are not committed yet."""
        self._file = None if self.shared else Path(make_url(url).database or "")
        self._alone = _lock_file(self._file) if self._file else None
        self._engine = _postgresql(url, client) if self.shared else _sqlite(url, power_safe)
        try:
            with self._engine.begin() as connection:
                self._lock(connection)
                migrate(connection)
        except DBAPIError as error:
            raise ConfigError(f"gateway.database: cannot use it: {' '.join(str(error.orig).split())}") from error
        self._gathered: list[Queued] = []
        """Writes that the thread does not have yet."""
        self._due = False
        """It gets them in this turn of the event loop."""
        self._writer: Connection | None = None
        """The writer's own; None: there is none yet, or it was lost."""
        self._queue: queue.SimpleQueue[list[Queued] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._commit_groups, name="store", daemon=True)
        self._thread.start()

    async def write(self, work: Work[T]) -> T:
        """Run `work` in the next group commit; its result after the commit, or what it raised."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._gather((work, future))
        self._hand_over_soon()
        # Shielded: a client that goes away must not cancel a future that the writer thread will resolve.
        return await asyncio.shield(future)

    def write_soon(self, work: Work[None]) -> None:
        """Run `work` in the next group commit, in the order of all writes, without waiting for it."""
        self._gather((work, None))
        self._hand_over_soon()

    def write_later(self, work: Work[None]) -> None:
        """The same, for what makes no commit of its own before `LATER_S`."""
        if not self._gathered:
            self._loop.call_later(LATER_S, self._hand_over)
        self._gather((work, None))

    def _gather(self, queued: Queued) -> None:
        """What is written together goes to the thread together: to wake it costs as much as a write, and so does a
        commit."""
        self._gathered.append(queued)
        self.waiting += 1

    def _hand_over_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._due = False
        if self._gathered:
            self._queue.put(self._gathered)
            self._gathered = []

    async def read(self, work: Work[T]) -> T:
        """Run a query on a connection of its own, in a thread; it sees every write that was queued before."""
        await self.write(lambda connection: None)

        def query() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        return await asyncio.to_thread(query)

    @contextmanager
    def listening(self, channel: str) -> Iterator[Any]:
        """A connection of the (PostgreSQL) driver that hears what is notified there, for one thread. By the name of its
        other connections a gateway is seen to live: this one has none of that."""
        with self._engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            connection.detach()  # from the pool, for it is of no other use
            driver.autocommit = True
            driver.execute("SET application_name = 'harnessed hints'")
            driver.execute(f"LISTEN {channel}")
            yield driver

    async def shrink(self) -> None:
        """Give back the room of what was deleted. PostgreSQL does so by itself."""
        if not self.shared:
            await self.read(_vacuum)

    def next_change(self) -> asyncio.Event:
        """Set when the journal grows. Take it before reading the journal, so that nothing falls between."""
        return self._changed

    def wake(self) -> None:
        """Let who waits for a change look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Commit what is queued and close the database."""
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, 30)
        if self._writer is not None:
            self._writer.close()
        self._engine.dispose()
        if self._alone is not None:
            os.close(self._alone)

    def _commit_groups(self) -> None:
        closing = False
        while not closing:
            handed_over = [self._queue.get()]
            while not self._queue.empty():
                handed_over.append(self._queue.get())
            closing = None in handed_over
            if work := [queued for each in handed_over if each for queued in each]:
                started = time.perf_counter()
                self._commit(work)
                self._committed(len(work), time.perf_counter() - started)

    def _commit(self, batch: list[Queued]) -> None:
        deadline = time.monotonic() + AWAY_LIMIT_S
        while True:
            try:
                done, journalled = self._transact(batch)
                self.trouble = next((_said(e) for _, _, e in done if isinstance(e, OperationalError)), self._no_room())
                break
            except Exception as error:  # noqa: BLE001  # the commit itself failed (disk full, say): everybody in it has to know
                away = _is_away(error) and time.monotonic() < deadline
                if not (away and self.trouble):
                    log.warning("a group commit of %d writes failed: %s", len(batch), _said(error))
                self.trouble = _said(error)
                if not away:
                    done, journalled = [(future, None, error) for _, future in batch], False
                    break
                time.sleep(AWAY_PAUSE_S)
        self._loop.call_soon_threadsafe(self._resolve, done, journalled)

    def _transact(self, batch: list[Queued]) -> tuple[list[Result], bool]:
        """All of the batch in one transaction; each in a savepoint of its own if one of them fails without them."""
        if self._writer is None or self._writer.closed or self._writer.invalidated:
            self._writer = self._engine.connect().execution_options(writes=True)
        connection = self._writer
        try:
            with connection.begin():
                connection.info.pop("journalled", None)
                self._lock(connection)
                done: list[Result] = [(future, work(connection), None) for work, future in batch]
        except Exception as error:
            if _is_away(error):
                self._writer = None
                raise
            with connection.begin():
                connection.info.pop("journalled", None)
                self._lock(connection)
                done = [(future, *_run_alone(connection, work)) for work, future in batch]
        return done, connection.info.pop("journalled", False)

    def _no_room(self) -> str:
        """Why nothing more should be written, although it still can."""
        if self._file is None or (free := shutil.disk_usage(self._file.parent).free) > LEAST_FREE_BYTES:
            return ""
        return f"only {free >> 20} MB are free where {self._file} lies: make room, and it goes on"

    def _lock(self, connection: Connection) -> None:
        """Until the end of the transaction. SQLite has one writer by itself."""
        if self.shared:
            connection.execute(_LOCK, {"number": _WRITERS_LOCK})

    def _resolve(self, done: list[Result], wake: bool) -> None:
        self.waiting -= len(done)
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


def _vacuum(connection: Connection) -> None:
    # A script, since the driver takes one step of anything else that gives no rows, which is one page.
    script = "PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE)"
    connection.connection.cursor().executescript(script)


_LOCK = text("SELECT pg_advisory_xact_lock(:number)")


def journal(connection: Connection, kind: ChangeKind, id: str, run: str, state: str) -> None:
    """Append a change to what the long-poll tells, in the transaction that makes the change."""
    connection.execute(insert(changes).values(kind=kind, id=id, run=run, state=state))
    connection.info["journalled"] = True


def _run_alone(connection: Connection, work: Work[Any]) -> tuple[Any, BaseException | None]:
    """Run one write so that its failure undoes itself only. Raises what makes the whole transaction void."""
    savepoint = connection.begin_nested()
    try:
        result = work(connection)
    except Exception as error:  # what a write raises belongs to its caller, not to its neighbours
        if _is_away(error):
            raise
        try:
            savepoint.rollback()
        except DBAPIError:  # SQLite gives the whole transaction up when its disk is full
            raise error from None
        return None, error
    savepoint.commit()
    return result, None


def _lock_file(database: Path) -> int:
    """An open file that says, as long as this process lives, that the database has its gateway. Raises ConfigError."""
    descriptor = os.open(database.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        why = "an SQLite file serves one gateway; end that one, choose another run.folder, or set gateway.database"
        raise ConfigError(f"another gateway uses {database} already: {why}") from None
    return descriptor


def _said(error: BaseException) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _is_away(error: Exception) -> bool:
    """Whether the database was lost from sight, so that nobody knows whether the transaction was kept."""
    if not isinstance(error, DBAPIError):
        return False
    # Without a statement it was no connection that was had. What the server says has a state.
    return error.connection_invalidated or (error.statement is None and getattr(error.orig, "sqlstate", "") is None)


def _sqlite(url: str | URL, power_safe: bool) -> Engine:
    # It holds what rollouts said; the files that SQLite puts beside it get its mode.
    file = Path(make_url(url).database or "")
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    engine = create_engine(
        url,
        connect_args={"check_same_thread": False, "timeout": 30},
        json_serializer=_dumps,
        json_deserializer=orjson.loads,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes too late for savepoints
        if not file.stat().st_size:  # on another than a new file it would be a write
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # `shrink` needs it
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if power_safe else 'NORMAL'}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # The writer waits for its turn where another connection makes room; begun as a reader, it would be refused.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")

    return engine


def _address(url: str | URL) -> URL:
    """Raises ConfigError."""
    try:
        return make_url(url)
    except (ArgumentError, ValueError):  # what they say may hold the password
        raise ConfigError("gateway.database: not an address of the form postgresql://user@host:5432/name") from None


def _postgresql(url: str | URL, client: str) -> Engine:
    """Raises ConfigError."""
    # A gateway that stands still in a transaction must not hold the lock of all for ever.
    options = "-c idle_in_transaction_session_timeout=10s"
    try:
        return create_engine(
            make_url(url).set(drivername="postgresql+psycopg"),
            connect_args={"application_name": client, "connect_timeout": 5, "options": options},
            pool_pre_ping=True,
            json_serializer=_dumps,
            json_deserializer=orjson.loads,
        )
    except ModuleNotFoundError:
        why = "pip install -e '.[postgresql]' in the folder of Harnessed"
        raise ConfigError(f"gateway.database: a PostgreSQL database needs psycopg: {why}") from None


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
