"""What a run warns of and stops for by the lines of its metrics: updates that are not finite, a policy that collapses.

`trainer.py` makes one `Safety` and gives it each step. What a batch of rollouts must not be is in `batches.py`.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from harnessed.config import Safety as Settings
from harnessed.training.failures import NotFinite

RECENT = 5
"""Steps over which the share of groups with equal rewards is a mean: of one step it says little."""


class Safety:
    """Of one run. All that it remembers follows from the lines of metrics.jsonl: `replay` restores it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._first_entropy: float | None = None
        self._equal: deque[float] = deque(maxlen=RECENT)
        self._warned: set[str] = set()
        """Metrics that are as bad as they were when it was told."""
        self._in_a_row = 0
        self.updates_skipped = 0
        """Over the whole run: the metric of this name."""

    def note(self, metrics: dict[str, Any]) -> list[str]:
        """A line of metrics, whatever it is of; the warnings that are new with it, one line each."""
        checks = {"entropy": self._of_entropy, "equal_groups_share": self._of_equal, "truncated_share": self._of_cut}
        new = []
        for name, check in checks.items():
            value = metrics.get(name)
            if value is None or not math.isfinite(value):
                continue
            warning = check(value)
            if warning and name not in self._warned:
                new.append(warning)
            self._warned = self._warned | {name} if warning else self._warned - {name}
        return new

    def _of_entropy(self, entropy: float) -> str:
        if self._first_entropy is None:
            self._first_entropy = entropy
        if entropy >= self._settings.entropy_fraction * self._first_entropy:
            return ""
        return (
            f"the entropy fell from {self._first_entropy:.3g} to {entropy:.3g} (trainer.safety.entropy_fraction): the "
            "policy explores no more; a lower learning rate, a higher clip_high or an entropy bonus help"
        )

    def _of_equal(self, share: float) -> str:
        self._equal.append(share)
        mean = statistics.fmean(self._equal)
        if len(self._equal) < RECENT or mean <= self._settings.equal_groups:
            return ""
        return (
            f"{mean:.0%} of the groups of the last {RECENT} steps had equal rewards: there is hardly anything to learn "
            "from; mix easier and harder tasks, or take larger groups"
        )

    def _of_cut(self, share: float) -> str:
        if share <= self._settings.truncated:
            return ""
        return (
            f"{share:.0%} of the answers were cut at sampling.max_tokens or limits.context: raise them, or give length "
            "a part in the reward"
        )

    def skipped(self, skipped: bool) -> None:
        """An update was tried; `skipped`: not one of its steps was finite, and the weights are as before. Raises
        NotFinite."""
        self._count(skipped)
        if self._in_a_row >= self._settings.skipped_updates:
            raise NotFinite(
                f"the last {self._in_a_row} updates were skipped because loss or gradient were not finite: look at "
                "logprob_difference_max and grad_norm of the steps before, and at the rewards; a lower "
                "trainer.optimiser.learning_rate or trainer.precision: float32 may help"
            )

    def replay(self, lines: Iterable[dict[str, Any]]) -> None:
        """Be as after the steps of these lines; nothing is told again, and nothing raised."""
        for line in lines:
            self.note(line)
            if "optimiser_steps" in line:  # one without has not come to an update
                self._count(not line["update_applied"])
        # Whoever goes on after the last one gets another try.
        self._in_a_row = min(self._in_a_row, self._settings.skipped_updates - 1)

    def _count(self, skipped: bool) -> None:
        self.updates_skipped += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
