"""Evaluators that work and that do not, and agents that leave traps for them."""

import json
import sys

import pytest
from controller_runs import Running, make_config, processes_with, running

from harnessed.controller.folders import remove
from harnessed.controller.verdict import read_verdict
from harnessed.records import Outcome, Reward


def test_parts_are_kept_beside_the_reward(local: Running) -> None:
    ending = local.run({"do": "answer", "judge": "judge_parts"}).ending
    assert (ending.reward, ending.parts) == (0.5, {"format": 1.0, "length": 2.5})
    assert ending.call_rewards == [0.25, 0.0]


def test_the_evaluator_sees_what_the_agent_does_not(local: Running) -> None:
    ending = local.run({"do": "answer", "prompt": "7", "secret": "7", "judge": "judge_hidden"}).ending
    assert ending.reward == 1.0


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        ("judge_error", "evaluator: exit status 1: KeyError: 'the evaluator is broken'"),
        ("judge_text", "evaluator: exit status 1: ValueError: the evaluator gave 'good' as reward"),
        ("judge_nan", "evaluator: exit status 1: ValueError: the evaluator gave nan as reward"),
        ("judge_hang", "evaluator: ran longer than 2 s"),
        ("judge_exit", "evaluator: exit status 3"),
    ],
)
def test_a_broken_evaluator_ends_the_rollout_without_reward_or_another_attempt(
    local: Running, judge: str, reason: str
) -> None:
    name = local.start({"do": "answer", "judge": judge})
    ended = local.end(name)
    assert ended.ending.outcome is Outcome.INFRASTRUCTURE
    assert ended.ending.reason.startswith(reason)
    assert ended.ending.reward is None
    assert ended.final
    assert judge != "judge_error" or "in judge_error" in (local.folder(name) / "evaluation.txt").read_text()
    assert not local.folder(f"{name}.evaluation").exists()
    assert processes_with("sleep\0001000") == []


def test_a_broken_evaluator_is_tried_again_on_the_same_result(local: Running, tmp_path) -> None:
    task = {"do": "answer", "judge": "judge_second_time", "mark": str(tmp_path / "mark")}
    assert local.run(task).ending.reward == 1.0


def test_nothing_that_the_agent_left_leads_the_evaluator_out_of_its_copy(local: Running) -> None:
    name = local.start({"do": "link_out", "judge": "judge_links"})
    ended = local.end(name)
    remove(local.folder(name))  # deeper than pytest's own cleaning can go
    assert (ended.ending.reward, ended.ending.reason) == (1.0, "")
    assert not local.folder(f"{name}.evaluation").exists()


def test_a_command_evaluator_prints_its_verdict_last(tmp_path, gateway) -> None:
    code = (
        "import json, os, sys; task = json.load(open(sys.argv[1])); print('noise'); print('noise', file=sys.stderr);"
        "assert os.path.exists('workspace/left.txt'); assert 'workspace' not in sys.argv[1]; print(task['say'])"
    )
    config = make_config(evaluator={"command": [sys.executable, "-c", code, "{task}"], "tries": 1})
    with running(config, tmp_path / "r", gateway) as local:

        def judged(say: str):
            ending = local.run({"do": "answer", "say": say}).ending
            return ending.reward if ending.reward is not None else ending.reason

        assert judged("0.25") == 0.25
        assert judged(json.dumps({"reward": 1, "x": 2})) == 1.0
        assert judged("NaN").startswith("evaluator: the evaluator gave nan as reward, which is not a number")
        assert judged("[" * 60_000).startswith("evaluator: ")
        assert judged("1" + "0" * 400).startswith("evaluator: the evaluator gave 1000")
        assert judged("").startswith("evaluator: Expecting value"), "the last line that is not empty counts"
        assert judged("[1]").startswith("evaluator: the evaluator gave [1] as reward")


@pytest.mark.parametrize(
    "value",
    [
        "1",
        None,
        [],
        {},
        {"x": 1},
        {"reward": None},
        {"reward": 1, "x": "y"},
        1e999,
        1e308,
        {"reward": 1, "call_rewards": {"1": 2}},
        {"reward": 1, "call_rewards": [0, "x"]},
    ],
)
def test_what_is_no_verdict(value) -> None:
    with pytest.raises(ValueError, match="the evaluator gave"):
        read_verdict(value)


def test_what_is_a_verdict() -> None:
    assert read_verdict(True) == Reward(reward=1.0)
    assert read_verdict({"reward": 2, "a": 0.5}) == Reward(reward=2.0, parts={"a": 0.5})
    assert read_verdict({"reward": 2, "call_rewards": (1, 0.5)}) == Reward(reward=2.0, call_rewards=[1.0, 0.5])


def test_an_integer_too_long_to_print_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="a huge integer"):
        read_verdict(10**5000)
