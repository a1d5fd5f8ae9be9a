"""What a whole run reports with everything switched on: its lines, its page of documentation, its picture."""

import json
import re
from pathlib import Path

import pytest
import torch
from command import harnessed, make_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harnessed.config import Kl, Objective
from harnessed.training.losses import Terms, objective_loss
from harnessed.training.metrics import of_micro_batches

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    trainer = {
        "steps": 2,
        "groups_per_step": 3,
        "group_size": 2,
        "trackers": ["tensorboard"],
        "advantage": {"refill": 1},
        "objective": {"dual_clip": 3.0},
    }
    config = make_config(folder, trainer=trainer, tasks={"train": "agent:easy_tasks"}, evaluation={"tasks": 2})
    done = harnessed("train", config, f"run.folder={folder / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, "nothing failed to be drawn or tracked"
    return folder / "run"


@pytest.fixture(scope="module")
def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def documented() -> set[str]:
    tables = PAGE.read_text().partition("## curve.png")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", tables, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_metric_is_documented_and_none_that_does_not_exist(lines):
    def general(name):
        return re.sub(
            r"^(reward|fates)/.*", lambda found: {"reward": "reward/<part>", "fates": "fates/<fate>"}[found[1]], name
        )

    reported = {general(name) for line in lines for name in line} - {"step"}
    # What a KL term adds.
    one = torch.zeros(1)
    terms = Terms(one, one, one, one, one, torch.zeros(1, dtype=torch.int64), one, one)
    _, sums = objective_loss(terms, Objective(kl=Kl(coefficient=0.1)))
    reported |= of_micro_batches([{name: value.item() for name, value in sums.items()}], 1).keys()
    assert reported - documented() == set(), "docs/metrics.md lacks these"
    assert documented() - reported == set(), "docs/metrics.md has these, and nothing reports them"


def test_the_numbers_of_a_step_fit_together(lines):
    steps = [line for line in lines if "reward_mean" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        fates = {name: value for name, value in line.items() if name.startswith("fates/")}
        assert sum(fates.values()) == line["sampled_tokens"]
        assert line["trained_tokens"] == fates.get("fates/trained", 0)
        assert line["groups"] == 3 + line["groups_refilled"] == line["groups_taken"] + line["groups_skipped"]
        assert line["rollouts"] == 2 * line["groups"]
        assert line["staleness_max"] in (0, None)
        phases = sum(line[f"timing_s/{phase}"] for phase in ("rollouts", "build", "update"))
        assert 0 < phases <= line["timing_s/step"]
        if line["update_applied"]:
            assert line["timing_s/forward"] + line["timing_s/backward"] <= line["timing_s/update"]
            assert line["importance_ess"] == pytest.approx(1, abs=1e-3)
            assert line["learning_rate"] == 1e-6


def test_a_picture_is_drawn(run):
    picture = (run / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert not list(run.glob(".curve*"))


def test_tensorboard_reads_the_numbers(run, lines):
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    for name in ("reward_mean", "held_out", "reward/sum"):
        expected = [(line["step"], line[name]) for line in lines if name in line]
        read = [(event.step, event.value) for event in events.Scalars(name)]
        assert read == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
