"""2,000 calls of 100 attempts by real SDKs, while gateways and the engine are killed with -9 at random moments.

`make chaos`. CHAOS_SEED chooses the moments, what is killed, and what is said; a failure prints it, with the moments.
"""

import asyncio
import itertools
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path

import logging_engine
import yaml
from books import Books
from crew import ATTEMPTS, Crew
from policies import CALLING, make_policy
from postgres import running as postgres
from supervisor import Service, faults, kill_all, schedule
from talkers import Connections

from harnessed.client import (
    AsyncClient,
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
PATIENCE_S = 60


def make_services(folder: Path, gateways: list[str], **settings: object) -> dict[str, Service]:
    """Gateways of these names with a folder in common, and their engine."""
    config = {
        "policy": {"model": str(make_policy(folder / "policy", CALLING))},
        "run": {"name": "chaos", "folder": str(folder / "run")},
        "gateway": {"generation_limit_s": 60} | settings,
        "tasks": {"train": "t.jsonl", "held_out": "t.jsonl", "hidden": ["word"]},
        "harness": {"kind": "python", "function": "agent:run"},
        "evaluator": {"function": "agent:judge"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run").mkdir()
    gateway = ["-m", "harnessed", "gateway", str(folder / "config.yaml"), "--listener", "{listener}"]
    commands = {name: [*gateway, "--owner", "{owner}"] for name in gateways}
    commands["engine"] = [logging_engine.__file__, "{listener}", str(folder / "sampled.log"), "{owner}"]
    return {name: Service(name, command, folder / f"{name}.log") for name, command in commands.items()}


async def make_run(admin: AsyncClient, folder: Path, engine: Service) -> None:
    limits = Limits(context=20_000)
    await admin(create_run(RunSpec(id="r", policy=str(folder / "policy"), limits=limits)))
    await admin(register_engine(EngineSpec(id="e", url=engine.url, run="r")))
    spec = {"run": "r", "task": {}, "n": ATTEMPTS // GROUPS, "sampling": Sampling(max_tokens=900)}
    await admin(create_groups([GroupSpec(id=f"g{number}", **spec) for number in range(GROUPS)]))


async def play(folder: Path, services: dict[str, Service], gateways: list[str]) -> None:
    """All of it; then the books."""
    running = [asyncio.create_task(service.run()) for service in services.values()]
    key, kills = Keyring.from_file(folder / "run" / "gateway.secret").sign(ADMIN), []
    begin = time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            connections = await stack.enter_async_context(Connections())
            asking = [AsyncClient(services[name].url, key, patience_s=PATIENCE_S) for name in gateways]
            admins = [await stack.enter_async_context(admin) for admin in asking]
            await make_run(admins[0], folder, services["engine"])
            begin = time.monotonic()
            last = next(itertools.islice(schedule(list(services), SEED), KILLS - 1, None))
            crew = Crew("r", admins, connections, SEED, last.after_s)
            killing = asyncio.create_task(
                kill_all(schedule(list(services), SEED), services, begin, kills, crew.answers)
            )
            await crew.work()
            assert killing.cancel()
            groups = [await admins[0](get_transcripts(f"g{number}")) for number in range(GROUPS)]
            totals = await admins[0](get_totals("r"))
        sampled = logging_engine.read(folder / "sampled.log")
        told = Books(crew.stories, crew.given_back, list(itertools.chain(*groups)), totals, sampled, kills).check()
        assert [faults(service, kills) for service in services.values()] == [""] * len(services)
        assert len(kills) >= KILLS
        print(f"{time.monotonic() - begin:.0f} s: {told}")
    finally:
        print(f"CHAOS_SEED={SEED} killed {[(round(kill.at - begin, 3), kill.name) for kill in kills]}")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_one_gateway_on_sqlite(tmp_path):
    gateways = ["gateway"]
    await play(tmp_path, make_services(tmp_path, gateways), gateways)


async def test_two_gateways_on_postgresql(tmp_path):
    """Round robin by call, and each retry by a caller goes to the other one."""
    gateways = ["gateway 1", "gateway 2"]
    with postgres() as database:
        await play(tmp_path, make_services(tmp_path, gateways, database=database), gateways)
