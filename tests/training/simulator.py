"""Runs of the trainer's own loop in simulated time: its decisions, its flights and what it does around an update are
the real ones; agents, engine and update are a clock.

`World` has the slots and plays the rollouts; it stamps each rollout's tokens with the versions that the engine served.
`Simulated` is the trainer. A wait in which nothing can happen any more is an error.
"""

import math
import random
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from transcripts import node, transcript

from harnessed.config import Run
from harnessed.config import Trainer as Settings
from harnessed.records import Fate, GroupSpec, Outcome, Sampling, Turnstile, TurnstileState, Version
from harnessed.training.backends.local import Update
from harnessed.training.batches import Alike
from harnessed.training.flights import Flights
from harnessed.training.lineages import Lineage
from harnessed.training.rollouts import Rollouts
from harnessed.training.selection import Group, Taken
from harnessed.training.trainer import Trainer, plan


class StandsStill(AssertionError):
    """The trainer waits, and nothing can happen."""


@dataclass(frozen=True)
class Ways:
    """How the simulated rest of the world behaves. Times are in units of the median rollout."""

    slots: int = 8
    spread: float = 0.8
    """Of the log-normal time of a rollout."""
    update: float = 1.0
    """Time of an update."""
    write: float = 0.05
    """The part of it in which an engine with devices of its own stands still."""
    equal: float = 0.0
    """Chance that the rewards of a group are all equal."""
    broken: float = 0.0
    """Chance that one rollout of a group ends by infrastructure."""
    silent: float = 0.0
    """Chance that a rollout samples no token."""
    skipped: float = 0.0
    """Chance that an update makes no version."""
    late_news: bool = False
    """The trainer learns of changes in parts."""
    slow_task: int | None = None
    """Number of the task that takes `slowness` times the median."""
    slowness: float = 100.0
    tasks: int | None = None
    """How many there are."""


@dataclass
class _Rollout:
    id: str
    left: float
    reward: float
    outcome: Outcome = Outcome.OK
    silent: bool = False
    ran: bool = False
    ended: bool = False
    first: Version | None = None
    """That sampled its first token."""
    last: Version | None = None


@dataclass
class _Watch:
    """What the trainer has read so far."""

    started: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    news: deque[tuple[str, str]] = field(default_factory=deque)
    """What happened and was not read: of which kind, and the group."""

    def moved(self) -> None:
        pass

    def catch_up(self) -> None:
        self.read(len(self.news))

    def read(self, changes: int) -> None:
        for _ in range(changes):
            kind, group = self.news.popleft()
            getattr(self, kind).add(group)


class World(Rollouts):
    """Slots, an engine and a journal."""

    def __init__(self, ways: Ways, seed: int) -> None:
        super().__init__(None, "r", seed, _Watch(), lambda: None)
        self.ways = ways
        self.random = random.Random(seed)
        self.now = 0.0
        self.paused = False
        self.draining = False
        """Only rollouts that are under way go on."""
        self.version = Version(0, 0)
        self.members: dict[str, list[_Rollout]] = {}
        self.specs_of: dict[str, GroupSpec] = {}
        self.running: list[_Rollout] = []
        self.queue: deque[_Rollout] = deque()
        self.created = 0
        self.cancelled: list[str] = []

    def create(self, specs: list[GroupSpec]) -> None:
        for spec in specs:
            self.open[spec.id] = self.specs_of[spec.id] = spec
            self.members[spec.id] = self._play(spec)
            self.queue.extend(self.members[spec.id])
            self.created += 1
        self._fill_slots()

    def wait(self, what: str) -> None:
        if not self.watch.news:
            if not self.running:
                raise StandsStill(f"waits for {what} at {self.now}, and nothing runs")
            self._run(min(each.left for each in self.running))
        news = len(self.watch.news)
        self.watch.read(self.random.randint(0, news) if self.ways.late_news else news)

    def read(self, group: str) -> list:
        return [self._transcript(each) for each in self.members[group]]

    def cancel(self, group: str) -> None:
        self.cancelled.append(group)
        mine = {each.id for each in self.members[group]}
        self.queue = deque(each for each in self.queue if each.id not in mine)
        self.running = [each for each in self.running if each.id not in mine]
        for each in self.members[group]:
            each.outcome = each.outcome if each.ended else Outcome.CANCELLED
        self._fill_slots()

    def advance(self, time: float) -> None:
        """Let it pass."""
        end = self.now + time
        while self.now < end:
            going = [each.left for each in self.running if self._goes(each)]
            self._run(min([end - self.now, *going]))

    def _run(self, time: float) -> None:
        self.now += time
        for each in [each for each in self.running if self._goes(each)]:
            each.left -= time
            each.first, each.last = each.first or self.version, self.version
            if each.left <= 1e-9:
                self._end(each)
        self._fill_slots()

    def _goes(self, rollout: _Rollout) -> bool:
        return not self.paused and not (self.draining and rollout.first is None)

    def _end(self, rollout: _Rollout) -> None:
        rollout.ended = True
        self.running.remove(rollout)
        group = rollout.id.rpartition(".")[0]
        if all(each.ended for each in self.members[group]):
            self.watch.news.append(("complete", group))

    def _fill_slots(self) -> None:
        while self.queue and len(self.running) < self.ways.slots:
            rollout = self.queue.popleft()
            rollout.ran = True
            self.running.append(rollout)
            self.watch.news.append(("started", rollout.id.rpartition(".")[0]))

    def _play(self, spec: GroupSpec) -> list[_Rollout]:
        ways, dice = self.ways, random.Random(spec.seed)
        slow = ways.slowness if spec.task["number"] == ways.slow_task else 1.0
        same = dice.random() < ways.equal
        members = [
            _Rollout(
                id=f"{spec.id}.{index}",
                left=slow * math.exp(dice.gauss(0, ways.spread)),
                reward=1.0 if same else float(index % 2),
                silent=dice.random() < ways.silent,
            )
            for index in range(spec.n)
        ]
        if dice.random() < ways.broken:
            members[0].outcome = Outcome.INFRASTRUCTURE
        return members

    def _transcript(self, rollout: _Rollout):
        nodes = []
        if rollout.first is not None and not rollout.silent:
            first = node(1, 0, [1], [2], version=rollout.first.pack())
            nodes = [first, node(2, 1, [3], [4], version=rollout.last.pack())]
        reward = None if rollout.outcome in (Outcome.INFRASTRUCTURE, Outcome.CANCELLED) else rollout.reward
        return transcript(nodes, id=rollout.id, reward=reward, outcome=rollout.outcome)


@dataclass(frozen=True)
class Trained:
    """One update."""

    version: int
    groups: list[Group]
    counting: int
    oldest: list[int | None]
    """For each group, the number of the version that sampled its first token."""
    time: float


class Simulated(Trainer):
    """The trainer's loop in a simulated world; `run_all` runs it to its end."""

    def __init__(self, settings: Settings, ways: Ways, seed: int = 0) -> None:
        self.world = World(ways, seed)
        self._config: Any = SimpleNamespace(trainer=settings, sampling=Sampling(), run=Run())
        numbers = range(ways.tasks if ways.tasks is not None else 10**9)
        self._train_tasks = ({"number": number} for number in numbers)
        self._rollouts, self._run = self.world, "r"
        self._lineages = [Lineage(0, 0, 0)]
        self._flights, self._plan = Flights(self.world, self._config, self._lineages), plan(settings)
        self._steps, self._tasks_ended, self._remade = 0, False, 0
        self._backend: Any = SimpleNamespace(version=Version(0, 0), update=self._compute)
        self._display: Any = SimpleNamespace(step=int, phase=str, note=str)
        self._alike = Alike(settings.safety)
        self._validation: Any = SimpleNamespace(look=self._look, finish=lambda: None)
        self.trained: list[Trained] = []
        self.dropped: list[tuple[str, Fate | None]] = []
        self.most_going = self.most_flights = 0

    def run_all(self) -> "Simulated":
        self._train()
        return self

    def _gateway(self, call: Any) -> Turnstile:
        """Closed at once, or after what runs has had some time to finish."""
        if call.path.endswith("/close") and call.body["mode"] == "finish":
            self.world.draining = True
            self.world.advance(self.world.random.uniform(0, 2) * self.world.ways.update)
        self.world.draining = not call.path.endswith("/open")
        return Turnstile(run="r", state=TurnstileState.CLOSED)

    def _engine(self, call: Any) -> None:
        self.world.paused = call.path == "/pause"

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def _step(self, groups: list[Group]) -> None:
        self._note(groups)
        with self._device():
            self._top_up()
            self._update(Taken([], [], 0), [([], [])])
        self._steps += 1

    def _compute(self, packs: Any, objective: Any, writing: AbstractContextManager[None]) -> Update:
        ways = self.world.ways
        self.world.advance(ways.update - ways.write)
        with writing:
            self.world.advance(ways.write)
            if self.world.random.random() >= ways.skipped:
                number = self._backend.version.number + 1
                self._backend.version = self.world.version = Version(0, number)
        return Update(1, {})

    def _book(self, groups: list[Group], fate: Fate | None = None) -> None:
        self.dropped += [(group.spec.id, fate) for group in groups]
        self.world.close([group.spec.id for group in groups])

    def _note(self, groups: list[Group]) -> None:
        settings = self._config.trainer
        firsts = [[each.first.number for each in self.world.members[group.spec.id] if each.first] for group in groups]
        refill = settings.advantage.refill
        counting = [not refill or self._comparable(group) for group in groups]
        oldest = [min(numbers, default=None) for numbers in firsts]
        version = self._backend.version.number
        self.trained.append(Trained(version, groups, sum(counting), oldest, self.world.now))
        self.world.close([group.spec.id for group in groups])

    def _comparable(self, group: Group) -> bool:
        rewards = [each.reward for each in group.samples if each.reward is not None]
        return len(set(rewards)) > 1

    def _look(self) -> None:
        flights = self._flights.all
        self.most_flights = max(self.most_flights, len(flights))
        self.most_going = max(self.most_going, sum(not each.complete or each.counts for each in flights))


def simulate(ways: Ways | None = None, seed: int = 0, **settings: Any) -> Simulated:
    """A run to its end, by the settings of `trainer`."""
    return Simulated(Settings(**settings), ways or Ways(), seed).run_all()
