"""Who is started first."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("groups", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("rollouts", sa.Column("rank", sa.Integer(), nullable=False, server_default="0"))
    op.create_index("rollouts_by_rank", "rollouts", ["state", "rank", "created"], unique=False)
    op.drop_index("rollouts_by_state", "rollouts")  # the one above does its work
