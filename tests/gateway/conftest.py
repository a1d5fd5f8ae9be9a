import asyncio
import secrets

import postgres
import pytest
import uvloop
from house import house  # noqa: F401  # a fixture
from sqlalchemy import create_engine, make_url, text


def pytest_asyncio_loop_factories(config, item):
    """What works close to the event loop has to work on that of tests and on that of a gateway."""
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return loops if item.path.name == "test_channel.py" else {"asyncio": asyncio.new_event_loop}


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
