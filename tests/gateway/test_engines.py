"""Several engines of one run, over real HTTP: where a rollout goes, and what becomes of it when engines die, hang,
come back or are taken away. Each engine stamps a version of its own, so that every token says where it was sampled."""

import asyncio
import contextlib
import time
from collections import Counter
from random import Random

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Scripted, ScriptedEngine
from texts import STOP, answer, ids

from harnessed.client import (
    ApiError,
    end_attempt,
    get_totals,
    get_transcripts,
    list_engines,
    register_engine,
    remove_engine,
)
from harnessed.config import Gateway
from harnessed.gateway import engines as client
from harnessed.gateway import routing
from harnessed.gateway.dialects import Generated, NoAnswer, read_preview, shown
from harnessed.records import Dialect, Ending, EngineSpec, Outcome, Version
from harnessed.training.samples import build

USER = {"role": "user", "content": "hello"}
SAID = answer("one two three four")
STALLS = Scripted(SAID, stall_at=5)


async def say(house, key, messages=(USER,), **options):
    completion = await house.openai(key).chat.completions.create(model="m", messages=list(messages), **options)
    return completion.choices[0].message.content


async def stream(house, key, messages=(USER,)):
    """The text of a whole stream."""
    chunks = await house.openai(key).chat.completions.create(model="m", messages=list(messages), stream=True)
    return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])


async def until(condition, limit_s=20):
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def fleet(house):
    """A function that gives the house so many engines, `e1` and so on, all of which say SAID."""
    with contextlib.ExitStack() as stack:

        async def build(n=2, **limits):
            await house.admin(remove_engine("e"))
            house.settings = Gateway(**{"generation_limit_s": 20} | limits)
            await house.restart()
            engines = []
            for number in range(1, n + 1):
                engine = ScriptedEngine(lambda prompt, call: rest_of(prompt), Version(0, number), policy=house.policy)
                engine.tells_all = True
                engine.open()
                stack.callback(close, engine)
                await house.admin(register_engine(EngineSpec(id=f"e{number}", url=engine.url, run="r")))
                engines.append(engine)
            return engines

        yield build


def close(engine):
    if engine._thread.is_alive():
        engine.close()


def kill(engine):
    return asyncio.to_thread(engine.close)


def rest_of(prompt, whole=SAID):
    """What follows the tokens of the answer that the prompt ends with already."""
    kept = next(n for n in range(len(whole), -1, -1) if prompt[len(prompt) - n :] == whole[:n])
    return whole[kept:]


def home_of(engines):
    """The one that was asked, of engines of which one was."""
    (home,) = (engine for engine in engines if engine.log)
    return home


def other_than(engine, engines):
    return next(each for each in engines if each is not engine)


def versions_of(node):
    return np.frombuffer(node.versions, np.int32).tolist()


def health(house):
    return {engine.id: engine.healthy for engine in house.memory._engines.known}


# Where a rollout goes


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.text(max_size=8))
def test_a_new_rollout_goes_where_less_than_a_share_runs(loads, rollout):
    in_flight = {f"e{number}": load for number, load in enumerate(loads)}
    chosen = routing.pick(rollout, in_flight)
    assert in_flight[chosen] < routing.SHARE * (sum(loads) + 1) / len(loads)


def test_gateways_that_see_even_loads_choose_alike_and_the_loss_of_an_engine_moves_only_its_rollouts():
    rollouts = [f"g{number}.0" for number in range(3000)]
    homes = {rollout: routing.pick(rollout, {"a": 3, "b": 3, "c": 3}) for rollout in rollouts}
    assert all(900 < count < 1100 for count in Counter(homes.values()).values())
    without_c = {rollout: routing.pick(rollout, {"a": 8, "b": 8}) for rollout in rollouts}
    assert all(without_c[rollout] == home for rollout, home in homes.items() if home != "c")


async def test_a_rollout_stays_on_its_engine(house, fleet):
    engines = await fleet(3)
    attempts = await house.attempts(12)
    for turn in range(3):
        messages = [USER] + [{"role": "user", "content": f"turn {n}"} for n in range(turn)]
        await asyncio.gather(*(say(house, attempt.key, messages) for attempt in attempts))
    assert all(len(engine.log) % 3 == 0 and engine.log for engine in engines)
    seeds = [{call.seed for call in engine.log} for engine in engines]
    assert sum(map(len, seeds)) == 36


async def test_load_is_spread_over_engines(house, fleet):
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: Scripted(SAID, delay_s=2)
    attempts = await house.attempts(20)
    asking = [asyncio.create_task(say(house, attempt.key)) for attempt in attempts]
    await until(lambda: sum(len(engine.log) for engine in engines) == 20)
    busy = [engine.in_flight for engine in await house.admin(list_engines())]
    assert sum(busy) == 20
    assert max(busy) <= routing.SHARE * 21 / 2 + 1
    await asyncio.gather(*asking)
    assert [engine.in_flight for engine in await house.admin(list_engines())] == [0, 0]


async def test_what_is_known_of_a_rollout_ends_with_its_attempt(house, fleet):
    await fleet(2)
    (attempt,) = await house.attempts()
    await say(house, attempt.key)
    homes = house.memory._engines._routing._homes
    assert list(homes) == [attempt.rollout]
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    assert not homes


# Engines that die


async def test_a_stream_goes_on_elsewhere_from_the_tokens_that_it_showed(house, fleet):
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: Scripted(rest_of(prompt), pace_s=0.03)
    (attempt,) = await house.attempts()
    asking = asyncio.create_task(stream(house, attempt.key))
    await until(lambda: any(engine.log and len(engine.log[0].answer) > 5 for engine in engines))
    first = home_of(engines)
    second = other_than(first, engines)
    await kill(first)
    assert await asking == "one two three four"
    (node,) = await house.nodes()
    sampled = np.frombuffer(node.answer, np.int32).tolist()
    assert sampled == SAID
    (resumed,) = second.log
    kept = len(resumed.prompt) - len(first.log[0].prompt)
    assert 5 < kept < len(SAID)
    assert resumed.prompt == first.log[0].prompt + sampled[:kept]
    assert resumed.max_tokens == first.log[0].max_tokens - kept
    assert (resumed.seed, resumed.begun) == (first.log[0].seed, kept)
    assert versions_of(node) == [first.version.pack()] * kept + [second.version.pack()] * (len(SAID) - kept)
    logprobs = engines[0].logprobs(1, len(SAID))
    assert np.frombuffer(node.logprobs, np.float32).tolist() == logprobs[:kept] + logprobs[: len(SAID) - kept]
    assert (await house.admin(get_totals("r"))).lost == 0


async def test_an_unstreamed_call_begins_again_elsewhere_and_its_rollout_stays_there(house, fleet):
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: STALLS
    (attempt,) = await house.attempts()
    asking = asyncio.create_task(say(house, attempt.key))
    await until(lambda: any(engine.log and engine.log[0].answer for engine in engines))
    first = home_of(engines)
    second = other_than(first, engines)
    second.script = lambda prompt, call: rest_of(prompt)
    await kill(first)
    assert await asking == "one two three four"
    assert second.log[0].prompt == first.log[0].prompt
    before = len(first.log)
    await asyncio.to_thread(first.open)
    await until(lambda: all(health(house).values()))
    await say(house, attempt.key, [USER, USER])
    assert (len(first.log), len(second.log)) == (before, 2)


async def test_when_all_are_dead_calls_wait_for_the_first_that_comes_back(house, fleet):
    engines = await fleet(2)
    (attempt,) = await house.attempts()
    for engine in engines:
        await kill(engine)
    asking = asyncio.create_task(say(house, attempt.key))
    await until(lambda: not any(health(house).values()))
    await asyncio.to_thread(engines[1].open)
    assert await asking == "one two three four"
    assert len(engines[1].log) == 1


async def test_engines_that_stay_dead_are_named_with_the_reason(house, fleet):
    engines = await fleet(2, generation_limit_s=1)
    (attempt,) = await house.attempts()
    for engine in engines:
        await kill(engine)
    with pytest.raises(openai.InternalServerError, match=r"within 1 s.*engine e1: \w+Error.*engine e2: \w+Error"):
        await say(house, attempt.key)


async def test_an_engine_that_takes_no_generation_though_it_says_that_it_is_healthy_is_left(house, fleet):
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: Scripted(SAID, hang_up=True)
    (attempt,) = await house.attempts()
    asking = asyncio.create_task(say(house, attempt.key))
    await until(lambda: all(engine.log for engine in engines))
    for engine in engines:
        engine.script = lambda prompt, call: rest_of(prompt)
    assert await asking == "one two three four"


async def test_an_engine_that_flaps_costs_no_call(house, fleet):
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: Scripted(rest_of(prompt), pace_s=0.01)
    attempts = await house.attempts(6)

    async def converse(attempt):
        return [await stream(house, attempt.key, [USER] * turn) for turn in range(1, 6)]

    async def flap():
        while True:
            await kill(engines[0])
            await asyncio.sleep(0.1)
            await asyncio.to_thread(engines[0].open)
            await asyncio.sleep(0.2)

    flapping = asyncio.create_task(flap())
    texts = await asyncio.gather(*map(converse, attempts))
    flapping.cancel()
    await asyncio.gather(flapping, return_exceptions=True)
    assert texts == [["one two three four"] * 5] * 6


# Limits


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "unstreamed"])
async def test_a_generation_that_takes_too_long_is_ended_and_the_retry_goes_on_from_its_tokens(house, fleet, streams):
    engines = await fleet(2, generation_limit_s=1)
    for engine in engines:
        engine.script = lambda prompt, call: STALLS if rest_of(prompt) == SAID else rest_of(prompt)
    (attempt,) = await house.attempts()
    ask = stream if streams else say
    with pytest.raises(openai.APIError, match="Connection error" if streams else "engine e. was interrupted"):
        await ask(house, attempt.key)
    engine = home_of(engines)
    assert engine.log[0].finish == "interrupted", "it still runs when the retry begins"
    assert await ask(house, attempt.key) == "one two three four"
    first, second = engine.log
    assert second.prompt == first.prompt + first.answer
    (node,) = await house.nodes()
    assert node.sampled == engine.sampled_tokens == len(SAID)


async def test_an_engine_that_cannot_be_interrupted_is_left_at_the_limit(house, fleet):
    engines = await fleet(2, generation_limit_s=1)
    for engine in engines:
        engine.interruptible = False
        engine.script = lambda prompt, call: STALLS if rest_of(prompt) == SAID else rest_of(prompt)
    (attempt,) = await house.attempts()
    began = time.monotonic()
    with pytest.raises(openai.APIError, match="within 1 s: its connection was closed"):
        await say(house, attempt.key)
    assert time.monotonic() - began < 1 + client.LAST_WORDS_S / 2, "it is not waited for"
    await until(lambda: all(engine.in_flight == 0 for engine in house.memory._engines.known))


async def test_what_the_stream_of_such_an_engine_showed_is_kept(house, fleet):
    (engine,) = await fleet(1, generation_limit_s=1)
    engine.interruptible = False
    engine.script = lambda prompt, call: STALLS if rest_of(prompt) == SAID else rest_of(prompt)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APIError):
        await stream(house, attempt.key)
    assert await stream(house, attempt.key) == "one two three four"
    assert engine.log[1].prompt == engine.log[0].prompt + SAID[:5]


async def test_a_chat_engine_is_left_at_the_limit(house):
    await house.admin(remove_engine("e"))
    house.settings = Gateway(generation_limit_s=1)
    await house.restart()
    await house.make_run(speaks=Dialect.CHAT)
    house.engine.script = lambda prompt, call: STALLS
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError, match="within 1 s: its connection was closed"):
        await say(house, attempt.key)


async def test_a_hung_engine_holds_nobody_for_long(house, fleet):
    engines = await fleet(2, generation_limit_s=1)
    for engine in engines:
        engine.script = lambda prompt, call: STALLS
    (attempt,) = await house.attempts()
    asking = asyncio.create_task(say(house, attempt.key))
    await until(lambda: any(engine.log and engine.log[0].answer for engine in engines))
    hung = home_of(engines)
    hung.hung = True
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError, match="within 1 s: its connection was closed"):
        await asking
    assert time.monotonic() - began < 1 + 10
    other_than(hung, engines).script = lambda prompt, call: rest_of(prompt)
    await until(lambda: list(health(house).values()).count(False) == 1)
    assert await say(house, attempt.key) == "one two three four"
    hung.hung = False
    await until(lambda: all(health(house).values()))


# Engines that come and go


async def test_an_engine_that_is_removed_gives_its_rollouts_to_the_others(house, fleet):
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: STALLS if rest_of(prompt) == SAID else rest_of(prompt)
    (attempt,) = await house.attempts()
    asking = asyncio.create_task(say(house, attempt.key))
    await until(lambda: any(engine.log and len(engine.log[0].answer) == 5 for engine in engines))
    first = home_of(engines)
    await house.admin(remove_engine(f"e{engines.index(first) + 1}"))
    assert await asking == "one two three four"
    (node,) = await house.nodes()
    second = other_than(first, engines)
    assert versions_of(node) == [first.version.pack()] * 5 + [second.version.pack()] * (len(SAID) - 5)
    assert [engine.url for engine in await house.admin(list_engines())] == [second.url]
    await house.restart()
    assert [engine.url for engine in await house.admin(list_engines())] == [second.url]


async def test_an_engine_that_nobody_knows_cannot_be_removed(house):
    with pytest.raises(ApiError, match="no engine x") as refusal:
        await house.admin(remove_engine("x"))
    assert refusal.value.status == 404


async def test_without_any_engine_a_call_is_told_so_at_once(house):
    await house.admin(remove_engine("e"))
    (attempt,) = await house.attempts()
    with pytest.raises(openai.InternalServerError, match="run r has no engine: register one"):
        await say(house, attempt.key)


async def test_engines_of_a_run_speak_the_same(house):
    other = EngineSpec(id="f", url=house.engine.url, run="r", speaks=Dialect.CHAT, model="m")
    with pytest.raises(ApiError, match="engine e of the same run r speaks tokens") as refusal:
        await house.admin(register_engine(other))
    assert refusal.value.status == 409
    assert [engine.id for engine in await house.admin(list_engines())] == ["e"]
    await house.admin(register_engine(other.model_copy(update={"id": "e"})))  # the only one may change
    await house.admin(register_engine(other))


async def test_the_end_of_an_attempt_reaches_the_engine_where_it_runs(house, fleet):
    """Not the one where the rollout would go now."""
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: STALLS
    (attempt,) = await house.attempts()
    asking = asyncio.create_task(say(house, attempt.key))
    await until(lambda: any(engine.log and engine.log[0].answer for engine in engines))
    house.memory._engines._routing.doubt(
        next(s for s in house.memory._engines._routing.servers() if s.spec.url == home_of(engines).url), "a test"
    )
    house.memory._engines.forget(attempt.rollout)
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    assert home_of(engines).log[0].finish == "interrupted"
    await asyncio.gather(asking, return_exceptions=True)


async def test_what_a_dead_gateway_asked_for_is_ended_wherever_it_runs(house, fleet):
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: STALLS
    attempts = await house.attempts(6)
    asking = [asyncio.create_task(say(house, attempt.key)) for attempt in attempts]
    await until(lambda: sum(len(engine.log) for engine in engines) == 6)
    running = [call.id for engine in engines for call in engine.log]
    await house.memory._engines.abandon("r", [*running, "unknown.0"])
    ended = [call for engine in engines for call in engine.log if call.id in running]
    await until(lambda: all(call.finish == "interrupted" for call in ended[:6]))
    await asyncio.gather(*asking, return_exceptions=True)


# What streams say


def test_tokens_of_a_stream_are_kept_only_with_all_that_belongs_to_them():
    whole = read_preview(b'{"tokens": [1, 2], "logprobs": [-1.0, -2.0], "versions": [3, 3]}')
    assert shown([whole, whole]) == Generated([1, 2, 1, 2], [-1, -2, -1, -2], [3] * 4, "interrupted")
    assert shown([whole, read_preview(b'{"tokens": [1]}')]).tokens == []
    assert read_preview(b'{"tokens": [1], "finish": "stop"}') is None
    for line in (b'{"tokens": [-1]}', b'{"tokens": ["1"]}', b'{"error": {}}', b"[]", b""):
        with pytest.raises(NoAnswer):
            read_preview(line)


# Everything at once


async def test_random_kills_among_fifty_calls_keep_the_books(house, fleet):
    random = Random(7)
    engines = await fleet(2)
    for engine in engines:
        engine.script = lambda prompt, call: Scripted([*ids("x" * 30), STOP], pace_s=0.01)
    attempts = await house.attempts(50)

    async def converse(attempt, streams):
        ask = stream if streams else say
        for turn in range(1, 4):
            assert await ask(house, attempt.key, [USER] * turn)

    async def kills():
        for _ in range(8):
            engine = random.choice(engines)
            await asyncio.sleep(random.uniform(0.1, 0.5))
            await kill(engine)
            await asyncio.sleep(random.uniform(0, 0.3))
            await asyncio.to_thread(engine.open)

    await asyncio.gather(kills(), *(converse(attempt, at % 2) for at, attempt in enumerate(attempts)))
    for attempt in attempts:
        await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 1))
    transcripts = await house.admin(get_transcripts("g"))
    totals = await house.admin(get_totals("r"))
    samples = [build(transcript) for transcript in transcripts]
    assert sum(sum(sample.fates.values()) for sample in samples) == totals.sampled_tokens
    assert (totals.calls, totals.answers, totals.lost, totals.undelivered) == (150, 150, 0, 0)
    moved = sum(len(set(versions_of(node))) > 1 for each in transcripts for node in each.attempts[-1].nodes)
    assert moved, "no answer went on elsewhere from its tokens"
    check_tokens(samples, engines)


def check_tokens(samples, engines):
    """Each trained token was sampled by the engine that its version names, behind exactly what is in front of it; none
    is there twice."""
    by_version = {engine.version.pack(): engine for engine in engines}
    seen = set()
    for row in (row for sample in samples for row in sample.rows):
        for place in np.flatnonzero(row.trained):
            number, offset = divmod(round(-float(row.logprobs[place]) * 2**20) - 1, 1024)
            version = int(row.versions[place])
            assert (version, number, offset) not in seen
            seen.add((version, number, offset))
            call = by_version[version].log[number - 1]
            assert row.tokens[: place + 1].tolist() == call.prompt + call.answer[: offset + 1]
    assert len(seen) == sum(sample.trained_tokens for sample in samples) > 0
