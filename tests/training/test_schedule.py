"""What a run does next: tables of the decision, and whole runs in simulated time."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulator import Simulated, Ways, simulate

from harnessed.config import ConfigError, Trainer
from harnessed.records import Fate
from harnessed.training.schedule import Create, Drop, Flight, Plan, Update, Wait, decide, to_create
from harnessed.training.trainer import plan

PLAN = Plan(groups_per_update=2, in_flight=4, staleness=2, most_groups=2)
SYNC = Plan(groups_per_update=2, in_flight=2, staleness=0, most_groups=2)
DEEP = Plan(groups_per_update=2, in_flight=6, staleness=2, most_groups=2)
REFILL = Plan(groups_per_update=2, in_flight=4, staleness=2, most_groups=4)


def flights(words: str) -> list[Flight]:
    """Each word a group: `a` was not begun; `b3` runs since version 3; `c3!` is complete; `d3?` complete and does not
    count; `e3+1` was made again once."""
    return [_flight(word) for word in words.split()]


def _flight(word: str) -> Flight:
    rest, _, remade = word.partition("+")
    since = rest[1:].rstrip("!?")
    return Flight(
        group=word[0],
        since=int(since) if since else None,
        complete=rest[-1] in "!?",
        counts=not rest.endswith("?"),
        remade=int(remade or 0),
    )


def ids(text: str) -> tuple[str, ...]:
    return tuple(text)


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ("", Create(4)),
        ("a b c", Create(1)),
        ("a b c d", Wait()),
        ("a5 b5 c d", Wait()),
        ("a5! b5 c5 d5", Wait()),
        ("a5! b5! c5 d5", Update(ids("ab"))),
        ("a5! b5! c5", Update(ids("ab"))),  # the place of c is filled while the update runs
        ("a5 b5! c5! d", Update(ids("bc"))),
        ("a5! b5! c5! d5!", Update(ids("ab"))),
        ("a5! b4! c3! d5", Update(ids("cb"))),  # the oldest first
        ("a! b4! c3! d5", Update(ids("ac"))),  # without a token there is nothing to compare ages by
        ("a4 b5! c5! d5", Update(ids("bc"))),
        ("a3 b5! c5! d5", Wait(ids("a"))),  # would be 3 old
        ("a3! b5! c5 d5", Update(ids("ab"))),
        ("a3 b3 c5! d5!", Wait(ids("ab"))),
        ("a3 b5! c5!", Create(1)),  # nobody waits with an empty slot
        ("a2 b5! c5! d5", Drop(ids("a"), again=True)),
        ("a2! b5! c5! d5", Drop(ids("a"), again=True)),
        ("a3! b3! c3! d5", Update(ids("abc"))),  # only a resumed run can come to this
    ],
)
def test_a_collocated_run_at_version_5(words, action):
    assert decide(flights(words), 5, 9, PLAN) == action


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ("", Create(2)),
        ("a", Create(1)),
        ("a b", Wait()),
        ("a5 b", Wait(ids("a"))),
        ("a5! b", Wait()),
        ("a5! b5", Wait(ids("b"))),
        ("a5! b5!", Update(ids("ab"))),
        ("a4! b5!", Drop(ids("a"), again=True)),
        ("a5! b5! c", Update(ids("ab"))),  # of an earlier life
        ("a5! b5! c5", Wait(ids("c"))),
    ],
)
def test_a_synchronous_run_at_version_5(words, action):
    assert decide(flights(words), 5, 9, SYNC) == action


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ("a3 b3 c5! d5! e f", Wait(ids("ab"))),
        ("a4 b4 c5! d5! e f", Update(ids("cd"))),
        # Four of one version are two updates, and after this one there is time for one only.
        ("a4 b4 c4 d4 e5! f5!", Wait(ids("cd"))),
        ("a4! b4 c4 d4 e5! f5!", Wait(ids("d"))),
        ("a4! b4! c4 d4 e5! f5!", Update(ids("ab"))),
        ("a3! b4 c4 d4 e5! f5", Wait(ids("d"))),
        ("a3! b4! c4 d4 e5! f5", Update(ids("ab"))),
        ("a5 b5 c5 d5 e5! f5!", Update(ids("ef"))),
    ],
)
def test_an_update_leaves_no_more_behind_than_those_after_it_can_take_in_time(words, action):
    assert decide(flights(words), 5, 9, DEEP) == action


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ("a5! b5? c5 d5", Create(1)),
        ("a5! b5? c5 d5 e", Wait()),
        ("a5! b5? c5! d5 e", Update(ids("acb"))),
        ("a5? b5? c5? d5 e5", Create(1)),
        ("a5? b5? c5? d5 e f", Wait()),  # never more in place of others than an update may
        ("a5? b5? c5? d5! e5 f5", Update(ids("dabc"))),
        ("a5? b5? c5? d5? e5 f5", Update(ids("abcd"))),
        ("a5? b5? c5? d5? e5! f5!", Update(ids("efabcd"))),  # what counts and is complete is not left behind
        ("a3? b5! c5! d5 e5", Update(ids("bca"))),
    ],
)
def test_groups_that_do_not_count_come_along_and_others_take_their_place(words, action):
    assert decide(flights(words), 5, 9, REFILL) == action


@pytest.mark.parametrize(
    ("words", "remake", "action"),
    [
        ("a3 b5! c5! d5", 1, Drop(ids("a"), again=True)),
        ("a3 b5! c5 d5", 1, Wait(ids("a"))),  # nobody waits for it yet
        ("a3 b5! c5!", 1, Create(1)),
        ("a3+1 b5! c5! d5", 1, Drop(ids("a"), again=False)),
        ("a3+1 b5! c5! d5", 2, Drop(ids("a"), again=True)),
        ("a3+2 b3 c5! d5!", 2, Drop(ids("b"), again=True)),
        ("a3! b4! c3+2 d5", 2, Drop(ids("c"), again=False)),
        ("a2 b5! c5! d5", 1, Drop(ids("a"), again=True)),
        ("a2+1 b2! c5! d5", 1, Drop(ids("ab"), again=True)),
    ],
)
def test_a_group_that_would_be_too_old_may_be_made_again(words, remake, action):
    assert decide(flights(words), 5, 9, dataclasses.replace(PLAN, remake=remake)) == action


@pytest.mark.parametrize(
    ("words", "the_plan", "action"),
    [
        ("a5! b5! c5", PLAN, Update(ids("ab"))),
        ("a5! b5 c5", PLAN, Wait()),
        ("a5! b5", PLAN, Wait()),
        ("a5! b5?", REFILL, Update(ids("ab"))),  # nobody takes its place
        ("a5? b5? c5?", REFILL, Update(ids("abc"))),
        ("a5! b5? c5", REFILL, Wait()),
        # Too few for an update: whoever creates groups is asked, and ends the run with the reason.
        ("", PLAN, Create(4)),
        ("a5!", PLAN, Create(3)),
        ("a5", SYNC, Create(1)),
        ("a5?", REFILL, Create(4)),
    ],
)
def test_when_there_are_no_further_tasks(words, the_plan, action):
    assert decide(flights(words), 5, 9, the_plan, ended=True) == action


@pytest.mark.parametrize(
    ("words", "left", "the_plan", "missing"),
    [
        ("", 9, PLAN, 4),
        ("a", 9, PLAN, 3),
        ("a b c d", 9, PLAN, 0),
        ("a b c d e f", 9, PLAN, 0),  # of an earlier life
        ("", 1, PLAN, 2),
        ("a", 1, PLAN, 1),
        ("a b", 1, PLAN, 0),
        ("a! b! c", 2, PLAN, 1),
        ("", 0, PLAN, 0),
        ("a? b", 9, REFILL, 3),
        ("a? b? c? d", 9, REFILL, 2),
        ("a? b? c? d? e? f", 9, REFILL, 0),
        ("a? b", 1, REFILL, 1),
    ],
)
def test_so_many_new_groups_are_wanted(words, left, the_plan, missing):
    assert to_create(flights(words), left, the_plan) == missing


@st.composite
def plans(draw):
    """Settings that are allowed, and the ways of a world."""
    kind = draw(st.sampled_from(["sync", "collocated", "async"]))
    groups, staleness = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = groups * {"sync": 1, "collocated": staleness + 1, "async": staleness}[kind]
    schedule = {
        "kind": kind,
        "staleness": staleness,
        "groups_in_flight": draw(st.one_of(st.just(most), st.integers(groups, most))),
        "at_update": draw(st.sampled_from(["interrupt", "finish"])),
        "remake": draw(st.sampled_from([0, 0, 1, 2])),
    }
    trainer = Trainer(
        steps=draw(st.integers(1, 14)),
        groups_per_step=groups,
        group_size=2,
        schedule=schedule,
        advantage={"refill": draw(st.sampled_from([0, 0, 1, 2]))},
        safety={"remake": 1000},
    )
    ways = Ways(
        slots=draw(st.integers(1, 12)),
        spread=draw(st.sampled_from([0.1, 0.8, 2.0])),
        update=draw(st.sampled_from([0.01, 1.0, 5.0])),
        write=0.001,
        equal=draw(st.sampled_from([0.0, 0.3, 0.9])),
        broken=draw(st.sampled_from([0.0, 0.0, 0.1])),
        silent=draw(st.sampled_from([0.0, 0.0, 0.3])),
        skipped=draw(st.sampled_from([0.0, 0.2])),
        late_news=draw(st.booleans()),
        slow_task=draw(st.sampled_from([None, 0, 3])),
        tasks=draw(st.sampled_from([None, None, groups, 13])),
    )
    return trainer, ways, draw(st.integers(0, 10**6))


def check(run: Simulated) -> None:
    """What holds for each run, whatever its settings and the world."""
    config: Trainer = run._config.trainer
    ways, the_plan = run.world.ways, plan(config)
    refill = config.advantage.refill
    made_again = ways.broken > 0  # then a batch may have been, with what does not count in it
    bound = 0 if config.schedule.kind == "sync" else config.schedule.staleness
    for update in run.trained:
        ages = [update.version - oldest for oldest in update.oldest if oldest is not None]
        assert all(0 <= age <= bound for age in ages), f"{ages} at version {update.version}"
        assert update.counting <= config.groups_per_step
        if not refill:
            assert update.counting == config.groups_per_step
        elif not run._tasks_ended:
            assert update.counting == config.groups_per_step or len(update.groups) >= the_plan.most_groups
        most = the_plan.most_groups + the_plan.in_flight - config.groups_per_step
        assert config.groups_per_step <= len(update.groups) <= most or made_again
    ids_trained = [group.spec.id for update in run.trained for group in update.groups]
    assert len(set(ids_trained)) == len(ids_trained)
    assert run.most_going <= the_plan.in_flight or made_again
    again = [id.rpartition("-")[2] for id in ids_trained if "-" in id]
    if not made_again:
        assert all(int(times) <= config.schedule.remake for times in again)
    if not config.schedule.remake and not made_again:
        assert all(fate != Fate.STALE for _, fate in run.dropped)
    if not (refill or config.schedule.remake or made_again):
        assert run.dropped == []
        assert run.world.created == len(ids_trained) + len(run._flights.all)


CROWDED = Trainer(steps=11, groups_per_step=1, group_size=2, schedule={"kind": "collocated", "groups_in_flight": 3})
ENDING = Trainer(steps=6, groups_per_step=4, group_size=2, advantage={"refill": 1})


@given(plans())
@example((CROWDED, Ways(slots=12, update=0.01, write=0.001, skipped=0.2, tasks=23), 448481))
@example((ENDING, Ways(slots=7, spread=0.1, equal=0.9, skipped=0.2, tasks=38), 582849))
@settings(max_examples=100, deadline=None)
def test_every_allowed_plan_comes_to_its_end_within_its_bounds(drawn):
    """A wait in which nothing can happen ends the simulation with an error."""
    trainer, ways, seed = drawn
    run = Simulated(trainer, ways, seed)
    try:
        run.run_all()
        assert (run._steps == trainer.steps and run._flights.all == []) or run.dropped
    except ConfigError as error:
        assert "tasks.train gives" in str(error)
        # There was nothing left of which an update could have been made.
        assert ways.tasks is not None and len(run._flights.all) < trainer.groups_per_step
    check(run)


ROOMY = {"steps": 30, "groups_per_step": 4, "group_size": 4}


@pytest.mark.parametrize(
    ("kind", "in_flight", "staleness"), [("collocated", 8, 2), ("collocated", 12, 2), ("async", 8, 2), ("async", 12, 3)]
)
def test_no_group_starves(kind, in_flight, staleness):
    """One task takes 100 times as long as the others. It is waited for, and trained within the bound."""
    schedule = {"kind": kind, "groups_in_flight": in_flight, "staleness": staleness}
    run = simulate(Ways(slots=32, slow_task=5), schedule=schedule, **ROOMY)
    check(run)
    trained_at = {group.spec.task["number"]: i for i, update in enumerate(run.trained) for group in update.groups}
    assert sorted(trained_at) == list(range(120))
    (age,) = [
        update.version - oldest
        for update in run.trained
        for group, oldest in zip(update.groups, update.oldest, strict=True)
        if group.spec.task["number"] == 5
    ]
    assert age == staleness
    # The others go on with what is in flight meanwhile, and without it afterwards.
    assert max(trained_at[number] for number in range(in_flight) if number != 5) <= trained_at[5] + 1
    assert run.trained[trained_at[5]].time > 50 > run.trained[trained_at[5] - 1].time


def test_a_group_that_takes_too_long_may_be_given_up():
    """It is begun again so often, and then nothing waits for it."""
    schedule = {"kind": "collocated", "remake": 2}
    run = simulate(Ways(slots=32, slow_task=5), schedule=schedule, **ROOMY)
    check(run)
    mine = [id for id, fate in run.dropped if id.startswith("r.train.000005") and fate == Fate.STALE]
    assert mine == ["r.train.000005", "r.train.000005-1", "r.train.000005-2"]
    assert set(mine) <= set(run.world.cancelled)
    assert all(group.spec.task["number"] != 5 for update in run.trained for group in update.groups)
    patient = simulate(Ways(slots=32, slow_task=5), schedule={"kind": "collocated"}, **ROOMY)
    assert run.world.now < patient.world.now


@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_for_the_slowest_when_more_is_in_flight(seed):
    """Half of a synchronous run is waiting for few; updates beside generation save their own time as well."""
    ways = Ways(slots=32, spread=1.2, update=3.0)
    sync = simulate(ways, seed, **ROOMY)
    collocated = simulate(ways, seed, schedule={"kind": "collocated"}, **ROOMY)
    apart = simulate(ways, seed, schedule={"kind": "async"}, **ROOMY)
    for run in (sync, collocated, apart):
        check(run)
        assert len(run.trained) == 30 and run.world.created == 120
    assert sync.world.now > 1.3 * collocated.world.now
    assert collocated.world.now > apart.world.now


def test_other_tasks_take_the_place_of_groups_with_equal_rewards_while_others_run():
    run = simulate(Ways(slots=32, equal=0.4), schedule={"kind": "collocated"}, advantage={"refill": 3}, **ROOMY)
    check(run)
    assert all(update.counting == 4 for update in run.trained)
    assert sum(len(update.groups) for update in run.trained) > 120


@pytest.mark.parametrize("kind", ["sync", "collocated", "async"])
def test_tasks_that_are_exactly_enough_are_enough(kind):
    run = simulate(Ways(slots=32, tasks=120), schedule={"kind": kind}, **ROOMY)
    check(run)
    assert len(run.trained) == 30


@pytest.mark.parametrize("kind", ["sync", "collocated", "async"])
def test_where_tasks_end_too_early_all_whole_updates_are_trained_first(kind):
    run = Simulated(Trainer(schedule={"kind": kind}, **ROOMY), Ways(slots=32, tasks=117), 0)
    with pytest.raises(ConfigError, match=r"tasks\.train gives [01] tasks where [0-9] are needed"):
        run.run_all()
    check(run)
    assert len(run.trained) == 29
