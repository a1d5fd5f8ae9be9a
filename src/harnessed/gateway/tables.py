"""The tables: what the gateway keeps, on SQLite as on PostgreSQL. `store.py` opens the database.

The modules that name transactions (`lifecycle.py`, `recording.py`, `closings.py`, `controllers.py`, `peers.py`) read
and write them. A change here comes with a migration in `migrations/`.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    TypeDecorator,
)
from sqlalchemy import String as SqlString


class String(TypeDecorator[str]):
    """Text. What agents write may hold the character 0, which PostgreSQL does not keep."""

    impl = SqlString
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        return value.replace("\0", "\ufffd") if value and "\0" in value else value


Wide = BigInteger().with_variant(Integer, "sqlite")
"""64 bits; all other numbers are those of things that are counted, and PostgreSQL gives them 32."""

schema = MetaData()

runs = Table(
    "runs",
    schema,
    Column("id", String, primary_key=True),
    Column("policy", String, nullable=False),
    Column("limits", JSON, nullable=False),
    Column("history", String, nullable=False),
    Column("side_calls", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("closed_s", Float, nullable=False),  # for so long its turnstile was closed, over the closings that ended
)

closings = Table(
    "closings",
    schema,
    Column("run", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("mode", String, nullable=False),
    Column("since", Float, nullable=False),
    Column("lease_s", Float, nullable=False),
    Column("lease_until", Float, nullable=False),
)

past_closings = Table(
    "past_closings",
    schema,
    Column("run", String, primary_key=True),
    Column("since", Float, primary_key=True),
    Column("until", Float, nullable=False),
    Column("owner", String, nullable=False),
)

gateways = Table(
    "gateways",
    schema,
    Column("id", String, primary_key=True),  # of one process, never used again
    Column("name", String, nullable=False),  # of one after the other
    Column("started", Float, nullable=False),
    Column("lease_until", Float, nullable=False),
    Column("quiet", JSON, nullable=False),  # closed run -> the `since` of the closing at which nothing runs any more
)

engines = Table(
    "engines",
    schema,
    Column("id", String, primary_key=True),
    Column("url", String, nullable=False),
    Column("run", String, nullable=False),
    Column("speaks", String, nullable=False),
    Column("model", String, nullable=False),
)

groups = Table(
    "groups",
    schema,
    Column("id", String, primary_key=True),
    Column("run", String, nullable=False, index=True),
    Column("task", JSON, nullable=False),
    Column("n", Integer, nullable=False),
    Column("purpose", String, nullable=False),
    Column("sampling", JSON, nullable=False),
    Column("seed", Wide, nullable=False),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("complete", Boolean, nullable=False),
    Column("created", Float, nullable=False),
)

rollouts = Table(
    "rollouts",
    schema,
    Column("id", String, primary_key=True),
    Column("run", String, nullable=False),
    Column("group", String, nullable=False, index=True),
    Column("index", Integer, nullable=False),
    Column("purpose", String, nullable=False),
    Column("rank", Integer, nullable=False, server_default="0"),  # the lowest first: minus its group's priority
    Column("state", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("outcome", String),
    Column("reason", String, nullable=False),
    Column("reward", Float),
    Column("parts", JSON, nullable=False),
    Column("call_rewards", JSON, nullable=False, server_default="[]"),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("finished", Float),
    Index("rollouts_by_rank", "state", "rank", "created"),
    Index("rollouts_by_age", "run", "created", "id"),
    Index("rollouts_by_outcome", "run", "purpose", "state", "outcome", "reward", "finished"),
)

attempts = Table(
    "attempts",
    schema,
    Column("rollout", String, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("owner", String, nullable=False),
    Column("lease_until", Float, nullable=False),
    Column("tries", Integer, nullable=False),  # attempts that the rollout may have in all, as the claim said
    Column("live", Boolean, nullable=False),  # calls are admitted and recorded only while this is true
    Column("ending", Boolean, nullable=False),  # it is about to end: what is generated for it is recorded first
    Column("nodes", Integer, nullable=False),  # number of the last node
    Column("faults", JSON, nullable=False),  # request -> why it was refused or failed: `budget: ...`, `engine: ...`
    Column("closed_s", Float, nullable=False),  # of its run, when it started
    Column("started", Float, nullable=False),
    Column("ended", Float),
    Index("attempts_by_lease", "live", "lease_until"),
)

controllers = Table(
    "controllers",
    schema,
    Column("owner", String, primary_key=True),
    Column("run", String, nullable=False),  # or the name that the ids of several begin with
    Column("slots", Integer, nullable=False),
    Column("judging", Integer, nullable=False),
    Column("lease_until", Float, nullable=False),
)

calls = Table(
    "calls",
    schema,
    Column("id", String, primary_key=True),
    Column("rollout", String, nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("gateway", String, nullable=False),  # that has admitted it
    Column("state", String, nullable=False),  # a records.CallState
    Column("left", Boolean, nullable=False),  # its client was seen to go away without the last byte
    Column("prompt", LargeBinary, nullable=False),  # digest of its request; equal for identical ones
    Column("most_tokens", Integer, nullable=False),  # that may be sampled for it
    Column("asked", JSON, nullable=False),  # the request without messages and tools, as the harness sent it
    Column("wanted", JSON, nullable=False),  # what of it the gateway honours: wire.turn.Wanted
    Column("admitted", Float, nullable=False),
    Column("ended", Float),
    Column("generated", LargeBinary),  # when engines sampled for it: pairs of float64, begin and end
)

nodes = Table(
    "nodes",
    schema,
    Column("rollout", String, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("parent", Integer, nullable=False),
    Column("call", String, nullable=False),
    Column("segment", LargeBinary, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", LargeBinary, nullable=False),
    Column("sampled", Integer, nullable=False),
    Column("temperature", Float, nullable=False),
    Column("finish", String, nullable=False),
    Column("cut", Integer, nullable=False),
    Column("delivered", Boolean, nullable=False),
    Column("follows", Integer, nullable=False),
    Column("broken_calls", Integer, nullable=False),
    Column("apart", String, nullable=False),
    Column("split", String, nullable=False),
    Column("messages", LargeBinary, nullable=False),  # JSON, not parsed again before somebody reads it
    Column("message", LargeBinary, nullable=False),
    Column("tools", LargeBinary, nullable=False),
    ForeignKeyConstraint(["rollout", "attempt"], ["attempts.rollout", "attempts.number"]),
)

events = Table(
    "events",
    schema,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("rollout", String, nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("type", String, nullable=False),
    Column("data", JSON, nullable=False),
    Column("time", Float, nullable=False),
)

metrics = Table(
    "metrics",
    schema,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("run", String, nullable=False),
    Column("step", Wide, nullable=False),
    Column("values", JSON, nullable=False),
    Column("time", Float, nullable=False),
    Index("metrics_by_run", "run", "number"),
)

fates = Table(
    "fates",
    schema,
    Column("rollout", String, primary_key=True),
    Column("tokens", JSON, nullable=False),  # fate -> sampled tokens, as its trainer booked them
)

changes = Table(
    "changes",
    schema,
    Column("cursor", Integer, primary_key=True, autoincrement=True),
    Column("kind", String, nullable=False),
    Column("id", String, nullable=False),
    Column("run", String, nullable=False),
    Column("state", String, nullable=False),
    Index("changes_by_run", "run", "cursor"),
)
