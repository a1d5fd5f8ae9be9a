"""Who waits for whom in a run, in one line with the likeliest cause first, from what a gateway says of itself.

`browse/status.py` shows it above its tables; `training/watchdog.py` says it when nothing has moved for long.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from harnessed.records import ControllerStatus, Engine, RunStatus, Status, Turnstile, TurnstileState, WaitingCall

MOST_SAID = 200
"""Characters of a reason that somebody else gave."""


class Weight(IntEnum):
    """How likely it is what all others wait for; the lightest one is said first."""

    STANDS = 0
    """It moves when somebody does something about it."""
    HOLDS = 1
    """It holds others up, and ends by itself."""
    WORKS = 2
    IDLE = 3


class Cause(NamedTuple):
    weight: Weight
    text: str


def who_waits(status: Status, run: str, now: float) -> str:
    """The line of one run; `now` in seconds since the epoch."""
    if status.store:
        return _one_line(f"the gateway cannot reach its store: {_cut(status.store)}")
    counts = next((each for each in status.runs if each.run == run), None)
    if counts is None:
        return f"the gateway knows no run {run}"
    calls = [call for call in status.waiting if call.run == run]
    causes = [
        *_turnstile(next((each for each in status.turnstiles if each.run == run), None), counts, now),
        *_engines(status, counts, calls, now),
        *_controllers([each for each in status.controllers if _serves(each, run)], counts, now),
        *_attempts(status, counts, calls, now),
        *_other_calls(calls, now),
    ]
    if not counts.queued + counts.running:
        causes.append(Cause(Weight.HOLDS, f"no rollout is queued or running, {counts.finished} are finished"))
    line = "; ".join(cause.text for cause in sorted(causes, key=lambda cause: cause.weight))
    gateways = len(status.gateways)
    return _one_line(line + (f" (calls as one of {gateways} gateways sees them)" if gateways > 1 else ""))


def goes_on(status: Status, run: RunStatus) -> bool:
    """Whether anybody may wait for anything in a run; one that has ended leaves nothing behind but its counts."""
    closed = any(each.run == run.run for each in status.turnstiles)
    served = any(each.run == run.run for each in status.engines)
    return bool(run.queued or run.running or run.held or run.in_flight or closed or served)


def _turnstile(turnstile: Turnstile | None, counts: RunStatus, now: float) -> Iterable[Cause]:
    if turnstile is None or turnstile.state == TurnstileState.OPEN:
        return
    since = _seconds(turnstile.since or now, now)
    text = f"turnstile {turnstile.state} for {since} by {turnstile.owner}"
    lease_until = turnstile.lease_until or now
    if lease_until < now:
        text += f", whose lease is over for {_seconds(lease_until, now)}"
    if turnstile.state == TurnstileState.CLOSING:
        text += f", {_many(turnstile.in_flight, 'generation')} still running"
    if counts.held:
        text += f", {_many(counts.held, 'call')} held"
    yield Cause(Weight.STANDS if lease_until < now else Weight.HOLDS, text)


def _engines(status: Status, counts: RunStatus, calls: list[WaitingCall], now: float) -> Iterable[Cause]:
    mine = [each for each in status.engines if each.run == counts.run]
    healthy = [each for each in mine if each.healthy]
    if not mine:
        if counts.queued or counts.running:
            yield Cause(Weight.STANDS, f"no engine is registered for run {counts.run}: register one")
        return
    for each in mine:
        if not each.healthy:
            why = _cut(each.reason) or "it does not say why"
            text = f"engine {each.id} not healthy for {_seconds(each.since or now, now)}: {why}"
            yield Cause(Weight.HOLDS if healthy else Weight.STANDS, text)
        elif each.paused:
            yield Cause(Weight.HOLDS, f"engine {each.id} paused")
    if healthy:
        yield _generations(healthy, len(status.gateways) > 1, calls, now)


def _generations(engines: list[Engine], shared: bool, calls: list[WaitingCall], now: float) -> Cause:
    """`shared`: other gateways ask these engines too, and only the engines know of all that they are asked."""
    who = "engine" if len(engines) == 1 else f"{len(engines)} engines"
    queued = sum(each.waiting or 0 for each in engines)
    asked = sum(
        each.running + (each.waiting or 0) if shared and each.running is not None else each.in_flight
        for each in engines
    )
    if not asked:
        return Cause(Weight.IDLE, f"{who} idle")
    names = {f"engine {each.id}" for each in engines}
    longest = min((call.since for call in calls if call.what in names), default=None)
    text = f"{who}: {_many(asked, 'generation')} running"
    if longest is not None:
        text += f", longest {_seconds(longest, now)}"
    if queued:
        text += f", {queued} of them queued there"
    return Cause(Weight.WORKS, text)


def _controllers(serving: list[ControllerStatus], counts: RunStatus, now: float) -> Iterable[Cause]:
    if not (counts.queued or counts.running):
        return
    queued = f"{counts.queued} queued"
    if counts.queued_since is not None:
        queued += f", longest {_seconds(counts.queued_since, now)}"
    gone = [each for each in serving if each.lease_until < now]
    here = [each for each in serving if each.lease_until >= now]
    for each in gone:
        over = f"controller {each.owner} gone, its lease is over for {_seconds(each.lease_until, now)}"
        weight = Weight.HOLDS if here else Weight.STANDS
        yield Cause(weight, over + (f" ({_many(each.attempts, 'attempt')})" if each.attempts else ""))
    if not here:
        yield Cause(Weight.STANDS, f"no controller claims anything for run {counts.run}: start one ({queued})")
        return
    who = "controller" if len(here) == 1 else f"{len(here)} controllers"
    busy = sum(each.attempts for each in here)
    slots = [each.presence.slots for each in here if each.presence]
    how = f"{busy} of {sum(slots)} slots busy" if len(slots) == len(here) else f"{_many(busy, 'attempt')} running"
    yield Cause(Weight.WORKS, f"{who}: {queued}, {how}")


def _serves(controller: ControllerStatus, run: str) -> bool:
    """One that has not said for whom it is there may be there for all."""
    if controller.presence is None:
        return True
    return run == controller.presence.run or run.startswith(f"{controller.presence.run}-")


def _attempts(status: Status, counts: RunStatus, calls: list[WaitingCall], now: float) -> Iterable[Cause]:
    if not counts.running:
        return
    text = f"agents: {counts.running} running"
    if counts.running_since is not None:
        text += f", longest {_seconds(counts.running_since, now)}"
    calling = {(call.rollout, call.attempt) for call in calls}
    # Of the calls at other gateways nothing is known here, nor which of the calls that are not listed belong together.
    if len(status.gateways) == 1 and len(calls) == counts.in_flight + counts.held:
        text += f", {max(0, counts.running - len(calling))} without a call"
    here = [each for each in status.controllers if _serves(each, counts.run) and each.lease_until >= now]
    if judging := sum(each.presence.judging for each in here if each.presence):
        text += f", evaluator: {judging} at work"
    yield Cause(Weight.WORKS, text)


def _other_calls(calls: list[WaitingCall], now: float) -> Iterable[Cause]:
    """What waits neither in an engine nor at the turnstile; of an engine that is away, its own line tells."""
    kinds: dict[str, list[WaitingCall]] = {}
    for call in calls:
        kind = call.what.partition(":")[0]
        if not kind.startswith(("engine ", "the turnstile")) and kind != "an engine":
            kinds.setdefault(kind, []).append(call)
    for each in kinds.values():
        longest = min(each, key=lambda call: call.since)
        text = f"{_many(len(each), 'call')} waiting for {_cut(longest.what)}, longest {_seconds(longest.since, now)}"
        yield Cause(Weight.HOLDS, text)


def _seconds(since: float, now: float) -> str:
    return f"{max(0.0, now - since):.0f} s"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
