"""Closes the turnstile of a run around an update, with a lease that is renewed for as long as that takes.

`trainer.py` uses it: calls that come meanwhile wait at the gateway, and their harness sees no error.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

from harnessed.client import ApiError, Client, Unreachable, close_turnstile, open_turnstile, renew_turnstile
from harnessed.records import CloseMode, TurnstileState

log = logging.getLogger(__name__)
LEASE_S = 60.0
INTERRUPT_LIMIT_S = 30.0
"""How long generations that were told to stop may take."""


def owner_of(run: str) -> str:
    """One trainer works in a run's folder at a time, and one that was started again takes over from the one before."""
    return f"trainer of {run}"


@contextlib.contextmanager
def closed(gateway: Client, run: str, mode: CloseMode, finish_s: float) -> Iterator[None]:
    """With `finish` running generations have `finish_s` to end. Then, or at once, they are interrupted, and go on from
    their tokens afterwards.

    Raises ApiError if another owner has closed it.
    """
    owner = owner_of(run)
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(gateway, run, owner, ended), name="lease", daemon=True)
    renewing.start()  # before it is closed, for the drain may last longer than the lease
    try:
        finished = mode == CloseMode.FINISH and _close(gateway, run, owner, mode, finish_s)
        if not finished:
            _close(gateway, run, owner, CloseMode.INTERRUPT, INTERRUPT_LIMIT_S)
        yield
    finally:
        ended.set()
        renewing.join()
        gateway(open_turnstile(run, owner))


def _close(gateway: Client, run: str, owner: str, mode: CloseMode, drain_s: float) -> bool:
    """Whether nothing is generated any more."""
    return gateway(close_turnstile(run, owner, mode, LEASE_S, drain_s)).state == TurnstileState.CLOSED


def _renew(gateway: Client, run: str, owner: str, ended: threading.Event) -> None:
    while not ended.wait(LEASE_S / 4):
        try:
            gateway(renew_turnstile(run, owner))
        except (ApiError, Unreachable) as error:
            log.warning("the turnstile of run %s was not renewed: %s", run, error)
        except Exception:  # noqa: BLE001  # what a client's `meanwhile` raises, whoever works meanwhile is told as well
            return
