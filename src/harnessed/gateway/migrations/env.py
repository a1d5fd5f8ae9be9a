"""Alembic runs this for each command: the steps, on the connection that it was given."""

from alembic import context

from harnessed.gateway.tables import schema

context.configure(connection=context.config.attributes["connection"], target_metadata=schema)
context.run_migrations()
