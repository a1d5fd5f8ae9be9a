"""What trainers report, and the indexes that make lists of many rollouts fast."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "metrics",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "fates",
        sa.Column("rollout", sa.String(), nullable=False),
        sa.Column("tokens", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("rollout"),
    )
    op.create_index("metrics_by_run", "metrics", ["run", "number"], unique=False)
    outcome = ["run", "purpose", "state", "outcome", "reward", "finished"]
    op.create_index("rollouts_by_outcome", "rollouts", outcome, unique=False)
    op.create_index("rollouts_by_age", "rollouts", ["run", "created", "id"], unique=False)
    op.drop_index(op.f("ix_rollouts_run"), "rollouts")  # the start of the one above
