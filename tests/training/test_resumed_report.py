"""The books of a run whose trainer died: what of them goes on, and that nothing is booked twice."""

import errno
import json
from collections import Counter
from pathlib import Path

import pytest
from test_report import summary
from transcripts import node, transcript

from harnessed.records import Fate, Outcome
from harnessed.training.failures import CannotWrite
from harnessed.training.lines import keep_lines
from harnessed.training.report import Report


class Posted:
    """In place of a gateway's client."""

    def __init__(self):
        self.calls = []

    def __call__(self, call):
        self.calls.append((call.method, call.path, call.body or call.query))


def report_in(folder):
    gateway = Posted()
    return Report(folder, gateway, "r", print), gateway


def book(report, rollout, step, fate=Fate.TRAINED, outcome=Outcome.OK):
    report.transcript(transcript([node(1, 0, [1], [2, 9])], id=rollout, outcome=outcome), {}, {fate: 2}, step)


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def dead(tmp_path):
    """Three steps, with an evaluation before the first and after the second; the checkpoint is that of step 2."""
    report, _ = report_in(tmp_path)
    book(report, "before.0", None, Fate.EVALUATION)
    report.metrics(0, {"held_out": 0.5})
    for step in (1, 2, 3):
        book(report, f"g{step}.0", step)
        book(report, f"g{step}.1", step, Fate.INFRASTRUCTURE, Outcome.INFRASTRUCTURE)
        report.metrics(step, {"reward_mean": step / 10})
        if step == 2:
            report.metrics(2, {"timing_s/checkpoint": 1.0})
    book(report, "after-3.0", None, Fate.EVALUATION)
    report.metrics(3, {"held_out": 0.75})
    return tmp_path


def test_what_came_after_the_checkpoint_goes_and_evaluations_stay_booked(dead):
    report, _ = report_in(dead)
    history = report.resume(2)
    assert [line["step"] for line in history] == [0, 1, 2, 2]
    assert lines(dead / "metrics.jsonl") == history
    left = [line["rollout"] for line in lines(dead / "transcripts.jsonl")]
    assert left == ["before.0", "g1.0", "g1.1", "g2.0", "g2.1", "after-3.0"]
    assert report.fates == Counter({Fate.EVALUATION: 4, Fate.TRAINED: 4, Fate.INFRASTRUCTURE: 4})
    assert report.outcomes == {"ok": 4, "infrastructure": 2}
    assert all(isinstance(fate, Fate) for fate in report.fates)
    assert not [path for path in dead.iterdir() if path.name.startswith(".")]


def test_what_goes_on_is_booked_once_and_what_was_taken_back_again(dead):
    report, _ = report_in(dead)
    report.resume(2)
    assert report.has("g2.0") and report.has("after-3.0") and not report.has("g3.0")
    for rollout, step in (("g2.0", 2), ("g3.0", 3), ("g3.1", 3), ("after-3.0", None)):
        book(report, rollout, step)
    booked = [line["rollout"] for line in lines(dead / "transcripts.jsonl")]
    assert len(booked) == len(set(booked)) == 8
    assert report.fates.total() == 16
    assert sum(report.outcomes.values()) == 8


def test_the_dashboard_forgets_the_same_lines_and_hears_of_evaluations_again(dead):
    report, gateway = report_in(dead)
    report.resume(2)
    report.metrics(3, {})
    assert gateway.calls == [
        ("DELETE", "/api/runs/r/metrics", {"above": 2}),
        ("POST", "/api/runs/r/fates", {"before.0": {"evaluation": 2}, "after-3.0": {"evaluation": 2}}),
        ("POST", "/api/runs/r/metrics", {"number": 0, "step": 3, "values": {"step": 3}, "time": None}),
    ]


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_line_that_the_dying_trainer_did_not_finish_is_dropped(dead, cut):
    for name in ("metrics.jsonl", "transcripts.jsonl"):
        whole = (dead / name).read_bytes()
        (dead / name).write_bytes(whole + whole.splitlines(keepends=True)[0][:-1][:cut])
    report, _ = report_in(dead)
    report.resume(3)
    report.metrics(4, {})
    assert [line["step"] for line in lines(dead / "metrics.jsonl")] == [0, 1, 2, 2, 3, 3, 4]
    assert len(lines(dead / "transcripts.jsonl")) == 8


def test_a_run_that_died_before_its_first_line_begins_anew(tmp_path):
    report, _ = report_in(tmp_path)
    assert report.resume(0) == []
    assert report.fates == {} and not list(tmp_path.iterdir())


def test_files_are_replaced_in_one_step_and_only_where_a_line_goes(dead):
    path = dead / "metrics.jsonl"
    before, inode = path.read_bytes(), path.stat().st_ino
    keep_lines(path, lambda line: True)
    assert path.read_bytes() == before and path.stat().st_ino == inode

    def dies(line):
        if line["step"] == 2:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        keep_lines(path, dies)
    assert path.read_bytes() == before
    keep_lines(path, lambda line: line["step"] == 2)
    assert [line["step"] for line in lines(path)] == [2, 2]


def test_a_full_disk_is_told_and_leaves_the_books_as_they_were(dead, monkeypatch):
    before = (dead / "metrics.jsonl").read_bytes()

    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    report, _ = report_in(dead)
    with pytest.raises(CannotWrite, match=r"cannot rewrite .*metrics.jsonl: No space left"):
        report.resume(2)
    assert (dead / "metrics.jsonl").read_bytes() == before


def test_the_books_of_a_resumed_run_say_what_they_do_not_know():
    books = summary(10, None, 10)
    books.resumed = 1
    assert books.balanced and "when the run was resumed is not known" in books.books
    books.fates = {"trained": 9}
    assert books.books == "THE BOOKS DO NOT BALANCE"
