"""What the gateway shows of itself: metrics, probes, status and logs."""

import asyncio
import io
import json
import logging
import re
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import Scripted
from test_every_route import BODIES, LISTS
from test_exchange import USER, say
from texts import answer

from harnessed import logs
from harnessed.client import (
    ApiError,
    AsyncClient,
    check_ready,
    close_turnstile,
    create_groups,
    end_attempt,
    get_status,
    get_totals,
    get_turnstile,
    open_turnstile,
    renew,
)
from harnessed.gateway.keys import METRICS, Key, Keyring, Scope
from harnessed.gateway.status import unserved
from harnessed.records import CloseMode, Ending, Engine, GroupSpec, Outcome, TurnstileState

CALLS = "harnessed_calls_total"


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    monkeypatch.setattr("harnessed.gateway.surroundings.FRESH_S", 0)


async def scrape(house) -> dict:
    """(name, labels as sorted pairs) -> value, as Prometheus reads the page."""
    page = await house.http.get(f"{house.url}/metrics", headers={"authorization": f"Bearer {house.keys.sign(METRICS)}"})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(page.text) for sample in family.samples]
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}


def count(page, name, **labels) -> float:
    """Of all samples of that name with these labels."""
    return sum(
        value for (found, *pairs), value in page.items() if found == name and labels.items() <= dict(pairs).items()
    )


async def until(condition, what: str) -> None:
    """Of the gateway, which learns of what clients do a moment later."""
    for _ in range(1000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(what)


async def leave(house, key, **body) -> None:
    """A client that gives up."""
    with pytest.raises((openai.APITimeoutError, httpx.TimeoutException)):
        await say(house, key, [USER | {"content": "leave"}], timeout=0.3, **body)


async def test_the_metrics_are_what_was_driven(house):
    house.engine.script = lambda prompt, call: answer(f"answer {call}")
    (attempt,) = await house.attempts()
    for n in range(3):
        await say(house, attempt.key, [USER | {"content": str(n)}])
    stream = await house.openai(attempt.key).chat.completions.create(
        model="m", messages=[USER | {"content": "a stream"}], stream=True
    )
    assert [event async for event in stream]
    await house.anthropic(attempt.key).messages.create(model="m", max_tokens=20, messages=[USER | {"content": "b"}])
    with pytest.raises(openai.AuthenticationError):
        await say(house, "sk-none", [USER])
    with pytest.raises(openai.BadRequestError):
        await say(house, attempt.key, [])
    house.engine.script = lambda prompt, call: Scripted(status=500)
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER | {"content": "fail"}])
    house.engine.script = lambda prompt, call: Scripted(answer("never"), delay_s=30)
    await leave(house, attempt.key)

    async def seen():
        return count(await scrape(house), CALLS) == 9

    await until(seen, "the gateway to see the client leave")
    page = await scrape(house)
    chat = {"protocol": "chat", "streamed": "no"}
    outcomes = {outcome: count(page, CALLS, **chat, outcome=outcome) for outcome in ("ok", "refused", "failed", "left")}
    assert outcomes == {"ok": 3, "refused": 2, "failed": 1, "left": 1}
    assert count(page, CALLS, protocol="chat", streamed="yes", outcome="ok") == 1
    assert count(page, CALLS, protocol="messages", outcome="ok") == 1
    assert count(page, "harnessed_call_seconds_count") == 5
    assert (
        count(page, "harnessed_first_text_seconds_count")
        == count(page, "harnessed_first_text_seconds_count", protocol="chat")
        == 1
    )
    assert count(page, "harnessed_sampled_tokens_total", engine="e") == house.engine.sampled_tokens
    assert count(page, "harnessed_engine_up", engine="e") == 1
    assert count(page, "harnessed_rollouts", run="r", state="running") == 1
    assert count(page, "harnessed_rollouts", run="r", state="queued") == 0
    assert count(page, "harnessed_sessions") == 1 and count(page, "harnessed_store_up") == 1
    assert count(page, "harnessed_calls_in_progress") == count(page, "harnessed_generations") == 0
    assert count(page, "harnessed_commit_writes_sum") >= count(page, "harnessed_commit_seconds_count") > 5
    assert count(page, "process_resident_memory_bytes") > 2**20
    assert attempt.rollout not in str(page)


async def test_a_stream_that_breaks_is_counted_as_interrupted(house):
    house.engine.script = lambda prompt, call: Scripted(answer(f"{call} two"), pace_s=0.05, hang_up=call == 1)
    house.engine.interruptible = False
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APIConnectionError):
        stream = await house.openai(attempt.key).chat.completions.create(model="m", messages=[USER], stream=True)
        async for _ in stream:
            pass

    async def seen():
        return count(await scrape(house), CALLS) == 1

    await until(seen, "the call to end")
    page = await scrape(house)
    assert count(page, CALLS, streamed="yes", outcome="interrupted") == count(page, CALLS) == 1


async def test_calls_in_progress_say_what_they_wait_for(house):
    house.engine.script = lambda prompt, call: Scripted(answer("late"), delay_s=30)
    began = time.time()
    first, second = await house.attempts(2)
    calls = [asyncio.create_task(say(house, each.key, [USER])) for each in (first, first, second)]

    async def asked():
        return len(house.engine.log) == 3

    await until(asked, "the engine to be asked")
    await house.admin(create_groups([GroupSpec(id="queued", run="r", task={}, n=4)]))
    status = await house.admin(get_status())
    assert sorted(call.rollout for call in status.waiting) == [first.rollout, first.rollout, second.rollout]
    assert {(call.run, call.attempt, call.what) for call in status.waiting} == {("r", 1, "engine e")}
    assert len({call.call for call in status.waiting}) == 3 and all(call.call for call in status.waiting)
    assert [call.since for call in status.waiting] == sorted(call.since for call in status.waiting)
    (run,) = status.runs
    assert (run.run, run.queued, run.running, run.finished, run.in_flight, run.held) == ("r", 4, 2, 0, 3, 0)
    assert began <= run.running_since <= status.waiting[0].since <= run.queued_since <= time.time()
    (engine,) = status.engines
    assert (engine.id, engine.healthy, engine.in_flight) == ("e", True, 3)
    (controller,) = status.controllers
    assert (controller.owner, controller.attempts) == ("controller", 2)
    assert len(status.gateways) == 1 and status.gateways[0].since <= status.waiting[0].since
    page = await scrape(house)
    assert count(page, "harnessed_generations", engine="e") == count(page, "harnessed_calls_in_progress") == 3
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)

    async def quiet():
        status = await house.admin(get_status())
        return not status.waiting and status.engines[0].in_flight == 0

    await until(quiet, "the calls to end")
    await house.admin(end_attempt(first.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 1))
    status = await house.admin(get_status())
    assert (status.runs[0].running, status.runs[0].finished, status.controllers[0].attempts) == (1, 1, 1)


async def test_a_call_whose_engine_is_away_says_so(house):
    (attempt,) = await house.attempts()
    house.engine.close()
    call = asyncio.create_task(say(house, attempt.key, [USER]))

    async def waits():
        return any("to be asked again" in each.what for each in (await house.admin(get_status())).waiting)

    await until(waits, "the call to wait for its engine")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_call_that_repeats_another_waits_for_what_that_one_waits_for(house):
    house.engine.script = lambda prompt, call: Scripted(answer("late"), delay_s=30)
    (attempt,) = await house.attempts()
    retry = {"x-stainless-retry-count": "1"}
    calls = [asyncio.create_task(say(house, attempt.key, [USER], extra_headers=headers)) for headers in ({}, retry)]

    async def both():
        waiting = (await house.admin(get_status())).waiting
        return [each.what for each in waiting] == ["engine e"] * 2 and waiting[0].call == waiting[1].call

    await until(both, "both to wait for the engine")
    assert len(house.engine.log) == 1
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_held_calls_name_who_has_closed_the_turnstile(house):
    (attempt,) = await house.attempts()
    await house.admin(close_turnstile("r", "trainer-1", CloseMode.FINISH, lease_s=100))
    call = asyncio.create_task(say(house, attempt.key, [USER]))

    async def held():
        return [each.what for each in (await house.admin(get_status())).waiting] == [
            "the turnstile, closed by trainer-1"
        ]

    await until(held, "the call to be held")
    status = await house.admin(get_status())
    assert status.turnstiles == [await house.admin(get_turnstile("r"))]
    (turnstile,) = status.turnstiles
    assert (turnstile.run, turnstile.owner, turnstile.state) == ("r", "trainer-1", TurnstileState.CLOSED)
    assert (status.runs[0].held, status.runs[0].in_flight) == (1, 0)
    page = await scrape(house)
    assert count(page, "harnessed_calls_held") == 1 and count(page, "harnessed_held_seconds_total") == 0
    await house.admin(open_turnstile("r", "trainer-1"))
    await call
    status = await house.admin(get_status())
    assert (status.turnstiles, status.waiting, status.runs[0].held) == ([], [], 0)
    page = await scrape(house)
    assert count(page, "harnessed_calls_held") == 0 and 0 < count(page, "harnessed_held_seconds_total") < 60
    assert count(page, CALLS, outcome="ok") == 1


async def test_a_turnstile_that_drains_says_what_still_runs(house):
    house.engine.script = lambda prompt, call: Scripted(answer("late"), delay_s=30)
    (attempt,) = await house.attempts()
    call = asyncio.create_task(say(house, attempt.key, [USER]))

    async def asked():
        return bool(house.engine.log)

    await until(asked, "the engine to be asked")
    await house.admin(close_turnstile("r", "trainer-1", CloseMode.FINISH, lease_s=100, drain_s=0))
    (turnstile,) = (await house.admin(get_status())).turnstiles
    assert (turnstile.state, turnstile.in_flight) == (TurnstileState.CLOSING, 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_status_crosses_http_as_the_contract_says(house):
    house.engine.script = lambda prompt, call: Scripted(answer("late"), delay_s=30)
    (attempt,) = await house.attempts()
    call = asyncio.create_task(say(house, attempt.key, [USER]))

    async def asked():
        return bool(house.engine.log)

    await until(asked, "the engine to be asked")
    headers = {"authorization": house.admin._http.headers["authorization"]}
    status = (await house.http.get(f"{house.url}/api/status", headers=headers)).json()
    assert set(status) == {"store", "gateways", "turnstiles", "runs", "waiting", "engines", "controllers"}
    assert set(status["gateways"][0]) == {"id", "since"}
    counts = {"queued", "running", "finished", "held", "in_flight"}
    assert set(status["runs"][0]) == {"run", *counts, "queued_since", "running_since"}
    assert set(status["waiting"][0]) == {"run", "rollout", "attempt", "call", "since", "for"}
    assert set(status["controllers"][0]) == {"owner", "attempts", "lease_until", "presence"}
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_ready_means_that_every_run_with_work_has_an_engine(house):
    async with AsyncClient(house.url) as anybody:
        assert (await house.http.get(f"{house.url}/healthz")).status_code == 200
        await anybody(check_ready())
        (attempt,) = await house.attempts()
        await anybody(check_ready())
        house.engine.close()

        async def unready():
            try:
                await anybody(check_ready())
            except ApiError as error:
                assert error.status == 503
                return "run r has no healthy engine: e says " in error.message and "connect" in error.message
            return False

        await until(unready, "the gateway to miss its engine")
        assert (await house.http.get(f"{house.url}/healthz")).status_code == 200
        await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 1))
        await anybody(check_ready())  # nothing is left to do


async def test_a_gateway_whose_store_is_out_of_reach_lives_and_is_not_ready(house, monkeypatch):
    async def never(work):
        await asyncio.sleep(30)

    monkeypatch.setattr("harnessed.gateway.surroundings.STORE_LIMIT_S", 0.1)
    await house.restart()
    monkeypatch.setattr(house.store, "read", never)
    assert (await house.http.get(f"{house.url}/healthz")).status_code == 200
    unready = await house.http.get(f"{house.url}/readyz")
    assert unready.status_code == 503 and "the store did not answer" in unready.json()["error"]["message"]
    assert count(await scrape(house), "harnessed_store_up") == 0
    status = await house.admin(get_status())
    assert (status.runs, status.controllers) == ([], []) and len(status.engines) == 1
    assert status.store == "did not answer within 5 s"


def test_a_run_is_served_if_one_of_its_engines_is_healthy():
    def engine(id, run, healthy, reason=""):
        return Engine(id=id, url="http://x", run=run, healthy=healthy, reason=reason)

    engines = [engine("a", "r", False, "it burns"), engine("b", "r", True), engine("c", "s", False, "it burns")]
    assert unserved({"r"}, engines) == unserved(set(), []) == ""
    assert unserved({"r", "s"}, engines) == "run s has no healthy engine: c says it burns"
    assert unserved({"t"}, engines) == "run t has no engine: register one"


async def test_the_metrics_want_a_key_that_is_worth_nothing_else(house):
    (attempt,) = await house.attempts()
    foreign = Keyring(b"another gateway's secret, as long").sign(METRICS)
    for key, status in (
        (None, 401),
        ("sk-none", 401),
        (foreign, 401),
        (attempt.key, 403),
        (attempt.evaluator_key, 403),
    ):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = await house.http.get(f"{house.url}/metrics", headers=headers)
        assert response.status_code == status and "harnessed_calls" not in response.text
    async with AsyncClient(house.url, house.keys.sign(METRICS)) as scraper:
        for call in (get_status(), renew("controller"), get_totals("r")):
            with pytest.raises(ApiError, match="needs the admin key"):
                await scraper(call)
    with pytest.raises(openai.PermissionDeniedError):
        await say(house, house.keys.sign(METRICS), [USER])


class Lines(io.StringIO):
    def json(self) -> list[dict]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def lines(monkeypatch):
    """What is logged as JSON."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    stream = Lines()
    monkeypatch.setattr("sys.stderr", stream)
    logs.configure("json")
    yield stream
    root.handlers[:] = before


async def test_a_refusal_is_a_line_that_says_whose_call_it_was(house, lines):
    (attempt,) = await house.attempts()
    with pytest.raises(openai.BadRequestError):
        await say(house, attempt.key, [])
    house.engine.script = lambda prompt, call: Scripted(status=500)
    with pytest.raises(openai.InternalServerError):
        await say(house, attempt.key, [USER])
    with pytest.raises(openai.AuthenticationError):
        await say(house, "sk-none", [USER])
    refused, failed, unknown = [line for line in lines.json() if line["logger"] == "harnessed.gateway.calls"]
    assert (refused["level"], refused["message"][:17], refused["call"]) == ("info", "refused with 400:", "")
    for line in (refused, failed):
        assert (line["run"], line["rollout"], line["attempt"]) == ("r", attempt.rollout, 1)
    assert failed["level"] == "warning" and failed["call"] and "engine e" in failed["message"]
    assert unknown["rollout"] == "" and "not made by this gateway" in unknown["message"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", failed["time"])


async def test_no_key_gets_into_a_log_or_an_error(house, lines):
    """Every route, with good, bad and foreign keys in every place where one may stand, and an engine that fails."""
    logging.getLogger().setLevel(logging.DEBUG)
    (attempt,) = await house.attempts()
    foreign = Keyring(b"another gateway's secret, as long").sign(Key(Scope.ATTEMPT, attempt.rollout, 1))
    keys = [attempt.key, attempt.key[:-1], foreign, attempt.evaluator_key, house.keys.sign(METRICS), "sk-proj-mine"]
    said = []

    async def ask(method, path, **how):
        said.append((await house.http.request(method, house.url + path, **how)).text)

    fill = {"rollout": attempt.rollout, "n:int": "1", "run": "r", "group": "g"}
    control = {
        (method, re.sub(r"\{([^}]+)\}", lambda match: fill.get(match[1], "1"), route.path))
        for route in house.routes
        for method in route.methods - {"HEAD"}
        if not route.path.startswith(("/a/", "/v1", "/{"))
    }
    for failing in (False, True):
        if failing:
            house.engine.script = lambda prompt, call: Scripted(status=500)
        for key in keys:
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}):
                for path, body in BODIES.items():
                    await ask("POST", path, json=body, headers=headers)
                for method, path in control:
                    await ask(method, path, json={"outcome": key}, headers=headers)
            for path, body in BODIES.items():
                await ask("POST", f"/a/{key}{path}", json=body)
                await ask("POST", f"/a/{key}{path}", content=b"{")
                await ask("POST", f"{path}?key={key}", json=body)
                await ask("PUT", f"/a/{key}{path}?key={key}", json=body)
            for path in LISTS:
                await ask("GET", f"/a/{key}{path}?key={key}")
            await ask("GET", f"/a/{key}/nowhere?key={key}")
    refusals = [text for text in said if '"error"' in text]
    assert len(refusals) > 500
    for text in [*refusals, lines.getvalue()]:
        assert "sk-hd." not in text and "sk-proj" not in text, text
    assert lines.json()


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("GET /a/sk-hd.attempt.Zy4wLzE.x-_y/v1/models?beta=1", "GET /a/***/v1/models?beta=1"),
        ("POST /v1beta/models/m?key=AIza123&alt=sse", "POST /v1beta/models/m?key=***&alt=sse"),
        ("'authorization': 'Bearer abc'", "'authorization': '***'"),
        ("(b'x-api-key', b'abc')", "(b'x-api-key', b'***')"),
        ("x-goog-api-key: abc", "x-goog-api-key: ***"),
        ("the key sk-proj-1234 is void", "the key *** is void"),
        ("engine e: asked for task-5 at /api/runs", "engine e: asked for task-5 at /api/runs"),
    ],
)
def test_redaction(said, kept):
    assert logs.redact(said) == kept


def test_a_traceback_is_one_line_without_keys(lines):
    try:
        raise ValueError("no key sk-hd.admin.x.y")
    except ValueError:
        logging.getLogger("harnessed.x").exception("it broke\nwith %s", "sk-hd.a.b", extra={"run": "r"})
    (line,) = lines.json()
    assert line["message"] == "it broke\nwith ***" and "ValueError: no key ***" in line["error"] and line["run"] == "r"
