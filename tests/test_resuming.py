"""Which run `--resume` goes on with, what has to be as it was, and who is waited for."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from harnessed import resuming
from harnessed.cli import _parse
from harnessed.config import Config, ConfigError
from harnessed.controller.predecessor import Predecessor
from harnessed.gateway.app import DATABASE
from harnessed.gateway.store import _lock_file
from harnessed.records import Turnstile, Version
from harnessed.resuming import RunRecord
from harnessed.run import Run
from harnessed.training.failures import CannotWrite, WrongVersion
from harnessed.training.lineages import Lineage
from harnessed.training.resumed import Resumed

LIVES = [Lineage(0, 0, 0), Lineage(1, 6, 4)]


def config(model=Path("policy"), **sections) -> Config:
    return Config.model_validate(
        {
            "policy": {"model": str(model)},
            "tasks": {"train": "a:b", "held_out": "a:b"},
            "harness": {"kind": "python", "function": "a:b"},
            "evaluator": {"function": "a:b"},
            **sections,
        }
    )


def a_run(folder: Path, id="run-1f2e3d", created=1.0, **settings) -> Path:
    folder.mkdir(parents=True)
    RunRecord(id, created, "print", lineages=LIVES).write(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(resuming.used(config(**settings))))
    return folder


def test_the_newest_run_of_the_name_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no run of the name run in"):
        resuming.find(config())
    runs = tmp_path / "runs"
    (runs / "run-20300101-000000").mkdir(parents=True)  # an evaluation, or one that never began
    newest = a_run(runs / "run-20260101-000000", created=3.0)
    a_run(runs / "run-20270101-000000", created=2.0)
    a_run(runs / "run-long-20280101-000000", id="run-long-1f2e3d", created=4.0)
    assert resuming.find(config()) == newest
    assert resuming.find(config(run={"folder": str(newest)})) == newest
    first = a_run(runs / "first", created=5.0)  # where run.folder was set
    assert resuming.find(config()) == first
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        resuming.find(config(run={"folder": str(runs)}))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "r"}', '{"id": "r", "lineages": 3}'])
def test_a_damaged_record_is_told(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--resume: cannot read .*run\.json"):
        RunRecord.read(tmp_path)


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = RunRecord("run-1", 1.5, "print", 2, LIVES)
    record.write(tmp_path)
    assert RunRecord.read(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_full_disk_is_told_and_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    RunRecord("run-1", 1.5, "print").write(tmp_path)

    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CannotWrite, match=r"cannot write .*run\.json: No space left on device"):
        RunRecord("run-1", 1.5, "print", 1).write(tmp_path)
    assert RunRecord.read(tmp_path).resumed == 0


def test_what_may_change_is_said(tmp_path):
    folder = a_run(tmp_path / "run", harness={"kind": "python", "function": "a:b", "environment": {"KEY": "old"}})
    environment = {"kind": "python", "function": "a:b", "environment": {"KEY": "new"}}
    now = config(Path("/moved"), trainer={"steps": 7}, harness=environment, run={"folder": str(folder)})
    assert resuming.changes(folder, now) == ["harness.environment.KEY", "trainer.steps: 100 -> 7"]


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"seed": 1}},
        {"trainer": {"lora": {"rank": 4}}},
        {"trainer": {"optimiser": {"kind": "adamw8bit"}}},
    ],
)
def test_what_has_to_stay_is_refused(tmp_path, sections):
    with pytest.raises(ConfigError, match=r"--resume: .* set it as it was, or begin another run"):
        resuming.changes(a_run(tmp_path / "before"), config(**sections))
    with pytest.raises(ConfigError, match=r"--resume: .* set it as it was, or begin another run"):
        resuming.changes(a_run(tmp_path / "after", **sections), config())


def test_a_policy_is_known_by_what_it_holds(tmp_path):
    record, model = RunRecord("run-1", 1.0, ""), tmp_path / "policy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = bytearray(resuming._SAMPLED_BYTES * resuming._SAMPLES * 3)
    (model / "model.safetensors").write_bytes(weights)
    record.policy = resuming.fingerprint(model)
    (model / "README.md").write_text("what training does not read")
    resuming.check_policy(record, model.rename(tmp_path / "moved"))
    trained = bytes(byte ^ 1 for byte in weights[:1000]) + weights[1000:]
    for name, content in (("config.json", b"{} "), ("model.safetensors", trained), ("tokenizer.json", b"{}")):
        before = (tmp_path / "moved" / name).read_bytes() if (tmp_path / "moved" / name).exists() else None
        (tmp_path / "moved" / name).write_bytes(content)
        with pytest.raises(ConfigError, match="is not the model that the run began with"):
            resuming.check_policy(record, tmp_path / "moved")
        (tmp_path / "moved" / name).unlink()
        if before is not None:
            (tmp_path / "moved" / name).write_bytes(before)


def test_a_folder_has_one_trainer_until_that_is_killed(tmp_path, monkeypatch):
    script = (
        "import sys, time, pathlib; from harnessed import resuming; lock = resuming.hold(pathlib.Path(sys.argv[1])); "
    )
    command = [sys.executable, "-c", f"{script} print(1, flush=True); time.sleep(100)", str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        monkeypatch.setattr(resuming, "_PATIENCE_S", 0.1)
        with pytest.raises(ConfigError, match=rf"another trainer \(process {other.pid}\) works in"):
            resuming.hold(tmp_path)
        other.kill()
        monkeypatch.setattr(resuming, "_PATIENCE_S", 30.0)
        with resuming.hold(tmp_path):
            assert (tmp_path / "trainer.lock").read_text() == f"{os.getpid()}\n"
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


@pytest.mark.parametrize("service", ["gateway", "controller"])
def test_services_that_still_end_are_waited_for(tmp_path, monkeypatch, capsys, service):
    """They hold what real ones hold."""
    folder = tmp_path / "attempts"
    if service == "gateway":
        descriptor = _lock_file(tmp_path / DATABASE)
        release = lambda: os.close(descriptor)  # noqa: E731
    else:
        predecessor = Predecessor(folder, "one that ends")
        release = predecessor._file.close
    monkeypatch.setattr(resuming, "LEFTOVERS_LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match=f"a {service} still works in"):
        resuming.wait_for_leftovers(tmp_path, config())
    elsewhere = {"gateway": {"url": "http://127.0.0.1:1"}, "controller": {"external": True}}
    resuming.wait_for_leftovers(tmp_path, config(**elsewhere))
    monkeypatch.setattr(resuming, "LEFTOVERS_LIMIT_S", 60.0)
    began = time.monotonic()
    timer = threading.Timer(0.3, release)
    timer.start()
    resuming.wait_for_leftovers(tmp_path, config())
    timer.join()
    assert time.monotonic() - began >= 0.3
    assert capsys.readouterr().out.count(f"waiting for the {service}") == 2  # once each time
    resuming.wait_for_leftovers(tmp_path, config())


def test_a_run_goes_on_from_its_own_newest_checkpoint_then_from_another_runs(tmp_path, capsys):
    def checkpoint(folder, step, **notes):
        folder.mkdir(parents=True)
        said = {"step": step, "version": [0, step - 1], "tasks": 0, "groups": [f"g.{step}"]} | notes
        (folder / "harnessed.json").write_text(json.dumps(said))
        torch.save({}, folder / "training.pt")
        save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
        return folder

    folder, record = a_run(tmp_path / "run"), RunRecord("run-1", 1.0, "print", 1, LIVES)
    found = resuming.take_up(folder, record, config())
    assert (found.checkpoint, found.step, found.version, found.groups, found.times) == (None, 0, None, frozenset(), 2)
    assert found.served == (Version(0, 0), Version(1, 6))
    other = checkpoint(tmp_path / "other", 20)
    found = resuming.take_up(folder, record, config(trainer={"resume_from": str(other)}))
    assert (found.checkpoint, found.step, found.groups) == (other, 20, frozenset())
    earlier = checkpoint(folder / "checkpoints" / "step-99998", 99998)
    own = checkpoint(folder / "checkpoints" / "step-100000", 100000)
    (folder / "checkpoints" / ".step-100001.77" / "adapter").mkdir(parents=True)
    found = resuming.take_up(folder, record, config(trainer={"resume_from": str(other)}))
    assert (found.checkpoint, found.step, found.version) == (own, 100000, Version(0, 99999))
    assert found.groups == {"g.100000"} and Version(0, 99999) in found.served
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-99998", "step-100000"}
    (own / "harnessed.json").write_text("{")
    assert resuming.take_up(folder, record, config()).checkpoint == earlier
    assert f"{own} is damaged and passed over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("summary", "steps", "done"),
    [
        (None, 5, False),
        ({"steps": 5, "interrupted": False}, 5, True),
        ({"steps": 5, "interrupted": False}, 4, True),
        ({"steps": 5, "interrupted": False}, 6, False),
        ({"steps": 5, "interrupted": True}, 5, False),
    ],
)
def test_a_run_that_has_taken_its_steps_is_done(tmp_path, summary, steps, done):
    if summary:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert bool(resuming.finished(tmp_path, steps)) == done


class Asked:
    """In place of a client: keeps what it was asked, and answers with a turnstile."""

    def __init__(self, calls: list, owner: str = "") -> None:
        self.calls, self.owner = calls, owner

    def __call__(self, call):
        self.calls.append((call.path.rpartition("/")[2], (call.body or {}).get("owner"), (call.body or {}).get("mode")))
        return Turnstile(run="r", owner=self.owner)


@pytest.mark.parametrize("holder", ["", "trainer that died"])
@pytest.mark.parametrize("engine", [{}, {"url": "http://127.0.0.1:1", "weights": "w"}], ids=["own", "another's"])
def test_nothing_generates_while_the_weights_of_a_resumed_run_are_written_anew(holder, engine):
    calls: list = []
    run = Run.__new__(Run)
    run.id, run._config, run.gateway = "r", config(engine=engine), Asked(calls, holder)
    run.engine = lambda: Asked(calls)
    run.resumed = None
    with run.weights_begin():
        calls.append("written")
    assert calls == ["written"]
    calls.clear()
    run.resumed = Resumed(1, None, 0, None, frozenset(), ())
    with pytest.raises(ValueError, match="no such model"), run.weights_begin():
        calls.append("written")
        raise ValueError("no such model")
    owner = holder or "trainer of r"
    still, on = ([("pause", None, None)], [("resume", None, None)]) if engine else ([], [])
    close, open_ = ("close", owner, "interrupt"), ("open", owner, None)
    assert calls == [("turnstile", None, None), close, *still, "written", *on, open_]


def test_a_life_begins_with_a_version_that_none_before_it_had(tmp_path):
    run = Run.__new__(Run)
    run.folder, run.resumed = tmp_path, None
    run._record = RunRecord("run-1", 1.0, "print")
    run.begin_lineage(Version(0, 0))
    run.resumed = Resumed(1, tmp_path / "c", 4, Version(0, 4), frozenset(), (Version(0, 0),))
    run.begin_lineage(Version(1, 6))
    assert run.lineages == RunRecord.read(tmp_path).lineages == LIVES
    for version in (Version(1, 7), Version(0, 0)):
        with pytest.raises(WrongVersion, match="was served in an earlier life"):
            run.begin_lineage(version)


def test_overrides_may_stand_on_both_sides_of_an_option(capsys):
    assert _parse(["train", "c.yaml", "a.b=1", "--resume", "c.d=2"]).overrides == ["a.b=1", "c.d=2"]
    assert _parse(["train", "--resume", "c.yaml"]).resume
    for wrong in (["train", "c.yaml", "--resum=x"], ["train", "c.yaml", "--resume", "--dry-run"], ["status", "--x"]):
        with pytest.raises(SystemExit) as ended:
            _parse(wrong)
        assert ended.value.code == 2
