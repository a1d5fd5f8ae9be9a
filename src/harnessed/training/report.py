"""What a run leaves in its folder for people and scripts: metrics.jsonl, transcripts.jsonl, curve.png, summary.json.

The trainer and `harnessed eval` write through here; every line is on disk when the call returns. Metrics and fates are
posted to the gateway as well, whose dashboard shows them. A run that is resumed goes on in the same files.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from harnessed.client import ApiError, Call, Client, Unreachable, forget_metrics, post_fates, post_metrics
from harnessed.records import Attempt, Fate, Metrics, Node, Outcome, Task, Transcript, Version
from harnessed.training.curve import draw
from harnessed.training.failures import CannotWrite
from harnessed.training.interval import Interval
from harnessed.training.lines import keep_lines
from harnessed.training.samples import Fates

Track = Callable[[int, dict[str, Any]], None]
"""Takes a step and its metrics, and does not fail."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Result of the held-out tasks."""

    success: float | None
    """Mean over the tasks of the mean reward of their rollouts that were judged; None: none was."""
    interval: Interval | None
    """Where the success on all tasks of this kind lies (`interval.py`)."""
    greedy: float | None
    """Mean reward of the greedy ones; None: none was judged, or none was asked for."""
    tasks: int
    rollouts: int
    """Without the greedy ones."""
    unjudged: int
    """Of these, rollouts without a reward (infrastructure); they are not in the mean."""
    complaint: str
    """One line about rollouts that did not end ok; empty if all did."""
    versions: tuple[Version, Version] | None
    """The first and the last that answered; None: the engine does not say."""


@dataclass(slots=True)
class Summary:
    """summary.json."""

    held_out_before: float | None
    held_out_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    steps: int
    """Optimiser steps' worth of rollouts; steps whose groups were all skipped count."""
    rollouts: int
    calls: int
    sampled_tokens: int
    """By the store; `fates` add up to it."""
    engine_sampled_tokens: int | None
    """By the engine's own counter, when the run had the engine to itself and it lived through the run. More than
    `sampled_tokens` where a gateway died: what was sampled for it then, nobody has recorded."""
    trained_tokens: int
    lost_calls: int
    """Calls that were admitted and never answered."""
    restarts: dict[str, int]
    """Services of the run that died and were started again: how often each."""
    fates: dict[str, int]
    outcomes: dict[str, int]
    seconds: float
    """Since the run was started, or last resumed; `restarts` count from then too."""
    seed: int
    checkpoint: str | None
    """The last one, relative to the run's folder."""
    interrupted: bool
    resumed: int = 0
    """How often the run was resumed. Everything else is of its whole life, as far as the last checkpoints reached."""
    interval_before: Interval | None = None
    """Of held_out_before."""
    interval_after: Interval | None = None
    best_checkpoint: str | None = None
    """The one with the highest held-out success, relative to the run's folder."""

    @property
    def balanced(self) -> bool:
        """Every recorded token has a fate, and the engine has sampled no others, as far as it could count. It may have
        sampled more for a gateway that died."""
        recorded, counted = self.sampled_tokens, self.engine_sampled_tokens
        if sum(self.fates.values()) != recorded:
            return False
        return counted is None or counted == recorded or (counted > recorded and "gateway" in self.restarts)

    @property
    def books(self) -> str:
        """Whether the books balance, in words."""
        if not self.balanced:
            return "THE BOOKS DO NOT BALANCE"
        if "engine" in self.restarts:
            return "each recorded token has one; what the engine had not answered when it died is not known"
        if self.resumed and self.engine_sampled_tokens is None:
            return "each recorded token has one; what was not answered when the run was resumed is not known"
        if self.engine_sampled_tokens is None or self.engine_sampled_tokens == self.sampled_tokens:
            return "the books balance"
        lost = self.engine_sampled_tokens - self.sampled_tokens
        return f"each recorded token has one; {lost} more were sampled for a gateway that died"


class Report:
    def __init__(
        self, folder: Path, gateway: Client, run: str, note: Callable[[str], None], track: Track = lambda *_: None
    ) -> None:
        """`note` tells a person what could not be posted; `track` gets the metrics as well."""
        self._folder = folder
        self._gateway = gateway
        self._run = run
        self._note = note
        self._track = track
        self._noted: set[str] = set()
        self.fates: Fates = Counter()
        """Of every rollout that was written."""
        self.outcomes: Counter[str] = Counter()
        self._written: set[str] = set()
        self._to_post: dict[str, dict[Fate, int]] = {}
        """Fates of rollouts that the gateway has not heard of."""

    def resume(self, step: int) -> list[dict[str, Any]]:
        """Go on with the books of an earlier life as they were after `step`, that of its checkpoint; before anything
        else is reported. Returns the lines of metrics.jsonl that stay.

        What was trained later is in no books any more: its rollouts will be reported again. Evaluations stay, for they
        were. Raises CannotWrite.
        """
        history: list[dict[str, Any]] = []

        def metrics(line: dict[str, Any]) -> bool:
            if line["step"] > step:
                return False
            history.append(line)
            return True

        def transcript(line: dict[str, Any]) -> bool:
            if line["step"] is not None and line["step"] > step:
                return False
            fates: Fates = Counter({Fate(fate): tokens for fate, tokens in line["fates"].items()})
            self._book(line["rollout"], line["outcome"], fates)
            if line["step"] is not None:  # they were posted with the metrics of their step
                del self._to_post[line["rollout"]]
            return True

        for name, stays in (("metrics.jsonl", metrics), ("transcripts.jsonl", transcript)):
            try:
                keep_lines(self._folder / name, stays)
            except OSError as error:
                raise CannotWrite(f"cannot rewrite {self._folder / name}: {error.strerror}") from error
        self._post(forget_metrics(self._run, above=step))
        return history

    def has(self, rollout: str) -> bool:
        """Whether its fates are in the books."""
        return rollout in self._written

    def metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """One line; several lines may be of one step."""
        line = {"step": step, **metrics}
        self._append("metrics.jsonl", line)
        self._post_fates()
        self._post(post_metrics(self._run, Metrics(step=step, values=line)))
        self._track(step, metrics)

    def curve(self) -> None:
        """Draw curve.png from the lines so far."""
        try:
            draw(self._folder / "metrics.jsonl", self._folder / "curve.png")
        except Exception as error:  # noqa: BLE001  # whatever a drawing library raises, a picture is no reason to end a run
            self._note_once(f"no curve.png: {type(error).__name__}: {error}")

    def transcript(self, transcript: Transcript, task: Task, fates: Fates, step: int | None) -> None:
        """Take the final fates of a rollout into the books, and keep its conversations for people.

        Once for each rollout: a run that is interrupted while it writes does not count one twice.
        """
        rollout = transcript.rollout
        if rollout.id in self._written:
            return
        self._book(rollout.id, rollout.outcome, fates)
        self._append(
            "transcripts.jsonl",
            {
                "rollout": rollout.id,
                "step": step,
                "purpose": rollout.purpose,
                "task": task,
                "outcome": rollout.outcome,
                "reason": rollout.reason,
                "reward": rollout.reward,
                "parts": rollout.parts,
                "attempts": len(transcript.attempts),
                "fates": fates,
                "conversations": conversations(transcript.attempts[-1]) if transcript.attempts else [],
            },
        )

    def _book(self, rollout: str, outcome: str | None, fates: Fates) -> None:
        self._written.add(rollout)
        self.fates += fates
        self._to_post[rollout] = dict(fates)
        self.outcomes[outcome or "unfinished"] += 1

    def summary(self, summary: Summary) -> None:
        text = json.dumps(asdict(summary), indent=2) + "\n"
        self._write("summary.json", "wb", text.encode())
        self._post_fates()

    def _post_fates(self) -> None:
        if self._to_post:
            self._post(post_fates(self._run, self._to_post))
            self._to_post = {}

    def _post(self, call: Call[None]) -> None:
        """The books are in the folder: a dashboard with a gap in its curves is no reason to end a run."""
        try:
            self._gateway(call)
        except (ApiError, Unreachable) as error:
            self._note(f"the dashboard will not show this step: {error}")

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self._write(name, "ab", orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))

    def _write(self, name: str, mode: str, data: bytes) -> None:
        try:
            with (self._folder / name).open(mode) as file:
                file.write(data)
        except OSError as error:
            raise CannotWrite(f"cannot write {self._folder / name}: {error.strerror}") from error


def complaint(transcripts: list[Transcript]) -> str:
    """One line about rollouts that did not end ok, with the most frequent reason; empty if all did."""
    wrong = [each.rollout for each in transcripts if each.rollout.outcome != Outcome.OK]
    if not wrong:
        return ""
    reason, _ = Counter(f"{rollout.outcome}: {rollout.reason}" for rollout in wrong).most_common(1)[0]
    return f"{len(wrong)} of {len(transcripts)} rollouts went wrong; most often {reason[:300]}"


def conversations(attempt: Attempt) -> list[list[dict[str, Any]]]:
    """The messages of every conversation, up to an answer that no later request repeats."""
    by_number = {node.number: node for node in attempt.nodes}
    leaves = sorted(by_number.keys() - {node.follows for node in attempt.nodes})
    return [_messages(by_number, leaf) for leaf in leaves]


def _messages(by_number: dict[int, Node], leaf: int) -> list[dict[str, Any]]:
    turns: list[list[dict[str, Any]]] = []
    while leaf:
        node = by_number[leaf]
        turns.append([*node.messages, node.message])
        leaf = node.follows
    return list(chain.from_iterable(reversed(turns)))
