"""The client of the engines: asks for an answer until it is whole, whichever of a run's engines live and die meanwhile.

`sampling.py` samples and interrupts through here; `api.py` registers and lists. `routing.py` says where a rollout goes.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

import aiohttp

from harnessed.gateway.channel import Channels, Lost
from harnessed.gateway.dialects import (
    NOTHING,
    PATHS,
    Generated,
    Generation,
    NoAnswer,
    ask,
    read,
    read_preview,
    shown,
)
from harnessed.gateway.preview import Preview
from harnessed.gateway.progress import waits_for
from harnessed.gateway.routing import Routing, Server, reason_in
from harnessed.records import Dialect, Engine, EngineSpec

INTERRUPT_LIMIT_S = 8.0
"""How long an engine may take for its next token."""
SOUGHT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Between two requests to interrupt what an engine does not know yet, because it is on its way there."""
LAST_WORDS_S = 8.0
"""How long an engine that is interrupted at the limit of a generation has to answer; then its connection is closed."""
LOST_LIMIT_S = 1.0
"""How long an engine whose connection broke is tried to be told that nobody waits there."""
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

    trouble: str = ""
    """What was wrong with the engines while it waited for one."""


@dataclass(slots=True, eq=False)
class _Running:
    """A generation that somebody asked for."""

    kept: Generated
    """What is sampled of it so far, as far as it is known."""
    deadline: float
    """In the time of the event loop."""
    periods: "array[float]"
    """When an engine was at it, in seconds since the epoch: begin and end, one after the other."""
    server: Server | None = None
    """Where it runs now."""
    lost: set[str] = field(default_factory=set)
    """Engines to which its connection broke."""
    unwanted: bool = False
    ending: "asyncio.Task[None] | None" = None
    """It is interrupted because its time is over."""


async def _always(_run: str, _rollout: str) -> bool:
    return True


class Engines:
    """The engines of all runs. Close it at the end."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._running: dict[str, _Running] = {}
        """By the generation's id."""
        self._channels = Channels()
        """For generations."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )
        """For all else."""
        self.sampled: Counter[str] = Counter()
        """Engine -> tokens that it gave."""
        self.may_go_on: Callable[[str, str], Awaitable[bool]] = _always
        """Asked about a run and a rollout before an answer that an engine broke off is gone on with."""
        self._routing = Routing(self._session)
        self._stored: set[str] = set()
        """Ids of engines that the store was last seen to hold."""

    def register(self, engine: EngineSpec) -> None:
        """The same id replaces; what runs there ends there."""
        self._routing.register(engine)

    async def remove(self, id: str) -> None:
        """Nothing more is asked of it. What runs there is interrupted and goes on elsewhere; of an engine that speaks
        chat it ends there."""
        if server := self._routing.remove(id):
            there = [id for id, running in self._running.items() if running.server is server]
            if server.spec.speaks == Dialect.TOKENS:
                await self._end(server, there)

    async def keep(self, engines: list[EngineSpec]) -> None:
        """These are stored; those that were and are no more are removed. One that is registered here at this moment may
        not be among them yet."""
        for engine in engines:
            self.register(engine)
        gone, self._stored = self._stored - {engine.id for engine in engines}, {engine.id for engine in engines}
        await asyncio.gather(*(self.remove(id) for id in gone))

    async def generate(
        self,
        run: str,
        rollout: str,
        generation: Generation,
        kept: Generated = NOTHING,
        preview: Preview | None = None,
        periods: "array[float] | None" = None,
    ) -> Generated:
        """Sample one answer, of which `kept` was sampled before; `periods` gets when an engine was at it.

        Within the time limit it waits for a healthy engine, and what an engine breaks off goes on from its tokens, at
        another one if this one was lost. Raises EngineFailed, which holds the tokens so far.
        """
        deadline = asyncio.get_running_loop().time() + self._limit_s
        running = _Running(kept, deadline, array("d") if periods is None else periods)
        self._running[generation.id] = running
        try:
            return await self._until_whole(run, rollout, generation, running, preview)
        except EngineFailed as error:
            error.kept = running.kept
            raise
        finally:
            del self._running[generation.id]

    async def interrupt(self, ids: Iterable[str], ended: Callable[[Iterable[str]], None] = lambda ids: None) -> None:
        """Let generations end with the tokens that they have, where they run. `ended` is told of those that have ended
        there, before their tokens come."""
        at: dict[Server | None, list[str]] = {}
        for id in ids:
            if running := self._running.get(id):
                running.unwanted = True
                at.setdefault(running.server, []).append(id)
        self._routing.wake()
        ended(at.pop(None, []))  # they are between two engines, and ask no other one
        await asyncio.gather(*(self._end(server, ids, ended) for server, ids in at.items() if server))

    async def abandon(self, run: str, ids: Iterable[str]) -> None:
        """End generations that a gateway asked for which is dead, wherever they run; nobody gets their tokens. An
        engine that speaks chat ends what its client has left."""
        ids = list(ids)

        engines = [server.spec for server in self._routing.servers(run) if server.spec.speaks == Dialect.TOKENS]
        await asyncio.gather(*(self._interrupt(engine, ids) for engine in engines))

    def speaks(self, run: str) -> Dialect:
        """How the run's engines are asked; by tokens as long as there is none."""
        return next((server.spec.speaks for server in self._routing.servers(run)), Dialect.TOKENS)

    def trouble(self, run: str, rollout: str) -> str:
        """Why the rollout's engine is out of reach; empty if it is not."""
        return self._routing.trouble(run, rollout)

    def forget(self, rollout: str) -> None:
        """It is over, or begins anew."""
        self._routing.forget(rollout)

    @property
    def known(self) -> list[Engine]:
        """All engines, as last heard (every 2 s), with what runs there for this gateway."""
        return [server.record for server in self._routing.servers()]

    async def health(self, id: str) -> Engine:
        """Ask one engine now."""
        (server,) = (server for server in self._routing.servers() if server.spec.id == id)
        return await self._routing.ask(server)

    async def ask_all(self) -> list[Engine]:
        """Ask all engines now."""
        return await self._routing.ask_all()

    async def close(self) -> None:
        await self._routing.close()
        await self._session.close()
        self._channels.close()

    async def _until_whole(
        self, run: str, rollout: str, generation: Generation, running: _Running, preview: Preview | None
    ) -> Generated:
        """Raises EngineFailed."""
        for wait_s in _waits():
            kept = running.kept
            if kept.tokens and kept.tokens[-1] in generation.stop:
                return replace(kept, finish="stop")
            if len(kept.tokens) >= generation.max_tokens:
                return replace(kept, finish="length")
            server = await self._healthy(run, rollout, running)
            if preview:
                preview.begin(kept.tokens)
            try:
                new = await self._ask(server, generation.after(kept), running, preview)
                self.sampled[server.spec.id] += len(new.tokens)
                running.kept = kept.then(new)
                if running.kept.finish != NOTHING.finish:
                    return running.kept
                if running.unwanted:
                    continue
                failed = f"engine {server.spec.id} broke its answer off"
                if server.spec.speaks == Dialect.CHAT:
                    raise EngineFailed(failed)
                if not await self.may_go_on(run, rollout):
                    raise Interrupted("its turnstile is closed")
            except Lost as error:
                failed = f"engine {server.spec.id} was lost: {error}"
                running.lost.add(server.spec.id)
                self._routing.doubt(server, str(error))
            left_s = running.deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                failed = f"engine {server.spec.id} was interrupted"
            if left_s < wait_s:
                raise EngineFailed(f"no whole answer within {self._limit_s:g} s: {failed}")
            waits_for(f"an engine, to be asked again: {failed}")
            await asyncio.sleep(wait_s)
        raise AssertionError("the deadline ends the loop")

    async def _healthy(self, run: str, rollout: str, running: _Running) -> Server:
        """Where to ask, as soon as there is one. Raises EngineFailed."""
        while (server := self._routing.choose(run, rollout, running.lost)) is None:
            troubles = self._routing.troubles(run)
            if running.unwanted:
                interrupted = Interrupted("nobody waits for it")
                interrupted.trouble = troubles
                raise interrupted
            if not self._routing.servers(run):
                raise EngineFailed(troubles)
            waits_for(f"an engine: {troubles}")
            if not await self._routing.changed_before(running.deadline):
                raise EngineFailed(f"no engine was healthy within {self._limit_s:g} s: {troubles}")
        if running.unwanted:
            raise Interrupted("nobody waits for it")
        return server

    async def _ask(
        self, server: Server, generation: Generation, running: _Running, preview: Preview | None
    ) -> Generated:
        """One answer, whole or broken off. What a stream has shown of one that is lost is kept. Raises Lost or
        EngineFailed."""
        pieces: list[Generated] = []
        waits_for(f"engine {server.spec.id}")
        running.server = server
        server.in_flight += 1
        began = time.time()
        try:
            async with asyncio.timeout(None) as limit:
                timer = asyncio.get_running_loop().call_at(
                    running.deadline, self._end_at_the_limit, generation.id, running, limit
                )
                try:
                    return await self._send(server.spec, generation, preview, pieces)
                finally:
                    running.periods.extend((began, time.time()))
                    timer.cancel()
                    if running.ending:
                        running.ending.cancel()
                        running.ending = None
        except Lost:
            running.kept = running.kept.then(shown(pieces))
            # It may still run there: an engine does not see at once that its client is gone.
            await self._interrupt(server.spec, [generation.id], LOST_LIMIT_S)
            raise
        except TimeoutError:
            running.kept = running.kept.then(shown(pieces))
            given = f"gave no answer within {self._limit_s:g} s"
            raise EngineFailed(f"engine {server.spec.id} {given}: its connection was closed") from None
        finally:
            server.in_flight -= 1
            running.server = None

    def _end_at_the_limit(self, id: str, running: _Running, limit: asyncio.Timeout) -> None:
        """So that no second generation begins while the first still runs: what can be interrupted answers with its
        tokens; of the others, the connection is closed, which ends a generation of vLLM."""

        async def end() -> None:
            server = running.server
            if server and (server.spec.speaks == Dialect.CHAT or not await self._end(server, [id])):
                limit.reschedule(asyncio.get_running_loop().time())

        limit.reschedule(running.deadline + LAST_WORDS_S)
        running.ending = asyncio.create_task(end())

    async def _end(
        self, server: Server, ids: list[str], ended: Callable[[Iterable[str]], None] = lambda ids: None
    ) -> bool:
        """Interrupt generations that run at an engine; false: it cannot be told. `ended` is told of those that have."""
        for wait_s in SOUGHT_S:
            ids = [id for id in ids if (running := self._running.get(id)) and running.server is server]
            if not ids:
                return True
            found = await self._interrupt(server.spec, ids)
            if found is None:
                return False
            ended(found)
            ids = [id for id in ids if id not in found]
            if not ids:
                return True
            await asyncio.sleep(wait_s)
        return False

    async def _interrupt(
        self, engine: EngineSpec, ids: list[str], limit_s: float = INTERRUPT_LIMIT_S
    ) -> set[str] | None:
        """Those that the engine knew, and that have ended there; None: it cannot be told."""
        try:
            limit = aiohttp.ClientTimeout(total=limit_s)
            asked = self._session.post(
                f"{engine.url}/interrupt", json={"ids": ids}, timeout=limit, allow_redirects=False
            )
            async with asked as response:
                return set((await response.json())["found"]) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return None

    async def _send(
        self, engine: EngineSpec, generation: Generation, preview: Preview | None, pieces: list[Generated]
    ) -> Generated:
        """`pieces`: gets what a stream shows. Raises Lost or EngineFailed."""
        try:
            asked = ask(engine, generation, stream=preview is not None)
            follow = _Lines(preview, pieces) if preview else None
            status, body = await self._channels.post(engine.url + PATHS[engine.speaks], asked, follow)
            if status == 200:
                return read(engine, body)
        except NoAnswer as error:
            raise EngineFailed(f"engine {engine.id} {error}") from error
        if status == 400 and b"context length" in body:  # the words of OpenAI and vLLM
            raise ContextTooLong(reason_in(body, status))
        if status == 400 and engine.speaks == Dialect.CHAT:
            raise RequestRefused(reason_in(body, status))
        if status >= 500 and not body.startswith(b"{"):
            # Not the engine's own words: its server that is being ended, or a proxy in front of nothing.
            raise Lost(reason_in(body, status))
        raise EngineFailed(f"engine {engine.id}: {reason_in(body, status)}")


class _Lines:
    """The lines of a stream. A `Follow`: it shows the tokens, and gives the last line, which is the whole answer."""

    def __init__(self, preview: Preview, pieces: list[Generated]) -> None:
        self._preview = preview
        self._pieces = pieces
        self._begun: list[bytes] = []
        """Of a line whose end is still to come."""

    def __call__(self, piece: bytes) -> bytes | None:
        """Raises NoAnswer."""
        *ends, rest = piece.split(b"\n")
        for end in ends:
            line, self._begun = b"".join([*self._begun, end]), []
            new = read_preview(line)
            if new is None:
                return line
            self._pieces.append(new)
            self._preview.add(new.tokens)
        self._begun.append(rest)
        return None


def _waits() -> Iterable[float]:
    """Seconds before the next try, without end."""
    yield from _BACKOFF_S
    while True:
        yield _BACKOFF_S[-1]
