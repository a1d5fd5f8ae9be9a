"""What a run's timeline says: from hand-made numbers, and from what a gateway and a trainer have recorded."""

import asyncio
import shutil
import time
from pathlib import Path

import numpy as np
import orjson
import pytest
from command import environment
from command import harnessed as run_command
from house import house  # noqa: F401  # a fixture
from scripted_engine import Scripted
from sqlalchemy import create_engine
from texts import answer

import harnessed as package
from harnessed.browse.picture import draw, packed
from harnessed.browse.timeline import RUNNING, TRIED_AGAIN, Bar, Phase, Timeline, busy, read, running, shares
from harnessed.client import close_turnstile, end_attempt, open_turnstile
from harnessed.config import ConfigError
from harnessed.records import CloseMode, Ending, Outcome
from harnessed.training.failures import CannotWrite
from harnessed.training.timeline import FILE
from harnessed.training.timeline import Timeline as Writer

QUESTION = [{"role": "user", "content": "hello"}]


def harnessed(*arguments):
    """The finished command, of the code that is tested."""
    return run_command(*arguments, env=environment(PYTHONPATH=str(Path(package.__file__).parent.parent)))


def made(periods, phases=(), bars=(), began=0.0, ended=100.0):
    """A timeline of these generations."""
    batch = running(np.array(periods, dtype=float).reshape(-1, 2))
    return Timeline("r", began, ended, batch, list(phases), list(bars), [])


def update(began, ended):
    return Phase("update", began, ended, 1)


def bar(began, ended, outcome="ok", evaluation=False):
    return Bar(began, ended, outcome, evaluation)


def test_periods_add_up_to_steps():
    steps = running(np.array([[1.0, 4.0], [2.0, 3.0], [4.0, 6.0], [5.0, 5.0]]))
    assert steps.times.tolist() == [1, 2, 3, 4, 5, 6]
    assert steps.counts.tolist() == [1, 2, 1, 1, 1, 0]
    assert steps.at(np.array([0.0, 1.0, 2.5, 3.0, 6.0, 9.0])).tolist() == [0, 1, 2, 1, 0, 0]
    assert steps.means(np.array([0.0, 2.0, 4.0, 10.0])).tolist() == [0.5, 1.5, 2 / 6]


def test_a_clock_that_was_set_back_makes_no_negative_period():
    steps = running(np.array([[5.0, 3.0], [1.0, 2.0]]))
    assert steps.counts.tolist() == [1, 0, 0]


def test_nothing_runs_without_periods():
    steps = running(np.empty((0, 2)))
    assert steps.at(np.array([1.0])).tolist() == [0]
    assert steps.means(np.array([0.0, 1.0])).tolist() == [0]


def test_shares_of_the_time():
    phases = [update(50, 60), Phase("wait", 60, 85, 2)]
    of = shares(made([(10, 50), (10, 30), (55, 70)], phases))
    assert (of.wall_s, of.updates) == (100, 1)
    assert (of.generating, of.updating, of.idle, of.waiting) == (0.55, 0.1, 0.4, 0.25)
    assert (of.mean_batch, of.usual_batch, of.busy) == (75 / 55, 1, None)


@pytest.mark.parametrize(
    ("small", "expected"),
    [(8, 1.0), (2, 1.0), (1, 0.75), (0, 0.75)],
    ids=["all", "just a quarter", "less than a quarter", "nothing"],
)
def test_busy_is_a_quarter_of_the_usual_batch_or_an_update(small, expected):
    """Usual is 8: from 20 to 40 and 60 to 80. From 40 to 60 fewer run."""
    periods = [(20, 40)] * 8 + [(40, 60)] * small + [(60, 80)] * 8
    assert busy(made(periods, [update(10, 20), update(80, 100)])) == pytest.approx(expected)


def test_busy_counts_from_the_end_of_the_first_update_to_the_end_of_the_last():
    """What is before, even with a batch that was never usual again, and after makes no difference."""
    periods = [(0, 9)] * 100 + [(30, 40)] * 4 + [(60, 100)] * 50
    assert busy(made(periods, [update(10, 20), update(50, 60)])) == pytest.approx((10 + 10) / 40)


def test_busy_counts_a_time_once_that_generates_and_updates():
    periods = [(20, 60)] * 4
    assert busy(made(periods, [update(10, 20), update(30, 50), update(60, 70)])) == 1.0


@pytest.mark.parametrize("updates", [[], [update(10, 20)]])
def test_busy_says_nothing_before_two_updates(updates):
    assert busy(made([(0, 100)], updates)) is None


def test_the_usual_batch_is_a_median_over_time():
    """One of 60 s counts for more than four of a second."""
    periods = [*[(0, 60)] * 5, (60, 61), *[(61, 62)] * 2, (62, 63), *[(63, 64)] * 9]
    assert shares(made(periods)).usual_batch == 5


def test_attempts_take_the_lowest_free_lane():
    assert packed([bar(0, 5), bar(1, 2), bar(2, 9), bar(3, 4), bar(5, 6)]) == [0, 1, 1, 2, 0]


def test_the_writer_keeps_each_phase_that_ended(tmp_path):
    writer, before = Writer(tmp_path), time.time()
    with writer.phase("wait", 3):
        assert not (tmp_path / FILE).exists()
    with pytest.raises(ZeroDivisionError), writer.phase("update", 3):
        _ = 1 / 0
    first, second = (orjson.loads(line) for line in (tmp_path / FILE).read_bytes().splitlines())
    assert (first["phase"], second["phase"], first["step"]) == ("wait", "update", 3)
    assert before <= first["began"] <= first["ended"] <= second["began"] <= second["ended"] <= time.time()


def test_a_disk_that_takes_no_more_is_told(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(CannotWrite, match=FILE), Writer(tmp_path).phase("wait", 1):
        pass


async def test_a_line_over_which_a_trainer_was_killed_costs_no_other(house):  # noqa: F811
    with Writer(house.folder).phase("wait", 1):
        pass
    with (house.folder / FILE).open("ab") as file:
        file.write(b'{"phase":"upd')
    with Writer(house.folder).phase("update", 1):
        pass
    with (house.folder / FILE).open("ab") as file:
        file.write(b'{"phase":"dreaming","began":1,"ended":2,"step":3}\n[]\n\n{"phase":"wait","beg')
    assert [phase.name for phase in read(house.folder).phases] == ["wait", "update"]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def ask(house, attempt, **settings):  # noqa: F811
    asking = house.openai(attempt.key).chat.completions.create(model="m", messages=QUESTION, **settings)
    return asyncio.create_task(asking)


async def test_a_generation_is_recorded_without_the_time_that_it_was_held(house):  # noqa: F811
    """Interrupted at a closing, it goes on from its tokens after it: two pieces of one call."""
    (attempt,) = await house.attempts()
    whole = answer("one two three")

    def script(prompt, call):
        return Scripted(whole, stall_at=5) if call == 1 else Scripted(whole[len(house.engine.log[0].answer) :])

    house.engine.script = script
    before = time.time()
    asking = ask(house, attempt)
    await until(lambda: house.engine.log and len(house.engine.log[0].answer) == 5)
    await house.admin(close_turnstile("r", "trainer", CloseMode.INTERRUPT, drain_s=5))
    closed = time.time()
    await asyncio.sleep(0.2)
    opening = time.time()
    await house.admin(open_turnstile("r", "trainer"))
    await asking
    after = time.time()
    found = await asyncio.to_thread(read, house.folder)
    first, gap, second, end = found.batch.times
    assert found.batch.counts.tolist() == [1, 0, 1, 0]
    assert before <= first <= gap <= closed <= opening <= second <= end <= after
    ((since, opened),) = found.closed
    assert first <= since <= gap and opening <= opened <= second


async def test_a_call_that_waits_for_the_turnstile_does_not_generate(house):  # noqa: F811
    (attempt,) = await house.attempts()
    await house.admin(close_turnstile("r", "trainer", CloseMode.FINISH, drain_s=5))
    asking = ask(house, attempt)
    await until(lambda: house.turnstiles.held("r") == 1)
    opening = time.time()
    await house.admin(open_turnstile("r", "trainer"))
    await asking
    found = await asyncio.to_thread(read, house.folder)
    assert found.batch.counts.tolist() == [1, 0] and found.batch.times[0] >= opening


async def test_answers_that_are_sampled_side_by_side_are_a_batch(house):  # noqa: F811
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: Scripted(answer("a"), delay_s=0.3)
    await ask(house, attempt, n=3)
    assert (await asyncio.to_thread(read, house.folder)).batch.counts.max() == 3


async def test_a_call_that_fails_has_generated_too(house):  # noqa: F811
    (attempt,) = await house.attempts()
    house.engine.script = lambda prompt, call: Scripted(status=400, delay_s=0.05)
    with pytest.raises(Exception, match="engine"):
        await ask(house, attempt)
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1), 3))
    found = await asyncio.to_thread(read, house.folder)
    assert found.batch.counts.tolist() == [1, 0] and np.diff(found.batch.times)[0] >= 0.05


async def test_attempts_are_drawn_with_what_became_of_them(house):  # noqa: F811
    first, second, third = await house.attempts(3)
    await house.admin(end_attempt(first.rollout, 1, Ending(outcome=Outcome.BUDGET, reward=0), 3))
    await house.admin(end_attempt(second.rollout, 1, Ending(outcome=Outcome.INFRASTRUCTURE), 3))
    found = await asyncio.to_thread(read, house.folder)
    assert sorted(bar.outcome for bar in found.bars) == sorted([Outcome.BUDGET, TRIED_AGAIN, RUNNING])
    assert max(bar.ended for bar in found.bars) <= found.ended
    assert third.attempt == 1


async def test_the_command_draws_runs_side_by_side(house, tmp_path):  # noqa: F811
    for attempt in await house.attempts(2):
        await ask(house, attempt)
        await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1), 3))
    writer = Writer(house.folder)
    for step in (1, 2):
        with writer.phase("update", step):
            pass
    alone = await asyncio.to_thread(harnessed, "timeline", house.folder)
    assert alone.returncode == 0, alone.stderr
    assert (house.folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    lines = {line[:30].strip(): line[30:].split() for line in alone.stdout.splitlines()}
    assert lines["updates"] == ["2"] and float(lines["mean batch while generating"][0]) == 1.0
    both = tmp_path / "both.svg"
    two = await asyncio.to_thread(harnessed, "timeline", house.folder, house.folder, "--out", both)
    assert two.returncode == 0 and "busy after warm-up" in two.stdout
    assert "<svg" in both.read_text()


async def test_a_run_without_phases_is_drawn(house):  # noqa: F811
    """One that was only evaluated, or whose trainer is another one."""
    (attempt,) = await house.attempts()
    await ask(house, attempt)
    found = await asyncio.to_thread(read, house.folder)
    assert found.phases == [] and shares(found).busy is None
    draw([(found, shares(found))], house.folder / "a.png")


def test_thousands_of_rollouts_are_drawn_as_counts(tmp_path):
    bars = [bar(i / 50, i / 50 + 0.05, outcome, i % 7 == 0) for i in range(5000) for outcome in ("ok", "agent_exit")]
    many = made([(each.began, each.ended) for each in bars], [update(10, 20)], bars)
    draw([(many, shares(many))], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < 2_000_000


async def test_what_cannot_be_drawn_is_told_with_what_to_do(house, tmp_path):  # noqa: F811
    def told(folder, *more):
        done = harnessed("timeline", folder, *more)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert "no run's folder" in told(tmp_path / "nowhere")
    assert "nothing has begun" in told(house.folder)
    assert ".svg" in told(house.folder, "--out", "a.gif")
    for name, gateway, expected in (
        ("postgresql", {"database": "postgresql://user:***@host/name"}, "postgresql://user:***@host/name"),
        ("elsewhere", {"url": "http://127.0.0.1:1"}, "http://127.0.0.1:1/ui/"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_bytes(orjson.dumps({"gateway": gateway}))
        assert expected in told(folder) and "dashboard" in told(folder)


async def test_records_of_an_earlier_version_are_told_apart(house, tmp_path):  # noqa: F811
    await house.attempts()
    old = tmp_path / "old"
    old.mkdir()
    shutil.copy(house.folder / "gateway.db", old)
    shutil.copy(house.folder / "gateway.db-wal", old)
    with create_engine(f"sqlite:///{old}/gateway.db").begin() as connection:
        connection.exec_driver_sql("ALTER TABLE calls DROP COLUMN generated")
    with pytest.raises(ConfigError, match="earlier version"):
        read(old)
