"""Registered engines: their health, which one serves a rollout, and the client that asks for an answer.

`exchange.py` samples through here; `api.py` registers and lists.
"""

import asyncio
import hashlib
import time
from array import array
from dataclasses import dataclass

import aiohttp
import orjson

from harnessed.records import Engine, EngineSpec

HEALTH_LIMIT_S = 5.0
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class EngineFailed(Exception):
    """No engine gave an answer; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine is asked for."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop: list[int]


@dataclass(frozen=True, slots=True)
class Generated:
    """What it gave: one entry per sampled token in each list."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str


class Engines:
    """The engines of all runs. One HTTP session for all of them; close it at the end."""

    def __init__(self, limit_s: float) -> None:
        self._engines: dict[str, EngineSpec] = {}
        self._trouble: dict[str, str] = {}
        """Engine -> why it is out of reach, while it is."""
        self._limit_s = limit_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=limit_s)
        )

    def register(self, engine: EngineSpec) -> None:
        self._engines[engine.id] = engine

    async def generate(self, run: str, rollout: str, generation: Generation) -> Generated:
        """Sample one answer. While the engine cannot be reached it is asked again, within the time limit.

        Raises EngineFailed.
        """
        body = orjson.dumps(
            {
                "prompt": generation.prompt,
                "max_tokens": generation.max_tokens,
                "temperature": generation.temperature,
                "seed": generation.seed,
                "stop": generation.stop,
            }
        )
        deadline = time.monotonic() + self._limit_s
        for tries in range(1_000_000):
            engine = self._of(run, rollout)
            try:
                generated = await self._ask(engine, body)
                self._trouble.pop(engine.id, None)
                return generated
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                self._trouble[engine.id] = f"engine {engine.id} was not reached: {error}"
                wait = _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]
                if time.monotonic() + wait > deadline:
                    raise EngineFailed(f"engine {engine.id} was not reached: {error}") from error
                await asyncio.sleep(wait)
            except aiohttp.ClientError as error:
                raise EngineFailed(f"engine {engine.id}: {type(error).__name__} {error}") from error
            except TimeoutError:
                raise EngineFailed(f"engine {engine.id} gave no answer within {self._limit_s:.0f} s") from None
        raise AssertionError("the deadline ends the loop")

    def trouble(self, run: str, rollout: str) -> str:
        """Why the rollout's engine is out of reach; empty if it is not."""
        try:
            return self._trouble.get(self._of(run, rollout).id, "")
        except EngineFailed as error:
            return str(error)

    async def health(self, id: str) -> Engine:
        """Ask one engine now."""
        engine = self._engines[id]
        fields = engine.model_dump()
        try:
            async with self._session.get(
                f"{engine.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_LIMIT_S)
            ) as response:
                body = await response.read()
                if response.status != 200:
                    return Engine(**fields, healthy=False, reason=_reason(body, response.status))
                health = orjson.loads(body)
                return Engine(
                    **fields,
                    healthy=health["status"] == "ok",
                    reason=health["reason"],
                    sampled_tokens=health["sampled_tokens"],
                    version=health["version"],
                )
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, KeyError) as error:
            return Engine(**fields, healthy=False, reason=f"{type(error).__name__} {error}".strip())

    async def list(self) -> "list[Engine]":
        return list(await asyncio.gather(*(self.health(id) for id in self._engines)))

    async def close(self) -> None:
        await self._session.close()

    def _of(self, run: str, rollout: str) -> EngineSpec:
        """A rollout stays on one engine, whose cache knows its beginning."""
        serving = [engine for engine in self._engines.values() if engine.run == run]
        if not serving:
            raise EngineFailed(f"run {run} has no engine: register one")
        return serving[int.from_bytes(hashlib.blake2b(rollout.encode(), digest_size=4).digest()) % len(serving)]

    async def _ask(self, engine: EngineSpec, request: bytes) -> Generated:
        async with self._session.post(
            f"{engine.url}/generate", data=request, headers={"content-type": "application/json"}
        ) as response:
            body = await response.read()
            if response.status != 200:
                raise EngineFailed(f"engine {engine.id}: {_reason(body, response.status)}")
            return _read(engine, body)


def _read(engine: EngineSpec, body: bytes) -> Generated:
    try:
        answer = orjson.loads(body)
        generated = Generated(answer["tokens"], answer["logprobs"], answer["versions"], answer["finish"])
        for numbers, kind in ((generated.tokens, "i"), (generated.logprobs, "f"), (generated.versions, "i")):
            array(kind, numbers)  # raises for what cannot be stored
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise EngineFailed(f"engine {engine.id} gave no answer of the protocol: {error!r}") from error
    if not generated.tokens or len(generated.tokens) != len(generated.versions):
        raise EngineFailed(
            f"engine {engine.id} gave {len(generated.tokens)} tokens, {len(generated.versions)} versions"
        )
    if generated.logprobs and len(generated.logprobs) != len(generated.tokens):
        raise EngineFailed(f"engine {engine.id} gave {len(generated.logprobs)} log-probabilities for its tokens")
    return generated


def _reason(body: bytes, status: int) -> str:
    """The engine's own words, where it speaks our protocol; else the beginning of what it said."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"status {status} {body[:200].decode(errors='replace')}".rstrip()
