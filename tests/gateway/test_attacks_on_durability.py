"""What attacks on the gateway's core found: several gateways on one database, a store in trouble, turnstiles, growing
requests. Each test says what goes wrong."""

import asyncio
import contextlib
import time

import httpx
import openai
import pytest
from house import open_house
from listening import listen
from scripted_engine import Scripted
from sqlalchemy import create_engine, insert, make_url, select, text, update
from texts import answer

from harnessed.client import (
    AsyncClient,
    cancel_rollout,
    claim,
    close_turnstile,
    create_groups,
    create_run,
    end_attempt,
    get_rollout,
    get_totals,
    get_turnstile,
)
from harnessed.gateway import app, delivery, intake, peers, retention
from harnessed.gateway import store as store_module
from harnessed.gateway.keys import ADMIN
from harnessed.gateway.tables import attempts as attempts_table
from harnessed.gateway.tables import calls, rollouts
from harnessed.records import CallState, CloseMode, Ending, GroupSpec, Limits, Outcome, RunSpec, TurnstileState

USER = {"role": "user", "content": "hello"}


@pytest.fixture
async def pair(tmp_path, database):
    """Two gateways on one PostgreSQL."""
    async with open_house(tmp_path, database=database) as house:
        await asyncio.sleep(2 * peers.SHARED_BEAT_S)  # both know the engine
        yield house


async def ask(url, key, messages=(USER,), *, retry=0, timeout=30, **options):
    """Status and body of one call, as they come."""
    headers = {"authorization": f"Bearer {key}"} | ({"x-stainless-retry-count": str(retry)} if retry else {})
    async with httpx.AsyncClient(timeout=timeout) as http:
        body = {"model": "m", "messages": list(messages)} | options
        response = await http.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        return response.status_code, response.text


async def until(condition, limit_s=10):
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def locked(database):
    """Nobody writes: somebody else holds the lock of all writers, as a gateway that stands still does."""
    engine = create_engine(make_url(database).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:n)"), {"n": store_module._WRITERS_LOCK})
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:n)"), {"n": store_module._WRITERS_LOCK})
            connection.rollback()
    engine.dispose()


async def waiting(house, count):
    """Returns when so many calls wait for the store."""
    await until(lambda: house.store.waiting >= count)


async def test_parallel_calls_of_an_attempt_draw_different_numbers(pair):
    """`take` overwrites `session.calls` with the count of the store, which does not hold the neighbours that were
    admitted since: parallel identical calls (best of n) get the same seed, hence the same answer, which is then trained
    as several samples."""
    (attempt,) = await pair.attempts()
    with locked(pair.settings.database):
        asking = [asyncio.create_task(ask(pair.url, attempt.key)) for _ in range(4)]
        await waiting(pair, 4)
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 4
    assert len({logged.seed for logged in pair.engine.log}) == 4


async def test_the_same_request_at_both_gateways_draws_different_numbers(pair):
    """Both count the attempt's calls before the other one's is admitted: the second sample has the seed of the first."""
    (attempt,) = await pair.attempts()
    with locked(pair.settings.database):
        asking = [asyncio.create_task(ask(url, attempt.key)) for url in pair.urls]
        await asyncio.sleep(0.5)
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 2
    assert len({logged.seed for logged in pair.engine.log}) == 2


async def test_parallel_calls_do_not_pass_the_limit(pair):
    """By the same cause an attempt of three calls has as many as it sends at once."""
    await pair.make_run(calls=3)
    (attempt,) = await pair.attempts()
    with locked(pair.settings.database):
        asking = [
            asyncio.create_task(ask(pair.url, attempt.key, [{"role": "user", "content": str(i)}])) for i in range(6)
        ]
        await waiting(pair, 6)
    statuses = [status for status, _ in await asyncio.gather(*asking)]
    assert (statuses.count(200), (await pair.admin(get_totals("r"))).calls) == (3, 3)


async def test_a_gateway_with_a_long_name_is_not_buried_again_and_again(pair):
    """PostgreSQL cuts `application_name` to 63 bytes. A gateway is named by host name, address, port and eight digits:
    with a host name of a cloud (ip-10-0-12-34.eu-central-1.compute.internal) that is longer, the others never see its
    connection, and bury it every second: none of its longer answers is ever kept."""
    listener = listen()
    await pair._serve(listener, "ip-10-0-12-34.eu-central-1.compute.internal:10.0.12.34:8000")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    pair.engine.script = lambda prompt, call: Scripted(answer("late"), delay_s=3)
    (attempt,) = await pair.attempts()
    await asyncio.sleep(2 * peers.SHARED_BEAT_S)
    status, said = await ask(url, attempt.key)
    assert (status, (await pair.admin(get_totals("r"))).lost) == (200, 0), said


async def test_attempts_that_end_at_one_gateway_are_forgotten_by_the_other(pair):
    """A gateway forgets the attempts that are ended through it; those that another one ends, as every attempt's end
    reaches only one of them, stay in its memory, transcripts and all, until it ends."""
    claimed = await pair.attempts(5)
    for each in claimed:
        assert (await ask(pair.urls[1], each.key))[0] == 200
    assert len(pair.memories[1]) == 5
    for each in claimed:
        await pair.admin(end_attempt(each.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    with contextlib.suppress(TimeoutError):
        await until(lambda: not len(pair.memories[1]), 5)
    assert len(pair.memories[1]) == 0


async def broken_off(house, key, messages=(USER,)):
    """A call whose client leaves after four tokens: they are kept."""
    house.engine.script = lambda prompt, call: (
        Scripted(answer("one two"), stall_at=4) if call == 1 else Scripted(answer(f"answer {call}"))
    )
    first = asyncio.create_task(ask(house.urls[1], key, messages))
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 4)
    first.cancel()
    await until(lambda: house.engine.log[0].finish)
    await asyncio.sleep(0.3)


async def test_parallel_calls_after_another_gateway_went_on_with_an_answer(pair):
    """A gateway knows an answer that was broken off, and the other one goes on with it. Of the next calls that look
    together at what the other did, the first removes the old node and the others fail on it: KeyError, status 500."""
    (attempt,) = await pair.attempts()
    await broken_off(pair, attempt.key)
    assert (await ask(pair.urls[0], attempt.key))[0] == 200
    with locked(pair.settings.database):
        asking = [
            asyncio.create_task(ask(pair.urls[1], attempt.key, [{"role": "user", "content": str(i)}]))
            for i in range(3)
        ]
        await asyncio.sleep(1)
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 3
