"""What people see of a run while it goes on, and at its end."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from harnessed.training import display as module
from harnessed.training.display import Display
from harnessed.training.report import Summary

METRICS = {
    "reward_mean": 0.5,
    "reward_std": 0.1,
    "groups_taken": 8,
    "groups": 8,
    "tokens_per_second": 100.0,
    "timing_s/step": 10.0,
}
SUMMARY = Summary(
    held_out_before=None,
    held_out_after=None,
    greedy_before=None,
    greedy_after=None,
    steps=4,
    rollouts=1,
    calls=1,
    sampled_tokens=1,
    engine_sampled_tokens=1,
    trained_tokens=1,
    lost_calls=0,
    restarts={},
    fates={"trained": 1},
    outcomes={},
    seconds=1,
    seed=0,
    checkpoint=None,
    interrupted=False,
)


@pytest.mark.parametrize("first", [1, 5])
def test_the_time_that_is_left_counts_the_steps_of_this_life(monkeypatch, first):
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=200)
    display = Display(first + 3, dict, console)
    for number in (first, first + 1):
        display.step(number)
        now += 10.0
        display.metrics(METRICS, "")
    lines = console.file.getvalue().splitlines()
    assert lines[0].endswith("left 30 s")
    assert lines[1].endswith("left 20 s")


def test_a_run_that_was_interrupted_says_how_it_goes_on():
    console = Console(file=io.StringIO(), width=200)
    display = Display(7, dict, console)
    display.summary(SUMMARY, "runs/first")
    assert "--resume" not in console.file.getvalue()
    display.summary(replace(SUMMARY, interrupted=True), "runs/first")
    assert "interrupted after step 4 of 7; --resume goes on with it" in console.file.getvalue()
