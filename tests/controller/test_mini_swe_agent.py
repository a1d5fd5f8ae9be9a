"""The unmodified mini-swe-agent, by the demo's YAML, with real shells and a model that follows a script."""

import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from controller_runs import Running, make_config, running
from scripted_gateway import FINISH, ScriptedGateway

from harnessed.controller import fence
from harnessed.records import Outcome

CONFIG = str(Path(__file__).parents[2] / "examples" / "demo" / "mini.yaml")
CALLS = 10


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


def start_mini(tmp_path: Path, gateway: ScriptedGateway, shell: str, config: str = CONFIG):
    harness = {"kind": "mini-swe-agent", "config": config, "shell": shell, "environment": {"GIVEN": "for the agent"}}
    sections = {"evaluator": {"function": "sample_agents:judge"}, "controller": {"time_limit_s": 40, "slots": 16}}
    return running(make_config(harness=harness, **sections), tmp_path, gateway)


@pytest.fixture(scope="module")
def model() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture(scope="module")
def mini(tmp_path_factory, model: ScriptedGateway):
    """The demo's YAML, but for the number of steps."""
    folder = tmp_path_factory.mktemp("mini")
    config = folder / "mini.yaml"
    config.write_text(Path(CONFIG).read_text().replace("step_limit: 4", f"step_limit: {CALLS}"))
    with start_mini(folder / "attempts", model, "bubblewrap", str(config)) as started:
        yield started


def result(local: Running, name: str) -> dict[str, str]:
    ended = local.end(name, 60)
    assert ended.ending.outcome is Outcome.OK, ended
    return json.loads((local.folder(name) / "result.json").read_text())


def commands(*texts: str):
    """A model that gives these commands one after the other."""
    return lambda key, request: block(texts[sum(m["role"] == "assistant" for m in request["messages"])])


def ask(local: Running, model: ScriptedGateway, *texts: str, **task) -> str:
    """What the agent submits when the last of these commands prints it."""
    model.script = commands(*texts[:-1], f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; {texts[-1]}")
    answer = result(local, local.start({"prompt": "a task"} | task))
    assert answer["exit_status"] == "Submitted"
    return answer["submission"]


def test_it_finishes_a_task_with_two_commands_in_bubblewrap(mini: Running, model: ScriptedGateway) -> None:
    files = {"app.conf": "port=amber\n", "db.conf": "host=birch\n"}
    assert ask(mini, model, "grep port *", "grep -h port * | cut -d= -f2", files=files) == "amber\n"
    first, second = [request for _, request in model.requests[-2:]]
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"] == "a task"
    assert second["messages"][3]["content"] == "returncode 0\napp.conf:port=amber\n"


def test_sixteen_children_at_once_get_their_own_answers_and_lose_none(mini: Running, model: ScriptedGateway) -> None:
    def script(key: str, request) -> str:
        turn = sum(m["role"] == "assistant" for m in request["messages"])
        return FINISH.format(key) if turn == CALLS - 1 else block(f"echo turn {turn} of {key}")

    model.script = script
    model.requests.clear()
    names = [mini.start({"prompt": f"task {index}"}) for index in range(16)]
    for name in names:
        assert result(mini, name)["submission"] == f"key-{name.replace('/', '-')}\n"
    keys = {f"key-{name.replace('/', '-')}" for name in names}
    assert Counter(key for key, _ in model.requests) == dict.fromkeys(keys, CALLS), "no request failed or came twice"
    for key, request in model.requests:
        seen = set(re.findall(r"key-[\w.-]+", json.dumps(request)))
        assert seen <= {key}


def test_the_shell_sees_neither_key_nor_foreign_variables_nor_network(mini: Running, model: ScriptedGateway) -> None:
    # Process 1 of the sandbox is bwrap: what it was started with can be read there.
    see = "(env; cat /proc/[0-9]*/environ) | tr '\\0' '\\n' | cut -d= -f1 | sort -u | xargs"
    assert set(ask(mini, model, see).split()) - {"SHLVL", "_", "OLDPWD", "PWD"} == {"HOME", "LANG", "PATH"}
    assert ask(mini, model, "cat /proc/[0-9]*/cmdline | grep -c 'key[-]g' || true") == "0\n"
    assert int(ask(mini, model, "ls /proc | grep -c ^[0-9]")) < 10, "it sees its own processes only"
    device = ask(mini, model, "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | xargs")
    assert device == "lo\n"
    port = model.server.server_port
    reached = ask(mini, model, f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached || echo refused")
    assert reached == "refused\n"


def test_the_shell_has_a_home_that_lasts_and_cannot_write_elsewhere(mini: Running, model: ScriptedGateway) -> None:
    write = "cd; echo kept > file; for d in /usr /etc /; do touch $d/x 2>/dev/null && echo wrote $d; done; id -u"
    assert ask(mini, model, write, "cat ~/file; ls /root /home 2>&1 | grep -c 'No such'") == "kept\n2\n"


def test_an_agent_that_runs_out_of_steps_is_ok_and_not_submitted(mini: Running, model: ScriptedGateway) -> None:
    model.script = lambda key, request: block("true")
    assert result(mini, mini.start({"prompt": "x"})) == {"exit_status": "LimitsExceeded", "submission": ""}


def test_a_task_without_prompt_is_broken(mini: Running) -> None:
    ended = mini.run({"question": "x"})
    assert (ended.ending.outcome, ended.final) == (Outcome.INFRASTRUCTURE, True)


def test_a_rollout_costs_little(mini: Running, model: ScriptedGateway) -> None:
    """Figures to look at with `pytest -s`; the bound is loose, for busy machines."""
    model.script = commands("cat *", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo x")
    count = 24
    template = Path(f"/proc/{mini.runner._harness._template_pid}/stat")
    judges = Path(f"/proc/{mini.runner._judges._template_pid}/stat")

    def ticks(stat: Path) -> list[int]:
        return [int(field) for field in stat.read_text().rpartition(")")[2].split()[11:15]]

    before, began = [ticks(template), ticks(judges)], time.monotonic()
    for name in [mini.start({"prompt": "x", "files": {"a": "b"}}) for _ in range(count)]:
        result(mini, name)
    wall = time.monotonic() - began
    after = [ticks(template), ticks(judges)]
    parts = [[(b - a) / 100 / count for a, b in zip(x, y, strict=True)] for x, y in zip(before, after, strict=True)]
    (own_user, own_system, user, system), judge = parts
    print(
        f"\nCPU per rollout of two calls: child {user + system:.3f} s with its shells, template"
        f" {own_user + own_system:.3f} s, evaluator {sum(judge):.3f} s; {count} took {wall:.1f} s"
    )
    assert user + system < 0.3


def test_the_plain_shell_sees_no_key_and_lives_in_the_attempts_folder(tmp_path, model: ScriptedGateway) -> None:
    config = tmp_path / "tools.yaml"
    config.write_text(Path(CONFIG).read_text() + "  litellm_model_registry: null\n")
    with start_mini(tmp_path / "r", model, "plain", str(config)) as local:
        variables = ask(local, model, "env | cut -d= -f1 | sort | xargs").split()
        names = {"GIVEN", "HARNESSED_ATTEMPT", "HARNESSED_ROLLOUT", "HOME", "LANG", "PATH", "PWD", "TMPDIR"}
        assert set(variables) - {"SHLVL", "_", "OLDPWD"} == names
        home, cwd = ask(local, model, "echo $HOME; pwd").split()
        folder = local.folder(f"g.{local.count}/1")
        assert (home, cwd) == (str(folder / "home"), str(folder / "workspace"))
        limits = ask(local, model, "ulimit -c; ulimit -f; ulimit -t").split()
        assert limits[0] == "0"
        assert "unlimited" not in limits


def test_where_bubblewrap_does_not_work_one_line_says_so(monkeypatch, caplog) -> None:
    monkeypatch.setattr(fence, "_candidates", lambda: ["/usr/bin/false"])
    assert fence.find("auto", 1 << 20) is None
    assert len(caplog.records) == 1
    assert "no sandbox" in caplog.text
