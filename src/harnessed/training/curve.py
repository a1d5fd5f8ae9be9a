"""curve.png in a run's folder: reward and held-out success, entropy and gradient norm. `report.py` draws it."""

import os
from pathlib import Path
from typing import Any

import orjson

SIZE_INCHES = (8, 6)
DOTS_PER_INCH = 120


def draw(metrics: Path, picture: Path) -> None:
    """Draw the lines of a metrics.jsonl. The picture is whole at any time.

    Raises ImportError where matplotlib is not installed.
    """
    # Imported late, because most commands draw nothing; without pyplot, because there may be no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = [orjson.loads(line) for line in metrics.read_bytes().splitlines()]
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    right = below.twinx()

    _curve(above, lines, "reward_mean", label="reward, mean of the step", color="C0")
    _curve(above, lines, "held_out", label="held-out tasks", color="C3", marker="o", linestyle="--")
    _curve(above, lines, "held_out_greedy", label="held-out tasks, greedy", color="C1", marker="s", linestyle=":")
    _curve(below, lines, "entropy", label="entropy", color="C2")
    _curve(right, lines, "grad_norm", label="gradient norm", color="C4", alpha=0.6)

    above.set_ylabel("reward")
    below.set_ylabel("entropy [nats]", color="C2")
    right.set_ylabel("gradient norm", color="C4")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend(loc="best")
    for axes in (below, right):
        axes.axhline(0, linewidth=0)  # the scale begins there

    unfinished = picture.with_name(f".{picture.name}.{os.getpid()}")
    FigureCanvasAgg(figure).print_figure(unfinished, dpi=DOTS_PER_INCH, format="png")
    unfinished.replace(picture)


def _curve(axes: Any, lines: list[dict[str, Any]], name: str, **style: Any) -> None:
    points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    if points:
        axes.plot(*zip(*points, strict=True), **style)
