"""Which checkpoints of a run stay, whatever happens meanwhile."""

import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import time

import pytest
from keeping import die_removing, keep_on, opened, write

from harnessed.training.failures import CannotWrite

FILES = {"harnessed.json", "training.pt", "model.safetensors"}


def steps(folder):
    return sorted(int(path.name[-5:]) for path in (folder / "checkpoints").glob("step-*"))


def scores(folder):
    return json.loads((folder / "checkpoints" / "scores.json").read_text())


def test_the_last_ones_stay_and_the_best_beside_them(tmp_path):
    checkpoints = opened(tmp_path)
    for step, success in ((10, 0.2), (20, 0.9), (30, 0.4), (40, 0.5), (50, 0.3)):
        assert checkpoints.save(step, write).is_dir()
        checkpoints.scored(step, success)
    assert steps(tmp_path) == [20, 40, 50]
    assert (checkpoints.best(), checkpoints.newest()) == (checkpoints.path(20), checkpoints.path(50))
    found = scores(tmp_path)
    assert found == {"best": "step-00020", "scores": {"10": 0.2, "20": 0.9, "30": 0.4, "40": 0.5, "50": 0.3}}
    checkpoints.save(60, write)
    checkpoints.scored(60, 0.9)  # the later one of equals
    assert steps(tmp_path) == [50, 60]
    assert scores(tmp_path)["best"] == "step-00060"


@pytest.mark.parametrize(("keep_best", "left"), [(0, [40, 50]), (1, [10, 40, 50]), (2, [10, 30, 40, 50])])
def test_so_many_of_the_best_as_is_asked_for(tmp_path, keep_best, left):
    checkpoints = opened(tmp_path, keep_best=keep_best)
    for step, success in ((10, 0.9), (20, 0.1), (30, 0.5), (40, 0.2), (50, 0.3)):
        checkpoints.save(step, write)
        checkpoints.scored(step, success)
    assert steps(tmp_path) == left
    assert checkpoints.best() == checkpoints.path(10 if keep_best else 50)
    assert scores(tmp_path)["best"] == checkpoints.best().name


def test_without_scores_the_last_ones_stay_and_there_is_no_best(tmp_path):
    checkpoints = opened(tmp_path)
    assert (checkpoints.newest(), checkpoints.best()) == (None, None)
    for step in (1, 2, 3, 100_000):
        checkpoints.save(step, write)
    checkpoints.scored(3, None)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00003", "step-100000"}
    assert (checkpoints.newest(), checkpoints.best()) == (checkpoints.path(100_000), None)


def test_one_that_is_being_measured_stays_until_it_is_scored(tmp_path):
    checkpoints = opened(tmp_path, keep=1)
    checkpoints.save(10, write)
    checkpoints.await_score(10)
    for step in (20, 30):
        checkpoints.save(step, write)
    assert steps(tmp_path) == [10, 30]
    checkpoints.await_score(30)
    checkpoints.scored(10, None)
    assert steps(tmp_path) == [30]


def test_a_run_goes_on_with_what_is_there_also_elsewhere(tmp_path):
    first = opened(tmp_path / "run")
    for step, success in ((10, 0.9), (20, 0.1), (30, 0.2)):
        first.save(step, write)
        first.scored(step, success)
    (tmp_path / "run").rename(tmp_path / "moved")
    second = opened(tmp_path / "moved")
    assert (second.newest(), second.best()) == (second.path(30), second.path(10))
    second.save(40, write)
    assert steps(tmp_path / "moved") == [10, 30, 40]


def test_damaged_ones_are_passed_over_with_a_line(tmp_path):
    told = []
    checkpoints = opened(tmp_path, keep=5)
    for step in (10, 20, 30, 40, 50):
        checkpoints.save(step, write)
        checkpoints.scored(step, step / 100)
    for step, file in ((20, "harnessed.json"), (30, "model.safetensors"), (40, "training.pt")):
        path = checkpoints.path(step) / file
        os.truncate(path, path.stat().st_size // 2)
    (checkpoints.path(50) / "model.safetensors").unlink()
    again = opened(tmp_path, keep=1, note=told.append)
    assert again.newest() == again.path(10)
    assert [str(again.path(step)) in line for step, line in zip((50, 40, 30, 20), told, strict=True)] == [True] * 4
    assert again.best() == again.path(10)
    again.save(20, write)  # in its place
    assert again.newest() == again.path(20)
    assert steps(tmp_path) == [10, 20, 30, 40, 50]  # people may look at what is damaged
    assert scores(tmp_path) == {"best": "step-00010", "scores": {"10": 0.1, "30": 0.3, "40": 0.4, "50": 0.5}}


def test_the_score_of_a_step_is_not_that_of_another_policy(tmp_path):
    checkpoints = opened(tmp_path)
    checkpoints.save(10, write)
    checkpoints.scored(10, 0.9)
    checkpoints.save(20, write)
    checkpoints.scored(20, 0.5)
    checkpoints.save(10, write)  # training went back behind it
    assert checkpoints.best() == checkpoints.path(20)


def test_scores_that_cannot_be_read_are_told(tmp_path):
    checkpoints = opened(tmp_path)
    checkpoints.save(10, write)
    checkpoints.scored(10, 0.9)
    (tmp_path / "checkpoints" / "scores.json").write_text("[")
    told = []
    again = opened(tmp_path, note=told.append)
    assert "scores.json cannot be read" in told[0]
    assert again.best() is None
    again.scored(10, 0.8)
    assert again.best() == again.path(10)


def test_what_killed_processes_left_is_removed(tmp_path):
    opened(tmp_path).save(10, write)
    for name in (".step-00010.1234", ".step-00020.old"):
        write(tmp_path / "checkpoints" / "step-00020")
        (tmp_path / "checkpoints" / "step-00020").rename(tmp_path / "checkpoints" / name)
    for name in (".scores.json.new", ".mine"):
        (tmp_path / "checkpoints" / name).write_text("{")
    opened(tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00010", ".mine"}


def test_processes_that_are_killed_lose_nothing_and_leave_nothing(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keeping"])
    draw = random.Random(7)
    last = 0
    half_done = set()
    for _ in range(30):
        heard, say = context.Pipe(duplex=False)
        child = context.Process(target=keep_on, args=(tmp_path, say))
        child.start()
        assert heard.poll(30), "the child saved nothing"
        time.sleep(draw.random() * 0.03)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        say.close()
        while heard.poll():
            try:
                last = heard.recv()
            except EOFError:
                break
        half_done |= {path.name.split(".")[-1] for path in (tmp_path / "checkpoints").glob(".step-*")}
        there = steps(tmp_path)
        assert there[-1] >= last
        assert len(there) <= 5  # two last, one best, one just written, one not removed yet
        for step in there:
            assert {path.name for path in (tmp_path / "checkpoints" / f"step-{step:05d}").iterdir()} == FILES
        if (tmp_path / "checkpoints" / "scores.json").exists():
            best = scores(tmp_path)["best"]
            assert best is None or int(best[-5:]) in there
    told = []
    checkpoints = opened(tmp_path, note=told.append)
    assert checkpoints.newest() == checkpoints.path(steps(tmp_path)[-1])
    assert checkpoints.best() in {checkpoints.path(step) for step in steps(tmp_path)}
    assert told == []
    assert [path.name for path in (tmp_path / "checkpoints").glob(".*")] == []
    assert len(half_done) > 1, "no kill hit what it should"


def test_one_that_was_being_removed_is_none(tmp_path):
    opened(tmp_path, keep=1).save(10, write)
    child = multiprocessing.get_context("forkserver").Process(target=die_removing, args=(tmp_path,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [".step-00010.old", "step-00020"]
    opened(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00020"]


@pytest.fixture
def small_files():
    """Files of this process end at 4 kB, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_is_told_and_the_last_good_one_stays(tmp_path, small_files):
    checkpoints = opened(tmp_path, keep=1)
    checkpoints.save(10, write)
    small_files()
    with pytest.raises(CannotWrite, match=r"cannot write the checkpoint .*step-00020 \(is the disk full\?\)"):
        checkpoints.save(20, write)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00010"]
    assert opened(tmp_path).newest() == checkpoints.path(10)


def test_a_full_disk_loses_no_score_that_was_written(tmp_path, monkeypatch):
    checkpoints = opened(tmp_path, keep=1)
    checkpoints.save(10, write)
    checkpoints.scored(10, 0.9)

    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(CannotWrite, match=r"scores\.json \(is the disk full\?\): No space left"):
        checkpoints.scored(20, 0.95)
    monkeypatch.undo()
    assert opened(tmp_path).best() == checkpoints.path(10)
    monkeypatch.setattr("pathlib.Path.rename", full)
    with pytest.raises(CannotWrite, match=r"cannot remove the checkpoint .*step-00010"):
        checkpoints.save(10, write)
    monkeypatch.undo()
    assert opened(tmp_path).newest() == checkpoints.path(10)
