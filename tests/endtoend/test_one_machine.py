"""Whole runs with what only the one-machine backend does: going on from a checkpoint, adapters, a critic."""

import json

from command import harnessed, make_config

TRAINER = {
    "steps": 2,
    "optimiser_steps": 2,
    "epochs": 2,
    "lora": {"rank": 4},
    "gradient_checkpointing": True,
    "objective": {"kl": {"coefficient": 0.01}},
}


def run(config, folder, *overrides):
    """The command, its metrics by step, and its summary."""
    done = harnessed("train", config, f"run.folder={folder}", *overrides, limit_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {line["step"]: line for line in lines if "version" in line}, summary


def tasks(folder):
    lines = [json.loads(line) for line in (folder / "transcripts.jsonl").read_bytes().splitlines()]
    return [json.dumps(line["task"]) for line in lines if line["purpose"] == "train"]


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    config = make_config(tmp_path, trainer=TRAINER)
    first, _ = run(config, tmp_path / "first")
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00002"
    second, summary = run(config, tmp_path / "second", f"trainer.resume_from={checkpoint}", "trainer.steps=3")
    assert list(first) == [1, 2]
    assert list(second) == [3]
    assert first[1]["optimiser_steps"] > 1
    assert second[3]["version"] == [1, first[2]["version"][1] + 2]
    assert second[3]["kl_reference"] > 0  # the reference is still the first run's start
    assert summary["steps"] == 3
    assert sum(summary["fates"].values()) == summary["sampled_tokens"] == summary["engine_sampled_tokens"]
    assert not set(tasks(tmp_path / "first")) & set(tasks(tmp_path / "second"))
    assert (tmp_path / "second" / "checkpoints" / "step-00003" / "adapter").is_dir()
    assert second[3]["logprob_difference_max"] < 1e-3  # the engine serves what is trained


def test_a_critic_and_a_divergence_in_the_reward(tmp_path):
    kl = {"coefficient": 0.1, "place": "reward", "estimator": "k3"}
    settings = {"steps": 2, "advantage": {"kind": "gae"}, "objective": {"kl": kl}}
    metrics, summary = run(make_config(tmp_path, trainer=settings), tmp_path / "run")
    assert [metrics[step]["update_applied"] for step in (1, 2)] == [True, True]
    assert {"value_loss", "value_mean", "value_explained"} <= metrics[2].keys()
    assert metrics[1]["kl_reference"] == 0 < metrics[2]["kl_reference"]
    assert metrics[1]["value_mean"] == 0  # its head begins with zeros
    assert metrics[2]["value_mean"] != 0
    assert summary["fates"].get("group_skipped", 0) == 0  # nothing is compared
    assert (tmp_path / "run" / "checkpoints" / "step-00002" / "critic.pt").is_file()
