"""Rewards for single calls."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("call_rewards", sa.JSON(), nullable=False, server_default="[]"))
