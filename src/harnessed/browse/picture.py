"""Draws timelines: lanes for engine, trainer and rollouts, a column for each run, all on one scale. `compare.py` calls
`draw`."""

import heapq
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from harnessed.browse.timeline import RUNNING, TRIED_AGAIN, Bar, Floats, Period, Shares, Timeline, running
from harnessed.records import Outcome
from harnessed.training.timeline import NAMES

DOTS_PER_INCH = 150
WIDE_INCHES, COLUMN_INCHES = 12.0, 8.0
"""A column that is alone, and one of several."""
HEIGHT_INCHES = 7.2
COLUMNS_OF_DOTS = 1200
"""For so many parts of the time means are drawn."""
MOST_LANES = 64
"""More slots than that, or attempts that would be narrower than a dot or two, are drawn as counts."""
LEAST_DOTS = 2.0
MOST_NUMBERS = 40
"""Updates whose step is written."""
GREY = "#5F6368"
BATCH = "#4C78A8"
CLOSED: dict[str, Any] = {"color": "#E3E3E3", "linewidth": 0, "zorder": 0}
"""Behind all else."""
PHASES = {
    "start": "#B7C0CC",
    "wait": "#E4E7EB",
    "build": "#EDAE49",
    "drain": "#F7D79C",
    "update": "#D1495B",
    "checkpoint": "#6D6875",
    "evaluation": "#8E7CC3",
}
OUTCOMES: dict[str, str] = {
    Outcome.OK: "#2A9D8F",
    Outcome.BUDGET: "#E9C46A",
    Outcome.AGENT_EXIT: "#F4A261",
    Outcome.AGENT_TIMEOUT: "#B5651D",
    Outcome.INFRASTRUCTURE: "#C1121F",
    Outcome.CANCELLED: "#9AA0A6",
    TRIED_AGAIN: "#E07A9B",
    RUNNING: "#A8C5DA",
}
UNITS = ((1.0, "s", 300.0), (60.0, "min", 3 * 3600.0), (3600.0, "h", float("inf")))
"""Of time: seconds, name, and for runs that are shorter than this."""
PALE = 0.45
"""Opacity of held-out rollouts."""


def draw(timelines: list[tuple[Timeline, Shares]], picture: Path) -> None:
    """By the ending of its name a PNG or an SVG; it is whole at any time.

    Raises ImportError where matplotlib is not installed, OSError.
    """
    # Imported late, because most commands draw nothing; without pyplot, because there may be no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = WIDE_INCHES if len(timelines) == 1 else COLUMN_INCHES * len(timelines)
    figure = Figure(figsize=(width, HEIGHT_INCHES), layout="constrained")
    rows = figure.add_gridspec(4, len(timelines), height_ratios=(2.6, 0.5, 3.2, 0.85))
    longest = max(1e-3, *(timeline.ended - timeline.began for timeline, _ in timelines))
    unit_s, unit = next((size, name) for size, name, most in UNITS if longest < most)
    counted = any(_as_counts(timeline.bars, longest) for timeline, _ in timelines)
    engines, slots = [], []
    for column, (timeline, of) in enumerate(timelines):
        engine, trainer, rollouts = lanes = [figure.add_subplot(rows[row, column]) for row in range(3)]
        clock = Clock(timeline.began, unit_s)
        _title(engine, timeline.run, of)
        _engine(engine, timeline, clock, of.usual_batch)
        _trainer(trainer, timeline, clock)
        (_counts if counted else _lanes)(rollouts, timeline, clock)
        for axes in lanes:
            axes.set_xlim(0, longest / unit_s)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelbottom=axes is rollouts)
        rollouts.set_xlabel(f"time since its begin [{unit}]")
        engines.append(engine)
        slots.append(rollouts)
    for alike in (engines, slots):
        top = max(axes.get_ylim()[1] for axes in alike)
        for axes in alike:
            axes.set_ylim(0, top)
    _legend(figure.add_subplot(rows[3, :]), timelines)
    unfinished = picture.with_name(f".{picture.name}.{os.getpid()}")
    FigureCanvasAgg(figure).print_figure(unfinished, dpi=DOTS_PER_INCH, format=picture.suffix[1:])
    unfinished.replace(picture)


class Clock:
    """Moments as they stand on the axis of a run."""

    def __init__(self, began: float, unit_s: float) -> None:
        self._began = began
        self._unit_s = unit_s

    def at(self, moments: Any) -> Any:
        return (np.asarray(moments) - self._began) / self._unit_s

    def bars(self, periods: Iterable[Period]) -> list[Period]:
        """Begin and length, as matplotlib wants them."""
        return [(self.at(began), self.at(ended) - self.at(began)) for began, ended in periods]


def _title(axes: Any, run: str, of: Shares) -> None:
    busy = "" if of.busy is None else f"busy {of.busy:.0%} after warm-up  ·  "
    shares = f"generating {of.generating:.0%}  ·  updating {of.updating:.0%}  ·  idle {of.idle:.0%}"
    said = f"{busy}{shares}  ·  {of.updates} updates in {of.wall_s:,.0f} s"
    axes.set_title(run, loc="left", fontsize=12, fontweight="bold", pad=22)
    axes.text(0, 1.03, said, transform=axes.transAxes, fontsize=9, color=GREY, va="bottom")


def _engine(axes: Any, timeline: Timeline, clock: Clock, usual: int) -> None:
    edges = _edges(timeline)
    means = timeline.batch.means(edges)
    axes.stairs(means, clock.at(edges), fill=True, color=BATCH, linewidth=0)
    if usual:
        axes.axhline(usual / 4, color=GREY, linewidth=0.9, linestyle=(0, (5, 3)))
    _closed(axes, timeline, clock)
    axes.set_ylim(0, max(1, timeline.batch.counts.max(initial=0)) * 1.06)
    axes.set_ylabel("engine\ngenerations running")


def _trainer(axes: Any, timeline: Timeline, clock: Clock) -> None:
    for name in NAMES:
        periods = [(phase.began, phase.ended) for phase in timeline.phases if phase.name == name]
        axes.broken_barh(clock.bars(periods), (0, 1), color=PHASES[name], linewidth=0)
    updates = [phase for phase in timeline.phases if phase.name == "update"]
    if len(updates) <= MOST_NUMBERS:
        for phase in updates:
            middle = clock.at((phase.began + phase.ended) / 2)
            axes.text(middle, 1.04, str(phase.step), fontsize=7, color=GREY, ha="center", va="bottom", clip_on=True)
    if not timeline.phases:
        axes.text(0.5, 0.5, "no phases recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_ylim(0, 1.5)
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(bottom=False)
    axes.set_ylabel("trainer", rotation=0, ha="right", va="center", y=0.33, labelpad=8)


def _lanes(axes: Any, timeline: Timeline, clock: Clock) -> None:
    """A lane for each slot, a bar for each attempt."""
    lanes = packed(timeline.bars)
    for outcome, evaluation in sorted({(bar.outcome, bar.evaluation) for bar in timeline.bars}):
        mine = [i for i, bar in enumerate(timeline.bars) if (bar.outcome, bar.evaluation) == (outcome, evaluation)]
        corners = []
        for i in mine:
            (began, length), lane = clock.bars([(timeline.bars[i].began, timeline.bars[i].ended)])[0], lanes[i]
            corners.append([(began, lane + 0.1), (began + length, lane + 0.1), (began + length, lane + 0.9),
                            (began, lane + 0.9)])  # fmt: skip
        axes.add_collection(_polygons(corners, OUTCOMES[outcome], PALE if evaluation else 1.0))
    _closed(axes, timeline, clock)
    axes.set_ylim(0, max(lanes, default=0) + 1)
    axes.set_ylabel("rollouts\nside by side")


def _polygons(corners: list[Any], colour: str, opacity: float) -> Any:
    from matplotlib.collections import PolyCollection

    return PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=0.4, alpha=opacity)


def _counts(axes: Any, timeline: Timeline, clock: Clock) -> None:
    """How many attempts run, by what became of them."""
    edges, below = _edges(timeline), np.zeros(COLUMNS_OF_DOTS)
    for outcome, colour in OUTCOMES.items():
        for evaluation in (False, True):
            periods = [
                (bar.began, bar.ended)
                for bar in timeline.bars
                if (bar.outcome, bar.evaluation) == (outcome, evaluation)
            ]
            means = running(np.array(periods).reshape(-1, 2)).means(edges)
            opacity = PALE if evaluation else 1.0
            axes.stairs(below + means, clock.at(edges), baseline=below, fill=True, color=colour, alpha=opacity, lw=0)
            below = below + means
    _closed(axes, timeline, clock)
    axes.set_ylim(0, max(1.0, float(below.max()) * 1.06))
    axes.set_ylabel("rollouts\nrunning")


def packed(bars: list[Bar]) -> list[int]:
    """The lane of each: the lowest that is free."""
    taken: list[tuple[float, int]] = []
    free: list[int] = []
    lanes = []
    for bar in bars:
        while taken and taken[0][0] <= bar.began:
            heapq.heappush(free, heapq.heappop(taken)[1])
        lane = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (bar.ended, lane))
        lanes.append(lane)
    return lanes


def _as_counts(bars: list[Bar], longest: float) -> bool:
    """Whether single attempts would not be seen."""
    if not bars or not longest:
        return False
    dots = float(np.median([bar.ended - bar.began for bar in bars])) / longest * COLUMNS_OF_DOTS
    return dots < LEAST_DOTS or max(packed(bars)) >= MOST_LANES


def _closed(axes: Any, timeline: Timeline, clock: Clock) -> None:
    axes.broken_barh(clock.bars(timeline.closed), (0, 1), transform=axes.get_xaxis_transform(), **CLOSED)


def _edges(timeline: Timeline) -> Floats:
    return np.linspace(timeline.began, max(timeline.ended, timeline.began + 1e-3), COLUMNS_OF_DOTS + 1)


def _legend(axes: Any, timelines: list[tuple[Timeline, Shares]]) -> None:
    """Of what the picture holds."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    phases = {phase.name for timeline, _ in timelines for phase in timeline.phases}
    bars = [bar for timeline, _ in timelines for bar in timeline.bars]
    outcomes = {bar.outcome for bar in bars}
    engine = [
        Patch(color=BATCH, label="generations"),
        Line2D([], [], color=GREY, linewidth=0.9, linestyle=(0, (5, 3)), label="a quarter of the usual batch"),
    ]
    if any(timeline.closed for timeline, _ in timelines):
        engine.append(Patch(label="turnstile closed", **CLOSED))
    trainer = [Patch(color=PHASES[name], label=name) for name in NAMES if name in phases]
    rollouts = [
        Patch(facecolor=colour, label=name.replace("_", " ")) for name, colour in OUTCOMES.items() if name in outcomes
    ]
    if any(bar.evaluation for bar in bars):
        rollouts.append(Patch(facecolor=OUTCOMES[Outcome.OK], alpha=PALE, label="paler: held out"))
    axes.set_axis_off()
    for title, handles, place, columns in (
        ("engine", engine, 0.0, 1),
        ("trainer", trainer, 0.27, 3),
        ("rollouts", rollouts, 0.6, 3),
    ):
        if handles:
            legend = Legend(
                axes, handles, [str(handle.get_label()) for handle in handles], title=title, ncols=columns, fontsize=8,
                title_fontproperties={"size": 8, "weight": "bold"}, alignment="left", frameon=False, borderaxespad=0,
                loc="upper left", bbox_to_anchor=(place, 1.0), bbox_transform=axes.transAxes,
            )  # fmt: skip
            axes.add_artist(legend)
