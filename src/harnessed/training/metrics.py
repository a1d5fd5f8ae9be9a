"""What a step reports: the lines of metrics.jsonl, from the groups, the update and the clock. `trainer.py` calls this.

Names are those that people know from TRL and verl where those have one; docs/metrics.md says what each means, and a
test holds the page and a real run against each other. A backend makes its part with `of_micro_batches`.
"""

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from harnessed.records import UNKNOWN_VERSION, Fate, Split, Version
from harnessed.training.groups import Group, Taken, members_of
from harnessed.training.report import HeldOut
from harnessed.training.samples import Sample

Line = dict[str, Any]
"""A part of a line of metrics.jsonl."""


class Clock:
    """Seconds, whole and by phase."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._phases: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._phases[name] += time.monotonic() - began

    @property
    def seconds(self) -> Line:
        """Of the phases so far."""
        return {f"timing_s/{name}": seconds for name, seconds in self._phases.items()}

    def speed(self, sampled_tokens: int) -> Line:
        """How long all took so far, and how fast that was."""
        whole = time.monotonic() - self._began
        return self.seconds | {"timing_s/step": whole, "tokens_per_second": sampled_tokens / whole}


def of_groups(groups: list[Group], wanted: int) -> Line:
    """What was rolled out in a step, with its final fates; `wanted` groups, before any was run in place of another."""
    samples = [sample for group in groups for sample in group.samples]
    fates: Counter[Fate] = sum((sample.fates for sample in samples), Counter())
    skipped = [any(sample.fates[Fate.GROUP_SKIPPED] for sample in group.samples) for group in groups]
    return {
        **of_rewards(groups),
        "groups": len(groups),
        "groups_skipped": sum(skipped),
        "groups_refilled": len(groups) - wanted,
        "rollouts": len(samples),
        "rollouts_judged": sum(sample.reward is not None for sample in samples),
        "tokens_per_rollout": fates.total() / len(samples),
        "sampled_tokens": fates.total(),
        "trained_tokens": fates[Fate.TRAINED],
        **{f"fates/{fate}": count for fate, count in fates.items() if count},
        **of_conversations(groups),
    }


def of_rewards(groups: list[Group]) -> Line:
    """Of the rollouts that count in their groups; parts where a rollout has them."""
    rewards = [reward for group in groups for reward in members_of(group.samples)[1]]
    parts: dict[str, list[float]] = {}
    for group in groups:
        for transcript, sample in zip(group.transcripts, group.samples, strict=True):
            for name, value in transcript.rollout.parts.items() if sample.reward is not None else ():
                parts.setdefault(name, []).append(value)
    return {
        "reward_mean": statistics.fmean(rewards) if rewards else None,
        "reward_std": statistics.pstdev(rewards) if rewards else None,
        **{f"reward/{name}": statistics.fmean(values) for name, values in sorted(parts.items())},
    }


def of_conversations(groups: list[Group]) -> Line:
    """How often a conversation went on in a new row, by kind, and how often what opened a tool call was none."""
    transcripts = [transcript for group in groups for transcript in group.transcripts if transcript.attempts]
    nodes = [node for transcript in transcripts for node in transcript.attempts[-1].nodes]
    found = Counter(node.split for node in nodes)
    broken = sum(node.broken_calls for node in nodes)
    return {f"splits_{kind}": found[kind] for kind in Split} | {"broken_calls": broken}


def of_taken(taken: Taken, current: Version) -> Line:
    """What an update is going to train, at version `current`. Staleness is the number of updates since the oldest
    trained token of a rollout; None where the engine does not say what it served."""
    samples = taken.samples
    oldest = [version for sample in samples if (version := _oldest(sample)) is not None]
    ages = [current.number - version.number for version in oldest]
    return {
        "groups_taken": len(taken.groups),
        "rows_per_rollout": sum(len(sample.rows) for sample in samples) / max(len(samples), 1),
        "staleness_mean": statistics.fmean(ages) if ages else None,
        "staleness_max": max(ages) if ages else None,
    }


def _oldest(sample: Sample) -> Version | None:
    """Numbers only grow, in a new lineage too."""
    trained = {int(version) for row in sample.rows for version in np.unique(row.versions[row.trained])}
    known = [Version.unpack(version) for version in trained - {UNKNOWN_VERSION}]
    return min(known, key=lambda version: version.number, default=None)


def of_held_out(result: HeldOut, seconds: float) -> Line:
    return {
        "held_out": result.success,
        "held_out_greedy": result.greedy,
        "held_out_unjudged": result.unjudged,
        "timing_s/evaluation": seconds,
    }


def of_micro_batches(sums: Sequence[dict[str, float]], tokens: int) -> Line:
    """Of an update over `tokens` trained tokens, from what `losses.objective_loss` counted in each micro-batch.

    Sums become means over tokens; of names that end with `_max` the largest counts, and it is not a number if one is
    not. `importance_ess` is the effective sample size of the importance weights, (sum w)^2 / (n sum w^2): the share of
    the tokens that equal weights would need for the same variance.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    largest: dict[str, list[float]] = {}
    for of_one in sums:
        for name, value in of_one.items():
            if name.endswith("_max"):
                largest.setdefault(name, []).append(value)
            else:
                totals[name] += value
    means = {name: total / max(tokens, 1) for name, total in totals.items()}
    squared = means.pop("importance_weight_squared", 0.0)
    means["importance_ess"] = means["importance_weight"] ** 2 / squared if squared else 0.0
    return means | {name: float(np.max(values)) for name, values in largest.items()}
