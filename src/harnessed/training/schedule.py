"""What a run does next: a pure function of the groups between their creation and their update. `trainer.py` asks it.

One rule makes all schedules. `sync` has as many groups in flight as an update takes and allows no staleness: it waits
for the slowest of them. `collocated` and `async` have more in flight, and take who is complete; they differ in where
the update computes, which is nothing to decide here.

The bound on staleness is kept by admission: an update moves everybody who stays behind one further from the policy, so
it starts only if the updates after it, each of `groups_per_update` groups and the oldest first, can still take all of
them in time. Otherwise it waits for some of those who would come too late. With at most `groups_per_update *
(staleness + 1)` groups in flight it never has to take more than `groups_per_update` for that. Only a run that was
resumed may: it trains what it finds rather than to throw it away.
"""

import math
from collections.abc import Iterable, Sequence
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
    """With so many an update starts, those that do not count included."""
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
    """Groups that keep an update from starting: those, or as many older ones, have to be complete."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Cancel these, which are too old or would become so. `again`: their tasks are begun anew."""

    groups: tuple[str, ...]
    again: bool


Action = Create | Update | Wait | Drop


def decide(flights: Sequence[Flight], version: int, left: int, plan: Plan, *, ended: bool = False) -> Action:
    """`flights` in the order of their creation; `version`: number of the policy's; `left`: updates still to be taken.

    `ended`: there are no further tasks, so an update does without those that would take the place of others. Where not
    even those in flight are enough for one, they are asked for all the same: whoever creates them knows what to say.
    """
    # Of an earlier life of the run: in this one nobody gets so old.
    if late := [each for each in flights if _age(each, version) > plan.staleness]:
        return Drop(tuple(each.group for each in late), again=True)
    taken = _taken(flights, plan)
    overdue = _overdue(_without(flights, taken), version + 1, plan)
    waited_for = [each for each in overdue if not each.complete]
    count = sum(each.counts for each in taken)
    enough = count >= plan.groups_per_update or len(taken) >= plan.most_groups
    if ended and all(each.complete for each in flights):
        enough = len(taken) >= plan.groups_per_update
    if enough and not waited_for:
        return Update(tuple(each.group for each in [*taken, *overdue]))
    asks = not ended or len(flights) < plan.groups_per_update
    if asks and (missing := to_create(flights, left, plan)):
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


def _oldest_first(flights: Iterable[Flight]) -> list[Flight]:
    """Complete ones without a token before all others; those that have not begun after them."""
    return sorted(flights, key=lambda each: (-1 if each.complete else math.inf) if each.since is None else each.since)


def _taken(flights: Sequence[Flight], plan: Plan) -> list[Flight]:
    """Of the complete ones, so many of the oldest as count. Those that do not are done with anyway."""
    complete = _oldest_first(each for each in flights if each.complete)
    counting = [each for each in complete if each.counts]
    return [*counting[: plan.groups_per_update], *(each for each in complete if not each.counts)]


def _without(flights: Sequence[Flight], taken: list[Flight]) -> list[Flight]:
    gone = {each.group for each in taken}
    return [each for each in flights if each.group not in gone]


def _overdue(rest: list[Flight], version: int, plan: Plan) -> list[Flight]:
    """Who would be too old when its turn comes, if updates took these from `version` on."""
    return [
        each
        for place, each in enumerate(_oldest_first(rest))
        if _age(each, version + place // plan.groups_per_update) > plan.staleness
    ]


def _drop(late: list[Flight], plan: Plan) -> Drop:
    again = [each for each in late if each.remade < plan.remake]
    return Drop(tuple(each.group for each in again or late), again=bool(again))
