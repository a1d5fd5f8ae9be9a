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
    for url in pair.urls:
        await ask(url, attempt.key, [{"role": "user", "content": url}])
    with locked(pair.settings.database):
        asking = [asyncio.create_task(ask(url, attempt.key)) for url in pair.urls]
        await asyncio.sleep(1)
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 2
    assert len({logged.seed for logged in pair.engine.log[2:]}) == 2


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


async def test_a_store_in_trouble_is_not_the_agents_fault(house, monkeypatch):
    """An agent gives up because its gateway had no room to admit its call. No fault is noted for that, so the attempt
    ends as `agent_exit` with its bad reward, and is trained on it, although the gateway had failed it."""
    (attempt,) = await house.attempts()
    assert (await ask(house.url, attempt.key))[0] == 200
    monkeypatch.setattr(store_module, "LEAST_FREE_BYTES", 1 << 60)
    await house.store.write(lambda connection: None)
    status, _ = await ask(house.url, attempt.key, [{"role": "user", "content": "go on"}])
    assert status == 503
    monkeypatch.undo()
    await house.store.write(lambda connection: None)
    ending = Ending(outcome=Outcome.AGENT_EXIT, reason="gave up", reward=0.0)
    ended = await house.admin(end_attempt(attempt.rollout, 1, ending, 1))
    assert (ended.outcome, ended.reward) == (Outcome.INFRASTRUCTURE, None)


async def pages(house):
    return await house.store.write(lambda connection: connection.exec_driver_sql("PRAGMA page_count").scalar_one())


async def fill(house, most):
    """The file holds no more than so many pages."""
    await house.store.write(lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {most}") and None)


async def test_an_answer_that_could_not_be_stored_is_not_the_agents_fault(house):
    """The same where the answer itself did not fit: the call stays `admitted`, no fault is noted, the agent is blamed,
    and the books know of no lost call."""
    (attempt,) = await house.attempts()
    long = [{"role": "user", "content": "x" * 1000} for _ in range(1)]
    house.engine.script = lambda prompt, call: Scripted(answer("y" * 300), stall_at=4, stall_until=lambda: free.is_set())
    free = asyncio.Event()
    asking = asyncio.create_task(ask(house.url, attempt.key, long))
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 4)
    await fill(house, await pages(house))
    free.set()
    status, said = await asking
    await fill(house, 10**6)
    assert status == 503, said
    ending = Ending(outcome=Outcome.AGENT_EXIT, reason="gave up", reward=0.0)
    ended = await house.admin(end_attempt(attempt.rollout, 1, ending, 1))
    totals = await house.admin(get_totals("r"))
    assert (ended.outcome, ended.reward, totals.lost) == (Outcome.INFRASTRUCTURE, None, 1)


async def test_a_call_whose_neighbour_could_not_be_stored_is_not_refused_for_good(house):
    """A request is being sent while an answer of the same attempt cannot be stored. Its session is dropped to be read
    again, and the request, which already has it, is told 403 `attempt_ended`: no SDK tries that again, the agent
    fails, and its attempt lives."""
    (attempt,) = await house.attempts()
    free = asyncio.Event()
    house.engine.script = lambda prompt, call: Scripted(
        answer("y" * 300), stall_at=4, stall_until=lambda: free.is_set()
    )
    asking = asyncio.create_task(ask(house.url, attempt.key, [{"role": "user", "content": "x" * 1000}]))
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 4)

    async def slowly():
        yield b'{"model": "m", "messages": ['
        await until(lambda: asking.done(), 20)
        await fill(house, 10**6)
        yield b'{"role": "user", "content": "hello"}]}'

    async with httpx.AsyncClient(timeout=30) as http:
        headers = {"authorization": f"Bearer {attempt.key}"}
        url = f"{house.url}/v1/chat/completions"
        other = asyncio.create_task(http.post(url, content=slowly(), headers=headers))
        await asyncio.sleep(0.3)
        await fill(house, await pages(house))
        free.set()
        assert (await asking)[0] == 503
        said = await other
    assert said.status_code in (200, 503), said.text


async def test_leases_end_also_after_a_store_was_away(house, monkeypatch):
    """The task that takes attempts from dead controllers ends with its first exception: once the store did not answer
    in time, or had no room, no lease of this gateway ever ends again, and the trainer waits for ever for rollouts whose
    controller died."""
    monkeypatch.setattr(app, "_EXPIRY_S", 0.05)
    await house.restart()
    (attempt,) = await house.attempts()
    house_read, failed = house.store.read, asyncio.Event()

    async def away(work):
        failed.set()
        raise TimeoutError("the store is away")

    monkeypatch.setattr(house.store, "read", away)
    await asyncio.wait_for(failed.wait(), 10)
    await asyncio.sleep(0.2)
    monkeypatch.setattr(house.store, "read", house_read)
    await house.store.write(lambda connection: connection.execute(update(attempts_table).values(lease_until=0)) and None)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while (await house.admin(get_rollout(attempt.rollout))).state == "running":
                await asyncio.sleep(0.05)
    assert (await house.admin(get_rollout(attempt.rollout))).state == "queued"


async def test_what_a_running_attempt_said_is_not_pruned(house):
    """A run counts as resting by the times of its rollouts alone: an attempt that has run for longer than `keep_days`
    loses its transcript while it goes on calling."""
    (attempt,) = await house.attempts()
    assert (await ask(house.url, attempt.key))[0] == 200
    begun = time.time() - 2 * retention.DAY_S
    await house.store.write(
        lambda connection: connection.execute(update(rollouts).values(created=begun, started=begun)) and None
    )
    keeping = asyncio.create_task(retention.keep_small(house.store, 1))
    await asyncio.sleep(0.5)
    keeping.cancel()
    assert len(await house.nodes()) == 1


async def test_a_turnstile_is_not_told_to_be_closed_by_a_gateway_that_lets_calls_pass(tmp_path, database, monkeypatch):
    """`look` counts all gateways but the one that is asked, and that one counts its own calls without knowing of the
    closing yet. Asked right after the closing at the other one, it says `closed` and lets the next call pass."""
    monkeypatch.setattr(peers, "SHARED_BEAT_S", 4.0)
    async with open_house(tmp_path, database=database) as house:
        await asyncio.sleep(5)  # both know the engine
        (attempt,) = await house.attempts()
        assert (await ask(house.urls[1], attempt.key))[0] == 200
        async with AsyncClient(house.urls[1], house.keys.sign(ADMIN)) as other:
            assert (await house.admin(close_turnstile("r", "trainer", CloseMode.FINISH, drain_s=0))).state == "closing"
            told = (await other(get_turnstile("r"))).state
        asking = asyncio.create_task(ask(house.urls[1], attempt.key, [{"role": "user", "content": "go on"}]))
        await asyncio.sleep(0.5)
        passed = len(house.engine.log) == 2
        asking.cancel()
        assert not (told == TurnstileState.CLOSED and passed)


async def test_a_gateway_that_is_taken_for_dead_generates_no_more(pair):
    """What ran at a gateway that was buried is ended at the engine, and the turnstile counts as closed. But that
    gateway, which is alive, takes the end for one of the engine's own, and at once asks the engine for the rest, which
    then samples while the trainer writes the weights. The answer is refused afterwards."""
    (attempt,) = await pair.attempts()
    pair.engine.script = lambda prompt, call: Scripted(answer("a long answer"), stall_at=4, stall_s=8)
    asking = asyncio.create_task(ask(pair.urls[1], attempt.key))
    await until(lambda: pair.engine.log and len(pair.engine.log[0].answer) == 4)
    await asyncio.sleep(0.3)
    gone = await pair.store.write(lambda c: peers._bury(c, [i for i in ids_of(c) if i.startswith("second")]))
    await pair.memory.stop_lost(gone)
    closed = await pair.admin(close_turnstile("r", "trainer", CloseMode.FINISH, drain_s=1))
    await asyncio.sleep(1)
    again, running = len(pair.engine.log) - 1, pair.engine.running
    asking.cancel()
    assert closed.state == TurnstileState.CLOSING or not running
    assert not again


def ids_of(connection):
    return list(connection.execute(select(peers.gateways.c.id)).scalars())


async def test_a_database_that_stood_still_kills_no_gateway(tmp_path, database, monkeypatch):
    """Leases run out while the database (or one gateway that holds the lock of all) stands still. Whoever writes first
    afterwards buries all others, though each is connected and waits to say that it is alive: all their calls are
    lost."""
    monkeypatch.setattr(peers, "LEASE_S", 1.5)
    async with open_house(tmp_path, database=database) as house:
        await asyncio.sleep(2 * peers.SHARED_BEAT_S)
        claimed = await house.attempts(2)
        house.engine.script = lambda prompt, call: Scripted(answer("late"), delay_s=4)
        asking = [
            asyncio.create_task(ask(url, each.key)) for url, each in zip(house.urls, claimed, strict=True)
        ]
        await until(lambda: len(house.engine.log) == 2)
        await asyncio.sleep(0.5)
        with locked(database):
            await asyncio.sleep(2.5)
        statuses = [status for status, _ in await asyncio.gather(*asking)]
        assert (statuses, (await house.admin(get_totals("r"))).lost) == ([200, 200], 0)


async def first_bytes(url, key, limit_s, *, retry=0):
    """Of a stream, what comes within a time; empty: nothing."""
    headers = {"authorization": f"Bearer {key}"} | ({"x-stainless-retry-count": str(retry)} if retry else {})
    body = {"model": "m", "messages": [USER], "stream": True}
    async with httpx.AsyncClient(timeout=30) as http:
        try:
            async with asyncio.timeout(limit_s):
                async with http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                    async for piece in response.aiter_raw():
                        return piece
        except TimeoutError:
            return b""


async def test_who_waits_for_an_answer_of_the_other_gateway_gets_signs_of_life(pair, monkeypatch):
    """A retry that comes to the other gateway waits for the first one's answer before anything is sent: no ping for as
    long as that generates, or is held. Idle timers (60 s of a proxy, 300 s of Codex) end it."""
    monkeypatch.setattr(delivery, "PING_S", 0.2)
    (attempt,) = await pair.attempts()
    over = asyncio.Event()
    pair.engine.script = lambda prompt, call: Scripted(answer("late"), stall_at=1, stall_until=lambda: over.is_set())
    asking = asyncio.create_task(ask(pair.urls[0], attempt.key))
    await until(lambda: pair.engine.log)
    await asyncio.sleep(0.3)
    try:
        assert await first_bytes(pair.urls[1], attempt.key, 4, retry=1)
    finally:
        over.set()
        await asking


async def test_who_waits_for_the_end_of_an_interrupted_answer_gets_signs_of_life(house, monkeypatch):
    """A client left and comes back while the engine, which cannot be interrupted or takes its time, still makes the
    answer. It waits for that end before anything is sent, without a ping."""
    monkeypatch.setattr(delivery, "PING_S", 0.2)
    (attempt,) = await house.attempts()
    house.engine.interruptible = False
    over = asyncio.Event()
    house.engine.script = lambda prompt, call: Scripted(answer("late"), stall_at=1, stall_until=lambda: over.is_set())
    first = asyncio.create_task(ask(house.url, attempt.key))
    await until(lambda: house.engine.log)
    first.cancel()
    await house.left()
    try:
        assert await first_bytes(house.url, attempt.key, 4)
    finally:
        over.set()


async def test_a_retry_does_not_wait_for_ever_for_a_call_whose_answer_was_not_stored(pair):
    """An answer could not be stored: its call stays `admitted`, though nobody makes it any more. Its retry at the other
    gateway waits for it without end."""
    (attempt,) = await pair.attempts()
    assert (await ask(pair.urls[0], attempt.key, [{"role": "user", "content": "first"}]))[0] == 200
    over = asyncio.Event()
    pair.engine.script = lambda prompt, call: Scripted(answer("late"), stall_at=1, stall_until=lambda: over.is_set())
    asking = asyncio.create_task(ask(pair.urls[0], attempt.key))
    await until(lambda: len(pair.engine.log) == 2)
    await asyncio.sleep(0.3)
    engine = create_engine(make_url(pair.settings.database).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:  # as a full disk does
        connection.execute(text("ALTER TABLE nodes ADD CONSTRAINT full_disk CHECK (number < 2)"))
    over.set()
    assert (await asking)[0] == 503
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE nodes DROP CONSTRAINT full_disk"))
    engine.dispose()
    try:
        status, _ = await ask(pair.urls[1], attempt.key, retry=1, timeout=8)
    except httpx.ReadTimeout:
        status = 0
    assert status == 200


async def test_many_rollouts_can_be_cancelled_at_once(pair, monkeypatch):
    """`cancel_run` puts all ids into one statement. With more than 65,535 the driver refuses it before it is sent, by an
    error without a state. The writer takes that for a database that is away and tries for a minute, in which nothing is
    written, not even that this gateway is alive; then all that was in the same batch fails too."""
    monkeypatch.setattr(store_module, "AWAY_LIMIT_S", 3.0)
    ids = [f"big.{index}" for index in range(66_000)]
    cancelling = asyncio.create_task(pair.store.write(lambda connection: peers._set_ending(connection, ids, True)))
    (said,) = await asyncio.gather(cancelling, return_exceptions=True)
    assert said is None, str(said)[:100]
