"""When a run measures itself by its held-out tasks: in a phase of its own, or beside training; and which checkpoint
was the best by that. `trainer.py` asks; what is run and how it is judged is in `evaluation.py`.
"""

import time
from collections.abc import Callable

from harnessed.config import Config
from harnessed.records import GroupSpec, Purpose, Task, Version
from harnessed.training.checkpoints import Checkpoints
from harnessed.training.display import Display
from harnessed.training.evaluation import BESIDE, book, evaluate, judge, of_version, specs
from harnessed.training.metrics import of_held_out
from harnessed.training.report import HeldOut, Report
from harnessed.training.rollouts import Rollouts
from harnessed.training.timeline import Timeline


class Validation:
    """Of one run."""

    def __init__(
        self,
        config: Config,
        tasks: list[Task],
        rollouts: Rollouts,
        report: Report,
        checkpoints: Checkpoints,
        timeline: Timeline,
        display: Display,
    ) -> None:
        self._settings = config.evaluation
        self._sampling = config.sampling
        self._tasks = tasks
        self._rollouts = rollouts
        self._report = report
        self._checkpoints = checkpoints
        self._timeline = timeline
        self._display = display
        self._pending: list[GroupSpec] = []
        """The groups that run beside training."""
        self._step = 0
        """After which they were begun."""
        self._began = 0.0

    def is_due(self, step: int) -> bool:
        """In between, after this step."""
        return self._settings.every is not None and step % self._settings.every == 0

    def restore(self) -> None:
        """Close the books of what an earlier life of the run had begun: it measured a policy that is gone."""
        for spec in self._rollouts.known():
            ids = [f"{spec.id}.{index}" for index in range(spec.n)]
            if spec.purpose == Purpose.EVALUATION and not all(map(self._report.has, ids)):
                self._rollouts.cancel(spec.id)
                book(self._report, [spec], [self._rollouts.read(spec.id)])

    def measure(self, when: str, version: Version, step: int) -> HeldOut:
        """The policy as it is now: no update is taken meanwhile."""
        self._display.phase(f"held-out tasks, {when} training")
        self._step, self._began = step, time.monotonic()
        with self._timeline.phase("evaluation", step):
            result = evaluate(
                self._rollouts, self._report, self._tasks, self._settings, self._sampling, of_version(version)
            )
        self._tell(result, when)
        return result

    def run_in_between(self, version: Version, step: int, save: Callable[[], None]) -> None:
        """After a step at which it is due; `save` makes the checkpoint of it, which may turn out to be the best."""
        self.finish()
        self._checkpoints.await_score(step)
        save()
        if not self._settings.beside:
            self.measure(f"{step}-steps-into", version, step)
            return
        self._step, self._began = step, time.monotonic()
        self._pending = specs(
            self._rollouts, self._tasks, self._settings, self._sampling, of_version(version), priority=BESIDE
        )
        self._rollouts.create(self._pending)

    def look(self) -> None:
        """Take up what ran beside training, if it has ended."""
        if self._pending and all(spec.id in self._rollouts.watch.complete for spec in self._pending):
            self.finish()

    def finish(self) -> None:
        """Wait for what runs beside training. Raises Stalled, NothingMeasured."""
        if not self._pending:
            return
        groups, self._pending = self._pending, []
        with self._timeline.phase("evaluation", self._step):
            transcripts = self._rollouts.collect(groups)
        book(self._report, groups, transcripts)
        self._rollouts.close([spec.id for spec in groups])
        self._tell(judge(groups, transcripts, self._settings.confidence), f"{self._step}-steps-into")

    def _tell(self, result: HeldOut, when: str) -> None:
        self._checkpoints.scored(self._step, result.success)
        self._report.metrics(self._step, of_held_out(result, time.monotonic() - self._began))
        self._report.curve()
        self._display.held_out(when, result)
