"""The SDK for the HTTP interfaces of gateway and engine, for trainers, controllers, evaluators and your own scripts.

Each route is described once, by a function that makes a typed `Call`; `Client` (blocking) or `AsyncClient` performs it:

    gateway = Client("http://127.0.0.1:8000", key)
    rollout = gateway(get_rollout("demo.g1.0"))

Both raise `ApiError` when the server refuses, with its own reason, and `Unreachable` when no server answers. A call
waits for at most its own deadline. With `patience_s` a server that is away, or in trouble of its own (status 429 or
500 and above), is asked again for so long. Every call may be repeated: what it does is done once, except where its
docstring says otherwise.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx
import msgpack
import orjson
from pydantic import BaseModel, TypeAdapter

from harnessed.records import (
    Assignment,
    Change,
    CloseMode,
    Ending,
    Engine,
    EngineSpec,
    Event,
    Examination,
    Fate,
    Group,
    GroupSpec,
    Metrics,
    Presence,
    Reward,
    Rollout,
    RunSpec,
    Status,
    Totals,
    Transcript,
    Turnstile,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

_PAUSES_S = (0.05, 2.0)
"""First and longest pause before a server is asked again; each is twice the last, and shortened by chance."""


_INCOMPLETE = "the answer was not complete in time"


class ApiError(Exception):
    """The server refused a call. `status` is its HTTP status."""

    def __init__(self, call: str, status: int, message: str) -> None:
        super().__init__(f"{call}: {message} (status {status})")
        self.status = status
        self.message = message


class Unreachable(Exception):
    """No server answered within the call's deadline."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and how to read its answer."""

    method: str
    path: str
    parse: Callable[[bytes], T]
    body: Any = None
    """JSON, or None."""
    query: dict[str, str | int | float] = field(default_factory=dict)
    timeout_s: float = 30

    def request(self, client: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        content = None if self.body is None else orjson.dumps(self.body)
        return client.build_request(
            self.method,
            self.path,
            content=content,
            params=self.query or None,
            headers={"content-type": "application/json"},
            timeout=self.timeout_s,
        )

    def read(self, status: int, body: bytes) -> T:
        if 200 <= status < 300:
            return self.parse(body)
        try:
            message = orjson.loads(body)["error"]["message"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            message = body[:500].decode(errors="replace")
        raise ApiError(f"{self.method} {self.path}", status, message)


class _Patience:
    """How long one client waits for its server; tells people once that it does, and once that it need not any more,
    however many of its calls wait."""

    def __init__(self, url: str, patience_s: float) -> None:
        self._url = url
        self._patience_s = patience_s
        self._waiting: set[_Waiting] = set()

    def begin(self) -> "_Waiting":
        return _Waiting(self, time.monotonic() + self._patience_s)

    def wait(self, waiting: "_Waiting", problem: Exception) -> None:
        if not self._waiting:
            limit = "" if self._patience_s == math.inf else f" for up to {self._patience_s:.0f} s"
            log.warning("%s; asking again%s", problem, limit)
        self._waiting.add(waiting)

    def end(self, waiting: "_Waiting", *, answered: bool) -> None:
        if waiting in self._waiting:
            self._waiting.discard(waiting)
            if answered and not self._waiting:
                log.warning("%s answers again", self._url)


class _Waiting:
    """The tries of one call."""

    def __init__(self, patience: _Patience, deadline: float) -> None:
        self._patience = patience
        self._deadline = deadline
        self._pause_s = _PAUSES_S[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._patience.end(self, answered=raised is None)

    def pause_s(self, problem: Exception) -> float:
        """How long to wait before asking again. Raises the problem if the call is refused, or the time is up."""
        refused = isinstance(problem, ApiError) and problem.status < 500 and problem.status != 429
        pause_s = self._pause_s * random.uniform(0.5, 1)
        if refused or time.monotonic() + pause_s > self._deadline:
            raise problem
        self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])
        self._patience.wait(self, problem)
        return pause_s


class Client:
    """Performs calls, blocking. May be used by several threads."""

    def __init__(
        self, url: str, key: str = "", *, patience_s: float = 0, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """`meanwhile` is called before a server is asked again; what it raises ends the wait. Raises ValueError if
        HTTP cannot carry the key."""
        self.url = url
        self._patience = _Patience(url, patience_s)
        self._meanwhile = meanwhile
        self._http = httpx.Client(base_url=url, headers=_authorisation(key), trust_env=False)

    def __call__(self, call: Call[T]) -> T:
        with self._patience.begin() as waiting:
            while True:
                try:
                    return call.read(*self._ask(call))
                except (httpx.TransportError, ApiError) as error:
                    self._meanwhile()
                    time.sleep(waiting.pause_s(_problem(self.url, call, error)))

    def _ask(self, call: Call[T]) -> tuple[int, bytes]:
        """The status and body of an answer."""
        deadline = time.monotonic() + call.timeout_s
        request = call.request(self._http)
        body = bytearray()
        with contextlib.closing(self._http.send(request, stream=True)) as response:
            for chunk in response.iter_bytes():  # httpx limits the wait for each
                body += chunk
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(_INCOMPLETE, request=request)
        return response.status_code, bytes(body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._http.close()


class AsyncClient:
    """Performs calls on the running event loop."""

    def __init__(self, url: str, key: str = "", *, patience_s: float = 0) -> None:
        self.url = url
        self._patience = _Patience(url, patience_s)
        self._http = httpx.AsyncClient(base_url=url, headers=_authorisation(key), trust_env=False)

    async def __call__(self, call: Call[T]) -> T:
        with self._patience.begin() as waiting:
            while True:
                try:
                    return call.read(*await self._ask(call))
                except (httpx.TransportError, ApiError) as error:
                    await asyncio.sleep(waiting.pause_s(_problem(self.url, call, error)))

    async def _ask(self, call: Call[T]) -> tuple[int, bytes]:
        """The status and body of an answer."""
        request = call.request(self._http)
        try:
            async with asyncio.timeout(call.timeout_s):
                response = await self._http.send(request)
        except TimeoutError:
            raise httpx.ReadTimeout(_INCOMPLETE, request=request) from None
        return response.status_code, response.content

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._http.aclose()


def _authorisation(key: str) -> dict[str, str]:
    """Without what surrounds a key in a file."""
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the key holds characters that no HTTP header can hold")
    return {"authorization": f"Bearer {key}"} if key else {}


def _problem(url: str, call: Call[Any], error: httpx.TransportError | ApiError) -> Exception:
    """What the caller is told."""
    if isinstance(error, ApiError):
        return error
    problem = Unreachable(f"{url} did not answer {call.method} {call.path}: {type(error).__name__} {error}".rstrip())
    problem.__cause__ = error
    return problem


def _json(type_: type[T]) -> Callable[[bytes], T]:
    return TypeAdapter(type_).validate_json


def _nothing(_: bytes) -> None:
    return None


def _dump(record: BaseModel) -> dict[str, Any]:
    return record.model_dump(mode="json")


# The gateway's control routes, in the order of a rollout's life. All need the admin key unless said otherwise.


def create_run(run: RunSpec) -> Call[RunSpec]:
    """Make a run known; again with the same id, its limits and policy are replaced."""
    return Call("POST", "/api/runs", _json(RunSpec), _dump(run))


def examine_template(run: str) -> Call[Examination]:
    """What the chat template of a run's policy does when a conversation goes on."""
    return Call("GET", f"/api/runs/{run}/template", _json(Examination))


def close_turnstile(run: str, owner: str, mode: CloseMode, lease_s: float = 30, drain_s: float = 60) -> Call[Turnstile]:
    """Hold the calls of a run from now on; returns when nothing is generated for it any more (`closed`), or after
    drain_s (`closing`). The owner renews within lease_s, and opens."""
    body = {"owner": owner, "mode": mode, "lease_s": lease_s, "drain_s": drain_s}
    return Call("POST", f"/api/runs/{run}/turnstile/close", _json(Turnstile), body, timeout_s=drain_s + 30)


def renew_turnstile(run: str, owner: str) -> Call[Turnstile]:
    """Keep it closed for another lease."""
    return Call("POST", f"/api/runs/{run}/turnstile/renew", _json(Turnstile), {"owner": owner})


def open_turnstile(run: str, owner: str) -> Call[Turnstile]:
    """Let the held calls go on. One that is open stays open."""
    return Call("POST", f"/api/runs/{run}/turnstile/open", _json(Turnstile), {"owner": owner})


def get_turnstile(run: str) -> Call[Turnstile]:
    """Whether it is open, or who has closed it, and how much still runs."""
    return Call("GET", f"/api/runs/{run}/turnstile", _json(Turnstile))


def register_engine(engine: EngineSpec) -> Call[Engine]:
    """Serve a run's policy from this engine, among others, from the next call on; the same id replaces at once. The
    engines of a run all speak the same (status 409)."""
    return Call("POST", "/api/engines", _json(Engine), _dump(engine))


def remove_engine(engine: str) -> Call[None]:
    """Its rollouts go elsewhere; what it generates now is interrupted and goes on there too."""
    return Call("DELETE", f"/api/engines/{engine}", _nothing)


def list_engines() -> Call[list[Engine]]:
    """Every engine with its health, asked now."""
    return Call("GET", "/api/engines", _json(list[Engine]))


def create_groups(groups: list[GroupSpec]) -> Call[list[Group]]:
    """Queue the rollouts of many groups in one transaction. Groups that exist are returned as they are."""
    return Call("POST", "/api/groups", _json(list[Group]), [_dump(group) for group in groups])


def list_groups(run: str) -> Call[list[Group]]:
    """All groups of a run, in the order of their creation."""
    return Call("GET", "/api/groups", _json(list[Group]), query={"run": run})


def get_group(group: str) -> Call[Group]:
    """A group, and whether it is complete."""
    return Call("GET", f"/api/groups/{group}", _json(Group))


def cancel_group(group: str) -> Call[Group]:
    """End its unfinished rollouts with the outcome `cancelled`."""
    return Call("POST", f"/api/groups/{group}/cancel", _json(Group))


def cancel_run(run: str) -> Call[list[str]]:
    """End all unfinished rollouts of a run with the outcome `cancelled`; their ids (a repeated call finds none)."""
    return Call("POST", f"/api/runs/{run}/cancel", _json(list[str]), timeout_s=60)


def get_transcripts(group: str) -> Call[list[Transcript]]:
    """All rollouts of a group with everything that was sampled for them, in the order of their index."""

    def parse(body: bytes) -> list[Transcript]:
        return [Transcript.unpack(packed) for packed in msgpack.unpackb(body)]

    return Call("GET", f"/api/groups/{group}/transcripts", parse, timeout_s=120)


def list_rollouts(run: str) -> Call[list[Rollout]]:
    """All rollouts of a run, in the order of their creation."""
    return Call("GET", "/api/rollouts", _json(list[Rollout]), query={"run": run})


def get_rollout(rollout: str) -> Call[Rollout]:
    """A rollout with its state, outcome and reward."""
    return Call("GET", f"/api/rollouts/{rollout}", _json(Rollout))


def cancel_rollout(rollout: str) -> Call[Rollout]:
    """End it with the outcome `cancelled`, unless it has ended."""
    return Call("POST", f"/api/rollouts/{rollout}/cancel", _json(Rollout))


def claim(run: str, owner: str, most: int, attempts: int, wait_s: float = 0) -> Call[list[Assignment]]:
    """Start attempts of up to `most` queued rollouts of a run for the controller `owner`: the highest
    priority first, the oldest among equals.

    `run` is a run's id, or the name that the ids of several runs begin with (`demo` for `demo-1f2e3d`).

    Waits up to wait_s for the first one. The owner keeps what it claimed as long as it renews (`renew`); a rollout
    whose attempt was lost is queued again, up to `attempts` attempts in all. What a call claimed whose answer was lost
    is the owner's too: `renew` names it.
    """
    body = {"run": run, "owner": owner, "most": most, "attempts": attempts, "wait_s": wait_s}
    return Call("POST", "/api/attempts/claim", _json(list[Assignment]), body, timeout_s=wait_s + 30)


def renew(owner: str, presence: Presence | None = None) -> Call[list[str]]:
    """Prolong the owner's leases. Returns its live attempts, as `rollout/attempt`; what is missing must be stopped.

    What it says of itself holds until the next renewal, and is told to whoever asks who waits for whom.
    """
    body = {"owner": owner, "presence": _dump(presence) if presence else None}
    return Call("POST", "/api/attempts/renew", _json(list[str]), body)


def get_held_seconds(rollout: str, attempt: int) -> Call[float]:
    """For how long the turnstile of its run has been closed since an attempt started: its time limit grows by this."""
    return Call("GET", f"/api/rollouts/{rollout}/attempts/{attempt}/held", _json(float))


def end_attempt(rollout: str, attempt: int, ending: Ending, attempts: int) -> Call[Rollout]:
    """Report an ending. `infrastructure` queues the rollout again while it has had fewer than `attempts` attempts.

    Again, it returns the rollout as it is. Status 409: the attempt was cancelled, or another one has begun.
    """
    body = _dump(ending) | {"attempts": attempts}
    # The gateway waits up to 30 s for what its engine still generates for the attempt.
    return Call("POST", f"/api/rollouts/{rollout}/attempts/{attempt}/end", _json(Rollout), body, timeout_s=60)


def post_reward(rollout: str, reward: Reward) -> Call[Rollout]:
    """Give a reward before the attempt ends (admin or the rollout's evaluator key); the first one wins, and any other
    is refused with status 409."""
    return Call("POST", f"/api/rollouts/{rollout}/reward", _json(Rollout), _dump(reward))


def append_event(event: Event) -> Call[None]:
    """Keep something about an attempt (admin, or the attempt's own key). A call that is repeated because its answer was
    lost keeps it twice."""
    return Call("POST", "/api/events", _nothing, _dump(event))


def list_events(rollout: str) -> Call[list[Event]]:
    """The events of all attempts of a rollout, in the order in which they came."""
    return Call("GET", f"/api/rollouts/{rollout}/events", _json(list[Event]))


def list_changes(run: str, after: int, wait_s: float = 0) -> Call[list[Change]]:
    """What changed in a run since a cursor (0: since the beginning); waits up to wait_s for the first change."""
    query: dict[str, str | int | float] = {"run": run, "after": after, "wait_s": wait_s}
    return Call("GET", "/api/changes", _json(list[Change]), query=query, timeout_s=wait_s + 30)


def get_totals(run: str) -> Call[Totals]:
    """What the stored records of a run hold, counted now."""
    return Call("GET", f"/api/runs/{run}/totals", _json(Totals))


def post_metrics(run: str, metrics: Metrics) -> Call[None]:
    """Keep a line of a trainer's metrics, for the dashboard's curves."""
    return Call("POST", f"/api/runs/{run}/metrics", _nothing, _dump(metrics))


def list_metrics(run: str, after: int = 0) -> Call[list[Metrics]]:
    """The lines of a run with a higher number than `after`, in the order in which they came."""
    return Call("GET", f"/api/runs/{run}/metrics", _json(list[Metrics]), query={"after": after})


def forget_metrics(run: str, above: int) -> Call[None]:
    """Delete the lines of steps above this one: a run that is resumed takes them again."""
    return Call("DELETE", f"/api/runs/{run}/metrics", _nothing, query={"above": above})


def post_fates(run: str, fates: dict[str, dict[Fate, int]]) -> Call[None]:
    """Keep what became of the sampled tokens of rollouts, for the dashboard; the last ones of a rollout count."""
    body = {rollout: {str(fate): tokens for fate, tokens in each.items()} for rollout, each in fates.items()}
    return Call("POST", f"/api/runs/{run}/fates", _nothing, body)


def get_status() -> Call[Status]:
    """Who waits for whom, and since when."""
    return Call("GET", "/api/status", _json(Status))


def check_ready() -> Call[None]:
    """Needs no key. An ApiError of status 503 says why the gateway cannot serve what there is to do."""
    return Call("GET", "/readyz", _nothing)


# The engine's own routes (no key: an engine listens where only gateway and trainer reach it).


def pause_engine(timeout_s: float) -> Call[None]:
    """Returns when no generation runs any more; later ones wait until `resume_engine`, or until the engine dies."""
    return Call("POST", "/pause", _nothing, {}, timeout_s=timeout_s)


def resume_engine() -> Call[None]:
    return Call("POST", "/resume", _nothing, {})
