"""Tracks two steps with a real package and prints what it kept, as JSON: `python track.py KIND FOLDER [resumed]`.

The run is then resumed after the first of them, and takes the second again.

Run by test_trackers.py in the environment that has the packages.
"""

import json
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from harnessed.config import Config
from harnessed.training.resumed import Resumed
from harnessed.training.trackers import open_trackers

LINES = [
    (1, {"reward_mean": 0.5, "reward/tests": 0.25, "version": [0, 1], "held_out": None}),
    (2, {"reward_mean": 0.75}),
]


def main(kind: str, folder: Path, *, is_resumed: bool) -> None:
    config = Config.model_validate(
        {
            "run": {"project": "proj"},
            "policy": {"model": "policy"},
            "tasks": {"train": "a:b", "held_out": "a:b"},
            "harness": {"kind": "python", "function": "a:b", "environment": {"TOKEN": "a-secret"}},
            "evaluator": {"function": "a:b"},
            "trainer": {"trackers": [kind]},
        }
    )
    with open_trackers(config, folder, "run-1") as track:
        for step, metrics in LINES:
            track(step, metrics)
    if is_resumed:
        resumed = Resumed(1, None, 1, None, frozenset(), ())
        with open_trackers(config, folder, "run-1", resumed) as track:
            track(2, {"reward_mean": 0.25})
    print(json.dumps(KEPT[kind](folder / kind)))


def kept_by_wandb(folder: Path) -> dict:
    path = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    deadline = time.monotonic() + 30
    while not (kept := kept_in(path))["points"] and time.monotonic() < deadline:
        time.sleep(0.1)  # another process of the package writes it
    return kept


def kept_in(path: Path) -> dict:
    from wandb.proto import wandb_internal_pb2 as proto

    kept = {"points": []}
    for data in records_of(path.read_bytes()):
        record = proto.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            settings = {each.key: json.loads(each.value_json) for each in record.run.config.update}
            kept |= {"project": record.run.project, "run": record.run.display_name, "steps": settings["trainer.steps"]}
        values = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        kept["points"] += [[values["_step"], name, x] for name, x in values.items() if not name.startswith("_")]
    return kept


def records_of(log: bytes) -> Iterator[bytes]:
    """The records of a W&B file: after 7 bytes, LevelDB's log format, in which none crosses a block's end."""
    at, begun, block = 7, b"", 32_768
    while at + 7 <= len(log):
        if block - at % block < 7:
            at += block - at % block
        length, kind = struct.unpack_from("<HB", log, at + 4)
        begun += log[at + 7 : at + 7 + length]
        if kind in (1, 4):  # whole, or the last part
            yield begun
            begun = b""
        at += 7 + length


def kept_by_mlflow(folder: Path) -> dict:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("proj")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    points = [[metric.step, metric.key, metric.value] for history in histories for metric in history]
    steps = int(run.data.params["trainer.steps"])
    return {"project": experiment.name, "run": run.info.run_name, "steps": steps, "points": points}


def kept_by_trackio(folder: Path) -> dict:
    with sqlite3.connect(folder / "proj.db") as database:
        logged = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
        ((settings,),) = database.execute("select config from configs").fetchall()
    points = [[step, name, x] for _, step, metrics in logged for name, x in json.loads(metrics).items()]
    (run,) = {name for name, _, _ in logged}
    return {"project": "proj", "run": run, "steps": json.loads(settings)["trainer.steps"], "points": points}


KEPT = {"wandb": kept_by_wandb, "mlflow": kept_by_mlflow, "trackio": kept_by_trackio}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), is_resumed=sys.argv[3:] == ["resumed"])
