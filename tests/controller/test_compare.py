"""The comparison of what the gateway says with what the runner has: one table."""

import pytest

from harnessed.controller.reconciler import Observation, compare
from harnessed.controller.runner import Ended
from harnessed.records import Ending, Outcome

OK = Ended(Ending(outcome=Outcome.OK, reward=1.0))
GONE = Ended(Ending(outcome=Outcome.CANCELLED))
LOST = Ended(Ending(outcome=Outcome.INFRASTRUCTURE, reason="the controller never got this attempt"))

# leased, unknown, attempts, reporting -> stop, report, forget, claim (of 2 slots)
TABLE = {
    "nothing to do": ("", "", {}, "", "", {}, "", 2),
    "ours and running": ("a", "", {"a": None}, "", "", {}, "", 1),
    "as many as there are slots": ("ab", "", {"a": None, "b": None}, "", "", {}, "", 0),
    "more than there are slots": ("abc", "", {"a": None, "b": None, "c": None}, "", "", {}, "", 0),
    "running, no longer ours": ("", "", {"a": None}, "", "a", {}, "", 1),
    "ours and ended": ("a", "", {"a": OK}, "", "", {"a": OK}, "", 2),
    "ended, on its way": ("a", "", {"a": OK}, "a", "", {}, "", 2),
    "ended, no longer ours: the gateway decides": ("", "", {"a": OK}, "", "", {"a": OK}, "", 2),
    "stopped by us": ("", "", {"a": GONE}, "", "", {}, "a", 2),
    "leased, and only just claimed": ("a", "", {}, "", "", {}, "", 2),
    "leased twice, and never seen here": ("a", "a", {}, "", "", {"a": LOST}, "", 2),
    "leased twice, seen here after all": ("a", "a", {"a": None}, "", "", {}, "", 1),
    "leased twice, given up already": ("a", "a", {}, "a", "", {}, "", 2),
    "all at once": ("abd", "d", {"a": None, "b": OK, "c": None, "e": GONE}, "", "c", {"b": OK, "d": LOST}, "e", 0),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_compare(row) -> None:
    leased, unknown, attempts, reporting, stop, report, forget, claim = row
    plan = compare(Observation(frozenset(leased), frozenset(unknown), attempts, frozenset(reporting), 2))
    assert (plan.stop, plan.report, plan.forget, plan.claim) == (frozenset(stop), report, frozenset(forget), claim)
