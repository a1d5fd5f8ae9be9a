"""What a whole run reports with everything switched on: its lines, its page of documentation, its picture."""

import json
import re
from pathlib import Path

import pytest
from command import harnessed, make_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PARTS = ("recompute", "forward", "backward")
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
        "objective": {"dual_clip": 3.0, "kl": {"coefficient": 0.01}},
        "optimiser_steps": 2,
    }
    config = make_config(folder, trainer=trainer, tasks={"train": "agent:easy_tasks"}, evaluation={"tasks": 2})
    done = harnessed("train", config, f"run.folder={folder / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "curve.png" not in done.stdout and "gets no more" not in done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def lines_with_critic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    trainer = {"steps": 1, "groups_per_step": 2, "group_size": 2, "advantage": {"kind": "gae"}}
    config = make_config(folder, trainer=trainer, tasks={"train": "agent:easy_tasks"}, evaluation={"tasks": 1})
    done = harnessed("train", config, f"run.folder={folder / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_bytes().splitlines()]


def documented() -> set[str]:
    tables = PAGE.read_text().partition("## curve.png")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", tables, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_metric_is_documented_and_none_that_does_not_exist(lines, lines_with_critic):
    def general(name):
        return re.sub(
            r"^(reward|fates)/.*", lambda found: {"reward": "reward/<part>", "fates": "fates/<fate>"}[found[1]], name
        )

    reported = {general(name) for line in [*lines, *lines_with_critic] for name in line} - {"step"}
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
        phases = sum(line[f"timing_s/{phase}"] for phase in ("wait", "build", "drain", "update"))
        assert 0 < phases <= line["timing_s/step"]
        if line["update_applied"]:
            assert sum(line[f"timing_s/{part}"] for part in PARTS) <= line["timing_s/update"]
            assert line["importance_ess"] == pytest.approx(1, abs=1e-3)
            assert line["learning_rate"] == 1e-6
            assert line["optimiser_steps"] + line["optimiser_steps_skipped"] <= 2


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


def test_a_run_that_goes_on_from_a_checkpoint_goes_on_in_its_tasks(run, lines, tmp_path):
    """Refilled groups used tasks as well."""
    used = sum(line["groups"] for line in lines if "groups" in line)
    done = harnessed(
        "train",
        run.parent / "config.yaml",
        f"run.folder={tmp_path / 'run'}",
        f"trainer.resume_from={run / 'checkpoints' / 'step-00002'}",
        "trainer.steps=3",
        "trainer.trackers=[]",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    transcripts = [json.loads(line) for line in (tmp_path / "run" / "transcripts.jsonl").read_bytes().splitlines()]
    trained = [line for line in transcripts if line["step"]]
    assert {line["step"] for line in trained} == {3}
    groups = {line["rollout"].rpartition(".")[0]: line["task"]["prompt"] for line in trained}
    # An update takes those first that can be compared.
    assert [groups[group] for group in sorted(groups)] == [f"task 0.{used + number}" for number in range(len(groups))]
    notes = json.loads((tmp_path / "run" / "checkpoints" / "step-00003" / "harnessed.json").read_text())
    assert notes["tasks"] == used + len(groups)
