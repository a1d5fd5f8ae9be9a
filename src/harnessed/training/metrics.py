"""What a step reports: the lines of metrics.jsonl, from the groups and the clock; `trainer.py` calls this.

What the update reports comes from its backend (`backends/tally.py`). Names are those that people know from TRL and verl
where those have one; docs/metrics.md says what each means, and a test holds the page and a real run together.
"""

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from harnessed.records import Fate, Split, Version
from harnessed.training.advantages import all_equal
from harnessed.training.lineages import Lineage, age_of
from harnessed.training.report import HeldOut
from harnessed.training.selection import Group, Taken, members_of

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
    # Also where its agents failed before their first token.
    skipped = [any(Fate.GROUP_SKIPPED in sample.fates for sample in group.samples) for group in groups]
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
        "equal_groups_share": equal_share(groups),
        "truncated_share": truncated_share(groups),
        **of_conversations(groups),
    }


def of_rewards(groups: list[Group]) -> Line:
    """Of the rollouts that count in their groups; parts where a rollout has them."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
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


def equal_share(groups: list[Group]) -> float | None:
    """Of the groups that can be compared, those whose rewards are all equal; None: none can be."""
    members = [members_of(group.samples) for group in groups]
    rewards = [[[sample.reward or 0.0] for sample in each] for each in members if len(each) > 1]
    return sum(map(all_equal, rewards)) / len(rewards) if rewards else None


def truncated_share(groups: list[Group]) -> float | None:
    """Of the answers, those that were cut for their length; None: there are none."""
    transcripts = [transcript for group in groups for transcript in group.transcripts if transcript.attempts]
    finishes = Counter(node.finish for each in transcripts for node in each.attempts[-1].nodes)
    del finishes["interrupted"]  # nobody got these
    return finishes["length"] / finishes.total() if finishes.total() else None


def of_conversations(groups: list[Group]) -> Line:
    """How often a conversation went on in a new row, by kind, and how often what opened a tool call was none."""
    transcripts = [transcript for group in groups for transcript in group.transcripts if transcript.attempts]
    nodes = [node for transcript in transcripts for node in transcript.attempts[-1].nodes]
    found = Counter(node.split for node in nodes)
    broken = sum(node.broken_calls for node in nodes)
    return {f"splits_{kind}": found[kind] for kind in Split} | {"broken_calls": broken}


def of_taken(taken: Taken, current: Version, lineages: list[Lineage]) -> Line:
    """What an update is going to train, at version `current`. Staleness is the number of updates since the oldest
    trained token of a rollout; None where the engine does not say what it served."""
    samples = taken.samples
    ages = [age for sample in samples if (age := age_of([sample], current, lineages)) is not None]
    return {
        "groups_taken": taken.groups,
        "rows_per_rollout": sum(len(sample.rows) for sample in samples) / max(len(samples), 1),
        "staleness_mean": statistics.fmean(ages) if ages else None,
        "staleness_max": max(ages) if ages else None,
    }


def of_held_out(result: HeldOut, seconds: float) -> Line:
    low, high = result.interval or (None, None)
    return {
        "held_out": result.success,
        "held_out_low": low,
        "held_out_high": high,
        "held_out_greedy": result.greedy,
        "held_out_unjudged": result.unjudged,
        "held_out_versions": [list(version) for version in result.versions] if result.versions else None,
        "timing_s/evaluation": seconds,
    }
