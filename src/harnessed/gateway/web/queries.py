"""What the dashboard's pages show, as read-only queries on the store. `pages.py` calls this.

Lists are paged by keyset: a page begins after a row's sort value and id, so that the thousandth page costs what the
first does. Everything returned is plain values for JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, Integer, and_, func, literal, select, tuple_

from harnessed.gateway.lifecycle import get_group, get_rollout, members
from harnessed.gateway.store import Refused
from harnessed.gateway.tables import String, attempts, changes, fates, groups, metrics, nodes, rollouts, runs
from harnessed.records import MOST_REWARD, State

PAGE = 50
SPARK = 200
"""Points of a run's curve in the list of runs."""
SORTS: dict[str, ColumnElement[Any]] = {
    "created": rollouts.c.created,
    "id": rollouts.c.id,
    "outcome": func.coalesce(rollouts.c.outcome, rollouts.c.state),
    "reward": func.coalesce(rollouts.c.reward, literal(-2 * MOST_REWARD)),
    "attempts": rollouts.c.attempt,
    "seconds": func.coalesce(rollouts.c.finished - rollouts.c.started, literal(-1.0)),
}
"""Values that rollouts are sorted by, none of them null: nulls would be in no place of a keyset."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A page of rollouts."""

    outcome: str = ""
    """An outcome, or the state of rollouts without one; empty: any. So for the others."""
    purpose: str = ""
    text: str = ""
    """Part of the id."""
    sort: str = "created"
    descending: bool = True
    after: str = ""
    """The place, `[value, id]` as JSON, that the page follows; empty: it is the first."""
    before: str = ""
    """The place that the page comes before."""


def list_runs(connection: Connection) -> list[dict[str, Any]]:
    """Newest first."""
    counts = _counts(connection, None)
    found = connection.execute(select(runs.c.id, runs.c.policy, runs.c.created).order_by(runs.c.created.desc()))
    return [
        dict(run)
        | {
            "counts": [count for count in counts if count["run"] == run["id"]],
            "rewards": _rewards(connection, run["id"]),
        }
        for run in found.mappings()
    ]


def get_run(connection: Connection, run: str) -> dict[str, Any]:
    """Raises Refused (404)."""
    found = connection.execute(select(runs).where(runs.c.id == run)).mappings().first()
    if found is None:
        raise Refused(404, f"no run {run}")
    cursor = connection.execute(select(func.max(changes.c.cursor)).where(changes.c.run == run)).scalar()
    return dict(found) | {"counts": _counts(connection, run), "cursor": cursor or 0}


def list_rollouts(connection: Connection, run: str, wanted: Wanted) -> dict[str, Any]:
    """A page, and the places before and after it (null: there is nothing there). Raises Refused (400)."""
    value = SORTS.get(wanted.sort)
    if value is None:
        raise Refused(400, f"no order {wanted.sort}: {', '.join(SORTS)}")
    query = select(rollouts, value.label("value")).where(rollouts.c.run == run)
    if wanted.outcome in (State.QUEUED, State.RUNNING):
        query = query.where(rollouts.c.state == wanted.outcome)
    elif wanted.outcome:
        query = query.where(rollouts.c.outcome == wanted.outcome)
    if wanted.purpose:
        query = query.where(rollouts.c.purpose == wanted.purpose)
    if wanted.text:
        query = query.where(rollouts.c.id.contains(wanted.text, autoescape=True))
    rows, before, after = _page(connection, query, (value, rollouts.c.id), wanted)
    return {"rows": [{k: v for k, v in row.items() if k != "value"} for row in rows], "before": before, "after": after}


def list_groups(connection: Connection, run: str, wanted: Wanted) -> dict[str, Any]:
    """A page as of rollouts, newest first; each with outcome and reward of its members."""
    query = select(groups.c.id, groups.c.purpose, groups.c.n, groups.c.complete, groups.c.created).where(
        groups.c.run == run
    )
    query = query.add_columns(groups.c.created.label("value"))
    if wanted.purpose:
        query = query.where(groups.c.purpose == wanted.purpose)
    if wanted.text:
        query = query.where(groups.c.id.contains(wanted.text, autoescape=True))
    rows, before, after = _page(connection, query, (groups.c.created, groups.c.id), wanted)
    of_page = rollouts.c.group.in_([row["id"] for row in rows])
    columns = (rollouts.c.group, rollouts.c.id, rollouts.c.state, rollouts.c.outcome, rollouts.c.reward)
    found = connection.execute(select(*columns).where(of_page).order_by(rollouts.c.index)).mappings().all()
    mine = {row["id"]: [dict(each) for each in found if each["group"] == row["id"]] for row in rows}
    return {"rows": [row | {"members": mine[row["id"]]} for row in rows], "before": before, "after": after}


def show_group(connection: Connection, group: str) -> dict[str, Any]:
    """A group with its task and, for each member, what its last attempt sampled and said last."""
    found = [
        each.model_dump(mode="json") | _said(connection, each.id, each.attempt) for each in members(connection, group)
    ]
    return get_group(connection, group).model_dump(mode="json") | {"members": found}


def show_rollout(connection: Connection, rollout: str) -> dict[str, Any]:
    """Everything of a rollout but the tokens: its attempts with their nodes, its task, siblings and reported fates."""
    record = get_rollout(connection, rollout)
    columns = [c for c in nodes.c if c.name not in ("rollout", "segment", "answer", "logprobs", "versions")]
    sizes = [
        (func.length(nodes.c.segment, type_=Integer) // 4).label("context"),
        (func.length(nodes.c.logprobs) > 0).label("scored"),
    ]
    found = connection.execute(
        select(*columns, *sizes).where(nodes.c.rollout == rollout).order_by(nodes.c.attempt, nodes.c.number)
    )
    tree = [
        dict(node) | {k: orjson.loads(node[k]) for k in ("messages", "message", "tools")} for node in found.mappings()
    ]
    tries = select(attempts.c.number, attempts.c.owner, attempts.c.live, attempts.c.started, attempts.c.ended)
    return record.model_dump(mode="json") | {
        "task": get_group(connection, record.group).task,
        "siblings": [
            {"id": each.id, "state": each.state, "outcome": each.outcome, "reward": each.reward}
            for each in members(connection, record.group)
        ],
        "fates": connection.execute(select(fates.c.tokens).where(fates.c.rollout == rollout)).scalar(),
        "tries": [
            dict(attempt) | {"nodes": [node for node in tree if node["attempt"] == attempt["number"]]}
            for attempt in connection.execute(
                tries.where(attempts.c.rollout == rollout).order_by(attempts.c.number)
            ).mappings()
        ],
    }


def load_tokens(connection: Connection, rollout: str, attempt: int, number: int) -> dict[str, Any]:
    """The packed arrays of a node and the folder of its policy. Raises Refused (404)."""
    query = (
        select(runs.c.policy, nodes.c.segment, nodes.c.answer, nodes.c.logprobs, nodes.c.versions)
        .join(rollouts, rollouts.c.id == nodes.c.rollout)
        .join(runs, runs.c.id == rollouts.c.run)
        .where(and_(nodes.c.rollout == rollout, nodes.c.attempt == attempt, nodes.c.number == number))
    )
    found = connection.execute(query).mappings().first()
    if found is None:
        raise Refused(404, f"attempt {attempt} of rollout {rollout} has no answer {number}")
    return dict(found)


def _page(
    connection: Connection, query: Any, key: Sequence[ColumnElement[Any]], wanted: Wanted
) -> tuple[list[dict[str, Any]], str | None, str | None]:
    """Rows that have a column `value` and an `id`, and the places around them. Raises Refused (400)."""
    back = bool(wanted.before)
    down = wanted.descending != back
    if place := wanted.before or wanted.after:
        here = tuple_(*map(literal, _read_place(place, text=isinstance(key[0].type, String))))
        query = query.where(tuple_(*key) < here if down else tuple_(*key) > here)
    order = [each.desc() if down else each.asc() for each in key]
    rows = [dict(row) for row in connection.execute(query.order_by(*order).limit(PAGE + 1)).mappings()]
    more, rows = len(rows) > PAGE, rows[:PAGE]
    if back:
        rows.reverse()
    places = [orjson.dumps([row["value"], row["id"]]).decode() for row in rows]
    first = places[0] if rows and (more if back else wanted.after) else None
    last = places[-1] if rows and (more or back) else None
    return rows, first, last


def _read_place(place: str, *, text: bool) -> tuple[Any, str]:
    """Sort value and id. Raises Refused (400): a database may not compare what is of another kind."""
    try:
        value, id = orjson.loads(place)
    except (TypeError, ValueError):
        value, id = None, None
    if type(value) not in ((str,) if text else (int, float)) or not isinstance(id, str):
        raise Refused(400, f"{place[:100]} is no place in this list")
    return value, id


def _counts(connection: Connection, run: str | None) -> list[dict[str, Any]]:
    """Rollouts of a run, or of all, by purpose and state: how many, their rewards' sum, the last end."""
    by = (rollouts.c.run, rollouts.c.purpose, rollouts.c.state, rollouts.c.outcome)
    query = select(
        *by,
        func.count().label("n"),
        func.count(rollouts.c.reward).label("judged"),
        func.sum(rollouts.c.reward).label("sum"),
        func.max(rollouts.c.finished).label("last"),
    ).group_by(*by)
    if run is not None:
        query = query.where(rollouts.c.run == run)
    return [dict(row) for row in connection.execute(query).mappings()]


def _rewards(connection: Connection, run: str) -> list[float]:
    """Mean rewards of the last steps."""
    reward = metrics.c["values"]["reward_mean"].as_float()
    query = select(reward).where(and_(metrics.c.run == run, reward.is_not(None))).order_by(metrics.c.number.desc())
    return list(connection.execute(query.limit(SPARK)).scalars())[::-1]


def _said(connection: Connection, rollout: str, attempt: int) -> dict[str, Any]:
    mine = and_(nodes.c.rollout == rollout, nodes.c.attempt == attempt)
    answers, sampled = connection.execute(select(func.count(), func.sum(nodes.c.sampled)).where(mine)).one()
    last = connection.execute(select(nodes.c.message).where(mine).order_by(nodes.c.number.desc()).limit(1)).scalar()
    return {"answers": answers, "sampled": sampled or 0, "message": orjson.loads(last) if last else None}
