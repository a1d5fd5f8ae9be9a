"""A real chat model through a real harness: SmolLM2-135M-Instruct, mini-swe-agent, one update."""

import json
from pathlib import Path

import pytest
import yaml
from command import harnessed

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2"

JUDGE = """
import zlib


def tasks(seed):
    while True:
        yield {"prompt": "Print the name of this folder."}


def reward(task, folder):
    # Any signal will do that differs between two rollouts: paths that differ in one letter differ in these bits.
    return zlib.crc32(str(folder).encode()) % 1024
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    if not MODEL.exists():
        pytest.fail("the model is missing: run `make test`, or `make smollm2` once")
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "judge.py").write_text(JUDGE)
    agent = yaml.safe_load((ROOT / "examples" / "demo" / "mini.yaml").read_text())
    agent["agent"]["step_limit"] = 3
    (folder / "mini.yaml").write_text(yaml.safe_dump(agent))
    config = {
        "policy": {"model": str(MODEL)},
        "tasks": {"train": "judge:tasks", "held_out": "judge:tasks"},
        "harness": {"kind": "mini-swe-agent", "config": str(folder / "mini.yaml")},
        "evaluator": {"function": "judge:reward"},
        "sampling": {"max_tokens": 48},
        "limits": {"calls": 3, "context": 2048},
        "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2, "optimiser": {"learning_rate": 1e-5}},
        "evaluation": {"tasks": 1},
    }
    (folder / "smollm2.yaml").write_text(yaml.safe_dump(config))
    done = harnessed("train", folder / "smollm2.yaml", f"run.folder={folder / 'run'}", limit_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_engine_and_trainer_agree_on_every_sampled_token(run):
    """In float32, with the same weights."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    (step,) = [step for step in steps if "loss" in step]
    assert step["update_applied"]
    assert step["trained_tokens"] > 48
    assert step["logprob_difference_max"] <= 1e-4
    assert 0 < step["logprob_difference"] <= step["logprob_difference_max"]


def test_the_books_balance(run):
    summary = json.loads((run / "summary.json").read_text())
    assert sum(summary["fates"].values()) == summary["sampled_tokens"] == summary["engine_sampled_tokens"]
    assert summary["lost_calls"] == 0
