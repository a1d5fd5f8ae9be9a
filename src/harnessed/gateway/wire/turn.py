"""What every protocol is translated into and from: Turn (a request), Reply (its answers), WireError (a refusal)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from harnessed.gateway.formats import Format, Types, declared
from harnessed.gateway.reading import Piece, Reader
from harnessed.gateway.wire.growing import Beginning

POLICY = "policy"
"""A name for the run's policy, which is served under every name."""
Address = Mapping[str, str]
"""Where a request was sent: the named parts of its path, and its query."""
REFERENCE = "harnessed:reference"
"""In place of an assistant message: the call, or the id of a tool call, whose answer it is."""
INSTRUCTIONS = "harnessed:instructions"
"""Marks a message that is not part of the conversation's history."""
PROMPT = "harnessed:prompt"
"""Marks the message that names a bare prompt, which means another thing than a chat; holds the ids of one of tokens."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the answer is wanted; a request is only the retry of one that wanted the same."""

    n: int = 1
    """Answers."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end an answer; they are not delivered."""
    calls: bool = True
    """Whether tool calls are looked for in the answer, if there are tools."""
    grammar: str = ""
    """OpenAI's `response_format` as JSON, where the answer has to have one: for engines that can."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a harness: what it says, and how it wants the answer sampled."""

    messages: list[dict[str, Any]]
    """In the shape of OpenAI chat messages, as they came."""
    tools: list[dict[str, Any]]
    model: str
    """Any name is served by the run's policy; the answer carries it back."""
    wanted: Wanted = Wanted()
    after: str = ""
    """The call whose answer the messages follow, where the client leaves the history to the gateway."""
    prompt: str | list[int] | None = None
    """The whole context as text or token ids, where no chat template writes it; `messages` only names it then."""
    stream: bool = False
    """Whether the answer is wanted as it is made."""
    events: bool = True
    """Whether a stream is one of server-sent events; else it is one JSON value."""
    logprobs: bool = False
    """Whether the answer is wanted with the log-probability of each token."""
    namespaces: tuple[str, ...] = ()
    """Beginnings of tools' names that Responses calls their namespace."""
    usage: bool = False
    """Whether a stream is to tell how many tokens there were."""
    asked: dict[str, Any] = field(default_factory=dict)
    """The request without messages and tools, kept beside the call."""
    beginning: Beginning | None = field(default=None, repr=False, compare=False)
    """Of its body, with which the next request may begin too."""
    known: int = field(default=0, compare=False)
    """So many of its messages are those of an earlier request, the very ones."""

    @property
    def types(self) -> Types | None:
        """Types of the tools' parameters; None: the answer is read without calls."""
        return declared(self.tools) if self.wanted.calls and self.tools else None

    def reader(self, format: Format) -> Reader:
        """Of an answer by a policy with this format; what goes on from a bare prompt is text as a whole."""
        return Reader(format if self.prompt is None else Format(), self.types)

    def following(self, history: list[dict[str, Any]]) -> "Turn":
        """With the history that it left out; instructions hold for one request only."""
        before = [message for message in history if not message.get(INSTRUCTIONS)]
        first = [message for message in self.messages if message.get(INSTRUCTIONS)]
        return replace(self, messages=first + before + self.messages[len(first) :])


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer as it is delivered."""

    message: dict[str, Any]
    finish: str
    """`stop`, `length` or `tool_calls`."""
    tokens: int
    """Sampled tokens."""
    stop: str = ""
    """The stop string that ended it."""
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    """Each token and its log-probability, where they were asked for and the engine gave them."""


@dataclass(frozen=True, slots=True)
class Reply:
    id: str
    model: str
    created: float
    """Seconds since the epoch."""
    prompt_tokens: int
    choices: list[Choice]
    namespaces: tuple[str, ...] = ()


class Stream(Protocol):
    """An answer as events: `begin`, then more of each of its n answers, then `end` with what was not told of them;
    calls come whole with it. After `begin`, `ping` says nothing but that there is more to come."""

    def begin(self, n: int) -> bytes: ...

    def ping(self) -> bytes: ...

    def more(self, index: int, piece: Piece) -> bytes: ...

    def end(self, reply: Reply, rests: list[Piece]) -> bytes: ...


class Wire(Protocol):
    """What the module of a protocol has."""

    __name__: str

    def parse(self, body: bytes, at: Address, before: Beginning | None = None, /) -> Turn: ...

    def render(self, reply: Reply) -> bytes: ...

    def render_error(self, error: "WireError") -> bytes: ...

    @property
    def Stream(self) -> Callable[[Turn, str, float], Stream]: ...


class WireError(Exception):
    """A refusal before the first byte. `code` is one that OpenAI's clients know where there is one."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def context_overflow(needed: int, limit: int) -> WireError:
    """The refusal that harnesses recognise as theirs to mend, by compaction for instance."""
    return WireError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {needed} tokens. "
        "Please reduce the length of the messages.",
    )
