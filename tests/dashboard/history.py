"""A run that has gone on for long, written straight into the store: what hours of training leave there."""

import math
from random import Random

from sqlalchemy import Connection, insert

from harnessed.gateway.tables import groups, metrics, rollouts, runs
from harnessed.records import Outcome, Purpose, State

OUTCOMES = {
    Outcome.OK: ("", 88),
    Outcome.AGENT_EXIT: ("exit status 1: the patch does not apply", 6),
    Outcome.AGENT_TIMEOUT: ("no end after 600 s", 3),
    Outcome.BUDGET: ("200 calls were made; then exit status 1", 2.5),
    Outcome.INFRASTRUCTURE: ("the engine did not answer for 600 s", 0.5),
}


def write_run(connection: Connection, run: str, policy: str, created: float) -> None:
    limits, rest = {"calls": 200, "context": 32768}, {"history": "exact", "side_calls": [], "closed_s": 0.0}
    connection.execute(insert(runs).values(id=run, policy=policy, limits=limits, created=created, **rest))


def write_steps(
    connection: Connection, run: str, count: int, *, begun: float, step_s: float, groups_each=16, n=8, seed=0
):
    """`count` steps of groups_each * n finished rollouts, their metrics, and held-out tasks every 20 steps."""
    random, lines = Random(seed), []
    all_groups, all_rollouts = [], []
    for step in range(count + 1):
        at = begun + step * step_s
        skill = 0.22 + 0.6 * (1 - math.exp(-3 * step / max(count, 1)))
        if step % 20 == 0 or step == count:
            held = {"held_out": skill - 0.05 + random.gauss(0, 0.015), "held_out_greedy": skill + random.gauss(0, 0.02)}
            lines.append({"run": run, "step": step, "values": {"step": step} | held, "time": at})
            add = _group(run, f"{run}.held-out-{step:05d}", 1, at, step_s, skill, random, Purpose.EVALUATION)
            all_groups.append(add[0])
            all_rollouts += add[1]
        if step == count:
            break
        mine = []
        for number in range(groups_each):
            group, members = _group(run, f"{run}.step-{step + 1:05d}.{number:02d}", n, at, step_s, skill, random)
            all_groups.append(group)
            mine += members
        all_rollouts += mine
        rewards = [each["reward"] for each in mine if each["reward"] is not None]
        lines.append({"run": run, "step": step + 1, "values": _values(step + 1, rewards, random), "time": at + step_s})
    connection.execute(insert(groups), all_groups)
    connection.execute(insert(rollouts), all_rollouts)
    connection.execute(insert(metrics), lines)


def _group(run, id, n, at, step_s, skill, random, purpose=Purpose.TRAIN):
    ease = min(0.97, max(0.03, random.gauss(skill, 0.2)))
    group = {
        "id": id,
        "run": run,
        "task": {"issue": "parse_range('5-') raises ValueError."},
        "n": n,
        "purpose": purpose,
    }
    group |= {"sampling": {"temperature": 1.0}, "seed": 0, "complete": True, "created": at}
    members = []
    for index in range(n):
        (outcome,) = random.choices(list(OUTCOMES), [weight for _, weight in OUTCOMES.values()])
        good = outcome == Outcome.OK and random.random() < ease
        reward = None if outcome == Outcome.INFRASTRUCTURE else 1.0 if good else random.choice([0.0, 0.0, 0.25, 0.5])
        if outcome not in (Outcome.OK, Outcome.INFRASTRUCTURE):
            reward = 0.0
        started = at + random.random() * 0.1 * step_s
        row = {"id": f"{id}.{index}", "run": run, "group": id, "index": index, "purpose": purpose}
        row |= {"state": State.FINISHED, "attempt": 1 + (random.random() < 0.02), "outcome": outcome, "reward": reward}
        row |= {"reason": OUTCOMES[outcome][0], "parts": {}, "created": at, "started": started}
        members.append(row | {"finished": started + step_s * (0.2 + 0.5 * random.random())})
    return group, members


def _values(step, rewards, random):
    mean = sum(rewards) / len(rewards)
    return {
        "step": step,
        "version": [0, step],
        "reward_mean": mean,
        "reward_std": math.sqrt(sum((each - mean) ** 2 for each in rewards) / len(rewards)),
        "groups_taken": random.randint(11, 16),
        "sampled_tokens": random.randint(190_000, 260_000),
        "entropy": 0.28 + 0.55 * math.exp(-step / 60) + random.gauss(0, 0.02),
        "kl": abs(random.gauss(0, 4e-4)),
        "grad_norm": random.uniform(0.2, 0.6),
        "logprob_difference": abs(random.gauss(0.004, 0.0005)),
        "tokens_per_second": random.uniform(2900, 3600),
        "update_applied": True,
    }
