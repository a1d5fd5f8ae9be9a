"""The calls of a rollout and the rewards that its evaluator gave for single ones. `samples.py` calls this."""

from harnessed.records import Attempt

Calls = list[list[int]]
"""Numbers of the nodes that answer each call, in the order in which the calls were answered."""


def calls_of(attempt: Attempt) -> Calls:
    """Every call whose answer the harness got; those of a request for several answers are one."""
    found: dict[str, list[int]] = {}
    for node in attempt.nodes:
        if node.delivered:
            found.setdefault(node.call or f"node {node.number}", []).append(node.number)
    return list(found.values())


def spread(rewards: list[float], calls: int) -> list[float]:
    """One reward for each of so many calls: calls without one got 0, what is left counts at the last one."""
    kept = rewards[:calls] + [0.0] * (calls - len(rewards))
    if kept:
        kept[-1] += sum(rewards[calls:])
    return kept
