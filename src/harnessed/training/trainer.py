"""The training loop: create groups, wait for them, take the optimiser steps of an update, again.

`harnessed train` makes a Trainer and calls `run`. What comes next is decided by `schedule.py`; an update reads top to
bottom in `_step`. Everything else is a pure function of values (samples, advantages, packs) or one of the three things
with effects: the rollouts, the engine's pause, the backend's update.
"""

import contextlib
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from harnessed.client import Client, get_totals, list_engines, pause_engine, resume_engine
from harnessed.config import Config
from harnessed.config import Trainer as TrainerSettings
from harnessed.records import Fate, Task
from harnessed.training import schedule
from harnessed.training.backends.local import LocalBackend, Update
from harnessed.training.batches import Alike, check_remade, infrastructure
from harnessed.training.batching import Advantages, optimiser_steps, scored
from harnessed.training.checkpoints import Checkpoints
from harnessed.training.closing import closed
from harnessed.training.display import Display
from harnessed.training.flights import Flights
from harnessed.training.lineages import Lineage
from harnessed.training.metrics import Clock, Line, of_groups, of_taken
from harnessed.training.packing import Pack, pack
from harnessed.training.report import HeldOut, Report, Summary, Track, complaint
from harnessed.training.resumed import Resumed
from harnessed.training.rollouts import Rollouts
from harnessed.training.safety import Safety
from harnessed.training.samples import Sample, build
from harnessed.training.schedule import Create, Drop, Plan, Wait, decide, to_create
from harnessed.training.selection import Group, Taken, select
from harnessed.training.tasks import take
from harnessed.training.timeline import Name as PhaseName
from harnessed.training.timeline import Timeline
from harnessed.training.validation import Validation
from harnessed.training.valuing import Lesson, of_penalties, penalise, select_by_critic

CURVE_EVERY = 10
"""Steps after which curve.png is drawn again; after each evaluation as well."""
PAUSE_LIMIT_S = 120
"""Longest wait for the engine to stand still when the gateway asks it for nothing any more."""
Step = tuple[list[Sample], list[Pack]]
"""An optimiser step: what it trains, and that in micro-batches."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the end of the outermost of these blocks: half of the books is no books."""
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


class Trainer:
    """One training run, from its first evaluation to summary.json."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        run: str,
        gateway: Client,
        engine: Client,
        backend: LocalBackend,
        rollouts: Rollouts,
        display: Display,
        train_tasks: Iterator[Task],
        held_out_tasks: list[Task],
        restarts: Mapping[str, int],
        track: Track,
        lineages: list[Lineage],
        resumed: Resumed | None = None,
    ) -> None:
        """`restarts`: how often each service of the run was started again so far; the summary tells. `track`: gets the
        metrics as well. `lineages`: of the policy, over the lives of the run; the last one is the backend's. `resumed`:
        where an earlier life ended."""
        self._config = config
        self._folder = folder
        self._run = run
        self._gateway = gateway
        self._engine = engine
        self._backend = backend
        self._rollouts = rollouts
        self._display = display
        self._all_tasks = train_tasks
        self._restarts = restarts
        self._lineages = lineages
        self._resumed = resumed
        self._flights = Flights(rollouts, config, lineages, backend.tasks)
        self._plan = plan(config.trainer)
        self._tasks_ended = False
        self._safety, self._alike = Safety(config.trainer.safety), Alike(config.trainer.safety)
        self._remade = 0
        """How often the present batch was made again."""
        self._report = Report(folder, gateway, run, display.note, track)
        self._timeline = Timeline(folder)
        self._checkpoints = Checkpoints(
            folder, keep=config.trainer.keep_checkpoints, keep_best=config.trainer.keep_best, note=display.note
        )
        self._validation = Validation(
            config, held_out_tasks, rollouts, self._report, self._checkpoints, self._timeline, display
        )
        self._started = time.monotonic()
        self._clock = Clock()
        """Of the step under way."""
        self._consumed: dict[str, int] = {}
        """Groups that are in the books -> the step of these."""
        self._steps = backend.step
        self._saved = backend.step
        """Step of the last checkpoint."""
        self._booked = backend.version
        """The policy after the last step that is in the books."""
        self._before: HeldOut | None = None
        self._after: HeldOut | None = None

    def run(self) -> Summary:
        """The whole run. An interruption (Ctrl-C) ends it early, with its books closed and the summary written; one
        that comes before it has gone on leaves all as it was."""
        interrupted = False
        self._go_on()
        try:
            self._before = self._before or self._validation.measure("before", self._backend.version, self._steps)
            self._train()
            self._after = self._validation.measure("after", self._backend.version, self._steps)
        except KeyboardInterrupt:
            interrupted = True
            self._display.phase("stopping")
            self._keep()  # first: a gateway that is gone ends the rest
            self._give_up()
        except Exception:  # whatever ends the run: what it has learnt stays
            self._keep()
            raise
        summary = self._summary(interrupted)
        self._report.summary(summary)
        return summary

    def _go_on(self) -> None:
        """From where an earlier life of the run ended, if it had one."""
        if self._resumed:
            history = self._report.resume(self._steps)
            self._safety.replay(history)
            self._before = before_of(history)
            self._consumed = dict.fromkeys(sorted(self._resumed.groups), self._steps)
            self._book(self._flights.restore(self._resumed.groups, self._backend.version), Fate.GROUP_INCOMPLETE)
            self._validation.restore()
        self._train_tasks = islice(self._all_tasks, self._flights.tasks, None)

    def _train(self) -> None:
        """Take the steps that are left."""
        steps = self._config.trainer.steps
        self._begin_step()
        while self._steps < steps:
            version, left = self._backend.version.number, steps - self._steps
            # With nothing in flight either there is only to say that the tasks have ended.
            ended = self._tasks_ended and bool(self._flights.all)
            match decide(self._flights.all, version, left, self._plan, ended=ended):
                case Create(groups):
                    self._create(groups, least=max(0, self._plan.groups_per_update - len(self._flights.all)))
                case schedule.Update(groups):
                    if self._is_fit(groups):
                        self._step(self._flights.take(groups))
                        self._begin_step()
                case Drop(groups, again):
                    self._book(self._flights.drop(groups, again=again), Fate.STALE)
                case Wait(overdue):
                    self._wait(f"{len(overdue) or self._plan.groups_per_update} groups")
            self._validation.look()
        self._validation.finish()
        # A run that was resumed may have begun more than its steps have taken.
        rest = tuple(flight.group for flight in self._flights.all)
        self._book(self._flights.drop(rest, again=False), Fate.GROUP_INCOMPLETE)

    def _is_fit(self, groups: tuple[str, ...]) -> bool:
        """Whether a batch can be trained. One of which too much failed is made again.

        Raises AllAlike, TooManyFailed.
        """
        safety = self._config.trainer.safety
        batch = self._flights.look(groups)
        self._alike.check(batch)
        why = infrastructure(batch, safety.infrastructure)
        if why:
            check_remade(why, self._remade, safety)
            self._display.note(f"a batch is made again: {why}")
            # In place of those that do not count others run already.
            counting = {flight.group for flight in self._flights.all if flight.counts}
            for again in (True, False):
                dropped = tuple(group for group in groups if (group in counting) == again)
                self._book(self._flights.drop(dropped, again=again), Fate.GROUP_INCOMPLETE)
        self._remade = self._remade + 1 if why else 0
        return not why

    def _wait(self, what: str) -> None:
        """Until a group begins or is complete."""
        with self._phase("wait"):
            while not self._flights.refresh(self._backend.version):
                self._rollouts.wait(what)

    @contextlib.contextmanager
    def _phase(self, name: PhaseName) -> Iterator[None]:
        """Of the step under way."""
        with self._timeline.phase(name, self._steps + 1), self._clock.phase(name):
            yield

    def _begin_step(self) -> None:
        self._clock = Clock()
        self._rollouts.watch.moved()
        self._display.step(self._steps + 1)
        self._display.phase("rollouts")

    def _create(self, groups: int, *, least: int = 0) -> None:
        """Begin groups with the next tasks. Raises ConfigError if there are fewer than `least`."""
        tasks = take(self._train_tasks, groups, "tasks.train", least=least)
        self._tasks_ended = len(tasks) < groups
        self._flights.create(tasks)

    def _step(self, groups: list[Group]) -> None:
        number, settings, clock = self._steps + 1, self._config.trainer, self._clock
        self._display.phase("update")
        samples = [group.samples for group in groups]
        with self._device():
            self._top_up()
            with self._phase("build"):
                penalise(samples, self._backend, settings)
                metrics: Line = of_penalties(samples, settings)
                taken, lesson = self._select(samples)
                steps = packed_steps(taken, settings, self._config.run.seed + number)
            metrics |= of_taken(taken, self._backend.version, self._lineages)
            with self._phase("update"):
                update = self._update(taken, steps)
                critic = self._backend.critic
                if critic and lesson and update and update.applied:
                    with clock.phase("critic"):
                        metrics |= critic.learn(lesson.packs, lesson.before, lesson.returns)
        with uninterrupted():
            self._book(groups)
            self._steps, self._booked = number, self._backend.version

        metrics |= of_groups(groups, settings.groups_per_step)
        metrics |= {"update_applied": update is not None and update.applied, **(update.metrics if update else {})}
        metrics |= {"version": list(self._backend.version), **clock.speed(metrics["sampled_tokens"])}
        skipped = update is not None and not update.applied
        metrics["updates_skipped"] = self._safety.updates_skipped + skipped
        self._report.metrics(number, metrics)
        self._display.metrics(metrics, complaint([each for group in groups for each in group.transcripts]))
        for warning in self._safety.note(metrics):
            self._display.note(f"warning: step {number}: {warning}")
        if update is not None:
            self._safety.skipped(skipped)
        if number % CURVE_EVERY == 0:
            self._report.curve()
        if number % settings.checkpoint_every == 0 or number == settings.steps:
            self._checkpoint(number)
        if self._validation.is_due(number) and number < settings.steps:
            self._validation.run_in_between(self._backend.version, number, self._keep)

    def _top_up(self) -> None:
        """Where others run beside an update, those that take the place of its groups begin already."""
        if self._config.trainer.schedule.kind != "sync":
            left = self._config.trainer.steps - self._steps - 1
            if missing := to_create(self._flights.all, left, self._plan):
                self._create(missing, least=0)

    def _book(self, groups: list[Group], fate: Fate | None = None) -> None:
        """Close the books of groups with the step under way; `fate`: they are not trained, for this reason."""
        with uninterrupted():
            for group in groups:
                self._consumed[group.spec.id] = self._steps + 1
                for transcript, sample in zip(group.transcripts, group.samples, strict=True):
                    if fate:
                        sample.give_up(fate)
                    self._report.transcript(transcript, group.spec.task, sample.fates, self._steps + 1)
            self._rollouts.close([group.spec.id for group in groups])

    def _select(self, groups: list[list[Sample]]) -> tuple[Taken, Lesson | None]:
        """What the update takes, and what a critic learns from it."""
        settings, critic = self._config.trainer, self._backend.critic
        if critic is None:
            return select(groups, settings.advantage), None
        return select_by_critic(groups, critic, settings)

    def _update(self, taken: Taken, steps: list[Step]) -> Update | None:
        """The optimiser steps; None if no group had a signal."""
        if not steps:
            return None
        packs = [packs for _, packs in steps]
        apart = self._config.trainer.schedule.kind == "async"
        writing = self._engine_stands_still() if apart else contextlib.nullcontext()
        update = self._backend.update(packs, self._config.trainer.objective, writing)
        trained = {sample.rollout for samples, _ in steps[: update.steps] for sample in samples}
        for sample in taken.samples:
            if sample.rollout not in trained and sample.trained_tokens:
                sample.give_up(Fate.UPDATE_SKIPPED)
        return update

    def _device(self) -> contextlib.AbstractContextManager[None]:
        """Around everything that an update computes: the engine leaves the devices to it, if they share them."""
        if self._config.trainer.schedule.kind == "async":
            return contextlib.nullcontext()
        return self._engine_stands_still()

    @contextlib.contextmanager
    def _engine_stands_still(self) -> Iterator[None]:
        """The gateway holds calls, and the engine is paused.

        An engine that dies forgets that it was paused. One that is started again within sees the writer's mark, and
        generates nothing before it is gone; what generates when the mark appears is discarded by the engine itself.
        """
        how = self._config.trainer.schedule
        # With devices of its own the trainer computes the update around this.
        phase = contextlib.nullcontext() if how.kind == "async" else self._phase("drain")
        with contextlib.ExitStack() as held:
            with phase:
                held.enter_context(closed(self._gateway, self._run, how.at_update, how.finish_s))
                # Who has begun by now has tokens of the present version; who begins later has none.
                self._rollouts.watch.catch_up()
                self._flights.refresh(self._backend.version)
                held.callback(self._engine, resume_engine())
                self._engine(pause_engine(PAUSE_LIMIT_S))
            yield

    def _checkpoint(self, number: int) -> None:
        self._display.phase("checkpoint")
        began = time.monotonic()
        with self._timeline.phase("checkpoint", number):
            self._save(number)
        self._report.metrics(number, {"timing_s/checkpoint": time.monotonic() - began})

    def _keep(self) -> None:
        """Save what was learnt since the last checkpoint, unless an update or its critic were interrupted."""
        if self._steps != self._saved and self._backend.whole and self._backend.version == self._booked:
            self._save(self._steps)

    def _save(self, number: int) -> None:
        version, tasks = list(self._backend.version), self._flights.tasks
        # What was given up since has its books in the step under way, and those end with this life.
        groups = [group for group, step in self._consumed.items() if step <= number]
        notes = {"step": number, "version": version, "tasks": tasks, "groups": groups}
        self._checkpoints.save(number, lambda folder: self._backend.save(folder, notes))
        self._saved = number

    def _give_up(self) -> None:
        """Close the books of rollouts that will not be trained."""
        for transcript, task in self._rollouts.give_up():
            sample = build(transcript)
            sample.give_up(Fate.GROUP_INCOMPLETE)
            self._report.transcript(transcript, task, sample.fates, self._steps + 1)

    def _summary(self, interrupted: bool) -> Summary:
        totals = self._gateway(get_totals(self._run))
        counters = [engine.sampled_tokens for engine in self._gateway(list_engines()) if engine.run == self._run]
        # An engine that was started again has counted from nothing.
        counted = self._config.engine.url is None and not self._restarts.get("engine") and not self._resumed
        before, after = self._before, self._after
        newest, best = self._checkpoints.newest(), self._checkpoints.best()
        return Summary(
            held_out_before=before.success if before else None,
            held_out_after=after.success if after else None,
            greedy_before=before.greedy if before else None,
            greedy_after=after.greedy if after else None,
            steps=self._steps,
            rollouts=sum(self._report.outcomes.values()),
            calls=totals.calls,
            sampled_tokens=totals.sampled_tokens,
            engine_sampled_tokens=counters[0] if counted and counters else None,
            trained_tokens=self._report.fates[Fate.TRAINED],
            lost_calls=totals.lost,
            restarts=dict(self._restarts),
            fates={str(fate): count for fate, count in self._report.fates.items()},
            outcomes=dict(self._report.outcomes),
            seconds=time.monotonic() - self._started,
            seed=self._config.run.seed,
            checkpoint=str(newest.relative_to(self._folder)) if newest else None,
            interrupted=interrupted,
            interval_before=before.interval if before else None,
            interval_after=after.interval if after else None,
            best_checkpoint=str(best.relative_to(self._folder)) if best else None,
            resumed=self._resumed.times if self._resumed else 0,
        )


def before_of(history: list[dict[str, Any]]) -> HeldOut | None:
    """What the held-out tasks gave before the first step, in an earlier life of the run."""
    for line in history:
        if "held_out" in line:
            low, high = line["held_out_low"], line["held_out_high"]
            return HeldOut(
                success=line["held_out"],
                interval=None if low is None else (low, high),
                greedy=line["held_out_greedy"],
                tasks=0,
                rollouts=0,
                unjudged=line["held_out_unjudged"],
                complaint="",
                versions=None,
            )
    return None


def plan(settings: TrainerSettings) -> Plan:
    """What `schedule.decide` has to know."""
    schedule = settings.schedule
    return Plan(
        groups_per_update=settings.groups_per_step,
        in_flight=settings.groups_in_flight,
        staleness=0 if schedule.kind == "sync" else schedule.staleness,
        most_groups=settings.groups_per_step * (settings.advantage.refill + 1),
        remake=schedule.remake,
    )


def packed_steps(taken: Taken, settings: TrainerSettings, seed: int) -> list[Step]:
    """The optimiser steps, which take whole groups. One without a trained token is left out."""
    by_group: dict[str, list[tuple[Sample, Advantages]]] = defaultdict(list)
    for sample, advantage in zip(taken.samples, taken.advantages, strict=True):
        by_group[sample.rollout.rpartition(".")[0]].append((sample, advantage))
    objective, groups = settings.objective, list(by_group.values())
    steps: list[Step] = []
    for chosen in optimiser_steps(len(groups), settings.optimiser_steps, settings.epochs, seed):
        samples, advantages = zip(*(pair for number in chosen for pair in groups[number]), strict=True)
        rows = iter(scored(list(samples), list(advantages), objective.normalisation, objective.constant))
        grouped = [list(islice(rows, len(groups[number]))) for number in chosen]
        steps.append((list(samples), pack(grouped, settings.micro_batch_tokens, settings.share_prefixes)))
    return [(samples, packs) for samples, packs in steps if packs]
