"""What comes of counting rows where rollouts are meant: three settings, the same tasks, seeds, and number of updates.

    python benchmarks/ablation.py [FOLDER]

`make ablation` runs it. The workload is `ablation/ablation.yaml`: a harness whose rollouts give one row or many, as the
task needs it and as the policy does it. Runs go one after the other into FOLDER/<setting>-seed<n>; one that has
finished is kept, so that an interrupted ablation goes on. At the end all of them are drawn and told as a table.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = Path(__file__).with_name("ablation")
PICTURE = ROOT / "docs" / "ablation.png"
SETTINGS = {
    "rollout advantage, rollout normalisation": ("rollout", "rollout"),
    "rollout advantage, sample normalisation": ("rollout", "sample"),
    "sample advantage, sample normalisation": ("row", "sample"),
}
"""What is compared: trainer.advantage.per and trainer.objective.normalisation. The others are told against the first.
"""
SEEDS = range(5)
T_QUANTILE = 2.776
"""0.975 quantile of Student's t with len(SEEDS) - 1 degrees of freedom."""
LAST_STEPS = 5
"""The final entropy is the mean over so many."""
LIMIT_S = 1200
COLOURS = ("tab:blue", "tab:orange", "tab:red")

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curves:
    """The runs of one setting."""

    held_out_steps: list[int]
    held_out: Values
    """Success [seed, held-out evaluation]."""
    entropy: Values
    """Nats for each trained token [seed, step]; not a number where a step trained nothing."""
    rows: Values
    """For each rollout taken [seed, step]."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare what counts as one: a rollout, or a row.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "runs" / "ablation")
    folder: Path = parser.parse_args().folder.absolute()
    curves = ablate(folder)
    draw(curves, PICTURE)
    print(f"\n{PICTURE}\n")
    print("\n".join(table(curves)))


def ablate(folder: Path) -> dict[str, Curves]:
    """Whatever has not finished yet is run; then all are read. Raises SystemExit where a run fails."""
    runs: dict[str, list[Path]] = {name: [] for name in SETTINGS}
    for seed in SEEDS:
        policy = make_policy(folder / f"policy-seed{seed}", seed)
        for name, (per, normalisation) in SETTINGS.items():
            run = folder / f"{per}-{normalisation}-seed{seed}"
            overrides = [f"trainer.advantage.per={per}", f"trainer.objective.normalisation={normalisation}"]
            train(run, [f"run.seed={seed}", f"policy.model={policy}", *overrides])
            runs[name].append(run)
    check_equal([run for of_setting in runs.values() for run in of_setting])
    return {name: read(of_setting) for name, of_setting in runs.items()}


def make_policy(folder: Path, seed: int) -> Path:
    if not folder.exists():
        call(str(WORKLOAD / "make_policy.py"), str(folder), "--seed", str(seed))
    return folder


def train(run: Path, overrides: list[str]) -> None:
    if (run / "summary.json").exists():
        return
    print(f"\n== {run.name}", flush=True)
    shutil.rmtree(run, ignore_errors=True)  # what an interruption left
    call("-m", "harnessed", "train", str(WORKLOAD / "ablation.yaml"), f"run.folder={run}", *overrides)
    if json.loads((run / "summary.json").read_text())["interrupted"]:
        shutil.rmtree(run)
        sys.exit("interrupted; the same command goes on from here")


def call(*arguments: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "examples" / "demo"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run([sys.executable, *arguments], env=environment, timeout=LIMIT_S, check=False)
    if ended.returncode:
        sys.exit(f"status {ended.returncode} of {' '.join(arguments)}")


def check_equal(runs: Sequence[Path]) -> None:
    """Runs of another workload are not compared. Raises SystemExit."""
    first = workload(runs[0])
    for run in runs[1:]:
        if workload(run) != first:
            sys.exit(f"{run.name} is a run of another workload than {runs[0].name}: remove the one that is out of date")


def workload(run: Path) -> dict[str, Any]:
    """The settings of a run, without those that differ by intent."""
    settings: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    del settings["run"], settings["policy"]
    del settings["trainer"]["advantage"]["per"], settings["trainer"]["objective"]["normalisation"]
    return settings


def read(runs: list[Path]) -> Curves:
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()] for run in runs]
    measured = [[line for line in of_run if "held_out" in line] for of_run in lines]
    steps = [[line for line in of_run if "rows_per_rollout" in line] for of_run in lines]
    return Curves(
        held_out_steps=[line["step"] for line in measured[0]],
        held_out=array([[line["held_out"] for line in of_run] for of_run in measured]),
        entropy=array([[line.get("entropy") for line in of_run] for of_run in steps]),
        rows=array([[line["rows_per_rollout"] for line in of_run] for of_run in steps]),
    )


def array(values: list[list[float | None]]) -> Values:
    return np.array(values, dtype=np.float64)  # None is not a number


def interval(values: Values) -> tuple[Values, Values]:
    """Mean over seeds, and half the width of its 95 % interval by Student's t; `values` [seed, ...]."""
    return values.mean(axis=0), T_QUANTILE * values.std(axis=0, ddof=1) / np.sqrt(len(values))


def draw(curves: dict[str, Curves], picture: Path) -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    success, entropy = figure.subplots(1, 2)
    for (name, of_setting), colour in zip(curves.items(), COLOURS, strict=True):
        steps = np.arange(1, of_setting.entropy.shape[1] + 1)
        for axes, at, values in (
            (success, np.array(of_setting.held_out_steps), of_setting.held_out),
            (entropy, steps, of_setting.entropy),
        ):
            mean, half = interval(values)
            axes.plot(at, mean, color=colour, label=name)
            axes.fill_between(at, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
    success.set(title="held-out success", xlabel="updates", ylim=(0, 1))
    entropy.set(title="entropy in training, nats per token", xlabel="updates", ylim=(0, None))
    for axes in (success, entropy):
        axes.set_xticks(next(iter(curves.values())).held_out_steps)
        axes.grid(alpha=0.3)
    success.legend(loc="upper left", fontsize="small")
    figure.suptitle(f"mean and 95 % interval over {len(SEEDS)} seeds", fontsize="medium")
    figure.savefig(picture, dpi=110)


def table(curves: dict[str, Curves]) -> list[str]:
    """Markdown: each setting, and its difference to the first on the same seeds."""
    columns = [
        "held-out success, last",
        "mean of evaluations but the first",
        "entropy, last steps",
        "rows of a rollout",
    ]
    lines = [f"| setting | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    numbers = {name: results(of_setting) for name, of_setting in curves.items()}
    for name, of_setting in numbers.items():
        lines.append(row(name, of_setting))
    first, *others = numbers
    for name in others:
        lines.append(row(f"{name}, less the first", numbers[name] - numbers[first]))
    return lines


def results(curves: Curves) -> Values:
    """One line for each seed: final success, mean success, final entropy, rows for each rollout."""
    return np.stack(
        [
            curves.held_out[:, -1],
            curves.held_out[:, 1:].mean(axis=1),
            np.nanmean(curves.entropy[:, -LAST_STEPS:], axis=1),
            curves.rows.mean(axis=1),
        ],
        axis=1,
    )


def row(name: str, values: Values) -> str:
    means, halves = interval(values)
    cells = [f"{mean:.3f} ± {half:.3f}" for mean, half in zip(means, halves, strict=True)]
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
