"""Batches of rollouts that must not be trained, or that show that going on is for nothing. `trainer.py` asks.

A failure that is nobody's is made good by other rollouts of the same tasks; one that all rollouts share is the same
again, however often they are made.
"""

import re
from collections import Counter
from collections.abc import Sequence

from harnessed.config import Safety
from harnessed.records import Outcome, Rollout
from harnessed.training.failures import AllAlike, TooManyFailed
from harnessed.training.selection import Group

MOST_SAID = 300
"""Characters of a reason."""


def infrastructure(groups: Sequence[Group], most: float) -> str:
    """Why a batch is to be made again: more than this share of it failed by infrastructure. Empty: it is not."""
    rollouts = _rollouts(groups)
    failed = [each for each in rollouts if each.outcome == Outcome.INFRASTRUCTURE]
    if len(failed) <= most * len(rollouts):
        return ""
    reason, _ = Counter(each.reason for each in failed).most_common(1)[0]
    return f"{len(failed)} of {len(rollouts)} rollouts failed by infrastructure, most often: {_said(reason)}"


def check_remade(why: str, remade: int, settings: Safety) -> None:
    """Before a batch is made again, which it was so often. Raises TooManyFailed."""
    if remade >= settings.remake:
        times = f"also after it was made again ({remade} of trainer.safety.remake), " if remade else ""
        raise TooManyFailed(f"a batch is not fit to be trained: {times}{why}")


def all_alike(groups: Sequence[Group]) -> str | None:
    """How all rollouts of a batch failed, if all failed in the same way, by the same reason up to numbers, ids and
    paths, and no reward differs. None: there may be something to learn."""
    rollouts = _rollouts(groups)
    kinds = {(each.outcome, _shape(each)) for each in rollouts}
    rewards = {(each.reward, *each.call_rewards) for each in rollouts}
    if len(kinds) != 1 or len(rewards) > 1 or rollouts[0].outcome in (Outcome.OK, Outcome.CANCELLED):
        return None
    outcome, reason = rollouts[0].outcome, rollouts[0].reason
    if outcome in (Outcome.AGENT_TIMEOUT, Outcome.BUDGET) and not is_silent(groups):
        return None  # as agents end that have not learnt to come to an end
    silent = ", before a token was sampled" if is_silent(groups) else ""
    return f"all {len(rollouts)} rollouts ended alike{silent}: {outcome}: {_said(reason) or 'no reason was given'}"


def is_silent(groups: Sequence[Group]) -> bool:
    """Whether no token was sampled for a batch, in no attempt."""
    transcripts = [transcript for group in groups for transcript in group.transcripts]
    return not any(node.sampled for each in transcripts for attempt in each.attempts for node in attempt.nodes)


class Alike:
    """Counts the batches in a row that failed alike. A run that goes on from a checkpoint counts anew."""

    def __init__(self, settings: Safety) -> None:
        self._settings = settings
        self._in_a_row = 0

    def check(self, groups: Sequence[Group]) -> None:
        """Raises AllAlike.

        One batch is enough where the policy has no part in it: without a token it has done nothing, and what failed by
        infrastructure has been tried `controller.attempts` times by each rollout. Where agents exit after answers of
        the policy, these may be the cause, and another batch may hold one that succeeds: it takes `alike_steps`.
        """
        why = all_alike(groups)
        self._in_a_row = self._in_a_row + 1 if why else 0
        if why is None:
            return
        at_once = is_silent(groups) or _rollouts(groups)[0].outcome == Outcome.INFRASTRUCTURE
        if at_once or self._in_a_row >= self._settings.alike_steps:
            steps = f" in {self._in_a_row} steps in a row" if self._in_a_row > 1 else ""
            raise AllAlike(f"{why}{steps}; nothing can be learnt from that: mend the agent or its surroundings")


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [transcript.rollout for group in groups for transcript in group.transcripts]


def _shape(rollout: Rollout) -> str:
    """Its reason without what differs between rollouts that fail in the same way."""
    return re.sub(r"\S*[\d/]\S*", "#", rollout.reason)


def _said(reason: str) -> str:
    return " ".join(reason.split())[:MOST_SAID]
