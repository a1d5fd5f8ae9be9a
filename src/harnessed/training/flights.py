"""The training groups of a run between their creation and the update that takes them.

`trainer.py` creates them here, lets them follow the journal (`watch.py`), shows them to `schedule.decide`, and takes
them. A group is called `<run>.train.<number>`, after the place of its task among all tasks of training, so that what
the gateway holds says where a run goes on that was started again.
"""

from dataclasses import dataclass, replace

from harnessed.config import Config
from harnessed.records import GroupSpec, Purpose, Task, Version
from harnessed.training.failures import WrongVersion
from harnessed.training.lineages import Forks, age_of
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
    def __init__(self, rollouts: Rollouts, config: Config, forks: Forks, tasks_before: int = 0) -> None:
        """`tasks_before`: how many tasks the runs have used from which this one goes on."""
        self._rollouts = rollouts
        self._config = config
        self._forks = forks
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

    def refresh(self, current: Version) -> None:
        """To be called after the journal was read, at the latest before the policy changes: what has begun since was
        begun at the current version."""
        watch = self._rollouts.watch
        for id, each in self._open.items():
            if each.flight.since is None and id in watch.started:
                each.flight = replace(each.flight, since=current.number)
            if each.group is None and id in watch.complete:
                self._complete(each, current)

    def take(self, ids: tuple[str, ...]) -> list[Group]:
        """Complete groups, for an update."""
        taken = [self._open.pop(id) for id in ids]
        return [each.group for each in taken if each.group]

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
        remade = dropped.flight.remade + 1
        first = dropped.spec.id.removesuffix(f"-{remade - 1}") if remade > 1 else dropped.spec.id
        id = f"{first}-{remade}"
        return dropped.spec.model_copy(update={"id": id, "seed": self._rollouts.seed_of(id, remade)})

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
            age = age_of(group.samples, current, self._forks)
        except KeyError as error:
            raise _wrong(each, f"version {_name(error.args[0])}, which this run never had") from None
        if age is None:
            return begun
        if begun is not None and current.number - age < begun and not each.inherited:
            raise _wrong(each, f"a version of {age} updates ago, and the group began later")
        return current.number - age

    def _read(self, spec: GroupSpec) -> Group:
        settings = self._config.trainer
        bound = Bound(settings.row_tokens, settings.overlong)
        transcripts = self._rollouts.read(spec.id)
        return Group(spec, transcripts, [build(transcript, bound) for transcript in transcripts])


def _wrong(each: _Open, what: str) -> WrongVersion:
    return WrongVersion(
        f"the engine answered group {each.spec.id} with {what}; does it map the folder that engine.weights names?"
    )


def _name(version: Version) -> str:
    return ".".join(map(str, version))
