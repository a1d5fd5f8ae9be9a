"""Tells the gateways of one PostgreSQL database at once that one of them has written what others wait for: a turnstile
was closed or opened, or nothing is generated behind it any more.

`peers.py` gives hints and listens. A hint that is lost costs time only: what holds is read from the tables, and every
gateway looks there four times a second anyway.
"""

import logging
import threading
from collections.abc import Callable

from sqlalchemy import Connection, text

from harnessed.gateway.store import Store

log = logging.getLogger(__name__)
CHANNEL = "harnessed_turnstiles"
LOOK_S = 1.0
"""Between two looks whether to end."""
RETRY_S = 2.0
"""Before a database that does not let this process listen is tried again."""


def give(connection: Connection) -> None:
    """To all gateways, with the commit of this transaction. The one gateway of an SQLite file needs none."""
    if connection.dialect.name == "postgresql":
        connection.execute(_NOTIFY)


_NOTIFY = text(f"NOTIFY {CHANNEL}")


class Listener:
    """Calls `heard` for every hint, from a thread of its own, until it is ended."""

    def __init__(self, store: Store, heard: Callable[[], object]) -> None:
        self._store = store
        self._heard = heard
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="hints", daemon=True).start()

    def end(self) -> None:
        """It calls nobody any more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._listen()
            except Exception as error:  # noqa: BLE001  # whatever the database's trouble is: without hints all goes on
                if not self._ended.wait(RETRY_S):
                    log.warning("what the other gateways do is seen later: %s", " ".join(str(error).split()))

    def _listen(self) -> None:
        with self._store.listening(CHANNEL) as driver:
            while not self._ended.is_set():
                for _ in driver.notifies(timeout=LOOK_S):
                    if self._ended.is_set():
                        return
                    self._heard()
