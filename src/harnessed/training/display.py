"""What people see while a run goes on: a live panel on a terminal, plain lines elsewhere. The trainer calls it."""

import math
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from harnessed.records import Outcome, State
from harnessed.training.interval import Interval
from harnessed.training.report import HeldOut, Summary

_FAILED = frozenset(Outcome) - {Outcome.OK}


class Display:
    """Use as a context manager: the terminal is given back at its end."""

    def __init__(self, steps: int, counts: Callable[[], Counter[str]], console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._steps = steps
        self._counts = counts
        self._step = 0
        self._done = 0
        self._phase = "starting"
        self._phase_began = time.monotonic()
        self._metrics: dict[str, Any] = {}
        self._held_out = ""
        self._first: tuple[int, float] | None = None
        """The first step of this process, and when it began: a run that goes on has taken others before."""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        """Show what is known now."""
        if self._live:
            self._live.update(self._panel(), refresh=True)

    def phase(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()
        if self._live:
            self.tick()
        elif phase not in ("rollouts", "update", "checkpoint"):
            self.note(f"{phase} ...")

    def step(self, number: int) -> None:
        self._step = number
        self._first = self._first or (number, time.monotonic())

    def metrics(self, metrics: dict[str, Any], complaint: str) -> None:
        """The step is done."""
        self._metrics = metrics
        self._done = self._step
        if complaint:
            self.note(f"step {self._step}: {complaint}")
        if not self._live:
            facts = [
                f"reward {_number(metrics['reward_mean'])} ± {_number(metrics['reward_std'])}",
                f"entropy {_number(metrics.get('entropy'))}",
                f"groups {metrics['groups_taken']}/{metrics['groups']}",
                f"{metrics['tokens_per_second']:.0f} tok/s",
                f"{metrics['timing_s/step']:.1f} s",
                f"left {self._left()}",
            ]
            self.note(f"step {self._step:>4}/{self._steps}  {'  '.join(facts)}")

    def held_out(self, label: str, result: HeldOut) -> None:
        self._held_out = f"{success(result)} {label} training ({beside_success(result)})"
        if result.complaint:
            self.note(f"held-out tasks: {result.complaint}")
        if not self._live:
            self.note(f"held-out success {self._held_out}")

    def note(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def summary(self, summary: Summary, folder: str) -> None:
        """The table before / after, and where things are."""
        table = Table(title="held-out success", title_justify="left")
        table.add_column("")
        table.add_column("before", justify="right")
        table.add_column("after", justify="right")
        table.add_row(
            "sampled",
            _within(summary.held_out_before, summary.interval_before),
            _within(summary.held_out_after, summary.interval_after),
        )
        if summary.greedy_before is not None:
            table.add_row("greedy", _number(summary.greedy_before), _number(summary.greedy_after))
        self._console.print(table)
        self.note(
            f"{summary.steps} steps, {summary.rollouts} rollouts, {summary.calls} calls, {summary.sampled_tokens} "
            f"sampled tokens ({summary.trained_tokens} trained) in {summary.seconds:.0f} s"
        )
        fates = ", ".join(f"{fate} {count}" for fate, count in sorted(summary.fates.items()))
        self.note(f"fates: {fates or 'none'} ({summary.books})")
        if summary.restarts or summary.lost_calls:
            restarts = ", ".join(f"{service} {count}" for service, count in sorted(summary.restarts.items()))
            self.note(
                f"died and were started again: {restarts or 'none'}; calls without an answer: {summary.lost_calls}"
            )
        if summary.best_checkpoint is not None:
            self.note(f"best checkpoint by held-out success: {summary.best_checkpoint}")
        self.note(f"run folder: {folder}")
        if summary.interrupted:
            self.note(f"interrupted after step {summary.steps} of {self._steps}; --resume goes on with it")

    def _panel(self) -> RenderableType:
        counts = self._counts()
        failed = sum(counts[outcome] for outcome in _FAILED)
        metrics = self._metrics
        table = Table.grid(padding=(0, 2))
        table.add_row("phase", f"{self._phase} ({time.monotonic() - self._phase_began:.0f} s)")
        table.add_row("step", f"{self._step} of {self._steps}, time left {self._left()}")
        table.add_row("reward", f"{_number(metrics.get('reward_mean'))} ± {_number(metrics.get('reward_std'))}")
        table.add_row("held-out success", self._held_out or "-")
        table.add_row("entropy", _number(metrics.get("entropy")))
        table.add_row(
            "rollouts",
            f"{counts[State.QUEUED]} queued, {counts[State.RUNNING]} running, "
            f"{counts[Outcome.OK] + failed} finished, {failed} of them failed",
        )
        table.add_row("tokens per second", _number(metrics.get("tokens_per_second"), 0))
        return Panel(table, title="harnessed", title_align="left", expand=False)

    def _left(self) -> str:
        if not self._done or self._first is None:
            return "-"
        first, began = self._first
        seconds = (time.monotonic() - began) / (self._done - first + 1) * (self._steps - self._done)
        return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def success(result: HeldOut) -> str:
    """With its interval: `0.953 (0.92 to 0.97)`."""
    return _within(result.success, result.interval)


def beside_success(result: HeldOut) -> str:
    """What else there is to say of it: `64 tasks, 4 rollouts each, greedy 0.969, 2 without a reward`."""
    each = result.rollouts // result.tasks
    versions = [f"{lineage}.{number}" for lineage, number in result.versions or ()]
    facts = [
        f"{result.tasks} tasks",
        f"{each} rollouts each" if each > 1 else "",
        f"greedy {result.greedy:.3f}" if result.greedy is not None else "",
        f"{result.unjudged} without a reward" if result.unjudged else "",
        f"versions {' to '.join(versions)}" if len(set(versions)) > 1 else "",
    ]
    return ", ".join(filter(None, facts))


def _within(value: float | None, interval: Interval | None) -> str:
    return _number(value) + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
