"""The training loop: roll out groups, compare their rewards, take the optimiser steps of an update, again.

`harnessed train` makes a Trainer and calls `run`. `Trainer.step` reads top to bottom; everything it calls is a pure
function of values (samples, advantages, packs) or one of the three things with effects: the rollouts, the
engine's pause, the backend's update.
"""

import contextlib
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import Any

from safetensors import SafetensorError

from harnessed.client import Client, get_totals, list_engines, pause_engine, resume_engine
from harnessed.config import Config
from harnessed.config import Trainer as TrainerSettings
from harnessed.records import Fate, Purpose, Task, Version
from harnessed.training.backends.local import LocalBackend, Update
from harnessed.training.batching import Advantages, optimiser_steps, scored
from harnessed.training.closing import closed
from harnessed.training.display import Display
from harnessed.training.evaluation import evaluate
from harnessed.training.failures import CannotWrite, WrongVersion
from harnessed.training.metrics import Clock, Line, of_groups, of_held_out, of_taken
from harnessed.training.packing import Pack, pack
from harnessed.training.report import HeldOut, Report, Summary, Track, complaint
from harnessed.training.resumed import Resumed
from harnessed.training.rollouts import Rollouts
from harnessed.training.samples import Bound, Sample, build
from harnessed.training.selection import Group, Taken, select, why_not
from harnessed.training.tasks import take
from harnessed.training.valuing import Lesson, of_penalties, penalise, select_by_critic

CURVE_EVERY = 10
"""Steps after which curve.png is drawn again; after each evaluation as well."""
DRAIN_LIMIT_S = 120
"""Longest wait for the engine to finish what it generates before an update."""
Step = tuple[list[Sample], list[Pack]]
"""An optimiser step: what it trains, and that in micro-batches."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the end of the block: half of the books is no books."""
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if arrived:
        raise KeyboardInterrupt


class Trainer:
    """One synchronous training run, from its first evaluation to summary.json."""

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
        resumed: Resumed | None = None,
    ) -> None:
        """`restarts`: how often each service of the run was started again so far; the summary tells. `track`: gets the
        metrics as well. `resumed`: where an earlier life of the run ended."""
        self._config = config
        self._folder = folder
        self._run = run
        self._gateway = gateway
        self._engine = engine
        self._backend = backend
        self._rollouts = rollouts
        self._display = display
        self._train_tasks = train_tasks
        self._held_out_tasks = held_out_tasks
        self._restarts = restarts
        self._report = Report(folder, gateway, run, display.note, track)
        self._resumed = resumed
        self._history = self._report.resume(backend.step) if resumed else []
        self._started = time.monotonic()
        self._consumed: list[str] = sorted(resumed.groups) if resumed else []
        self._consumed_before = len(self._consumed)
        """By lives whose tasks the backend counts."""
        own = resumed and resumed.checkpoint and resumed.checkpoint.is_relative_to(folder)
        self._checkpoints: list[Path] = sorted((folder / "checkpoints").glob("step-*")) if own else []
        self._steps = backend.step
        self._saved = backend.step
        """Step of the last checkpoint."""
        self._booked = backend.version
        """The policy after the last step that is in the books."""
        self._before: HeldOut | None = None
        self._after: HeldOut | None = None

    def run(self) -> Summary:
        """The whole run. An interruption (Ctrl-C) ends it early, with its books closed and the summary written."""
        interrupted = False
        every = self._config.evaluation.every
        try:
            self._before = before_of(self._history) or self._evaluate("before")
            for number in range(self._backend.step + 1, self._config.trainer.steps + 1):
                self.step(number)
                if every and number % every == 0 and number < self._config.trainer.steps:
                    self._evaluate(f"{number}-steps-into")
            self._after = self._evaluate("after")
        except KeyboardInterrupt:
            interrupted = True
            self._display.phase("stopping")
            self._give_up()
            self._keep()
        except Exception:  # whatever ends the run: what it has learnt stays
            self._keep()
            raise
        summary = self._summary(interrupted)
        self._report.summary(summary)
        return summary

    def step(self, number: int) -> None:
        settings = self._config.trainer
        clock = Clock()
        self._display.step(number)
        self._display.phase("rollouts")
        with clock.phase("rollouts"):
            groups = self._roll_out(number)
        self._display.phase("update")
        with clock.phase("build"):
            samples = [group.samples for group in groups]
            metrics: Line = of_penalties(samples, settings)
            taken, lesson = self._select(samples)
            self._check_versions(taken)
            metrics |= of_taken(taken, self._backend.version)
            steps = packed_steps(taken, settings, self._config.run.seed + number)
        with clock.phase("update"):
            update = self._update(taken, steps)
        critic = self._backend.critic
        if critic and lesson and update and update.applied:
            with clock.phase("critic"):
                metrics |= critic.learn(lesson.packs, lesson.before, lesson.returns)
        with uninterrupted():
            self._consumed += [group.spec.id for group in groups]
            self._steps, self._booked = number, self._backend.version
            for group in groups:
                for transcript, sample in zip(group.transcripts, group.samples, strict=True):
                    self._report.transcript(transcript, group.spec.task, sample.fates, number)
            self._rollouts.close()

        metrics |= of_groups(groups, settings.groups_per_step)
        metrics |= {"update_applied": update is not None and update.applied, **(update.metrics if update else {})}
        metrics |= {"version": list(self._backend.version), **clock.speed(metrics["sampled_tokens"])}
        self._report.metrics(number, metrics)
        self._display.metrics(metrics, complaint([each for group in groups for each in group.transcripts]))
        if number % CURVE_EVERY == 0:
            self._report.curve()
        if number % settings.checkpoint_every == 0 or number == settings.steps:
            self._checkpoint(number)

    def _roll_out(self, number: int) -> list[Group]:
        """The groups of a step. In place of those that cannot be compared, further tasks are run, in so many rounds as
        `trainer.advantage.refill` allows."""
        settings, sampling = self._config.trainer, self._config.sampling
        bound = Bound(settings.row_tokens, settings.overlong)
        groups: list[Group] = []
        missing = settings.groups_per_step
        for refill in range(settings.advantage.refill + 1):
            tasks = take(self._train_tasks, missing, "tasks.train", least=0 if refill else missing)
            if not tasks:
                break
            label = f"step-{number:05d}" + (f"-refill-{refill}" if refill else "")
            specs = self._rollouts.specs(label, tasks, settings.group_size, Purpose.TRAIN, sampling, draws=label)
            collected = zip(specs, self._rollouts.collect(specs), strict=True)
            found = [Group(spec, each, [build(transcript, bound) for transcript in each]) for spec, each in collected]
            penalise([group.samples for group in found], self._backend, settings)
            groups += found
            missing = sum(why_not(group.samples, settings.advantage) is not None for group in found)
            if not missing:
                break
        return groups

    def _select(self, groups: list[list[Sample]]) -> tuple[Taken, Lesson | None]:
        """What the update takes, and what a critic learns from it."""
        settings, critic = self._config.trainer, self._backend.critic
        if critic is None:
            return select(groups, settings.advantage), None
        return select_by_critic(groups, critic, settings)

    def _check_versions(self, taken: Taken) -> None:
        """In a synchronous run every token is sampled by the weights that it trains, or in an earlier life."""
        current = self._backend.version.pack()
        served = {int(version) for sample in taken.samples for row in sample.rows for version in row.versions}
        served = {version for version in served if Version.unpack(version).lineage == self._backend.version.lineage}
        if served - {current}:
            others = ", ".join(".".join(map(str, Version.unpack(version))) for version in sorted(served - {current}))
            raise WrongVersion(
                f"the engine answered with version {others} of the policy where the trainer has written "
                f"{'.'.join(map(str, self._backend.version))}; does it map the folder that engine.weights names?"
            )

    def _update(self, taken: Taken, steps: list[Step]) -> Update | None:
        """The optimiser steps; None if no group had a signal."""
        if not steps:
            return None
        packs = [packs for _, packs in steps]
        update = self._backend.update(packs, self._config.trainer.objective, self._engine_stands_still())
        trained = {sample.rollout for samples, _ in steps[: update.steps] for sample in samples}
        for sample in taken.samples:
            if sample.rollout not in trained and sample.trained_tokens:
                sample.give_up(Fate.UPDATE_SKIPPED)
        return update

    @contextlib.contextmanager
    def _engine_stands_still(self) -> Iterator[None]:
        """Around the write of the weights: the gateway holds calls, and the engine is paused.

        An engine that dies forgets that it was paused. One that is started again within sees the writer's mark, and
        generates nothing before it is gone; what generates when the mark appears is discarded by the engine itself.
        """
        with closed(self._gateway, self._run, drain_s=DRAIN_LIMIT_S):
            try:
                self._engine(pause_engine(DRAIN_LIMIT_S))
                yield
            finally:
                self._engine(resume_engine())

    def _evaluate(self, label: str) -> HeldOut:
        self._display.phase(f"held-out tasks, {label} training")
        began = time.monotonic()
        settings, sampling = self._config.evaluation, self._config.sampling
        held_out = evaluate(self._rollouts, self._report, self._held_out_tasks, settings, sampling, label)
        self._report.metrics(self._steps, of_held_out(held_out, time.monotonic() - began))
        self._report.curve()
        self._display.held_out(label, held_out)
        return held_out

    def _checkpoint(self, number: int) -> None:
        self._display.phase("checkpoint")
        began = time.monotonic()
        self._save(number)
        self._report.metrics(number, {"timing_s/checkpoint": time.monotonic() - began})

    def _keep(self) -> None:
        """Save what was learnt since the last checkpoint, unless an update or its critic were interrupted."""
        if self._steps != self._saved and self._backend.whole and self._backend.version == self._booked:
            self._save(self._steps)

    def _save(self, number: int) -> None:
        folder = self._folder / "checkpoints" / f"step-{number:05d}"
        tasks = self._backend.tasks + len(self._consumed) - self._consumed_before
        notes = {"step": number, "version": list(self._backend.version), "tasks": tasks, "groups": self._consumed}
        try:
            self._backend.save(folder, notes)
        except (OSError, RuntimeError, SafetensorError) as error:  # each library tells of a full disk in its own way
            raise CannotWrite(f"cannot write the checkpoint {folder} (is the disk full?): {error}") from error
        self._saved = number
        self._checkpoints.append(folder)
        for old in self._checkpoints[: -self._config.trainer.keep_checkpoints]:
            # Under its name a checkpoint is whole, also when this is interrupted.
            rmtree(old.rename(old.with_name(f".{old.name}.old")))
        self._checkpoints = self._checkpoints[-self._config.trainer.keep_checkpoints :]

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
            checkpoint=str(self._checkpoints[-1].relative_to(self._folder)) if self._checkpoints else None,
            interrupted=interrupted,
            resumed=self._resumed.times if self._resumed else 0,
        )


def before_of(history: list[dict[str, Any]]) -> HeldOut | None:
    """What the held-out tasks gave before the first step, in an earlier life of the run."""
    for line in history:
        if "held_out" in line:
            return HeldOut(line["held_out"], line["held_out_greedy"], 0, line["held_out_unjudged"], "")
    return None


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
