"""The line that says who waits for whom, from statuses made by hand."""

import pytest

from harnessed.records import (
    ControllerStatus,
    Engine,
    GatewayStatus,
    Presence,
    RunStatus,
    Status,
    Turnstile,
    TurnstileState,
    WaitingCall,
)
from harnessed.waiting import goes_on, who_waits

NOW = 10_000.0
IDLE = {"queued": 0, "running": 0, "finished": 12, "held": 0, "in_flight": 0}


def ago(seconds: float) -> float:
    return NOW - seconds


def run(**counts) -> RunStatus:
    return RunStatus(run="r", **IDLE | counts)


def engine(id="e", of="r", **said) -> Engine:
    return Engine(id=id, url="http://x", run=of, **{"healthy": True} | said)


def controller(attempts, owner="c", serves="r", slots=16, judging=0, left_s=20.0) -> ControllerStatus:
    presence = Presence(run=serves, slots=slots, judging=judging) if slots else None
    return ControllerStatus(owner=owner, attempts=attempts, lease_until=NOW + left_s, presence=presence)


def call(what, since_s, rollout="g.0", of="r") -> WaitingCall:
    return WaitingCall(run=of, rollout=rollout, attempt=1, call="x", since=ago(since_s), what=what)


def turnstile(state=TurnstileState.CLOSED, left_s=20.0, **said) -> Turnstile:
    return Turnstile(run="r", state=state, owner="trainer of r", since=ago(90), lease_until=NOW + left_s, **said)


def status(runs, *, gateways=1, turnstiles=(), waiting=(), engines=None, controllers=None, store="") -> Status:
    return Status(
        store=store,
        gateways=[GatewayStatus(id=f"g{n}", since=0.0) for n in range(gateways)],
        turnstiles=list(turnstiles),
        runs=[runs] if isinstance(runs, RunStatus) else runs,
        waiting=list(waiting),
        engines=[engine()] if engines is None else engines,
        controllers=[controller(0)] if controllers is None else controllers,
    )


BUSY = run(queued=40, running=16, in_flight=3, queued_since=ago(300), running_since=ago(1200))
CALLS = [call("engine e", 812, "g.0"), call("engine e", 30, "g.1"), call("engine e", 10, "g.1")]
LINES = {
    "generations that run, a full controller, agents at work": (
        status(BUSY, waiting=CALLS, engines=[engine(in_flight=3, running=9)], controllers=[controller(16, judging=2)]),
        "engine: 3 generations running, longest 812 s; controller: 40 queued, longest 300 s, 16 of 16 slots busy; "
        "agents: 16 running, longest 1200 s, 14 without a call, evaluator: 2 at work",
    ),
    "an update": (
        status(
            run(running=4, held=4, running_since=ago(100)),
            turnstiles=[turnstile()],
            waiting=[call("the turnstile, closed by trainer of r", 80, f"g.{n}") for n in range(4)],
            engines=[engine(paused=True)],
            controllers=[controller(4)],
        ),
        "turnstile closed for 90 s by trainer of r, 4 calls held; engine e paused; "
        "controller: 0 queued, 4 of 16 slots busy; agents: 4 running, longest 100 s, 0 without a call; engine idle",
    ),
    "a turnstile whose owner is gone, before an engine that works": (
        status(
            run(running=1, in_flight=1, running_since=ago(95)),
            turnstiles=[turnstile(TurnstileState.CLOSING, left_s=-60, in_flight=1)],
            waiting=[call("engine e", 95)],
            engines=[engine(in_flight=1, waiting=1)],
            controllers=[controller(1)],
        ),
        "turnstile closing for 90 s by trainer of r, whose lease is over for 60 s, 1 generation still running; "
        "engine: 1 generation running, longest 95 s, 1 of them queued there; controller: 0 queued, 1 of 16 slots busy; "
        "agents: 1 running, longest 95 s, 0 without a call",
    ),
    "no controller at all": (
        status(run(queued=8, queued_since=ago(150)), controllers=[]),
        "no controller claims anything for run r: start one (8 queued, longest 150 s); engine idle",
    ),
    "a controller of another run": (
        status(run(queued=8), controllers=[controller(3, serves="s")]),
        "no controller claims anything for run r: start one (8 queued); engine idle",
    ),
    "a controller of all runs of that name": (
        status(
            [RunStatus(run="demo-1f", **IDLE | {"queued": 8})],
            engines=[engine(of="demo-1f")],
            controllers=[controller(2, serves="demo")],
        ),
        "controller: 8 queued, 2 of 16 slots busy; engine idle",
    ),
    "a controller that died": (
        status(run(queued=8, running=2), controllers=[controller(2, left_s=-45, judging=1)]),
        "controller c gone, its lease is over for 45 s (2 attempts); no controller claims anything for run r: start "
        "one (8 queued); agents: 2 running, 2 without a call; engine idle",
    ),
    "two controllers, of which one died, and one that has not said how many slots it has": (
        status(
            run(queued=8),
            controllers=[controller(2, "a"), controller(0, "b", left_s=-45), controller(1, "d", slots=0)],
        ),
        "controller b gone, its lease is over for 45 s; 2 controllers: 8 queued, 3 attempts running; engine idle",
    ),
    "a gone owner and no controller stand still, an engine of two only holds": (
        status(
            run(queued=8),
            turnstiles=[turnstile(left_s=-60)],
            engines=[engine("a", healthy=False, since=ago(4)), engine("b")],
            controllers=[],
        ),
        "turnstile closed for 90 s by trainer of r, whose lease is over for 60 s; "
        "no controller claims anything for run r: start one (8 queued); "
        "engine a not healthy for 4 s: it does not say why; engine idle",
    ),
    "no engine": (
        status(run(queued=8), engines=[engine(of="another run")], controllers=[controller(0)]),
        "no engine is registered for run r: register one; controller: 8 queued, 0 of 16 slots busy",
    ),
    "an engine that is away, first, in one line": (
        status(
            run(queued=8, running=1, in_flight=1),
            engines=[engine(healthy=False, reason="no answer\nto GET", since=ago(40), in_flight=1)],
            waiting=[call("an engine: engine e: no answer to GET", 39)],
            controllers=[controller(1, slots=1)],
        ),
        "engine e not healthy for 40 s: no answer to GET; controller: 8 queued, 1 of 1 slots busy; "
        "agents: 1 running, 0 without a call",
    ),
    "an engine of two that is away": (
        status(
            run(running=1, in_flight=2),
            engines=[engine("a", healthy=False, since=ago(4)), engine("b", in_flight=2), engine("c")],
            waiting=[call("engine b", 7), call("engine b", 5)],
            controllers=[controller(1)],
        ),
        "engine a not healthy for 4 s: it does not say why; 2 engines: 2 generations running, longest 7 s; "
        "controller: 0 queued, 1 of 16 slots busy; agents: 1 running, 0 without a call",
    ),
    "calls that wait for something else": (
        status(
            run(running=3, in_flight=3),
            waiting=[
                call("the store", 20, "g.0"),
                call("the store", 5, "g.1"),
                call("an engine, to be asked again: engine e broke its answer off", 3, "g.2"),
                call("the store", 500, "other", of="s"),
            ],
            controllers=[controller(3)],
        ),
        "2 calls waiting for the store, longest 20 s; 1 call waiting for an engine, to be asked again: engine e broke "
        "its answer off, longest 3 s; controller: 0 queued, 3 of 16 slots busy; "
        "agents: 3 running, 0 without a call; engine idle",
    ),
    "two gateways: only the engine knows of all calls": (
        status(
            run(running=16, in_flight=1),
            gateways=2,
            waiting=[call("engine e", 50)],
            engines=[engine(in_flight=1, running=6, waiting=2)],
            controllers=[controller(16)],
        ),
        "engine: 8 generations running, longest 50 s, 2 of them queued there; "
        "controller: 0 queued, 16 of 16 slots busy; agents: 16 running (calls as one of 2 gateways sees them)",
    ),
    "all is done": (status(run()), "no rollout is queued or running, 12 are finished; engine idle"),
    "an update when all is done": (
        status(run(), turnstiles=[turnstile()]),
        "turnstile closed for 90 s by trainer of r; no rollout is queued or running, 12 are finished; engine idle",
    ),
    "the store is away": (
        status([], store="did not answer\nwithin 5 s"),
        "the gateway cannot reach its store: did not answer within 5 s",
    ),
    "another gateway": (status([]), "the gateway knows no run r"),
}


@pytest.mark.parametrize("case", LINES)
def test_one_line_names_the_likeliest_cause_first(case):
    seen, line = LINES[case]
    assert who_waits(seen, seen.runs[0].run if seen.runs else "r", NOW) == line


def test_long_reasons_are_cut_and_clocks_that_differ_do_no_harm():
    away = engine(healthy=False, reason="x" * 5000, since=NOW + 30)
    line = who_waits(status(run(queued=1), engines=[away]), "r", NOW)
    assert line.startswith("engine e not healthy for 0 s: xxx") and len(line) < 400


def test_calls_that_are_not_all_listed_are_not_counted_by_attempt():
    listed = status(run(running=4, in_flight=4), waiting=CALLS[:1], engines=[engine(in_flight=4)])
    assert "without a call" not in who_waits(listed, "r", NOW)


@pytest.mark.parametrize(
    ("counts", "engines", "turnstiles", "expected"),
    [
        ({}, [], [], False),
        ({}, [engine(of="s")], [], False),
        ({}, [engine()], [], True),
        ({}, [], [turnstile()], True),
        ({"queued": 1}, [], [], True),
        ({"running": 1}, [], [], True),
        ({"held": 1}, [], [], True),
        ({"in_flight": 1}, [], [], True),
    ],
)
def test_a_run_that_has_ended_waits_for_nobody(counts, engines, turnstiles, expected):
    one = run(**counts)
    assert goes_on(status(one, engines=engines, turnstiles=turnstiles), one) is expected
