"""When engines sampled for each call, and when turnstiles were closed."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("calls", sa.Column("generated", sa.LargeBinary()))
    op.create_table(
        "past_closings",
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("run", "since"),
    )
