"""Statements of the hot path: compiled once for each kind of database, and handed to its driver.

SQLAlchemy takes four times as long to find the compiled form of a statement and to bind its values as the driver takes
to execute it. `recording.py` has the few statements that every call needs in this form; all others go the usual way.
"""

from typing import Any

from sqlalchemy import Connection, Delete, Insert, Update
from sqlalchemy.exc import DBAPIError

Row = dict[str, Any]
"""Values by the names of their parameters; JSON as text."""


class Prepared:
    """One statement."""

    def __init__(self, statement: Insert | Update | Delete) -> None:
        self._statement = statement
        self._compiled: dict[str, tuple[str, Row]] = {}
        """By the name of the database's dialect: the text, and the values that are part of the statement."""

    def execute(self, connection: Connection, values: Row) -> Any:
        """In the transaction of the connection; the driver's cursor. Raises DBAPIError."""
        text, own = self._compiled.get(connection.dialect.name) or self._compile(connection)
        cursor = connection.connection.cursor()
        try:
            cursor.execute(text, own | values)
        except connection.dialect.loaded_dbapi.Error as error:
            away = connection.dialect.is_disconnect(error, connection.connection, cursor)
            if away:
                connection.invalidate()
            raise DBAPIError.instance(
                text, None, error, connection.dialect.loaded_dbapi.Error,
                connection_invalidated=away, dialect=connection.dialect,
            ) from error  # fmt: skip
        return cursor

    def _compile(self, connection: Connection) -> tuple[str, Row]:
        kind: Any = type(connection.dialect)
        dialect = kind(paramstyle="named" if connection.dialect.name == "sqlite" else "pyformat")
        compiled = self._statement.compile(dialect=dialect)
        own = {name: str(value) if isinstance(value, str) else value for name, value in compiled.params.items()}
        self._compiled[connection.dialect.name] = (str(compiled), own)
        return self._compiled[connection.dialect.name]
