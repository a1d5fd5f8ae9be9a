"""What a run tells its gateway for the dashboard, and that no run depends on it."""

import json
import sys

from transcripts import node, transcript

from harnessed.client import ApiError, Unreachable
from harnessed.records import Fate
from harnessed.training.report import Report


class Posted:
    """In place of a gateway's client: keeps what it is given, or fails."""

    def __init__(self, failure=None):
        self.calls = []
        self.failure = failure

    def __call__(self, call):
        if self.failure:
            raise self.failure
        self.calls.append((call.path, call.body))


def test_metrics_are_posted_with_the_fates_of_their_step(tmp_path):
    gateway, notes = Posted(), []
    report = Report(tmp_path, gateway, "r", notes.append)
    report.transcript(transcript([node(1, 0, [1], [2, 9])], id="g.0"), {}, {Fate.TRAINED: 2}, 1)
    report.metrics(1, {"reward_mean": 0.5})
    report.metrics(2, {"reward_mean": 0.6})
    assert [path for path, _ in gateway.calls] == ["/api/runs/r/fates", *["/api/runs/r/metrics"] * 2]
    assert gateway.calls[0][1] == {"g.0": {"trained": 2}}
    assert gateway.calls[1][1]["values"] == json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert not notes


def test_a_gateway_that_does_not_take_them_ends_no_run(tmp_path):
    for failure in (ApiError("POST", 500, "the disk is full"), Unreachable("nobody answers")):
        notes = []
        Report(tmp_path, Posted(failure), "r", notes.append).metrics(1, {})
        assert len(notes) == 1 and str(failure) in notes[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_picture_that_cannot_be_drawn_is_told_once_and_ends_no_run(tmp_path, monkeypatch):
    notes = []
    report = Report(tmp_path, Posted(), "r", notes.append)
    report.metrics(1, {"reward_mean": 0.5})
    report.curve()
    drawn = (tmp_path / "curve.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and notes == []
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.curve()
    report.curve()
    assert len(notes) == 1 and "no curve.png" in notes[0]
    assert (tmp_path / "curve.png").read_bytes() == drawn


def test_trackers_get_what_the_file_gets(tmp_path):
    tracked = []
    report = Report(tmp_path, Posted(), "r", print, lambda step, metrics: tracked.append((step, metrics)))
    report.metrics(3, {"reward_mean": 0.5})
    assert tracked == [(3, {"reward_mean": 0.5})]
