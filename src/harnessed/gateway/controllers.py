"""Controllers in the store, as transactions: who has said that it is there, for which runs, and what each has claimed.

`api.py` keeps what a controller says of itself when it renews, `status.py` lists them.
"""

from sqlalchemy import Connection, delete, func, insert, select

from harnessed.gateway.lifecycle import LEASE_S
from harnessed.gateway.tables import attempts, controllers
from harnessed.records import ControllerStatus, Presence

REMEMBERED_S = 3600.0
"""So long after its last sign of life a controller is still listed as one that is gone."""


def keep(connection: Connection, owner: str, presence: Presence | None, now: float) -> None:
    """What a controller says of itself takes the place of what it has said; nothing: it goes."""
    gone = controllers.c.lease_until < now - REMEMBERED_S
    connection.execute(delete(controllers).where((controllers.c.owner == owner) | gone))
    if presence:
        values = presence.model_dump() | {"owner": owner, "lease_until": now + LEASE_S}
        connection.execute(insert(controllers).values(values))


def list_all(connection: Connection) -> list[ControllerStatus]:
    """Those that hold attempts or have said that they are there, also if that is over."""
    present = {
        row["owner"]: (Presence(run=row["run"], slots=row["slots"], judging=row["judging"]), row["lease_until"])
        for row in connection.execute(select(controllers)).mappings()
    }
    held = (
        select(attempts.c.owner, func.count(), func.min(attempts.c.lease_until))
        .where(attempts.c.live)
        .group_by(attempts.c.owner)
    )
    holding = {owner: (count, lease_until) for owner, count, lease_until in connection.execute(held)}
    found = []
    for owner in sorted(present.keys() | holding.keys()):
        presence, said_until = present.get(owner, (None, 0.0))
        count, held_until = holding.get(owner, (0, said_until))
        found.append(ControllerStatus(owner=owner, attempts=count, lease_until=held_until, presence=presence))
    return found
