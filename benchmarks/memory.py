"""Whether the gateway keeps anything of attempts that have ended: `gateway.py --memory CALLS` measures with it."""

import asyncio

import aiohttp
from agents import OWNER, Agent
from figures import Figure
from processes import Server

from harnessed.client import AsyncClient, claim, create_groups, end_attempt
from harnessed.gateway.template import ChatTemplate
from harnessed.records import Assignment, Ending, GroupSpec, Outcome

CALLS = 10
"""Of one attempt."""
AT_ONCE = 64
EARLY = 10_000
PROMPT = 10
"""Tokens."""


async def measure_memory(server: Server, admin: str, template: ChatTemplate, calls: int) -> list[Figure]:
    """Resident memory after so many calls, against that after `EARLY`."""
    early, done = 0.0, 0
    connector = aiohttp.TCPConnector(limit=0)
    async with AsyncClient(server.url, admin) as gateway, aiohttp.ClientSession(connector=connector) as http:
        while done < calls:
            group = GroupSpec(id=f"memory{done}", run="r", task={}, n=AT_ONCE)
            await gateway(create_groups([group]))
            claimed = await gateway(claim("r", OWNER, AT_ONCE, 1))
            await asyncio.gather(*(_attempt(server, gateway, http, template, each) for each in claimed))
            done += CALLS * len(claimed)
            if not early and done >= EARLY:
                early = server.resident_mb()
    late = server.resident_mb()
    what = f"resident after {done:,} calls of {done // CALLS:,} attempts, against {EARLY:,} calls"
    return [Figure(what, late / early, 1.05, f"{early:.0f} MB, then {late:.0f} MB")]


async def _attempt(
    server: Server, gateway: AsyncClient, http: aiohttp.ClientSession, template: ChatTemplate, given: Assignment
) -> None:
    agent = Agent(template, 0, given.key, server.url)
    for number in range(CALLS):
        await agent.call(http, agent.ask(PROMPT, stream=number % 2 == 0))
    await gateway(end_attempt(given.rollout, given.attempt, Ending(outcome=Outcome.OK, reward=1.0), 1))
