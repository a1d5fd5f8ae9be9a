"""Runs in which rollouts go on over updates: what the store says of the versions that sampled their tokens."""

import json
import os
from itertools import pairwise

import numpy as np
import pytest
from command import HERE, harnessed, make_config
from test_train import stored_transcripts

from harnessed.records import Fate, Version

GROUPS, MEMBERS, BOUND = 2, 2, 2
UPDATES = int(os.environ.get("HARNESSED_UPDATES", "60"))
"""Of the collocated run; `make staleness` takes 200."""


class Run:
    """One that has ended, with what its database and its files hold."""

    def __init__(self, folder, kind: str, updates: int) -> None:
        self.updates = updates
        (folder / "uneven_agent.py").write_text((HERE / "uneven_agent.py").read_text())
        config = make_config(
            folder,
            tasks={"train": "uneven_agent:tasks", "held_out": "uneven_agent:tasks", "hidden": []},
            harness={"kind": "python", "function": "uneven_agent:run"},
            evaluator={"function": "uneven_agent:reward"},
            controller={"slots": 12, "time_limit_s": 100},
            sampling={"max_tokens": 24},
            trainer={
                "steps": updates,
                "groups_per_step": GROUPS,
                "group_size": MEMBERS,
                "checkpoint_every": updates,
                "optimiser": {"learning_rate": 1e-4},
                "schedule": {"kind": kind, "staleness": BOUND, "groups_in_flight": 2 * GROUPS},
            },
            evaluation={"tasks": 1},
        )
        result = harnessed("train", config, f"run.folder={folder / 'run'}", limit_s=280)
        assert result.returncode == 0, result.stdout + result.stderr
        self.summary = json.loads((folder / "run" / "summary.json").read_text())
        self.metrics = [line for line in _lines(folder / "run" / "metrics.jsonl") if "reward_mean" in line]
        self.booked = {line["rollout"]: line for line in _lines(folder / "run" / "transcripts.jsonl")}
        self.stored = [each for group in stored_transcripts(folder / "run", ".train.") for each in group]
        self.trained_at = {line["step"]: Version(*line["version"]).number for line in self.metrics}
        """Step -> number of the version that it made."""

    def version_before(self, step: int) -> int:
        return self.trained_at.get(step - 1, 0)

    def trained(self):
        """Each rollout that was trained: its step, and the versions of its delivered tokens in their order."""
        for transcript in self.stored:
            line = self.booked[transcript.rollout.id]
            if line["fates"].get(Fate.TRAINED):
                nodes = [node for node in transcript.attempts[-1].nodes if node.delivered]
                yield line["step"], [_numbers(node) for node in nodes]


def _lines(path) -> list[dict]:
    """What a model says at random holds characters that other readers take for the end of a line."""
    return [json.loads(line) for line in path.read_text().rstrip("\n").split("\n")]


def _numbers(node) -> list[int]:
    return [Version.unpack(int(packed)).number for packed in np.frombuffer(node.versions, np.int32)]


@pytest.fixture(scope="module", params=["collocated", "async"])
def run(request, tmp_path_factory):
    updates = UPDATES if request.param == "collocated" else min(UPDATES, 25)
    return Run(tmp_path_factory.mktemp(request.param), request.param, updates)


def test_no_token_is_trained_by_an_update_further_away_than_the_bound(run):
    oldest = [run.version_before(step) - min(map(min, nodes)) for step, nodes in run.trained()]
    assert len(oldest) > 0.9 * run.updates * GROUPS * MEMBERS
    # There are tasks for which an update has to wait. That a group began is seen before its first token is.
    assert min(oldest) >= 0 and BOUND - 1 <= max(oldest) <= BOUND
    assert sum(age > 0 for age in oldest) > 0.2 * len(oldest), "the test shows nothing where nothing grows old"


def test_the_metrics_say_what_the_store_says(run):
    by_step: dict[int, list[int]] = {}
    for step, nodes in run.trained():
        by_step.setdefault(step, []).append(run.version_before(step) - min(map(min, nodes)))
    for line in run.metrics:
        ages = by_step.get(line["step"], [])
        assert line["staleness_max"] == max(ages, default=None)
        assert line["staleness_mean"] == (pytest.approx(sum(ages) / len(ages)) if ages else None)


def test_rollouts_go_on_over_updates_and_never_meet_an_older_version(run):
    over_updates = within_an_answer = 0
    for _, nodes in run.trained():
        numbers = [number for node in nodes for number in node]
        assert all(before <= after for before, after in pairwise(numbers)), numbers
        over_updates += numbers[0] < numbers[-1]
        within_an_answer += any(node[0] < node[-1] for node in nodes)
    assert over_updates > 0.1 * run.updates
    assert within_an_answer > 0, "no answer was interrupted and continued"


def test_every_update_takes_its_groups_and_the_books_balance(run):
    assert [line["step"] for line in run.metrics] == list(range(1, run.updates + 1))
    assert {line["groups"] for line in run.metrics} == {GROUPS}
    groups = {}
    for id, line in run.booked.items():
        if ".train." in id:
            groups.setdefault(id.rpartition(".")[0], []).append(line["step"])
    assert all(len(steps) == MEMBERS and len(set(steps)) == 1 for steps in groups.values())
    assert len(groups) == run.updates * GROUPS  # none was begun for nothing
    fates = run.summary["fates"]
    stored = sum(node.sampled for each in run.stored for attempt in each.attempts for node in attempt.nodes)
    assert sum(fates.values()) == run.summary["sampled_tokens"] == run.summary["engine_sampled_tokens"]
    assert stored == run.summary["sampled_tokens"] - fates.get(Fate.EVALUATION, 0)
