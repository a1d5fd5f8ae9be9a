"""The held-out tasks: the same tasks and draws whenever a run measures itself. Used by the trainer and the CLI."""

import math

from harnessed.config import Evaluation
from harnessed.records import Purpose, Sampling, Task, Transcript
from harnessed.training.failures import NothingMeasured
from harnessed.training.report import HeldOut, Report, complaint
from harnessed.training.rollouts import Rollouts
from harnessed.training.samples import build


def evaluate(
    rollouts: Rollouts, report: Report, tasks: list[Task], settings: Evaluation, sampling: Sampling, label: str
) -> HeldOut:
    """Run the held-out tasks once, and the first `greedy_tasks` greedily as well.

    `sampling`: that of training, used where the settings have none of their own.

    Raises NothingMeasured: a number that measures a broken set-up is worse than none.
    """
    sampling = settings.sampling or sampling
    greedy_tasks = tasks[: settings.greedy_tasks]
    greedy = sampling.model_copy(update={"temperature": 0.0})
    specs = [
        *rollouts.specs(label, tasks, 1, Purpose.EVALUATION, sampling, "held-out"),
        *rollouts.specs(f"{label}-greedy", greedy_tasks, 1, Purpose.EVALUATION, greedy, "held-out"),
    ]
    transcripts = [transcript for group in rollouts.collect(specs) for transcript in group]
    for transcript, spec in zip(transcripts, specs, strict=True):
        report.transcript(transcript, spec.task, build(transcript).fates, step=None)
    rollouts.close([spec.id for spec in specs])
    sampled = _rewards(transcripts[: len(tasks)])
    wrong = complaint(transcripts)
    if not sampled or (wrong and not any(attempt.nodes for each in transcripts for attempt in each.attempts)):
        raise NothingMeasured(f"the held-out tasks measured nothing: {wrong}")
    return HeldOut(
        success=_mean(sampled),
        greedy=_mean(_rewards(transcripts[len(tasks) :])),
        rollouts=len(tasks),
        unjudged=len(tasks) - len(sampled),
        complaint=wrong,
    )


def _rewards(transcripts: list[Transcript]) -> list[float]:
    return [each.rollout.reward for each in transcripts if each.rollout.reward is not None]


def _mean(rewards: list[float]) -> float | None:
    return math.fsum(rewards) / len(rewards) if rewards else None
