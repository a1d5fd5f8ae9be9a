"""Trackers: the real packages in an environment of their own (`make trackers`), and what happens when one fails."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harnessed.config import Config, ConfigError
from harnessed.training.resumed import Resumed
from harnessed.training.trackers import check_trackers, open_trackers

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "trackers" / "bin" / "python"


@pytest.fixture
def proxy():
    """Stands where everything that leaves the machine has to pass, and keeps what knocked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        knocked = []

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    connection.settimeout(5)
                    knocked.append(connection.recv(200))

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", knocked


LIFE = [[1, "reward/tests", 0.25], [1, "reward_mean", 0.5], [2, "reward_mean", 0.75]]
AGAIN = [2, "reward_mean", 0.25]


@pytest.mark.parametrize(
    ("kind", "how", "run", "points"),
    [
        ("wandb", (), "run-1", LIFE),
        ("wandb", ("resumed",), "run-1-resumed-1", [AGAIN]),
        ("mlflow", (), "run-1", LIFE),
        ("mlflow", ("resumed",), "run-1", [*LIFE, AGAIN]),
        ("trackio", (), "run-1", LIFE),
        ("trackio", ("resumed",), "run-1", [*LIFE, AGAIN]),
    ],
)
def test_a_real_tracker_keeps_the_numbers_in_the_runs_folder_and_calls_nobody(tmp_path, proxy, kind, how, run, points):
    if not PYTHON.exists():
        pytest.fail("the packages are missing: run `make test`, or `make trackers` once")
    address, knocked = proxy
    home, folder = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    folder.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT / "src")}
    environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("track.py"), kind, folder, *how],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads(done.stdout)  # and nothing else was printed
    assert sorted(kept.pop("points")) == sorted(points)
    assert kept == {"project": "proj", "run": run, "steps": 100}
    assert knocked == []
    assert not [path for path in folder.rglob("*") if path.is_file() and b"a-secret" in path.read_bytes()]
    assert {path.name for path in tmp_path.iterdir()} == {"home", "run"}


def config(*kinds: str) -> Config:
    return Config.model_validate(
        {
            "policy": {"model": "policy"},
            "tasks": {"train": "a:b", "held_out": "a:b"},
            "harness": {"kind": "python", "function": "a:b"},
            "evaluator": {"function": "a:b"},
            "trainer": {"trackers": list(kinds)},
        }
    )


def test_a_missing_package_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_trackers(["tensorboard", "wandb"])
    check_trackers(["tensorboard"])


FAILING = """
def init(*_, **__):
    {init}
    return Run()


class Run:
    def log(self, numbers, step):
        print(numbers, step, file=open("said", "a"))
        if step == 2:
            raise RuntimeError("the disk is full")


def finish():
    print("finished", file=open("said", "a"))
"""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A package in the place of trackio."""

    def make(init="pass"):
        (tmp_path / "trackio.py").write_text(FAILING.format(init=init))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "trackio", raising=False)

    yield make
    sys.modules.pop("trackio", None)


def test_a_tracker_that_fails_is_left_out_with_one_warning_and_the_others_go_on(tmp_path, failing, caplog):
    failing()
    with open_trackers(config("trackio", "tensorboard"), tmp_path / "run", "r") as track:
        for step in range(1, 5):
            track(step, {"reward_mean": 0.5})
    (warning,) = caplog.records
    assert "trackio" in warning.message and "the disk is full" in warning.message
    assert len((tmp_path / "said").read_text().splitlines()) == 2
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward_mean")] == [1, 2, 3, 4]


def test_steps_that_are_taken_again_replace_what_tensorboard_showed(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_trackers(config("tensorboard"), tmp_path, "r") as track:
        for step in range(1, 5):
            track(step, {"reward_mean": 0.5})
    with open_trackers(config("tensorboard"), tmp_path, "r", Resumed(1, None, 2, None, frozenset(), ())) as track:
        track(3, {"reward_mean": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward_mean")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 0.5), (3, 0.75)]


def test_a_tracker_that_cannot_start_ends_the_run_before_it_begins(tmp_path, failing):
    failing("raise RuntimeError('not logged in')")
    with (
        pytest.raises(ConfigError, match="trackio cannot be started: not logged in"),
        open_trackers(config("trackio"), tmp_path, "r"),
    ):
        pass
