"""2,000 calls of 100 attempts by real SDKs, while gateways and the engine are killed with -9 at random moments.

CHAOS_SEED chooses the moments, what is killed, and what is said; it is printed with every failure.
"""

import asyncio
import itertools
import os
import time

import pytest
import yaml
from books import Books
from crew import ATTEMPTS, LIMIT_S, Crew
from logging_engine import read
from policies import CALLING, make_policy
from supervisor import Service, faults, kill_all, schedule
from talkers import Connections

from harnessed.client import (
    AsyncClient,
    Unreachable,
    create_groups,
    create_run,
    get_totals,
    get_transcripts,
    register_engine,
)
from harnessed.gateway.keys import ADMIN, Keyring
from harnessed.records import EngineSpec, GroupSpec, Limits, RunSpec, Sampling

SEED = int(os.environ.get("CHAOS_SEED", "0"))
KILLS = 20
GROUPS = 20


def make_config(folder):
    config = {
        "policy": {"model": str(make_policy(folder / "policy", CALLING))},
        "run": {"name": "chaos", "folder": str(folder / "run")},
        "gateway": {"generation_limit_s": 60},
        "tasks": {"train": "t.jsonl", "held_out": "t.jsonl", "hidden": ["word"]},
        "harness": {"kind": "python", "function": "agent:run"},
        "evaluator": {"function": "agent:judge"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def make_services(folder):
    config, engine = make_config(folder), ["-u", str(__file__).replace("test_chaos", "logging_engine")]
    gateway = ["-m", "harnessed", "gateway", str(config), "--listener", "{listener}", "--owner", "{owner}"]
    gateway += ["--folder", str(folder / "run")]
    (folder / "run").mkdir()
    return [
        Service("gateway", gateway, folder / "gateway.log"),
        Service("engine", [*engine, "{listener}", str(folder / "sampled.log"), "{owner}"], folder / "engine.log"),
    ]


async def insist(client, call):
    """A gateway that is still starting is waited for by its socket."""
    for _ in range(100):
        try:
            return await client(call)
        except Unreachable:
            await asyncio.sleep(0.1)
    raise TimeoutError("no gateway came up")


async def make_run(admin, folder, engine):
    limits = Limits(context=20_000)
    await insist(admin, create_run(RunSpec(id="r", policy=str(folder / "policy"), limits=limits)))
    await insist(admin, register_engine(EngineSpec(id="e", url=engine.url, run="r")))
    spec = {"run": "r", "task": {}, "n": ATTEMPTS // GROUPS, "sampling": Sampling(max_tokens=900)}
    await insist(admin, create_groups([GroupSpec(id=f"g{number}", **spec) for number in range(GROUPS)]))


async def test_whatever_is_killed_no_token_is_lost_from_the_books(tmp_path):
    *gateways, engine = services = make_services(tmp_path)
    running = [asyncio.create_task(service.run()) for service in services]
    key = Keyring.from_file(tmp_path / "run" / "gateway.secret").sign(ADMIN)
    kills, killing = [], None
    try:
        async with Connections() as connections:
            admins = [AsyncClient(gateway.url, key) for gateway in gateways]
            await make_run(admins[0], tmp_path, engine)
            begin = time.monotonic()
            last = next(itertools.islice(schedule(services, SEED), KILLS - 1, None))
            crew = Crew("r", admins, connections, SEED, last.after_s + 1)
            killing = asyncio.create_task(kill_all(schedule(services, SEED), begin, kills))
            await crew.work()
            killing.cancel()
            transcripts = [
                transcript
                for number in range(GROUPS)
                for transcript in await insist(admins[0], get_transcripts(f"g{number}"))
            ]
            totals = await insist(admins[0], get_totals("r"))
            for admin in admins:
                await admin.__aexit__()
        books = Books(crew, transcripts, totals, read(tmp_path / "sampled.log"), kills)
        import pickle
        for kill in kills:
            kill.service.process = kill.service.listener = None
        crew.connections = crew.admins = crew.urls = None
        with open(os.environ.get("BOOKS", "/tmp/h7_books.pickle"), "wb") as f:
            pickle.dump((books, begin), f)
        told = books.check()
        assert len(kills) >= KILLS
        for service in services:
            assert not faults(service, kills)
        print(f"seed {SEED}, {time.monotonic() - begin:.0f} s: {told}")
    finally:
        moments = [(round(kill.at - begin, 3), kill.service.name) for kill in kills]
        print(f"CHAOS_SEED={SEED} killed {moments}")
        for task in (killing, *running):
            task and task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
