"""Groups between their creation and their update: since when they run, what of them is exact, and what a run finds
that was started again."""

from types import SimpleNamespace

import pytest
from transcripts import node, transcript

from harnessed.config import Advantage, Run
from harnessed.config import Trainer as TrainerSettings
from harnessed.records import UNKNOWN_VERSION, GroupSpec, Outcome, Purpose, Sampling, Version
from harnessed.training.failures import WrongVersion
from harnessed.training.flights import Flights
from harnessed.training.lineages import Lineage
from harnessed.training.rollouts import Rollouts
from harnessed.training.schedule import Drop, Flight, decide
from harnessed.training.trainer import plan

FIRST = [Lineage(0, 0, 0)]
RESUMED = [Lineage(0, 0, 0), Lineage(1, 6, 3)]
"""The second life goes on from the checkpoint of update 3; the first one had come to version 5."""


class Played(Rollouts):
    """The groups of a store; the tests say what happens to them."""

    def __init__(self):
        super().__init__(None, "r", 0, SimpleNamespace(started=set(), complete=set()), lambda: None)
        self.store: dict[str, GroupSpec] = {}
        self.nodes: dict[str, list] = {}
        """Group -> of each of its rollouts, the versions of its tokens."""
        self.ended: dict[str, list[Outcome]] = {}
        self.cancelled: list[str] = []

    def create(self, specs):
        self.open |= {spec.id: spec for spec in specs}
        self.store |= {spec.id: spec for spec in specs}

    def known(self):
        return list(self.store.values())

    def cancel(self, group):
        self.cancelled.append(group)

    def read(self, group):
        rollouts = self.nodes.get(group, [[], []])
        outcomes = self.ended.get(group, [Outcome.OK] * len(rollouts))
        return [
            transcript(
                [node(number, number - 1, [1], [2], version=packed(each)) for number, each in enumerate(versions, 1)],
                id=f"{group}.{index}",
                outcome=outcome,
                reward=float(index) if outcome == Outcome.OK else None,
            )
            for index, (versions, outcome) in enumerate(zip(rollouts, outcomes, strict=True))
        ]

    def begins(self, *numbers):
        self.watch.started |= {name(number) for number in numbers}

    def completes(self, number, *rollouts, outcomes=None):
        """With these versions of the tokens of each rollout."""
        self.begins(number)
        self.watch.complete.add(name(number))
        self.nodes[name(number)] = list(rollouts)
        if outcomes:
            self.ended[name(number)] = outcomes


def packed(version) -> int:
    return version if isinstance(version, int) and version < 0 else Version(*version).pack()


def name(number) -> str:
    """Of the group of the task with this number; `3-1`: made again once."""
    number, _, remade = str(number).partition("-")
    return f"r.train.{int(number):06d}" + (f"-{remade}" if remade else "")


def flights_of(rollouts, lineages=FIRST, tasks_before=0, **settings) -> Flights:
    settings = {"groups_per_step": 2, "group_size": 2} | settings
    config = SimpleNamespace(trainer=TrainerSettings(**settings), sampling=Sampling(), run=Run())
    return Flights(rollouts, config, lineages, tasks_before)


def begun(tasks: int, **settings):
    rollouts = Played()
    flights = flights_of(rollouts, **settings)
    flights.create([{"number": number} for number in range(tasks)])
    return rollouts, flights


def at(number: int, lineage: int = 0) -> Version:
    return Version(lineage, number)


def test_a_group_runs_since_the_version_at_which_it_was_seen_to_begin():
    rollouts, flights = begun(3)
    assert not flights.refresh(at(4))
    rollouts.begins(0, 1)
    assert flights.refresh(at(4))
    assert not flights.refresh(at(5))  # nothing new
    rollouts.begins(2)
    assert flights.refresh(at(5))
    assert flights.all == [Flight(name(0), 4), Flight(name(1), 4), Flight(name(2), 5)]


@pytest.mark.parametrize(
    ("tokens", "since"),
    [
        ([[(0, 4), (0, 6)], [(0, 5)]], 4),
        ([[(0, 6)], [(0, 5), (0, 6)]], 5),  # it began before, and sampled nothing before the next update
        ([[], [(0, 6)]], 6),
        ([[], []], 4),  # nothing says anything else
        ([[UNKNOWN_VERSION], [UNKNOWN_VERSION]], 4),
        ([[UNKNOWN_VERSION], [(0, 5)]], 5),
    ],
)
def test_of_a_complete_group_its_tokens_tell_since_when_it_runs(tokens, since):
    rollouts, flights = begun(1)
    rollouts.begins(0)
    flights.refresh(at(4))
    rollouts.completes(0, *tokens)
    assert flights.refresh(at(6))
    assert flights.all == [Flight(name(0), since, complete=True)]


def test_a_group_that_is_complete_before_it_was_seen_to_begin():
    rollouts, flights = begun(2)
    rollouts.completes(0, [(0, 4)], [(0, 4)])
    rollouts.watch.complete.add(name(1))  # no rollout of it was ever begun
    assert flights.refresh(at(4))
    assert flights.all == [Flight(name(0), 4, complete=True), Flight(name(1), None, complete=True)]


def test_tokens_that_are_not_trained_do_not_make_a_group_old():
    """Of a rollout that ended by infrastructure nothing is."""
    rollouts, flights = begun(1)
    rollouts.begins(0)
    flights.refresh(at(4))
    rollouts.completes(0, [(0, 4)], [(0, 6)], outcomes=[Outcome.INFRASTRUCTURE, Outcome.OK])
    flights.refresh(at(6))
    assert flights.all[0].since == 6


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ([[(0, 3)], [(0, 5)]], "weights of 3 updates ago, and the group began later"),
        ([[(1, 6)], [(0, 5)]], "weights that it cannot have: no life of this run made version 1.6 of its policy"),
    ],
)
def test_tokens_of_a_version_that_cannot_be_end_the_run(tokens, complaint):
    rollouts, flights = begun(1)
    rollouts.begins(0)
    flights.refresh(at(4))
    rollouts.completes(0, *tokens)
    with pytest.raises(WrongVersion, match=f"answered group {name(0)} with {complaint}; does it map the folder"):
        flights.refresh(at(6))


@pytest.mark.parametrize(
    ("refill", "outcomes", "counts"),
    [
        (1, None, True),
        (1, [Outcome.OK, Outcome.INFRASTRUCTURE], False),
        (0, [Outcome.OK, Outcome.INFRASTRUCTURE], True),
    ],
)
def test_who_cannot_be_compared_counts_where_nobody_takes_its_place(refill, outcomes, counts):
    rollouts, flights = begun(1, advantage=Advantage(refill=refill))
    rollouts.completes(0, [(0, 0)], [(0, 0)], outcomes=outcomes)
    flights.refresh(at(0))
    assert flights.all == [Flight(name(0), 0, complete=True, counts=counts)]


def test_ids_and_seeds_follow_from_the_place_of_the_task():
    rollouts, flights = begun(3)
    flights.create([{"number": 3}])
    assert list(rollouts.store) == [name(number) for number in range(4)]
    assert flights.tasks == 4
    seeds = [spec.seed for spec in rollouts.store.values()]
    assert len(set(seeds)) == 4
    again, later = begun(4)[0], Played()
    flights_of(later, tasks_before=2).create([{"number": 2}, {"number": 3}])
    assert [spec.seed for spec in again.store.values()] == seeds
    assert later.store == {id: spec for id, spec in again.store.items() if id >= name(2)}


def test_a_group_that_is_made_again_has_its_task_and_other_draws():
    rollouts, flights = begun(2)
    rollouts.begins(0)
    flights.refresh(at(4))
    (dropped,) = flights.drop((name(0),), again=True)
    assert dropped.spec.id == name(0) and rollouts.cancelled == [name(0)]
    assert flights.all == [Flight(name(1)), Flight(name("0-1"), None, remade=1)]  # and it has to begin anew
    flights.drop((name("0-1"),), again=True)
    assert flights.all == [Flight(name(1)), Flight(name("0-2"), None, remade=2)]
    specs = [rollouts.store[name(number)] for number in ("0", "0-1", "0-2")]
    assert {spec.task["number"] for spec in specs} == {0} and len({spec.seed for spec in specs}) == 3
    flights.drop((name("0-2"), name(1)), again=False)
    assert flights.all == [] and flights.tasks == 2
    assert rollouts.cancelled == [name("0"), name("0-1"), name("0-2"), name(1)]


def test_taken_groups_leave_and_looked_at_ones_stay():
    rollouts, flights = begun(3)
    for number in (0, 2):
        rollouts.completes(number, [(0, 0)], [(0, 0)])
    flights.refresh(at(0))
    ids = (name(2), name(0))
    assert [group.spec.id for group in flights.look(ids)] == list(ids)
    taken = flights.take(ids)
    assert [group.spec.id for group in taken] == list(ids)
    assert all(len(group.transcripts) == len(group.samples) == 2 for group in taken)
    assert flights.all == [Flight(name(1))]


def left_behind() -> Played:
    """A store of which the checkpoint of update 3 has consumed two groups."""
    rollouts = Played()
    flights_of(rollouts).create([{"number": number} for number in range(8)])
    rollouts.completes(2, [(0, 2)], [(0, 3)])
    rollouts.completes(3, [(0, 5)], [(0, 5)])  # by a branch that was left: two back
    rollouts.completes(4, [(0, 0)], [(0, 1)])  # too old
    rollouts.begins(5)
    rollouts.nodes[name(5)] = [[(0, 4)], []]
    rollouts.begins(6)
    rollouts.store["r.held-out-0.0.0000"] = rollouts.store[name(0)].model_copy(
        update={"id": "r.held-out-0.0.0000", "purpose": Purpose.EVALUATION}
    )
    return rollouts


def test_a_run_that_was_started_again_finds_its_groups_and_how_old_they_are():
    rollouts = left_behind()
    flights = flights_of(rollouts, RESUMED, tasks_before=2)
    assert flights.restore([name(0), name(1)], at(6, 1)) == []
    assert flights.tasks == 8
    assert set(rollouts.open) >= {name(number) for number in range(2, 8)}
    since = {flight.group: flight.since for flight in flights.all}
    assert since == {name(2): 5, name(3): 4, name(4): 3, name(5): 5, name(6): None, name(7): None}
    assert not any(flight.complete for flight in flights.all)

    flights.refresh(at(6, 1))  # the journal is read from its beginning
    assert [flight.group for flight in flights.all if flight.complete] == [name(2), name(3), name(4)]
    assert {flight.group: flight.since for flight in flights.all} == since | {name(6): 6}
    # Groups of an earlier life may turn out older than was seen; those of this one may not.
    flights.create([{"number": 8}])
    rollouts.begins(8)
    rollouts.completes(6, [(0, 2)], [(1, 6)])
    flights.refresh(at(6, 1))
    assert flights.all[4] == Flight(name(6), 5, complete=True)
    rollouts.completes(8, [(0, 2)], [(1, 6)])
    with pytest.raises(WrongVersion):
        flights.refresh(at(6, 1))


def test_what_has_grown_too_old_over_a_restart_is_begun_anew():
    rollouts = left_behind()
    flights = flights_of(rollouts, RESUMED, schedule={"kind": "collocated"})
    flights.restore([name(0), name(1)], at(6, 1))
    flights.refresh(at(6, 1))
    action = decide(flights.all, 6, 9, plan(flights._config.trainer))
    assert action == Drop((name(4),), again=True)
    (group,) = flights.drop(action.groups, again=action.again)
    assert name("4-1") in {flight.group for flight in flights.all}
    assert rollouts.store[name("4-1")].task == group.spec.task
    assert len(group.samples) == 2 and name(4) in rollouts.cancelled


def test_groups_that_were_cancelled_while_a_run_ended_are_begun_anew_and_booked():
    rollouts = Played()
    flights_of(rollouts).create([{"number": number} for number in range(3)])
    rollouts.completes(1, [(0, 0)], [], outcomes=[Outcome.OK, Outcome.CANCELLED])
    flights = flights_of(rollouts, RESUMED)
    (cancelled,) = flights.restore([name(0)], at(6, 1))
    assert cancelled.spec.id == name(1) and rollouts.cancelled == [name(1)]
    assert {flight.group: flight.remade for flight in flights.all} == {name("1-1"): 1, name(2): 0}
    assert rollouts.store[name("1-1")].task == {"number": 1}

    # The same life again, killed after this: what was begun anew is known, and is not begun once more.
    flights = flights_of(rollouts, RESUMED)
    assert [group.spec.id for group in flights.restore([name(0)], at(6, 1))] == [name(1)]
    assert {flight.group: flight.remade for flight in flights.all} == {name("1-1"): 1, name(2): 0}
    # Its books hold the cancelled one by now.
    flights = flights_of(rollouts, RESUMED)
    assert flights.restore([name(0), name(1), name("1-1")], at(6, 1)) == []
    assert [flight.group for flight in flights.all] == [name(2)] and flights.tasks == 3
