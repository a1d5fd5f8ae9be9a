"""The attempts that call, in the memory of one gateway: read from the store when they first call, brought up to date
where other gateways write to it too, and forgotten when they end.

`exchange.py` asks for the session of a call, `api.py` ends attempts through here, and `peers.py` lets this gateway do
its part of what others decide.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

from harnessed.config import ConfigError
from harnessed.gateway.catchup import catch_up, load
from harnessed.gateway.engines import Engines
from harnessed.gateway.peers import LostCall
from harnessed.gateway.progress import STORE, waits_for
from harnessed.gateway.recording import AttemptId, living, record_fault
from harnessed.gateway.sampling import Sampler, generations
from harnessed.gateway.session import Pending, Session, attempt_ended, read_again
from harnessed.gateway.store import Store
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.wire.turn import WireError
from harnessed.records import EngineSpec

AT_ONCE = 500
"""Attempts in one statement."""


class Attempts:
    """Those that have called this gateway and not ended."""

    def __init__(self, store: Store, engines: Engines, sampler: Sampler, gateway: str) -> None:
        """`gateway`: the id of this process among those of the store."""
        self._store = store
        self._engines = engines
        self._sampler = sampler
        self._gateway = gateway
        self._sessions: dict[AttemptId, Session] = {}
        self._loading: dict[AttemptId, asyncio.Task[Session]] = {}
        self._templates: dict[str, ChatTemplate] = {}
        self._ending: Counter[str] = Counter()
        """Rollouts whose attempt is being ended."""
        self._failed: dict[AttemptId, str] = {}
        """Attempts whose last call failed by the store, and why."""
        self.elsewhere: Callable[[list[str], float], contextlib.AbstractAsyncContextManager[None]] | None = None
        """Around the end of attempts: the other gateways' part."""

    def __len__(self) -> int:
        return len(self._sessions)

    def policy(self, folder: str) -> ChatTemplate:
        """The template of a policy folder, read once. Raises ConfigError."""
        if folder not in self._templates:
            self._templates[folder] = ChatTemplate(Path(folder))
        return self._templates[folder]

    async def session(self, attempt: AttemptId) -> Session:
        """Raises WireError."""
        known = self._sessions.get(attempt)
        if known is None or known.ended or known.outdated:
            loading = self._loading.get(attempt)
            if loading is None:
                loading = self._loading[attempt] = asyncio.create_task(self._load(attempt))
                loading.add_done_callback(lambda _: self._loading.pop(attempt))
            waits_for(STORE)
            return await asyncio.shield(loading)
        return known

    async def catch_up(self, session: Session) -> None:
        """See what other gateways have done to the attempt. Raises WireError if they have ended it."""
        if not self._store.shared:
            return
        waits_for(STORE)
        if not await catch_up(self._store, session, self._gateway):
            session.ended = True
            raise attempt_ended(session.attempt)

    def check(self, session: Session) -> None:
        """Raises WireError if it admits nothing any more."""
        if session.outdated:
            raise read_again()
        if session.ended or session.attempt[0] in self._ending:
            raise attempt_ended(session.attempt)

    @contextlib.asynccontextmanager
    async def ending(self, rollouts: Sequence[str], limit_s: float) -> AsyncIterator[None]:
        """Around the end of attempts: their further calls are refused, and what the engine still generates for them is
        recorded first, so that the books hold every token. An engine that takes longer is left behind."""
        self._ending.update(rollouts)
        try:
            sessions = [session for attempt, session in self._sessions.items() if attempt[0] in set(rollouts)]
            if unfinished := _unanswered(sessions):
                interrupting = [asyncio.create_task(self._sampler.interrupt(*each)) for each in unfinished]
                await asyncio.wait({call.answers for _, call in unfinished}, timeout=limit_s)
                for each in interrupting:
                    each.cancel()
            for session in sessions:
                await self._blame_engine(session)
            for attempt in [each for each in self._failed if each[0] in set(rollouts)]:
                fault = f"engine: {self._failed.pop(attempt)}"
                await self._store.write(partial(record_fault, attempt=attempt, request="store", what=fault))
            async with self.elsewhere(list(rollouts), limit_s) if self.elsewhere else contextlib.nullcontext():
                yield
        finally:
            self._ending.subtract(rollouts)
            self._ending += Counter()
            for session in [session for attempt, session in self._sessions.items() if attempt[0] in set(rollouts)]:
                self._forget(session)
            for attempt, loading in self._loading.items():
                if attempt[0] in set(rollouts):  # what it has read may be older than the end
                    loading.add_done_callback(self._end)

    def has(self, rollout: str) -> bool:
        """Whether an attempt of it is here, and as the store has it."""
        found = [session for attempt, session in self._sessions.items() if attempt[0] == rollout]
        return any(not (session.ended or session.outdated) for session in found)

    def failed_by_store(self, attempt: AttemptId, why: str) -> None:
        """A call of it was refused, or not answered, because nothing could be stored."""
        self._failed[attempt] = why

    def overcame_store(self, attempt: AttemptId) -> None:
        """A later one was answered."""
        self._failed.pop(attempt, None)

    async def forget_ended(self) -> None:
        """Those that another gateway has ended."""
        known = list(self._sessions)
        for at in range(0, len(known), AT_ONCE):
            part = known[at : at + AT_ONCE]
            live = await self._store.read(partial(living, rollouts=[rollout for rollout, _ in part]))
            for attempt in part:
                if attempt not in live and (session := self._sessions.get(attempt)):
                    self._forget(session)

    async def stop_all(self) -> None:
        """This gateway ends: so does what it lets engines generate."""
        await asyncio.gather(*(self._sampler.interrupt(*each) for each in _unanswered(list(self._sessions.values()))))

    async def interrupt_run(self, run: str) -> None:
        """Running generations stop, and go on from their tokens when the run's turnstile opens."""
        await self._sampler.suspend(run)

    async def interrupt_rollout(self, rollout: str) -> None:
        """Another gateway is about to end its attempt: what is generated for it ends, and is recorded."""
        sessions = [session for attempt, session in self._sessions.items() if attempt[0] == rollout]
        await asyncio.gather(*(self._sampler.interrupt(*each) for each in _unanswered(sessions)))

    async def stop_lost(self, calls: list[LostCall]) -> None:
        """Let engines end what they generate for a gateway that died."""
        asked = (self._engines.abandon(each.run, generations(each.call, each.answers)) for each in calls)
        await asyncio.gather(*asked)

    async def know_engines(self, engines: list[EngineSpec]) -> None:
        """These are registered, by whichever gateway."""
        await self._engines.keep(engines)

    def forget_all(self) -> None:
        """Read every attempt from the store again."""
        for session in self._sessions.values():
            session.outdated = True

    async def _load(self, attempt: AttemptId) -> Session:
        try:
            session = await load(self._store, attempt, self._gateway, self.policy)
        except ConfigError as error:
            raise WireError(503, "policy_unusable", str(error)) from error
        if session is None:
            raise attempt_ended(attempt)
        self._sessions[attempt] = session  # before anybody who waits for it goes on
        return session

    async def _blame_engine(self, session: Session) -> None:
        """An attempt that ends while its engine is out of reach did not fail by itself."""
        trouble = self._engines.trouble(session.run, session.attempt[0])
        if trouble and any(not pending.answers.done() for pending in session.calls_in_progress()):
            fault = f"engine: {trouble}"
            await self._store.write(lambda connection: record_fault(connection, session.attempt, "", fault))

    def _end(self, loading: "asyncio.Task[Session]") -> None:
        if not loading.cancelled() and loading.exception() is None:
            self._forget(loading.result())

    def _forget(self, session: Session) -> None:
        session.ended = True
        self._sessions.pop(session.attempt, None)
        self._engines.forget(session.attempt[0])


def _unanswered(sessions: list[Session]) -> list[tuple[Session, Pending]]:
    """The calls of this gateway that have no answer yet."""
    open_ = [(session, call) for session in sessions for call in session.calls_in_progress()]
    return [(session, call) for session, call in open_ if not (call.gateway or call.answers.done())]
