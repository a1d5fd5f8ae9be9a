"""The controller as a process of its own against a gateway over HTTP: claims, leases, endings, and its death."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from controller_runs import processes_with, wait_for
from scripted_gateway import ScriptedGateway

HERE = Path(__file__).parent


@contextmanager
def controller(gateway: ScriptedGateway, folder: Path, **sections) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "controller_main.py"), json.dumps(sections), gateway.url, str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            _, errors = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        sys.stderr.write(errors)
        wait_for(lambda: not processes_with(str(folder)), 5)


@pytest.fixture
def scripted() -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway()
    yield gateway
    gateway.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[ScriptedGateway]:
    """A gateway with a controller of two slots."""
    gateway = ScriptedGateway()
    with controller(gateway, tmp_path_factory.mktemp("shared"), controller={"slots": 2}):
        yield gateway
    gateway.close()


def templates(process: subprocess.Popen[str]) -> list[int]:
    """Keepers and templates of a controller."""
    return [pid for pid in processes_with("harnessed.controller.warm") if f" {process.pid}" in cmdline(pid)]


def cmdline(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_claimed_rollout_is_run_and_its_end_reported(shared: ScriptedGateway) -> None:
    end = shared.end(shared.add("ok", {"do": "answer"}))
    assert end == {"outcome": "ok", "reason": "", "reward": 1.0, "parts": {}, "call_rewards": [], "attempts": 3}


def test_an_end_that_another_attempt_cannot_change_forbids_one(shared: ScriptedGateway) -> None:
    broken = shared.end(shared.add("broken", {"do": "answer", "judge": "judge_error"}, attempt=2))
    assert (broken["outcome"], broken["attempts"]) == ("infrastructure", 2)


def test_a_controller_says_what_it_has_and_what_is_judged(shared: ScriptedGateway) -> None:
    def last() -> dict | None:
        return shared.presences[-1] if shared.presences else None

    here = {"run": "r", "slots": 2, "judging": 0}
    shared.wait(lambda: last() == here)
    name = shared.add("slow-to-judge", {"do": "answer", "judge": "judge_hang"})
    shared.wait(lambda: last() == here | {"judging": 1})
    assert shared.end(name)["outcome"] == "infrastructure"
    shared.wait(lambda: last() == here)


def test_a_queued_rollout_starts_at_once(shared: ScriptedGateway) -> None:
    waits = []
    for index in range(12):
        began = time.time()
        end = shared.end(shared.add(f"quick.{index}", {"do": "show"}))
        assert end["outcome"] == "ok"
        waits.append(time.time() - began)
    print(f"claim to recorded end of an empty rollout: median {statistics.median(waits) * 1000:.0f} ms")
    assert statistics.median(waits) < 0.3


def test_never_more_attempts_than_slots(shared: ScriptedGateway) -> None:
    names = [shared.add(f"slot.{index}", {"do": "daemons", "mark": "41000", "then": 0.3}) for index in range(5)]
    peak = 0
    while len(shared.ends.keys() & set(names)) < 5:
        # Looking takes a while, in which one attempt can follow another: what is seen twice was there at one moment.
        peak = max(peak, len(set(processes_with("41000")) & set(processes_with("41000"))))
    assert all(shared.end(name)["outcome"] == "ok" for name in names)
    assert max(claim["most"] for claim in shared.claims) == 2
    assert 3 <= peak <= 2 * 3  # each attempt is three processes


def test_an_attempt_that_is_no_longer_leased_is_stopped(shared: ScriptedGateway) -> None:
    name = shared.add("superseded", {"do": "daemons", "mark": "41001", "then": 60})
    wait_for(lambda: len(processes_with("41001")) == 3)
    with shared.changed:
        shared.leased.remove(name)
    wait_for(lambda: not processes_with("41001"), 5)
    assert name not in shared.ends


def test_an_attempt_whose_claim_was_lost_is_given_back(shared: ScriptedGateway) -> None:
    with shared.changed:
        shared.lose_claims = 1
    end = shared.end(shared.add("lost", {"do": "answer"}))
    assert end["outcome"] == "infrastructure"
    assert end["reason"] == "the controller never got this attempt"


def test_an_ending_survives_a_gateway_that_is_away(shared: ScriptedGateway) -> None:
    name = shared.add("patient", {"do": "daemons", "mark": "41002", "then": 0.6})
    wait_for(lambda: processes_with("41002"))
    shared.down = True
    wait_for(lambda: not processes_with("41002"))
    time.sleep(1)
    assert name not in shared.ends
    shared.down = False
    assert shared.end(name)["outcome"] == "ok"


def test_an_ending_that_is_refused_is_forgotten(shared: ScriptedGateway) -> None:
    name = shared.add("refused", {"do": "daemons", "mark": "41003", "then": 0.1})
    shared.wait(lambda: name in shared.leased)
    shared.down = True
    time.sleep(0.8)
    with shared.changed:
        shared.leased.remove(name)
    shared.down = False
    shared.wait(lambda: name in shared.refused_ends)
    assert shared.end(shared.add("next", {"do": "answer"}))["outcome"] == "ok"
    assert shared.refused_ends.count(name) == 1


def test_a_told_controller_ends_soon_gives_back_and_leaves_nothing(scripted: ScriptedGateway, tmp_path) -> None:
    with controller(scripted, tmp_path) as process:
        name = scripted.add("g.0", {"do": "daemons", "mark": "41004", "then": 60})
        wait_for(lambda: len(processes_with("41004")) == 3)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 3
        assert processes_with("41004") == []
        assert scripted.ends[name]["outcome"] == "infrastructure"
        assert scripted.ends[name]["reason"] == "the controller was stopped"


def test_a_controller_told_to_end_while_its_harness_is_imported_ends(scripted: ScriptedGateway, tmp_path) -> None:
    module = tmp_path / "slow_to_import.py"
    module.write_text("import time\ntime.sleep(60)\n")
    harness = {"kind": "python", "function": "slow_to_import:act"}
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        with controller(scripted, tmp_path / "r", harness=harness) as process:
            del os.environ["PYTHONPATH"]
            wait_for(lambda: len(templates(process)) == 4)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
    finally:
        os.environ.pop("PYTHONPATH", None)


def test_a_killed_controller_leaves_no_process(scripted: ScriptedGateway, tmp_path) -> None:
    with controller(scripted, tmp_path) as process:
        scripted.add("g.0", {"do": "daemons", "mark": "41005", "then": 60})
        scripted.add("g.1", {"do": "answer", "judge": "judge_hang"})
        wait_for(lambda: len(processes_with("41005")) == 3)
        pids = templates(process)
        assert len(pids) >= 4
        process.kill()
        process.wait()
        wait_for(lambda: not processes_with("41005"), 5)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5)


def test_a_controller_killed_between_evaluation_and_report_leaves_no_reward(scripted, tmp_path) -> None:
    with controller(scripted, tmp_path) as process:
        name = scripted.add("g.0", {"do": "daemons", "mark": "41007", "then": 0.6})
        wait_for(lambda: processes_with("41007"))
        scripted.down = True
        scripted.wait(lambda: "/api/rollouts/g.0/attempts/1/end" in scripted.turned_away)
        process.kill()
        process.wait()
    scripted.wait(lambda: not scripted.claiming)
    scripted.down = False
    with controller(scripted, tmp_path):
        buried = scripted.end(name)
        assert (buried["outcome"], buried["reward"]) == ("infrastructure", None)
        assert buried["reason"] == "its controller died"
        assert scripted.end(scripted.add("g.0", {"do": "answer"}, attempt=2))["reward"] == 1.0


@pytest.mark.parametrize("victim", ["template", "keeper"])
def test_a_killed_template_is_infrastructure_and_the_next_attempt_works(
    scripted: ScriptedGateway, tmp_path, victim: str
) -> None:
    with controller(scripted, tmp_path):
        name = scripted.add("g.0", {"do": "daemons", "mark": "41006", "then": 60})
        wait_for(lambda: len(processes_with("41006")) == 3)
        template = parent(first_process(tmp_path))
        os.kill(template if victim == "template" else parent(template), signal.SIGKILL)
        end = scripted.end(name)
        assert end["outcome"] == "infrastructure"
        assert end["reason"] == "the warm template died"
        assert processes_with("41006") == []
        again = scripted.end(scripted.add("g.0", {"do": "answer"}, attempt=2))
        assert again["outcome"] == "ok"


def first_process(root: Path) -> int:
    """Of the attempt below this folder: the fork of a template that works in a workspace."""
    for pid in processes_with("harnessed.controller.warm"):
        cwd = Path(f"/proc/{pid}/cwd").readlink()
        if cwd.is_relative_to(root) and cwd.name == "workspace":
            return pid
    raise AssertionError("no attempt runs")


def test_a_harness_that_cannot_be_imported_ends_the_controller_with_the_reason(scripted, tmp_path) -> None:
    with controller(scripted, tmp_path, harness={"kind": "python", "function": "no_such_module:act"}) as process:
        assert process.wait(10) == 1
        assert "No module named 'no_such_module'" in process.stderr.read()
    assert scripted.claims == []
