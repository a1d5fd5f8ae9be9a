"""What the controller (spawner.py) and a warm template (warm.py) say to each other: JSON lines over a socket pair.

The first line is a `Preparation`, answered by `{"ready": pid}` or `{"failed": text}`. After it the controller sends
`{"start": Order}` and `{"kill": id}`, and gets one `Exit` for every order, when nothing of the attempt is left.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preparation:
    """What a template does once, so that no attempt has to."""

    path: list[str]
    """Where modules are looked for (`sys.path`)."""
    modules: list[str] = field(default_factory=list)
    """Imported before the first fork."""
    warm_up: str = ""
    """`module:function` to call then, with `arguments`."""
    arguments: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Bounds:
    """Resource limits of each process of an attempt."""

    file_bytes: int
    processes: int
    """How many processes this user may have beyond those it had when the template started. Linux counts processes
    per user, not per attempt, so this is the sum over all slots; it does not bind root."""
    cpu_s: int


@dataclass(frozen=True)
class Order:
    """One process to fork: it calls a function, or becomes a command."""

    id: str
    cwd: str
    environment: dict[str, str]
    """All of it: nothing is inherited."""
    log: str
    """File that its output is appended to."""
    bounds: Bounds
    function: str = ""
    """`module:function`, called with `arguments`; what it returns is written to `result` as JSON."""
    arguments: list[Any] = field(default_factory=list)
    result: str = ""
    command: list[str] = field(default_factory=list)
    output: str = ""
    """File for the command's standard output, if it is wanted apart from the log."""


@dataclass(frozen=True)
class Exit:
    """How an order ended."""

    id: str
    status: int | None = None
    """Exit status; None if a signal ended it, or if it never started."""
    signal: int = 0
    strays: int = 0
    """Processes that it had left behind, and that were killed."""
    stuck: int = 0
    """Processes that were still there when the template gave up killing them."""
    failure: str = ""
    """Why it could not be started; it did not run then."""
    timed_out: bool = False
    """Killed because its time was over (set by the controller)."""
