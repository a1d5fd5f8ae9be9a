"""Brings a database to the tables of this version; `store.py` calls `migrate` when it opens one.

Each file in `versions/` is one step of Alembic's. A change of `tables.py` gets the next one; a test compares both.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, inspect

from harnessed.config import ConfigError

FOLDER = Path(__file__).parent


def migrate(connection: Connection) -> None:
    """In the transaction of the connection. Raises ConfigError."""
    names = inspect(connection).get_table_names()
    if "rollouts" in names and "alembic_version" not in names:
        raise ConfigError("the database was written before its tables had versions: move it away, or name another one")
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
