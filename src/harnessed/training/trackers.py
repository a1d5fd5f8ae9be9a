"""Gives the metrics of a run to TensorBoard, W&B, MLflow or trackio, as `trainer.trackers` says.

`cli.py` opens them around a run. Each writes into the run's folder; whether one also sends anything is for its own
environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID). None of them can end a run that has begun.
"""

import contextlib
import importlib.util
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harnessed.config import Config, ConfigError
from harnessed.training.resumed import Resumed

log = logging.getLogger(__name__)

Track = Callable[[int, dict[str, Any]], None]
"""Takes a step and its metrics; those that are no numbers are left out."""
Tracker = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]
"""What writes the numbers of a step, and what is called at the end."""

TOLD = {"run", "policy", "sampling", "limits", "trainer", "evaluation"}
"""Sections of the configuration that trackers get: the others hold environments, addresses and paths."""


def check_trackers(kinds: Sequence[str]) -> None:
    """Raises ConfigError that says what to install."""
    for kind in kinds:
        if importlib.util.find_spec(kind) is None:
            raise ConfigError(f"trainer.trackers: {kind} is not installed; `pip install {kind}`, or leave it out")


@contextlib.contextmanager
def open_trackers(config: Config, folder: Path, run: str, resumed: Resumed | None = None) -> Iterator[Track]:
    """`run`: its id, within the project `run.project`. Raises ConfigError where one cannot be started.

    A run that is resumed goes on where it was, and in W&B, which takes no step twice, as a run of its own.
    """
    settings = dict(_flat(config.model_dump(mode="json", include=TOLD)))
    trackers: dict[str, Tracker] = {}
    for kind in dict.fromkeys(config.trainer.trackers):
        try:
            trackers[kind] = _OPEN[kind](folder / kind, config.run.project, run, settings, resumed)
        except Exception as error:  # whatever the package raises, its message is what the user needs
            raise ConfigError(f"trainer.trackers: {kind} cannot be started: {error}") from error
    try:
        yield lambda step, metrics: _track(trackers, step, _numbers(metrics))
    finally:
        for name, (_, close) in trackers.items():
            _attempt(name, close)


def _track(trackers: dict[str, Tracker], step: int, numbers: dict[str, float]) -> None:
    for kind, (write, _) in list(trackers.items()):
        if not _attempt(kind, partial(write, step, numbers)):
            del trackers[kind]


def _attempt(kind: str, what: Callable[[], None]) -> bool:
    try:
        what()
    except Exception as error:  # noqa: BLE001  # whatever the package raises: the books are in metrics.jsonl
        log.warning("%s gets no more metrics of this run: %s: %s", kind, type(error).__name__, error)
        return False
    return True


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _open_tensorboard(
    folder: Path, project: str, name: str, settings: dict[str, Any], resumed: Resumed | None
) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # What is taken again replaces what was there.
    writer = SummaryWriter(str(folder), purge_step=resumed.step + 1 if resumed else None)
    rows = "".join(f"| {setting} | {value} |\n" for setting, value in settings.items())
    writer.add_text("settings", f"{project}, {name}\n\n| setting | value |\n| --- | --- |\n{rows}")

    def write(step: int, numbers: dict[str, float]) -> None:
        for metric, value in numbers.items():
            writer.add_scalar(metric, value, step)
        writer.flush()

    return write, writer.close


def _open_wandb(folder: Path, project: str, name: str, settings: dict[str, Any], resumed: Resumed | None) -> Tracker:
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    folder.mkdir(exist_ok=True)
    quiet = wandb.Settings(silent=True, console="off")
    name = f"{name}-resumed-{resumed.times}" if resumed else name
    run = wandb.init(project=project, name=name, dir=str(folder), config=settings, settings=quiet)
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _open_mlflow(folder: Path, project: str, name: str, settings: dict[str, Any], resumed: Resumed | None) -> Tracker:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    folder.mkdir(exist_ok=True)
    # Its store in plain files gets no updates any more.
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(project)
    id = experiment.experiment_id if experiment else client.create_experiment(project)
    before = client.search_runs([id], f"attributes.run_name = '{name}'", max_results=1) if resumed else []
    run = (before[0] if before else client.create_run(id, run_name=name)).info.run_id
    if before:
        client.update_run(run, "RUNNING")
    for setting, value in settings.items() if not before else ():  # it takes each of them once
        client.log_param(run, setting, value)

    def write(step: int, numbers: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        # Other characters are refused; names of parts of a reward are the evaluator's.
        names = {metric: re.sub(r"[^\w./ -]", "_", metric) for metric in numbers}
        client.log_batch(run, [Metric(names[metric], value, now, step) for metric, value in numbers.items()])

    return write, lambda: client.set_terminated(run)


def _open_trackio(folder: Path, project: str, name: str, settings: dict[str, Any], resumed: Resumed | None) -> Tracker:
    os.environ.setdefault("TRACKIO_DIR", str(folder))
    import trackio

    def close() -> None:
        with quiet():
            trackio.finish()

    quiet = partial(contextlib.redirect_stdout, io.StringIO())  # the terminal belongs to the display
    with quiet():
        resume = "allow" if resumed else "never"
        alone = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        run = trackio.init(project, name, config=settings, resume=resume, **alone)
    return lambda step, numbers: run.log(numbers, step=step), close


_OPEN = {"tensorboard": _open_tensorboard, "wandb": _open_wandb, "mlflow": _open_mlflow, "trackio": _open_trackio}
