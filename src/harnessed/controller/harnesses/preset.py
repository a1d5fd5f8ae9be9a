"""What the preset of a command-line harness is: a module with `PROGRAM` and `start`. `launch.py` has the table of them.

    PROGRAM = "codex"  # on the PATH, unless the setting harness.command names another

    def start(endpoint: Endpoint, prompt: str) -> Start: ...

A preset says how a harness is told its endpoint, key and limits, works through one prompt without a person, and leaves
out what is nobody's business here: telemetry, updates, calls for titles where they can be switched off.
"""

from dataclasses import dataclass, field
from typing import Protocol

PATIENCE_S = 86_400
"""Of a harness, where it has to be told: what ends an attempt that waits is the controller's time limit, not a client's
timer."""


@dataclass(frozen=True)
class Endpoint:
    """What a harness has to know of the model; the policy answers to any name."""

    url: str
    """The gateway's, without a path."""
    key: str
    """The attempt's."""
    context: int
    """Most tokens of prompt and answer."""
    answer: int
    """Most tokens of one answer."""


@dataclass(frozen=True)
class Start:
    """How a harness is started on one prompt."""

    arguments: list[str]
    """After the program."""
    environment: dict[str, str] = field(default_factory=dict)
    """Beside HOME, PATH and what names the endpoint to SDKs."""
    files: dict[str, str] = field(default_factory=dict)
    """Path in HOME -> content."""


class Preset(Protocol):
    """What the module of a command-line harness has."""

    @property
    def PROGRAM(self) -> str: ...

    def start(self, endpoint: Endpoint, prompt: str) -> Start: ...
