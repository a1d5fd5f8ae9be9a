"""What a run does next: a pure function of the groups between their creation and their update. `trainer.py` asks it.

One rule makes all schedules. `sync` has as many groups in flight as an update takes and allows no staleness: it waits
for the slowest of them. `collocated` and `async` have more in flight, and take who is complete; they differ in where
the update computes, which is nothing to decide here.

The bound on staleness is kept by admission: an update moves everybody who stays behind one further from the policy, so
it does not start before those are complete who would then be too old, and it takes them. With at most
`groups_per_update * (staleness + 1)` groups in flight there are never more of them than an update takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flight:
    """A group between its creation and the update that takes it."""

    group: str
    since: int | None = None
    """Number of the version that sampled its oldest token, or of an earlier one. None: nothing was sampled yet."""
    complete: bool = False
    counts: bool = True
    """Of a complete one: whether it is one of the `groups_per_update`. One that cannot be compared may not be."""
    remade: int = 0
    """How often its task was begun again because it took too long."""


@dataclass(frozen=True, slots=True)
class Plan:
    groups_per_update: int
    in_flight: int
    """Most groups that run or are complete and count."""
    staleness: int
    """Most updates between the oldest token of a group and the update that takes it."""
    most_groups: int
    """Of one update, those that do not count included."""
    remake: int = 0
    """How often a group is cancelled and made again rather than waited for."""


@dataclass(frozen=True, slots=True)
class Create:
    """So many new groups."""

    groups: int


@dataclass(frozen=True, slots=True)
class Update:
    """Train these."""

    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Until something changes."""

    overdue: tuple[str, ...] = ()
    """Groups without which no update may start."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Cancel these, which are too old or would become so. `again`: their tasks are begun anew."""

    groups: tuple[str, ...]
    again: bool


Action = Create | Update | Wait | Drop


def decide(
    flights: Sequence[Flight], version: int, left: int, plan: Plan, *, admit: bool = True, ended: bool = False
) -> Action:
    """`flights` in the order of their creation; `version`: number of the policy's; `left`: updates still to be taken.

    `admit`: new groups may be made now. `ended`: there are no further tasks, so the last update takes what there is.
    """
    if late := [each for each in flights if _age(each, version) > plan.staleness]:
        return _drop(late, plan)
    overdue = [each for each in flights if _age(each, version + 1) > plan.staleness]
    waited_for = [each for each in overdue if not each.complete]
    taken = _taken([each for each in flights if each.complete], overdue, plan)
    enough = _enough(sum(each.counts for each in taken), len(taken), plan)
    if ended and all(each.complete for each in flights):
        enough = bool(taken)
    if enough and not waited_for:
        return Update(tuple(each.group for each in taken))
    if admit and not ended and (missing := to_create(flights, left, plan)):
        return Create(missing)
    if enough and plan.remake:
        return _drop(waited_for, plan)
    return Wait(tuple(each.group for each in waited_for))


def to_create(flights: Sequence[Flight], left: int, plan: Plan) -> int:
    """New groups that are wanted now; never more than the rest of the run takes."""
    going = sum(not each.complete or each.counts for each in flights)
    wanted = min(plan.in_flight, left * plan.groups_per_update) - going
    # Those that do not count have a bound as well: an update takes what there is before it waits for ever.
    room = plan.in_flight - plan.groups_per_update + plan.most_groups - len(flights)
    return max(0, min(wanted, room))


def _age(flight: Flight, version: int) -> int:
    return 0 if flight.since is None else version - flight.since


def _taken(complete: list[Flight], overdue: list[Flight], plan: Plan) -> list[Flight]:
    """The oldest first, until they are enough; whoever would be too old afterwards comes along."""
    taken: list[Flight] = []
    count = 0
    must = {each.group for each in overdue}
    for each in sorted(complete, key=lambda each: -1 if each.since is None else each.since):
        if each.group in must or not _enough(count, len(taken), plan):
            taken.append(each)
            count += each.counts
    return taken


def _enough(count: int, groups: int, plan: Plan) -> bool:
    return count >= plan.groups_per_update or groups >= plan.most_groups


def _drop(late: list[Flight], plan: Plan) -> Drop:
    again = [each for each in late if each.remade < plan.remake]
    return Drop(tuple(each.group for each in again or late), again=bool(again))
