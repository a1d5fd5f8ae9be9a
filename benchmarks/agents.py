"""Agents of a benchmark: conversations that grow, and who sends them. `gateway.py` lets them call."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

import aiohttp
import orjson
from texts import source

from harnessed.client import AsyncClient, renew
from harnessed.gateway.template import ChatTemplate

FIRST, LATER = 3_000, 50
"""Tokens of what they ask. With answers of 200 and what the template writes, 50 turns end at 16,000."""
OWNER = "benchmark"


class Agent:
    """One conversation."""

    def __init__(self, template: ChatTemplate, number: int, key: str, url: str) -> None:
        self._template = template
        self._draw = random.Random(number)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._url = f"{url}/v1/chat/completions"
        self._messages: list[dict[str, str]] = []

    def ask(self, tokens: int, *, stream: bool) -> bytes:
        """The next request."""
        ids = _ids(self._template)
        begin = self._draw.randrange(len(ids) - tokens)
        text = self._template.written(ids[begin : begin + tokens])
        self._messages.append({"role": "user", "content": text})
        return orjson.dumps({"model": "m", "messages": self._messages, "stream": stream})

    async def call(self, http: aiohttp.ClientSession, body: bytes) -> float:
        """Send it and take the answer; the seconds to the first token, or to the answer if that is no stream."""
        started = time.perf_counter()
        async with http.post(self._url, data=body, headers=self._headers) as response:
            assert response.status == 200, await response.text()
            if response.content_type == "text/event-stream":
                text, seconds = await _streamed(response, started)
            else:
                answer, seconds = await response.read(), time.perf_counter() - started
                text = orjson.loads(answer)["choices"][0]["message"]["content"]
        self._messages.append({"role": "assistant", "content": text})
        return seconds

    def forget(self) -> None:
        self._messages.clear()


async def _streamed(response: aiohttp.ClientResponse, started: float) -> tuple[str, float]:
    """The text of an answer, and when the first of it came."""
    body, first = b"", 0.0
    async for piece in response.content.iter_any():
        body += piece
        if not first and body.count(b'"content":') > 1:  # the first one is empty
            first = time.perf_counter() - started
    events = [orjson.loads(event[6:]) for event in body.split(b"\n\n") if event and event != b"data: [DONE]"]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events), first


async def talk(http: aiohttp.ClientSession, agents: Sequence[Agent], turns: int, tokens: int, *, stream: bool) -> None:
    """All at once, each as fast as it gets its answers."""

    async def one(agent: Agent) -> None:
        for _ in range(turns):
            await agent.call(http, agent.ask(tokens, stream=stream))

    await asyncio.gather(*map(one, agents))


async def talk_at(http: aiohttp.ClientSession, agents: Sequence[Agent], turns: int, per_s: float) -> list[float]:
    """Streams, so many a second of all agents together: the seconds to the first token of each."""

    async def one(agent: Agent, at: float) -> list[float]:
        taken = []
        for _ in range(turns):
            body = agent.ask(LATER, stream=True)
            await asyncio.sleep(at - time.perf_counter())
            taken.append(await agent.call(http, body))
            at += len(agents) / per_s
        return taken

    begin = time.perf_counter() + 0.1
    each = await asyncio.gather(*(one(agent, begin + i / per_s) for i, agent in enumerate(agents)))
    return [seconds for taken in each for seconds in taken]


@asynccontextmanager
async def connected() -> AsyncIterator[aiohttp.ClientSession]:
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as http:
        yield http


@asynccontextmanager
async def renewing(url: str, admin: str) -> AsyncIterator[None]:
    """While attempts are held by `OWNER`."""

    async def keep() -> None:
        while True:
            await gateway(renew(OWNER))
            await asyncio.sleep(5)

    async with AsyncClient(url, admin) as gateway, asyncio.TaskGroup() as group:
        task = group.create_task(keep())
        yield
        task.cancel()


@cache
def _ids(template: ChatTemplate) -> list[int]:
    return template.encode(source()).tolist()
