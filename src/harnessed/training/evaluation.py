"""The held-out tasks: the same tasks and draws whenever a run measures itself. Used by the trainer and the CLI."""

import math

from harnessed.config import Evaluation
from harnessed.records import Purpose, Sampling, Task, Transcript
from harnessed.training.report import HeldOut, Report
from harnessed.training.rollouts import Rollouts
from harnessed.training.samples import build


def evaluate(
    rollouts: Rollouts, report: Report, tasks: list[Task], settings: Evaluation, sampling: Sampling, label: str
) -> HeldOut:
    """Run the held-out tasks once as in training, and the first `greedy_tasks` greedily as well."""
    greedy_tasks = tasks[: settings.greedy_tasks]
    greedy = sampling.model_copy(update={"temperature": 0.0})
    specs = [
        *rollouts.specs(label, tasks, 1, Purpose.EVALUATION, sampling, "held-out"),
        *rollouts.specs(f"{label}-greedy", greedy_tasks, 1, Purpose.EVALUATION, greedy, "held-out"),
    ]
    transcripts = [transcript for group in rollouts.collect(specs) for transcript in group]
    for transcript in transcripts:
        report.transcript(transcript, build(transcript).fates, step=None)
    sampled = _rewards(transcripts[: len(tasks)])
    return HeldOut(
        success=_mean(sampled),
        greedy=_mean(_rewards(transcripts[len(tasks) :])) if greedy_tasks else None,
        rollouts=len(tasks),
        failed=len(tasks) - len(sampled),
    )


def _rewards(transcripts: list[Transcript]) -> list[float]:
    return [each.rollout.reward for each in transcripts if each.rollout.reward is not None]


def _mean(rewards: list[float]) -> float:
    return math.fsum(rewards) / len(rewards) if rewards else math.nan
