"""The held-out tasks: the same tasks and draws whenever a run measures itself. Used by the trainer and the CLI.

`evaluate` is a phase of its own. Beside training its parts are used one by one: the groups of `specs` are created with
the priority BESIDE, training goes on, and `judge` says what came of them when all are complete.
"""

import math

from harnessed.config import Evaluation
from harnessed.records import UNKNOWN_VERSION, GroupSpec, Purpose, Sampling, Task, Transcript, Version
from harnessed.training.failures import NothingMeasured
from harnessed.training.interval import interval
from harnessed.training.report import HeldOut, Report, complaint
from harnessed.training.rollouts import Rollouts
from harnessed.training.samples import build

BESIDE = -1
"""Priority of held-out groups that training goes on beside: they get the slots that its own leave free."""
_GREEDY = "-greedy"


def evaluate(
    rollouts: Rollouts, report: Report, tasks: list[Task], settings: Evaluation, sampling: Sampling, label: str
) -> HeldOut:
    """Run the held-out tasks and wait for them. Raises NothingMeasured, Stalled."""
    groups = specs(rollouts, tasks, settings, sampling, label)
    transcripts = rollouts.collect(groups)
    book(report, groups, transcripts)
    rollouts.close([group.id for group in groups])
    return judge(groups, transcripts, settings.confidence)


def specs(
    rollouts: Rollouts, tasks: list[Task], settings: Evaluation, sampling: Sampling, label: str, priority: int = 0
) -> list[GroupSpec]:
    """A group of `samples` rollouts for each task, `<run>.<label>.<index>`, and one of a greedy rollout for each of the
    first `greedy_tasks`, `<run>.<label>-greedy.<index>`.

    `sampling`: that of training, used where the settings have none of their own. `label`: another one for each
    evaluation of a run; `of_version` gives it.
    """
    sampling = settings.sampling or sampling
    greedy = sampling.model_copy(update={"temperature": 0.0})
    groups = [
        *rollouts.specs(label, tasks, settings.samples, Purpose.EVALUATION, sampling, "held-out"),
        *rollouts.specs(label + _GREEDY, tasks[: settings.greedy_tasks], 1, Purpose.EVALUATION, greedy, "held-out"),
    ]
    return [group.model_copy(update={"priority": priority}) for group in groups]


def of_version(version: Version) -> str:
    """The label of the evaluation that begins with this version."""
    return f"held-out-{version.lineage}.{version.number}"


def book(report: Report, specs: list[GroupSpec], transcripts: list[list[Transcript]]) -> None:
    """Into the books: all that was sampled has the fate `evaluation`."""
    for spec, group in zip(specs, transcripts, strict=True):
        for transcript in group:
            report.transcript(transcript, spec.task, build(transcript).fates, step=None)


def judge(specs: list[GroupSpec], transcripts: list[list[Transcript]], confidence: float) -> HeldOut:
    """What the complete groups of `specs` say, all of them together.

    Raises NothingMeasured: a number that measures a broken set-up is worse than none.
    """
    pairs = list(zip(specs, transcripts, strict=True))
    sampled = [group for spec, group in pairs if not _is_greedy(spec)]
    rewards = [found for group in sampled if (found := _rewards(group))]
    everything = [transcript for group in transcripts for transcript in group]
    wrong = complaint(everything)
    if not rewards or (wrong and not any(attempt.nodes for each in everything for attempt in each.attempts)):
        raise NothingMeasured(f"the held-out tasks measured nothing: {wrong}")
    rollouts = sum(map(len, sampled))
    return HeldOut(
        success=_mean([_mean(each) for each in rewards]),
        interval=interval(rewards, confidence),
        greedy=_mean(found) if (found := _rewards([group[0] for spec, group in pairs if _is_greedy(spec)])) else None,
        tasks=len(sampled),
        rollouts=rollouts,
        unjudged=rollouts - sum(map(len, rewards)),
        complaint=wrong,
        versions=_versions(everything),
    )


def _is_greedy(spec: GroupSpec) -> bool:
    return spec.id.rpartition(".")[0].endswith(_GREEDY)


def _rewards(transcripts: list[Transcript]) -> list[float]:
    return [each.rollout.reward for each in transcripts if each.rollout.reward is not None]


def _mean(rewards: list[float]) -> float:
    return math.fsum(rewards) / len(rewards)


def _versions(transcripts: list[Transcript]) -> tuple[Version, Version] | None:
    """Numbers only grow, in a new lineage too."""
    nodes = [node for each in transcripts if each.attempts for node in each.attempts[-1].nodes]
    packed = {int(version) for node in nodes for version in memoryview(node.versions).cast("i")} - {UNKNOWN_VERSION}
    served = sorted(map(Version.unpack, packed), key=lambda version: version.number)
    return (served[0], served[-1]) if served else None
