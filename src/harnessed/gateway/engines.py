"""Registered engines: their health, which one serves a rollout, and the client that asks for an answer.

`exchange.py` samples through here; `api.py` registers and lists.
"""

import asyncio
import contextlib
import hashlib
import time
from dataclasses import replace

import aiohttp
import orjson

from harnessed.gateway.dialects import (
    NOTHING,
    PATHS,
    STREAM,
    Generated,
    Generation,
    NoAnswer,
    ask,
    read,
    read_preview,
)
from harnessed.gateway.preview import Preview
from harnessed.records import Dialect, Engine, EngineSpec

HEALTH_LIMIT_S = 5.0
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class EngineFailed(Exception):
    """No engine gave an answer; the text says which and why."""

    kept: Generated = NOTHING
    """What was sampled of it before."""


class ContextTooLong(EngineFailed):
    """The engine says that the conversation does not fit its context; for the harness to mend."""


class RequestRefused(EngineFailed):
    """The engine cannot take these messages; for the harness to mend."""


class Interrupted(EngineFailed):
    """Nobody wants the answer any more."""


class _Again(Exception):
    """Worth asking again; the text says why."""


class Engines:
    """The engines of all runs. One HTTP session for all of them; close it at the end."""

    def __init__(self, limit_s: float) -> None:
        self._engines: dict[str, EngineSpec] = {}
        self._trouble: dict[str, str] = {}
        """Engine -> why it is out of reach, while it is."""
        self._running: set[str] = set()
        """Generations that somebody was asked for."""
        self._unwanted: set[str] = set()
        """Generations that were interrupted and have not ended yet."""
        self._limit_s = limit_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=limit_s)
        )

    def register(self, engine: EngineSpec) -> None:
        self._engines[engine.id] = engine

    async def generate(
        self,
        run: str,
        rollout: str,
        generation: Generation,
        kept: Generated = NOTHING,
        preview: Preview | None = None,
    ) -> Generated:
        """Sample one answer, of which `kept` was sampled before.

        While the engine cannot be reached it is asked again, within the time limit; an answer that it breaks off goes
        on from its tokens. Raises EngineFailed, which holds the tokens so far.
        """
        deadline = time.monotonic() + self._limit_s
        self._running.add(generation.id)
        try:
            for tries in range(1_000_000):
                if kept.tokens and kept.tokens[-1] in generation.stop:
                    return replace(kept, finish="stop")
                if len(kept.tokens) >= generation.max_tokens:
                    return replace(kept, finish="length")
                if generation.id in self._unwanted:
                    raise Interrupted("nobody waits for it")
                engine = self._of(run, rollout)
                if preview:
                    preview.begin(kept.tokens)
                try:
                    kept = kept.then(await self._ask(engine, generation.after(kept), preview))
                    if kept.finish != NOTHING.finish:
                        self._trouble.pop(engine.id, None)
                        return kept
                    if generation.id in self._unwanted:
                        continue
                    if engine.speaks == Dialect.CHAT:
                        raise EngineFailed(f"engine {engine.id} broke its answer off")
                    again = f"engine {engine.id} broke its answer off"
                except _Again as error:
                    again = self._trouble[engine.id] = str(error)
                wait = _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]
                if time.monotonic() + wait > deadline:
                    raise EngineFailed(again)
                await asyncio.sleep(wait)
        except EngineFailed as error:
            error.kept = kept
            raise
        finally:
            self._running.discard(generation.id)
            self._unwanted.discard(generation.id)
        raise AssertionError("the deadline ends the loop")

    async def interrupt(self, run: str, rollout: str, ids: list[str]) -> None:
        """Let generations end with the tokens that they have, of an engine that is asked by tokens."""
        self._unwanted.update(self._running.intersection(ids))
        try:
            engine = self._of(run, rollout)
        except EngineFailed:
            return
        # A request that is still on its way to the engine is not known there yet.
        for wait_s in _BACKOFF_S:
            asked = [self._interrupt(engine, id) for id in ids if id in self._unwanted]
            if all(await asyncio.gather(*asked)):
                return
            await asyncio.sleep(wait_s)

    async def abandon(self, run: str, rollout: str, ids: list[str]) -> None:
        """Let generations end that were asked for by a gateway that died; what they have is lost."""
        with contextlib.suppress(EngineFailed):
            engine = self._of(run, rollout)
            if engine.speaks == Dialect.TOKENS:
                await asyncio.gather(*(self._interrupt(engine, id) for id in ids))

    async def _interrupt(self, engine: EngineSpec, id: str) -> bool:
        """Whether the engine knew of it."""
        try:
            limit = aiohttp.ClientTimeout(total=HEALTH_LIMIT_S)
            async with self._session.post(f"{engine.url}/interrupt", json={"id": id}, timeout=limit) as response:
                return response.status != 200 or bool((await response.json())["found"])
        except (aiohttp.ClientError, TimeoutError):
            return False  # then nothing is generated there

    def speaks(self, run: str, rollout: str) -> Dialect:
        """How the rollout's engine is asked; by tokens as long as there is none."""
        try:
            return self._of(run, rollout).speaks
        except EngineFailed:
            return Dialect.TOKENS

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
                if engine.speaks == Dialect.CHAT:  # it says nothing but that it is there
                    return Engine(**fields, healthy=True)
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

    async def _ask(self, engine: EngineSpec, generation: Generation, preview: Preview | None) -> Generated:
        """Raises _Again or EngineFailed."""
        headers = {"content-type": "application/json"}
        url = engine.url + PATHS[engine.speaks]
        try:
            body = ask(engine, generation, stream=preview is not None)
            async with self._session.post(url, data=body, headers=headers) as response:
                if preview and response.content_type == STREAM:
                    body = await _follow(response, preview)
                else:
                    body = await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Again(f"engine {engine.id} was not reached: {error}") from error
        except NoAnswer as error:
            raise EngineFailed(f"engine {engine.id} {error}") from error
        except aiohttp.ClientError as error:
            raise EngineFailed(f"engine {engine.id}: {type(error).__name__} {error}") from error
        except TimeoutError:
            raise EngineFailed(f"engine {engine.id} gave no answer within {self._limit_s:.0f} s") from None
        if response.status == 400 and b"context length" in body:  # the words of OpenAI and vLLM
            raise ContextTooLong(_reason(body, response.status))
        if response.status == 400 and engine.speaks == Dialect.CHAT:
            raise RequestRefused(_reason(body, response.status))
        if response.status != 200:
            raise EngineFailed(f"engine {engine.id}: {_reason(body, response.status)}")
        try:
            return read(engine, body)
        except NoAnswer as error:
            raise EngineFailed(f"engine {engine.id} {error}") from error


async def _follow(response: aiohttp.ClientResponse, preview: Preview) -> bytes:
    """Show the tokens of a stream; its last line, which is the whole answer. Raises NoAnswer."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            new = read_preview(line)
            if new is None:
                return line
            preview.add(new)
    raise NoAnswer("ended its stream without an answer")


def _reason(body: bytes, status: int) -> str:
    """The engine's own words, where it speaks our protocol; else the beginning of what it said."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"status {status} {body[:200].decode(errors='replace')}".rstrip()
