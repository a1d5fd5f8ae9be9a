"""Every route of the gateway against what nobody should send, and against an agent that tries more than it may."""

import asyncio
import json
import re
import socket
import struct

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import Scripted
from test_agreement import PROTOCOLS
from test_exchange import USER, say, told
from texts import answer

from harnessed.client import end_attempt, get_rollout, get_totals, list_events
from harnessed.config import Gateway
from harnessed.gateway.keys import ADMIN, Key, Keyring, Scope
from harnessed.records import Ending, Outcome

GEMINI = "/v1beta/models/m"
BODIES = dict(PROTOCOLS.values())
BODIES |= {f"{GEMINI}:{method}": BODIES[GEMINI] for method in ("generateContent", "streamGenerateContent")}
del BODIES[GEMINI]
BODIES |= {
    "/v1/messages/count_tokens": BODIES["/v1/messages"],
    f"{GEMINI}:countTokens": BODIES[f"{GEMINI}:generateContent"],
}
LISTS = ["/v1/models", "/v1/models/any/name", "/v1beta/models", GEMINI]


def is_refusal(path, response):
    """The protocol's own shape of an error, with words for a person."""
    error = response.json()["error"]
    assert 400 <= response.status_code < 500, response.text
    assert isinstance(error["message"], str) and error["message"] and "Traceback" not in response.text
    if "messages" in path:
        assert response.json()["type"] == "error" and error["type"].endswith(("error", "large"))
    elif "v1beta" in path:
        assert error["code"] == response.status_code and error["status"].isupper()
    else:
        assert error["type"] in ("invalid_request_error", "server_error") and error["code"]
    return True


async def send(house, path, body, key, **headers):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"} | headers
    return await house.http.post(house.url + path, content=body, headers=headers)


def broken(body):
    """Bodies that are no request, made of one that is."""
    text = json.dumps(body).encode()
    deep = b"[" * 5000 + b"]" * 5000
    return st.one_of(
        st.integers(0, len(text) - 1).map(lambda end: text[:end]),
        st.integers(0, len(text)).map(lambda at: text[:at] + b"\xff\xfe" + text[at:]),
        st.sampled_from([b"", b"null", b"1", b'"text"', b"[]", b"[{}]", b"{}", b"\x00", b"{]", deep, b'{"a": NaN}']),
        st.sampled_from(list(body)).map(
            lambda name: text[:-1] + b", " + json.dumps(name).encode() + b": " + deep + b"}"
        ),
        st.sampled_from([name for name in body if name in ("messages", "input", "contents", "prompt")]).flatmap(
            lambda name: st.sampled_from([1, True, {"a": 1}, [1, "a"], [[]], [None], ""]).map(
                lambda value: json.dumps(body | {name: value}).encode()
            )
        ),
    )


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_what_is_no_request_is_refused_and_leaves_nothing(house, path, data, caplog):
    body = data.draw(broken(BODIES[path]))
    group = f"g{len(house.engine.log)}"
    if house.world != group:
        (house.attempt,) = await house.attempts(group=group)
        house.world = group
    response = await send(house, path, body, house.attempt.key)
    served = response.status_code == 200  # `[1, 2]` is a prompt, say
    assert served or is_refusal(path, response)
    if not served:
        await asyncio.sleep(0)
        assert await house.nodes(group) == [] and "Traceback" not in caplog.text
        assert (await house.admin(get_totals("r"))).calls == len(house.engine.log)


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_and_any_model_are_served_and_recorded(house, path):
    (attempt,) = await house.attempts()
    body = BODIES[path] | {"model": "no/such:model", "invented": {"deep": [1, None, "é"]}, "betas": ["x-2030"]}
    response = await send(house, path, json.dumps(body).encode(), attempt.key, **{"anthropic-beta": "x", "x-any": "y"})
    assert response.status_code == 200, response.text
    if "count" not in path.lower():
        assert "no/such:model" in response.text or path.startswith(GEMINI)
        (recorded,) = await asked(house)
        assert recorded["invented"] == {"deep": [1, None, "é"]}


async def asked(house):
    from sqlalchemy import select

    from harnessed.gateway.tables import calls

    return await house.store.read(lambda connection: [row[0] for row in connection.execute(select(calls.c.asked))])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("chunked", [False, True], ids=["told", "chunked"])
async def test_a_body_over_the_limit_of_the_setting_is_refused(house, path, chunked):
    house.settings = Gateway(body_mb=1)
    await house.restart()
    (attempt,) = await house.attempts()

    async def pieces():
        for _ in range(20):
            yield b" " * 2**16

    body = pieces() if chunked else b" " * (2**20 + 1)
    response = await send(house, path, body, attempt.key)
    assert response.status_code == 413 and is_refusal(path, response)
    assert (await house.admin(get_totals("r"))).calls == 0
    body = json.dumps(BODIES[path]).encode()
    assert (await send(house, path, body + b" " * (2**20 - len(body)), attempt.key)).status_code == 200


@pytest.mark.parametrize("path", [*BODIES, *LISTS])
async def test_a_wrong_or_foreign_key_is_refused(house, path):
    (attempt,) = await house.attempts()
    foreign = Keyring(b"another gateway's secret, as long").sign(Key(Scope.ATTEMPT, attempt.rollout, 1))
    keys = {
        "": 401,
        "sk-none": 401,
        "x.y.é": 401,
        foreign: 401,
        attempt.key[:-1]: 401,
        attempt.evaluator_key: 403,
        house.keys.sign(ADMIN): 403,
        house.keys.sign(Key(Scope.ATTEMPT, attempt.rollout, 2)): 403,
        house.keys.sign(Key(Scope.ATTEMPT, "no-such", 1)): 403,
    }
    for key, status in keys.items():
        headers = {"authorization": f"Bearer {key}".encode()} if key else {}
        if path in BODIES:
            response = await house.http.post(house.url + path, json=BODIES[path], headers=headers)
        else:
            if status == 403 and key not in (attempt.evaluator_key, house.keys.sign(ADMIN)):
                continue  # whether the attempt lives makes no difference to a list of names
            response = await house.http.get(house.url + path, headers=headers)
        assert response.status_code == status and is_refusal(path, response), key
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    if path in BODIES:
        response = await send(house, path, json.dumps(BODIES[path]).encode(), attempt.key)
        assert response.status_code == 403 and "has ended" in response.text
    assert (await house.admin(get_totals("r"))).calls == 0


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_is_cut_leaves_nothing(house, path, caplog):
    (attempt,) = await house.attempts()
    body = json.dumps(BODIES[path]).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {attempt.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    for sent in (b"", body[:-1]):
        for reset in (False, True):
            with socket.create_connection(("127.0.0.1", int(house.url.rpartition(":")[2]))) as connection:
                connection.sendall(head.encode() + sent)
                await asyncio.sleep(0.05)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert (await send(house, path, body, attempt.key)).status_code == 200
    counts = "count" in path.lower()
    assert (await house.admin(get_totals("r"))).calls == len(house.engine.log) == (0 if counts else 1)
    assert "Traceback" not in caplog.text


async def test_a_control_request_that_is_cut_is_no_error_of_the_gateway(house, caplog):
    head = f"POST /api/runs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house.keys.sign(ADMIN)}\r\n"
    with socket.create_connection(("127.0.0.1", int(house.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"{head}content-length: 9\r\n\r\n{{".encode())
        await asyncio.sleep(0.05)
    await house.attempts()
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text


def control_routes(house, attempt):
    """(method, path) of every route that is no call of the model, with this attempt's names filled in."""
    names = {"rollout": attempt.rollout, "n:int": "1", "run": "r", "group": "g"}
    for operation in house.operations:
        yield operation.method, re.sub(r"\{([^}]+)\}", lambda match: names.get(match[1], "1"), operation.path)


async def test_an_agents_key_opens_calls_and_its_own_events_and_nothing_else(house):
    mine, other = await house.attempts(2)
    tried = list(control_routes(house, other)) + list(control_routes(house, mine))
    assert len(tried) > 40
    for method, path in tried:
        for body in ({}, {"reward": 1.0}, {"outcome": "ok", "reward": 1.0, "attempts": 1}):
            response = await house.http.request(
                method, house.url + path, json=body, headers={"authorization": f"Bearer {mine.key}"}
            )
            own_events = path == "/api/events"
            assert response.status_code == (400 if own_events else 403), (method, path, response.text)
            assert other.key not in response.text
    for rollout, number, status in ((mine.rollout, 1, 200), (mine.rollout, 2, 403), (other.rollout, 1, 403)):
        event = {"rollout": rollout, "attempt": number, "type": "note", "data": {}}
        response = await house.http.post(
            f"{house.url}/api/events", json=event, headers={"authorization": f"Bearer {mine.key}"}
        )
        assert response.status_code == status, response.text
    assert len(await house.admin(list_events(mine.rollout))) == 1
    assert await house.admin(list_events(other.rollout)) == []
    for attempt in (mine, other):
        rollout = await house.admin(get_rollout(attempt.rollout))
        assert (rollout.reward, rollout.outcome, rollout.attempt) == (None, None, 1)


async def test_an_agent_cannot_fill_the_disk_with_events(house, monkeypatch):
    monkeypatch.setattr("harnessed.gateway.lifecycle.MOST_EVENTS", 3)
    (attempt,) = await house.attempts()
    event = {"rollout": attempt.rollout, "attempt": 1, "type": "note", "data": {}}
    headers = {"authorization": f"Bearer {attempt.key}"}
    statuses = [
        (await house.http.post(f"{house.url}/api/events", json=event, headers=headers)).status_code for _ in range(4)
    ]
    assert statuses == [200, 200, 200, 403]
    large = event | {"data": {"text": "x" * 2**17}}
    assert (await house.http.post(f"{house.url}/api/events", json=large, headers=headers)).status_code == 413


async def loop(house, key):
    """An agent that never ends by itself; what stopped it, and the tokens that it got."""
    messages, sampled = [USER], 0
    for _ in range(100):
        try:
            reply = await say(house, key, messages)
        except openai.APIStatusError as error:
            return error, sampled
        sampled += reply.usage.completion_tokens
        messages += [told(reply), USER]
    raise AssertionError("nothing stopped it")


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"calls": 5}, "budget_exhausted"),
        ({"tokens": 50}, "budget_exhausted"),
        ({"context": 300}, "context_length_exceeded"),
    ],
    ids=["calls", "tokens", "context"],
)
async def test_an_agent_that_loops_stops_at_its_limits(house, limits, code):
    await house.make_run(**limits)
    (attempt,) = await house.attempts()
    error, sampled = await loop(house, attempt.key)
    assert error.code == code
    assert sampled == house.engine.sampled_tokens <= limits.get("tokens", 1000)
    await house.restart()
    if code == "budget_exhausted":  # a new conversation has room in its context
        assert (await loop(house, attempt.key))[1] == 0
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.AGENT_EXIT, reward=0.0), 3))
    assert (await house.admin(get_rollout(attempt.rollout))).outcome == Outcome.BUDGET


async def test_many_at_once_never_sample_more_than_the_limit_together(house):
    await house.make_run(tokens=100, at_once=3)
    house.engine.script = lambda prompt, call: Scripted(answer("x" * 100), delay_s=0.05)
    (attempt,) = await house.attempts()
    asked = [say(house, attempt.key, [USER], max_tokens=30) for _ in range(10)]
    given = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(each) for each in given} == {openai.types.chat.ChatCompletion, openai.RateLimitError}
    assert sum(not isinstance(each, Exception) for each in given) == 3
    with pytest.raises(openai.BadRequestError, match="4 answers were asked for: at most 3"):
        await say(house, attempt.key, [USER], n=4)
    error, _ = await loop(house, attempt.key)
    assert error.code == "budget_exhausted"
    assert house.engine.sampled_tokens == 100
