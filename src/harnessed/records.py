"""The records that gateway, controller, trainer and engine share.

Read this file alone and you know the system: a *task* is given to a *group* of *rollouts*; each rollout is executed in
*attempts*; an attempt's *calls* to the model become the *nodes* of its transcript; every sampled token ends with one
*fate*. Control records are pydantic models (they cross HTTP as JSON); nodes are plain dataclasses of packed arrays
(they cross HTTP as msgpack and are read by numpy without a copy). This module imports nothing of the project.
"""

import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,120}$"
"""What the ids of runs and groups are: they stand in addresses and name folders."""

MOST_REWARD = 1e9
"""Rewards are numbers within plus and minus this: their sums and squares stay exact enough to be compared."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A number as databases keep it."""

RewardValue = Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD, allow_inf_nan=False)]

CallRewards = list[RewardValue]
"""Beside the reward of the whole: one for each answer that the harness got from the model, in the order in which they
were made, side calls included. Shorter: the rest got 0. Longer: what is left counts at the last answer."""

Task = dict[str, Any]
"""One row of the dataset. `files` (path -> content), if present, is written into the workspace of every attempt."""


class Outcome(StrEnum):
    """How a rollout ended."""

    OK = "ok"
    AGENT_EXIT = "agent_exit"
    """The harness ended with a non-zero status or an exception."""
    AGENT_TIMEOUT = "agent_timeout"
    BUDGET = "budget"
    """The attempt failed after a limit (calls, context) had refused one of its calls."""
    INFRASTRUCTURE = "infrastructure"
    """Not the agent's fault: engine, controller, evaluator or machine. Never a reward of 0."""
    CANCELLED = "cancelled"


TRAINED_OUTCOMES = frozenset({Outcome.OK, Outcome.AGENT_EXIT, Outcome.AGENT_TIMEOUT, Outcome.BUDGET})
"""Outcomes that are evaluated, trained and counted in their group; the others leave it."""


class Fate(StrEnum):
    """What became of a sampled token. The list is closed, and the counts add up to every token that was sampled."""

    TRAINED = "trained"
    UNDELIVERED = "undelivered"
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    """Another attempt of the rollout followed."""
    EVALUATION = "evaluation"
    SIDE_CALL = "side_call"
    OVERLONG = "overlong"
    NO_LOGPROB = "no_logprob"
    CONSTRAINED = "constrained"
    """Sampled under a grammar: the recorded probability is not the policy's own."""
    STALE = "stale"
    GROUP_INCOMPLETE = "group_incomplete"
    """The group lost so many members that no reward could be compared, or the run ended before it was complete."""
    GROUP_SKIPPED = "group_skipped"
    """All rewards of the group were equal."""
    UPDATE_SKIPPED = "update_skipped"
    """The optimiser step was not finite."""
    INFRASTRUCTURE = "infrastructure"
    """The last attempt of a rollout that ended by infrastructure."""
    CANCELLED = "cancelled"


UNKNOWN_VERSION = -1
"""In place of a packed version: the engine does not say what sampled the token."""


class Version(NamedTuple):
    """A policy version, never used twice. `number` only grows, over restarts too; a restart begins a new lineage."""

    lineage: int
    """0 to 2,047."""
    number: int
    """Updates since the first weights; 0 to 1,048,575."""

    def pack(self) -> int:
        """As one int32, which is how the engine stamps it on every token."""
        return self.lineage << 20 | self.number

    @staticmethod
    def unpack(packed: int) -> "Version":
        return Version(packed >> 20, packed & 0xFFFFF)


class Purpose(StrEnum):
    TRAIN = "train"
    EVALUATION = "evaluation"


class History(StrEnum):
    """What stands in a context for earlier answers."""

    EXACT = "exact"
    """The sampled tokens, whatever the chat template makes of an answer that is repeated."""
    TEMPLATE = "template"
    """What the chat template writes; where that is not what was sampled, the conversation goes on in a new row."""


class Split(StrEnum):
    """Why a conversation goes on in a new row although the request repeats an earlier answer."""

    TEMPLATE = "template"
    """The template writes the answer in another way than it was sampled: reasoning stripped, say."""
    RETOKENISED = "retokenised"
    """The same text came back from the engine as other tokens."""
    EDITED = "edited"
    """The harness changed its history: the answer itself, or what stood before it."""


class Overlong(StrEnum):
    """What becomes of a training row that is longer than allowed."""

    TRUNCATE = "truncate"
    """Its first tokens are trained; the fate of the others is `overlong`."""
    DROP = "drop"
    """It is not trained. What it shares with a row that fits is trained there."""
    FAIL = "fail"
    """The run ends."""


class Dialect(StrEnum):
    """How an engine is asked."""

    TOKENS = "tokens"
    """Token ids in, token ids out: the protocol of `engine/app.py`."""
    CHAT = "chat"
    """OpenAI's Chat Completions with `return_token_ids` (vLLM); the engine applies the chat template."""


class State(StrEnum):
    """State of a rollout."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class Record(BaseModel):
    """Base of the control records: a misspelt field is an error, not silence."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Sampling(Record):
    """How answers are sampled. In rollouts of a run this overrides what the harness asks for (which is kept)."""

    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    """0 is greedy: the recorded log-probability is then 0; not for training. Above 0 at least 0.001."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1, answers are sampled from the likeliest tokens whose probabilities sum to it, and the recorded
    log-probabilities are of those alone. Not for training: the trainer's are those of the whole vocabulary."""
    max_tokens: int = Field(1024, ge=1)
    """Most tokens of one answer; a harness may ask for fewer."""

    @field_validator("temperature")
    @classmethod
    def _within_float32(cls, temperature: float) -> float:
        if 0 < temperature < 0.001:
            raise ValueError("must be 0 (greedy) or at least 0.001")
        return temperature


class Limits(Record):
    """What one attempt may use. A call beyond a limit is refused before its first byte."""

    calls: int = Field(200, ge=1)
    context: int = Field(32_768, ge=1)
    """Most tokens of prompt and answer together."""
    tokens: int | None = Field(None, ge=1)
    """Most tokens sampled for all answers together; none: as many as calls and context allow."""
    at_once: int = Field(128, ge=1)
    """Most answers that are sampled at the same time. A call beyond it is refused with status 429."""


class SideCall(Record):
    """A kind of request that is beside the task, for a title or a summary: all that is set has to hold."""

    system: str | None = None
    """A regular expression that is found in the text of its system messages."""
    tools: bool | None = None
    """Whether it declares tools."""

    @model_validator(mode="after")
    def _says_something(self) -> "SideCall":
        if self.system is None and self.tools is None:
            raise ValueError("a side call is told by `system`, `tools` or both")
        try:
            re.compile(self.system or "")
        except re.error as error:
            raise ValueError(f"`system` of a side call is no regular expression: {error}") from None
        return self


class RunSpec(Record):
    """One training or evaluation."""

    id: str
    policy: str
    """Folder of the policy's tokenizer and chat template, as the gateway's machine sees it."""
    limits: Limits = Limits()
    history: History = History.EXACT
    side_calls: list[SideCall] = []


class Verdict(StrEnum):
    """What a policy's chat template does in one case of its examination."""

    EXACT = "exact"
    """The context of `history: exact` is what the deployed template writes."""
    DIFFERS = "differs"
    """Training stays exact, but the deployed template shows the model another context."""
    UNSUPPORTED = "unsupported"
    """The template refuses such a conversation."""
    BROKEN = "broken"
    """What the template adds after an answer is not well defined: the model would get a context that nobody meant."""


class Finding(Record):
    case: str
    verdict: Verdict
    detail: str
    """One sentence; empty if there is nothing to say."""


class Examination(Record):
    """What a policy's chat template does when a conversation goes on (`gateway/examine.py`)."""

    findings: list[Finding]

    def cases(self, *verdicts: Verdict) -> list[str]:
        return [finding.case for finding in self.findings if finding.verdict in verdicts]


class GroupSpec(Record):
    """The request for `n` rollouts of one task. Creating the same id again gives the group that exists."""

    id: str = Field(pattern=NAME)
    run: str
    task: Task
    n: int = Field(ge=1)
    purpose: Purpose = Purpose.TRAIN
    sampling: Sampling = Sampling()
    seed: Whole = 0
    """Every answer's seed follows from this, the rollout's index and the answer's place in its attempt."""
    priority: int = Field(0, ge=-1_000_000, le=1_000_000)
    """Queued rollouts with the highest are started first, the oldest among equals."""


class Group(GroupSpec):
    """The n rollouts of one task, whose rewards are compared."""

    complete: bool = False
    """Every member is finished, with whatever outcome."""
    created: float
    """Seconds since the epoch, as every time here."""


class Rollout(Record):
    """One complete run of the harness on one task."""

    id: str
    """`<group>.<index>`."""
    run: str
    group: str
    index: int
    """Place in the group, from 0."""
    purpose: Purpose
    state: State
    attempt: int
    """Number of the latest attempt; 0 before the first. Only this one can be trained."""
    outcome: Outcome | None = None
    """Set together with `state = finished`, in one transaction; the first ending wins."""
    reason: str = ""
    """One sentence for a person: why the outcome is not ok, or what was odd."""
    reward: float | None = None
    """None unless an evaluator gave one."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward, for the eye."""
    call_rewards: CallRewards = Field(default_factory=list)
    """Of single calls; trained on where `trainer.advantage.per_call` says so."""
    created: float
    started: float | None = None
    finished: float | None = None


class Assignment(Record):
    """What a controller gets when it claims a rollout: the right and the duty to run one attempt."""

    rollout: str
    attempt: int
    run: str
    task: Task
    key: str
    """The attempt's API key: model calls and events of this attempt, nothing else."""
    evaluator_key: str
    """Lets an evaluator post the reward of this rollout, nothing else."""


class Ending(Record):
    """How an attempt ended, as its controller reports it."""

    outcome: Outcome
    reason: str = ""
    reward: RewardValue | None = None
    parts: dict[str, float] = Field(default_factory=dict)
    call_rewards: CallRewards = Field(default_factory=list)


class Reward(Record):
    """What an evaluator gives; one outside of the controller posts it before the attempt ends."""

    reward: RewardValue
    parts: dict[str, float] = Field(default_factory=dict)
    call_rewards: CallRewards = Field(default_factory=list)


class Event(Record):
    """Anything else worth keeping about a rollout."""

    rollout: str
    attempt: int = Field(ge=0, lt=2**31)
    type: str
    data: dict[str, Any] = Field(default_factory=dict)
    time: float | None = None
    """Set by the gateway."""


class Metrics(Record):
    """One line of a trainer's metrics.jsonl, as it was posted; docs/metrics.md says what the values mean."""

    number: int = 0
    """Set by the gateway: grows with every line, over all runs."""
    step: Whole
    values: dict[str, Any]
    time: float | None = None
    """Set by the gateway."""


class ChangeKind(StrEnum):
    ROLLOUT = "rollout"
    GROUP = "group"


class Change(Record):
    """One line of the journal that the long-poll reads. The cursor is the truth; a notification is a hint."""

    cursor: int
    kind: ChangeKind
    id: str
    run: str
    state: str
    """Of a rollout: its state, or its outcome once finished. Of a group: `complete`."""


class CloseMode(StrEnum):
    """What becomes of running generations when a turnstile closes."""

    FINISH = "finish"
    """They run to their end."""
    INTERRUPT = "interrupt"
    """They stop, and go on from their tokens when it opens. Those of engines that cannot stop run to their end."""


class TurnstileState(StrEnum):
    OPEN = "open"
    CLOSING = "closing"
    """New generations wait, and some that began before still run."""
    CLOSED = "closed"


class CallState(StrEnum):
    """State of a call in the store."""

    ADMITTED = "admitted"
    ANSWERED = "answered"
    INTERRUPTED = "interrupted"
    """Its client went away before its answer: what was sampled for it is kept."""
    FAILED = "failed"
    LOST = "lost"
    """Its gateway died before it was answered."""


class Turnstile(Record):
    """Where the calls of a run wait while its policy is updated."""

    run: str
    state: TurnstileState = TurnstileState.OPEN
    owner: str = ""
    """Who has closed it, and alone may open it."""
    mode: CloseMode = CloseMode.FINISH
    since: float | None = None
    """When it was closed; names the closing."""
    lease_until: float | None = None
    """If the owner has not renewed by then, it is gone: another one may take the closing over, and some time later the
    gateway opens."""
    in_flight: int = 0
    """Generations that run at the gateway that answers."""


class Closing(Record):
    """The request to close a turnstile."""

    owner: str = Field(min_length=1)
    mode: CloseMode = CloseMode.FINISH
    lease_s: float = Field(30, gt=0, le=3600)
    drain_s: float = Field(60, ge=0, le=600)
    """Longest wait for running generations; the answer comes when none is left, or then."""


class EngineSpec(Record):
    """An inference server of a policy."""

    id: str
    url: str
    run: str
    """The run whose policy it serves."""
    speaks: Dialect = Dialect.TOKENS
    model: str = ""
    """Name to ask for where the engine speaks chat."""


class Engine(EngineSpec):
    healthy: bool
    sampled_tokens: int | None = None
    """The engine's own count since it started."""
    version: int | None = None
    """Packed `Version` that it serves."""
    reason: str = ""
    """Why it is not healthy."""
    since: float | None = None
    """When it became healthy, or ceased to be, as far as the gateway that says this has seen."""
    paused: bool = False
    """It holds back what it is asked, until its trainer lets it go on."""
    in_flight: int = 0
    """Answers that the gateway which says this has asked it for."""
    running: int | None = None
    """Answers that the engine generates, whoever asked; none: it does not say."""
    waiting: int | None = None
    """Answers that wait in the engine; none: it does not say."""


class GatewayStatus(Record):
    id: str
    since: float
    """When it started."""


class RunStatus(Record):
    """Rollouts by state, and calls in progress at the gateway that says this."""

    run: str
    queued: int
    running: int
    finished: int
    held: int
    """Calls that wait at a closed turnstile."""
    in_flight: int
    """Calls in progress that are not held."""
    queued_since: float | None = None
    """When the oldest of the queued rollouts was made."""
    running_since: float | None = None
    """When the oldest of the live attempts was started."""


class WaitingCall(Record):
    """A call in progress at the gateway that says this."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    run: str
    """Empty, as what follows, until it is known."""
    rollout: str
    attempt: int
    call: str
    since: float
    """When it began to wait for this."""
    what: str = Field(alias="for")
    """For whom or what it waits."""


class Presence(Record):
    """What a controller says of itself when it renews its leases."""

    run: str
    """The id of the run that it serves, or the name that the ids of several begin with."""
    slots: int = Field(ge=1, lt=2**31)
    """Attempts that it runs at once."""
    judging: int = Field(0, ge=0, lt=2**31)
    """Attempts whose agent has ended, and whose evaluator runs."""


class ControllerStatus(Record):
    owner: str
    attempts: int
    """Live ones."""
    lease_until: float
    """Of the attempt that it would lose first; without attempts, until when it has said that it is there."""
    presence: Presence | None = None
    """None: it has not said."""


class Status(Record):
    """Who waits for whom, and since when."""

    store: str = ""
    """Why the store is out of reach, and all that it knows is missing here; empty: it answers."""
    gateways: list[GatewayStatus]
    turnstiles: list[Turnstile]
    """Those that are not open."""
    runs: list[RunStatus]
    """In the order of their creation."""
    waiting: list[WaitingCall]
    """The longest waiting first, at most 1,000."""
    engines: list[Engine]
    controllers: list[ControllerStatus]


class Totals(Record):
    """What the stored records of a run hold."""

    calls: int
    """Calls admitted."""
    answers: int
    sampled_tokens: int
    lost: int
    """Calls that were admitted and will never be answered: their gateway died, or their engine failed."""
    interrupted: int
    """Calls whose client went away before their answer: what was sampled for them is kept."""
    undelivered: int
    """Answers whose last byte was not handed over."""


@dataclass(slots=True)
class Node:
    """An answer with the segment before it. Arrays are packed little-endian bytes; `numpy.frombuffer` reads them."""

    number: int
    """From 1, unique in the attempt, in the order in which answers were recorded."""
    parent: int
    """Number of the node whose answer this segment follows; 0 for the start of a conversation."""
    segment: bytes
    """int32 ids of the prompt tokens between the parent's answer and this answer."""
    answer: bytes
    """int32 ids of the sampled tokens, stop token included when it was sampled."""
    logprobs: bytes
    """float32, one per sampled token, of the distribution actually sampled from. Empty: the engine gave none."""
    versions: bytes
    """int32, one per sampled token: the packed `Version` that sampled it, or UNKNOWN_VERSION."""
    temperature: float
    finish: str
    """`stop`, `length` or `interrupted`: the engine broke off, and nothing of it was delivered."""
    cut: int
    """Tokens at the end of the parent's answer that are not part of this context: 1 where the parent ended with a stop
    token that history writes differently, else 0."""
    delivered: bool
    """The last byte of the answer was handed to the kernel, or a later request repeated it."""
    follows: int = 0
    """Number of the node whose conversation the request goes on with, by what its messages mean. Another one than
    `parent` only where a split parts them, and none for a bare prompt."""
    split: str = ""
    """A `Split`: why the context leaves an answer that the request repeats. Empty: it does not."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The request's messages after that conversation, as they came."""
    message: dict[str, Any] = field(default_factory=dict)
    """The assistant message as delivered."""
    call: str = ""
    """Id of the call that it answers; the answers of a request for several share it."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tool declarations of the request; only where it follows no conversation."""
    apart: str = ""
    """A `Fate` that its tokens have whatever becomes of the rollout: `side_call` or `constrained`."""
    broken_calls: int = 0
    """Texts in the answer that opened a tool call and did not parse: they were delivered as text."""

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.answer) // 4


@dataclass(slots=True)
class Attempt:
    """All nodes of one attempt, in the order of their numbers."""

    number: int
    nodes: list[Node]


@dataclass(slots=True)
class Transcript:
    """One rollout with everything that was sampled for it, superseded attempts included."""

    rollout: Rollout
    attempts: list[Attempt]

    def pack(self) -> dict[str, Any]:
        """As values that msgpack carries."""
        return {"rollout": self.rollout.model_dump(mode="json"), "attempts": [asdict(a) for a in self.attempts]}

    @staticmethod
    def unpack(packed: dict[str, Any]) -> "Transcript":
        return Transcript(
            Rollout.model_validate(packed["rollout"]),
            [Attempt(a["number"], [Node(**node) for node in a["nodes"]]) for a in packed["attempts"]],
        )
