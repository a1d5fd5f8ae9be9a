"""The training groups of a run between their creation and the update that takes them.

`trainer.py` creates them here, lets them follow the journal (`watch.py`), shows them to `schedule.decide`, and takes
them. A group is called `<run>.train.<number>`, after the place of its task among all tasks of training, so that what
the gateway holds says where a run goes on that was started again.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from harnessed.config import Config
from harnessed.records import GroupSpec, Outcome, Purpose, Task, Version
from harnessed.training.failures import WrongVersion
from harnessed.training.lineages import Lineage, age_of, age_so_far
from harnessed.training.rollouts import Rollouts
from harnessed.training.samples import Bound, build
from harnessed.training.schedule import Flight
from harnessed.training.selection import Group, comparable

LABEL = "train"


@dataclass(slots=True)
class _Open:
    flight: Flight
    spec: GroupSpec
    group: Group | None = None
    """With what was recorded, once it is complete."""
    inherited: bool = False
    """It was created by a trainer that has died."""


class Flights:
    def __init__(self, rollouts: Rollouts, config: Config, lineages: list[Lineage], tasks_before: int = 0) -> None:
        """`tasks_before`: how many tasks the runs have used from which this one goes on."""
        self._rollouts = rollouts
        self._config = config
        self._lineages = lineages
        self._open: dict[str, _Open] = {}
        self.tasks = tasks_before
        """How many tasks of training were begun."""

    @property
    def all(self) -> list[Flight]:
        """In the order of their creation."""
        return [each.flight for each in self._open.values()]

    def create(self, tasks: list[Task]) -> None:
        """Begin a group for each of the next tasks."""
        specs = [self._spec(number, task) for number, task in enumerate(tasks, self.tasks)]
        self.tasks += len(tasks)
        self._begin(specs, remade=0)

    def restore(self, consumed: Collection[str], current: Version) -> list[Group]:
        """Take up what an earlier life of the run has begun, but for what it has consumed.

        Groups that it cancelled while it ended are begun anew; what was recorded of them is returned, for the books.
        So is what it had given up for another group of the same task, which goes on in its place.
        """
        found = [spec for spec in self._rollouts.known() if spec.purpose == Purpose.TRAIN]
        known = {spec.id for spec in found}
        cancelled: list[Group] = []
        for spec in found:
            number, remade = _place(spec.id)
            self.tasks = max(self.tasks, number + 1)
            if spec.id in consumed:
                continue
            group = self._read(spec)
            open_ = _Open(Flight(spec.id, remade=remade), spec, inherited=True)
            again = self._again(open_)
            if again.id in known or any(each.rollout.outcome == Outcome.CANCELLED for each in group.transcripts):
                self._rollouts.cancel(spec.id)  # it may have been killed in the middle of this
                cancelled.append(self._read(spec))
                if again.id not in known:
                    self._begin([again], remade + 1)
                continue
            age = age_so_far(group.transcripts, current, self._lineages)
            since = None if age is None else current.number - age
            self._rollouts.open[spec.id] = spec
            self._open[spec.id] = replace(open_, flight=replace(open_.flight, since=since))
        return cancelled

    def refresh(self, current: Version) -> bool:
        """Whether a group has begun or is complete, by what was read of the journal.

        To be called at the latest before the policy changes: who has begun since the last time began at the current
        version.
        """
        watch, before = self._rollouts.watch, self.all
        for id, each in self._open.items():
            if each.flight.since is None and id in watch.started:
                each.flight = replace(each.flight, since=current.number)
            if each.group is None and id in watch.complete:
                self._complete(each, current)
        return self.all != before

    def look(self, ids: tuple[str, ...]) -> list[Group]:
        """Complete groups, which stay."""
        return [group for id in ids if (group := self._open[id].group)]

    def take(self, ids: tuple[str, ...]) -> list[Group]:
        """Complete groups, for an update."""
        taken = self.look(ids)
        for id in ids:
            del self._open[id]
        return taken

    def drop(self, ids: tuple[str, ...], *, again: bool) -> list[Group]:
        """Cancel groups; as they are then. `again`: their tasks are begun anew."""
        dropped = [self._open.pop(id) for id in ids]
        for each in dropped:
            self._rollouts.cancel(each.spec.id)
        if again:
            for each in dropped:
                self._begin([self._again(each)], each.flight.remade + 1)
        return [each.group or self._read(each.spec) for each in dropped]

    def _begin(self, specs: list[GroupSpec], remade: int) -> None:
        self._rollouts.create(specs)
        for spec in specs:
            self._open[spec.id] = _Open(Flight(spec.id, remade=remade), spec)

    def _spec(self, number: int, task: Task) -> GroupSpec:
        run = self._rollouts.run
        return GroupSpec(
            id=f"{run}.{LABEL}.{number:06d}",
            run=run,
            task=task,
            n=self._config.trainer.group_size,
            purpose=Purpose.TRAIN,
            sampling=self._config.sampling,
            seed=self._rollouts.seed_of(LABEL, number),
        )

    def _again(self, dropped: _Open) -> GroupSpec:
        """The same task with other draws."""
        number, remade = _place(dropped.spec.id)
        id = f"{self._rollouts.run}.{LABEL}.{number:06d}-{remade + 1}"
        return dropped.spec.model_copy(
            update={"id": id, "seed": self._rollouts.seed_of(f"{LABEL}-{remade + 1}", number)}
        )

    def _complete(self, each: _Open, current: Version) -> None:
        """Read it. What its tokens say of their versions is exact."""
        each.group = self._read(each.spec)
        since = self._told(each, each.group, current)
        settings = self._config.trainer
        counts = settings.advantage.refill == 0 or comparable(each.group.samples, settings)
        each.flight = replace(each.flight, complete=True, counts=counts, since=since)

    def _told(self, each: _Open, group: Group, current: Version) -> int | None:
        """Since when it runs, by its tokens. Raises WrongVersion if that cannot be."""
        begun = each.flight.since
        try:
            age = age_of(group.samples, current, self._lineages)
        except LookupError as error:
            raise _wrong(each, f"weights that it cannot have: {error}") from None
        if age is None:
            return begun
        if begun is not None and current.number - age < begun and not each.inherited:
            raise _wrong(each, f"weights of {age} updates ago, and the group began later")
        return current.number - age

    def _read(self, spec: GroupSpec) -> Group:
        settings = self._config.trainer
        bound = Bound(settings.row_tokens, settings.overlong)
        transcripts = self._rollouts.read(spec.id)
        return Group(spec, transcripts, [build(transcript, bound) for transcript in transcripts])


def _place(id: str) -> tuple[int, int]:
    """Number of its task, and how often that was begun anew."""
    number, _, remade = id.rpartition(".")[2].partition("-")
    return int(number), int(remade or 0)


def _wrong(each: _Open, what: str) -> WrongVersion:
    return WrongVersion(
        f"the engine answered group {each.spec.id} with {what}; does it map the folder that engine.weights names?"
    )
