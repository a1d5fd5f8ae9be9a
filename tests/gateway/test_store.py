"""Both databases: the same tables, and writes that are kept whole or not at all."""

import asyncio

import openai
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, insert, make_url, select, text

from harnessed.client import end_attempt, get_rollout
from harnessed.config import ConfigError
from harnessed.gateway import metrics, retention
from harnessed.gateway import store as store_module
from harnessed.gateway.lifecycle import claim, create_groups, get_group
from harnessed.gateway.store import Refused, Store
from harnessed.gateway.tables import runs, schema
from harnessed.records import Ending, GroupSpec, Metrics, Outcome

RUN = {"policy": "p", "limits": {}, "history": "exact", "side_calls": [], "created": 0.0, "closed_s": 0.0}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    return request.getfixturevalue("database") if request.param == "postgresql" else f"sqlite:///{tmp_path}/a.db"


@pytest.fixture
async def store(url):
    store = Store(url)
    yield store
    await store.close()


def add(id):
    return lambda connection: connection.execute(insert(runs).values(id=id, **RUN)) and None


def ids(connection):
    return list(connection.execute(select(runs.c.id).order_by(runs.c.id)).scalars())


async def test_the_steps_make_the_tables(store):
    def differences(connection):
        return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), schema)

    assert await store.read(differences) == []


async def test_the_highest_priority_is_claimed_first_and_the_oldest_among_equals(store):
    specs = [
        GroupSpec(id=id, run="r", task={}, n=2, priority=priority)
        for id, priority in (("d", -1_000_000), ("b", 0), ("a", 0), ("c", 1_000_000))
    ]
    await store.write(add("r"))
    for now, spec in enumerate(specs):
        await store.write(lambda connection, spec=spec, now=now: create_groups(connection, [spec], float(now)))

    async def claimed(most):
        rows = await store.write(lambda connection: claim(connection, "r", "me", most, 1, 9.0))
        return [rollout.id for rollout, _ in rows]

    assert await claimed(3) == ["c.0", "c.1", "b.0"]
    late = GroupSpec(id="e", run="r", task={}, n=1, priority=1)
    await store.write(lambda connection: create_groups(connection, [late], 9.0))
    assert await claimed(9) == ["e.0", "b.1", "a.0", "a.1", "d.0", "d.1"]


async def test_seeds_and_steps_have_64_bits(store):
    """The trainer's seeds have 48."""
    spec = GroupSpec(id="g", run="r", task={}, n=1, seed=2**63 - 1)
    await store.write(add("r"))
    await store.write(lambda connection: create_groups(connection, [spec], 0.0))
    await store.write(lambda connection: metrics.append(connection, "r", Metrics(step=-(2**63), values={}), 0.0))
    assert (await store.read(lambda connection: get_group(connection, "g"))).seed == 2**63 - 1
    (line,) = await store.read(lambda connection: metrics.after(connection, "r", 0))
    assert line.step == -(2**63)


async def test_a_database_is_opened_again(url):
    for id in "ab":
        store = Store(url)
        await store.write(add(id))
        await store.close()
    store = Store(url)
    assert await store.read(ids) == ["a", "b"]
    await store.close()


async def test_a_write_that_fails_undoes_itself_alone(store):
    def fail(connection):
        add("half")(connection)
        raise Refused(409, "no")

    written = await asyncio.gather(
        *(store.write(work) for work in (add("a"), fail, add("b"), add("a"), add("c"))), return_exceptions=True
    )
    assert [type(each).__name__ for each in written] == [
        "NoneType",
        "Refused",
        "NoneType",
        "IntegrityError",
        "NoneType",
    ]
    assert await store.read(ids) == ["a", "b", "c"]
    assert store.trouble == ""


async def test_text_of_agents_is_kept_whatever_it_holds(store):
    await store.write(add("a\0b"))
    assert (await store.read(ids))[0].startswith("a")


def test_a_database_of_before_is_not_touched(tmp_path):
    database = f"sqlite:///{tmp_path}/old.db"
    with create_engine(database).begin() as connection:
        connection.execute(text("CREATE TABLE rollouts (id TEXT)"))

    async def opened():
        Store(database)

    with pytest.raises(ConfigError, match="move it away"):
        asyncio.run(opened())


def test_a_database_that_is_not_there_is_named(tmp_path):
    async def opened():
        Store("postgresql://nobody@127.0.0.1:1/none")

    with pytest.raises(ConfigError, match=r"gateway.database: .*refused"):
        asyncio.run(opened())


async def test_a_full_disk_is_told_and_damages_nothing(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/a.db")
    await store.write(add("a"))
    await store.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1") and None)
    with pytest.raises(Exception, match="full"):
        await store.write(lambda c: c.execute(insert(runs).values(id="big", **RUN | {"policy": "p" * 10**6})) and None)
    assert "full" in store.trouble
    await store.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1000000") and None)
    await store.write(add("b"))
    assert (await store.read(ids), store.trouble) == (["a", "b"], "")
    await store.close()


async def test_writes_wait_while_the_server_is_away(database):
    """Its connections are cut: nobody knows of a transaction in progress whether it was kept."""
    store = Store(database, client="cut me")
    await store.write(add("a"))
    engine = create_engine(make_url(database).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'cut me'"
        assert connection.execute(text(cut)).all()
    engine.dispose()
    await store.write(add("b"))
    assert await store.read(ids) == ["a", "b"]
    await store.close()


async def test_admission_stops_before_the_disk_is_full(house, monkeypatch):
    (attempt,) = await house.attempts()
    question = [{"role": "user", "content": "hello"}]
    monkeypatch.setattr(store_module, "LEAST_FREE_BYTES", 1 << 60)
    await house.store.write(lambda connection: None)
    with pytest.raises(openai.InternalServerError, match=r"MB are free where .* lies: make room"):
        await house.openai(attempt.key).chat.completions.create(model="m", messages=question)
    assert house.engine.log == []
    monkeypatch.undo()
    await house.store.write(lambda connection: None)
    await house.openai(attempt.key).chat.completions.create(model="m", messages=question)


async def test_runs_that_rest_lose_what_was_said(house):
    (attempt,) = await house.attempts()
    await house.openai(attempt.key).chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))

    async def rests(days):
        keeping = asyncio.create_task(retention.keep_small(house.store, days))
        await asyncio.sleep(0.5)
        keeping.cancel()
        return await house.nodes()

    assert len(await rests(1)) == 1
    assert await rests(1e-9) == []
    assert (await house.admin(get_rollout(attempt.rollout))).reward == 1.0


async def test_an_sqlite_file_has_one_gateway(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/a.db")
    with pytest.raises(ConfigError, match="another gateway uses"):
        Store(f"sqlite:///{tmp_path}/a.db")
    await store.close()
    await Store(f"sqlite:///{tmp_path}/a.db").close()
