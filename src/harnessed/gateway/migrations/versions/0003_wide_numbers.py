"""Seeds and steps of 64 bits; those of SQLite have been so all along."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.alter_column("groups", "seed", type_=sa.BigInteger())
        op.alter_column("metrics", "step", type_=sa.BigInteger())
