"""What becomes of attempts, good and bad, on this machine: the real runner with real processes."""

import json
import os
import time

import pytest
from controller_runs import Running, make_config, processes_with, running

from harnessed.controller.runner import Ended
from harnessed.records import Outcome


def outcome(ended: Ended) -> tuple[str, str]:
    return ended.ending.outcome.value, ended.ending.reason


def test_a_good_attempt_is_ok_and_has_its_reward(local: Running) -> None:
    ended = local.run({"do": "answer", "prompt": "x"})
    assert outcome(ended) == ("ok", "")
    assert ended.ending.reward == 1.0


def test_the_harness_reaches_the_model_with_its_own_key(local: Running, gateway) -> None:
    name = local.start({"do": "call_model"})
    assert local.end(name).ending.outcome is Outcome.OK
    assert json.loads((local.folder(name) / "result.json").read_text()).startswith("```bash")
    assert f"key-{name.replace('/', '-')}" in [key for key, _ in gateway.requests]


def test_an_attempt_sees_what_was_listed_and_nothing_else(local: Running, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CONTROLLER", "1")
    name = local.start({"do": "show", "secret": "42", "files": {"a/b.txt": "text", "c": ""}})
    assert local.end(name).ending.outcome is Outcome.OK
    seen = json.loads((local.folder(name) / "result.json").read_text())
    folder = local.folder(name)
    key = f"key-{name.replace('/', '-')}"
    url = local.runner._gateway
    assert seen["environment"] == {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "HARNESSED_ROLLOUT": name.partition("/")[0],
        "HARNESSED_ATTEMPT": "1",
    }
    assert "secret" not in seen["task"]
    assert seen["cwd"] == str(folder / "workspace")
    assert seen["files"] == ["a/b.txt", "c"]
    assert seen["descriptors"] == ["/dev/null", str(folder / "log.txt"), str(folder / "log.txt")]
    assert seen["stdin"] == ""


def test_attempts_draw_different_random_numbers(local: Running) -> None:
    names = [local.start({"do": "show"}) for _ in range(2)]
    assert all(local.end(name) for name in names)
    drawn = {json.loads((local.folder(name) / "result.json").read_text())["random"] for name in names}
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("do", "expected", "reason"),
    [
        ("fail", "agent_exit", "exit status 1: RuntimeError: it broke, and the key is ***"),
        ("leave", "agent_exit", "exit status 7"),
        ("garbage", "agent_exit", "ended by SIGSEGV"),
        ("odd_signal", "agent_exit", "ended by signal 40"),
        ("unserialisable", "agent_exit", "exit status 1: TypeError: Object of type object is not JSON serializable"),
        ("hang", "agent_timeout", "ran longer than 3 s: hanging"),
        ("fill_log", "agent_exit", "exit status 1"),
    ],
)
def test_a_bad_harness_is_recorded_with_outcome_and_reason(local: Running, do: str, expected: str, reason: str) -> None:
    ended = local.run({"do": do})
    assert ended.ending.outcome == expected
    assert ended.ending.reason.startswith(reason)
    assert ended.ending.reward == 0.0, "it is judged by what it left"
    assert not ended.final


def test_a_log_is_never_longer_than_a_file_may_be(local: Running) -> None:
    name = local.start({"do": "fill_log"})
    assert local.end(name).ending.outcome is Outcome.AGENT_EXIT
    assert (local.folder(name) / "log.txt").stat().st_size <= 2 << 20


def test_daemons_die_before_the_evaluator_looks(local: Running) -> None:
    ended = local.run({"do": "daemons", "mark": "31011", "judge": "judge_late"})
    assert outcome(ended) == ("ok", "3 processes that it had left were killed")
    assert ended.ending.reward == 1.0
    assert processes_with("31011") == []


def test_a_timeout_takes_all_descendants_along(local: Running) -> None:
    ended = local.run({"do": "daemons", "mark": "31012", "then": 60, "judge": "judge_late"})
    assert ended.ending.outcome is Outcome.AGENT_TIMEOUT
    assert ended.ending.reward == 1.0
    assert processes_with("31012") == []


def test_a_small_fork_bomb_is_swept_up(local: Running) -> None:
    ended = local.run({"do": "bomb", "mark": "31013", "judge": "judge_late"})
    assert ended.ending.outcome is Outcome.OK
    assert "were killed" in ended.ending.reason
    assert processes_with("31013") == []


def test_the_end_of_one_attempt_leaves_the_daemons_of_another_alone(local: Running) -> None:
    lasting = local.start({"do": "daemons", "mark": "31014", "then": 1.5})
    assert local.run({"do": "daemons", "mark": "31015", "then": 0.5}).ending.outcome is Outcome.OK
    assert len(processes_with("31014")) == 3
    assert processes_with("31015") == []
    assert local.end(lasting).ending.outcome is Outcome.OK
    assert processes_with("31014") == []


def test_a_stopped_attempt_is_gone_and_cancelled(local: Running) -> None:
    name = local.start({"do": "daemons", "mark": "31016", "then": 60})
    while len(processes_with("31016")) < 3:
        pass
    for _ in range(2):
        local.loop.call_soon_threadsafe(local.runner.stop, name)
    assert local.end(name).ending.outcome is Outcome.CANCELLED
    assert processes_with("31016") == []


@pytest.mark.parametrize(
    "files",
    [{"../x": ""}, {"/etc/x": ""}, {"a/../../x": ""}, {"": ""}, {".": ""}, {"a": "", "a/b": ""}, {"a": 1}, ["a"]],
)
def test_files_that_leave_the_workspace_are_a_broken_task_without_another_attempt(local: Running, files) -> None:
    ended = local.run({"do": "answer", "files": files})
    assert ended.ending.outcome is Outcome.INFRASTRUCTURE
    assert "the task's" in ended.ending.reason
    assert ended.final


def test_a_command_harness_gets_prompt_task_and_folder(tmp_path, gateway) -> None:
    command = ["sh", "-c", 'cat "$2"; pwd; echo "$1 $OPENAI_API_KEY $GIVEN"; ls "$3"; exit 3', "-"]
    harness = {"kind": "command", "command": [*command, "{prompt}", "{task}", "{folder}"]}
    config = make_config(harness=harness | {"environment": {"GIVEN": "given"}}, controller={"keep_folders": "failed"})
    with running(config, tmp_path / "r", gateway) as local:
        name = local.start({"prompt": "a {task} ; $(x)", "secret": "1"})
        assert outcome(local.end(name))[0] == "agent_exit"
        log = (local.folder(name) / "log.txt").read_text().splitlines()
        assert log[0] == '{"prompt": "a {task} ; $(x)"}' + str(local.folder(name) / "workspace")
        assert log[1] == "a {task} ; $(x) key-g.1-1 given"
        assert log[2:] == ["home", "log.txt", "task.json", "tmp", "workspace"]


def test_a_program_that_is_missing_is_no_fault_of_the_agent(tmp_path, gateway) -> None:
    config = make_config(
        harness={"kind": "command", "command": ["no-such-program"]}, controller={"keep_folders": "none"}
    )
    with running(config, tmp_path / "r", gateway) as local:
        ended = local.run({})
        assert ended.ending.outcome is Outcome.INFRASTRUCTURE
        assert "No such file" in ended.ending.reason
        assert not local.folder("g.1/1").exists()


def test_time_for_which_its_calls_were_held_is_added_to_the_limit(local: Running) -> None:
    local.held[f"g.{local.count + 1}"] = 2.0
    began = time.monotonic()
    ended = local.run({"do": "hang"})
    assert ended.ending.outcome is Outcome.AGENT_TIMEOUT
    assert time.monotonic() - began >= 3 + 2
