import secrets

import postgres
import pytest
from house import house  # noqa: F401  # a fixture
from sqlalchemy import create_engine, make_url, text


@pytest.fixture(scope="session")
def server():
    """A PostgreSQL server of the session."""
    with postgres.running() as url:
        yield url


@pytest.fixture
def database(server):
    """An empty PostgreSQL database."""
    name = f"test_{secrets.token_hex(4)}"
    engine = create_engine(make_url(server).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return make_url(server).set(database=name).render_as_string(hide_password=False)
