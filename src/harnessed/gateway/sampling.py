"""From an encoded call to its recorded answers: what the engine is asked for, and what becomes of what it gives.

`exchange.py` calls `choices` when it admits a call, and lets `sample` run as a task that belongs to the attempt, not to
the connection.
"""

import asyncio
import hashlib
import re
import secrets
import string
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

from harnessed.gateway.dialects import NOTHING, Generated, Generation
from harnessed.gateway.engines import ContextTooLong, EngineFailed, Engines, Interrupted, RequestRefused
from harnessed.gateway.intake import Asked
from harnessed.gateway.matching import text_of
from harnessed.gateway.preview import Preview
from harnessed.gateway.progress import STORE, waits_for
from harnessed.gateway.reading import cut_at
from harnessed.gateway.recording import record_answers, record_failure, record_fault
from harnessed.gateway.session import Pending, Session, attempt_ended, read_again
from harnessed.gateway.splits import by_ids
from harnessed.gateway.store import Refused, Store, Work
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.transcript import INTERRUPTED, Place, Segment, packed
from harnessed.gateway.turnstile import Left, Turnstiles
from harnessed.gateway.wire.turn import Turn, WireError, context_overflow
from harnessed.records import Dialect, Fate, Node

LIMIT = "limit"
"""In place of a request among the faults: what reached a limit once does so again."""
CALL_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Wanted:
    """One answer to be sampled."""

    segment: Segment | None
    """None: the engine says what it made of the messages."""
    generation: Generation
    begun: Node | None
    """What an engine broke off before: sampled already, and recorded."""


class Sampler:
    """Asks the engines for answers, and records them."""

    def __init__(self, store: Store, engines: Engines, turnstiles: Turnstiles) -> None:
        self._store = store
        self._engines = engines
        self._turnstiles = turnstiles
        self._unwanted: set[str] = set()
        """Calls in progress for which nobody waits any more."""

    def choices(self, session: Session, asked: Asked, call: str, begun: list[Node]) -> list[Wanted]:
        """What is to be sampled, of which `begun` was before. Refuses what does not fit the context."""
        turn, segment = asked.turn, asked.segment
        if segment is None:
            used, prompt = asked.chat_length, b""
        else:
            prompt = session.tree.context(segment.parent, segment.cut) + segment.ids
            used = len(prompt) // 4
        room = session.limits.context - used
        if room < 1:
            self.fault(session, LIMIT, f"budget: the context limit of {session.limits.context} tokens was reached")
            raise context_overflow(used + 1, session.limits.context)
        left, free = (tokens // turn.wanted.n for tokens in session.tokens_left())
        if free < 1 <= left:
            why = "the attempt's other calls may sample all tokens that are left to it: ask again when they have ended"
            raise WireError(429, "rate_limit_exceeded", why)
        if left < 1:
            self.fault(session, LIMIT, f"budget: the limit of {session.limits.tokens} sampled tokens was reached")
            raise WireError(403, "budget_exhausted", f"this attempt may sample {session.limits.tokens} tokens in all")
        sampled = partial(
            Generation,
            prompt=prompt,
            temperature=session.sampling.temperature,
            top_p=session.sampling.top_p,
            stop=session.template.stop_ids,
            stop_strings=list(turn.wanted.stop),
            messages=turn.messages if segment is None else [],
            tools=turn.tools if segment is None else [],
            grammar=turn.wanted.grammar,
        )
        most = min(room, session.sampling.max_tokens, turn.wanted.max_tokens or room)
        return [
            _choice(session, segment, partial(sampled, seed=self._seed(session, call, choice), id=id), node, most, free)
            for choice, (id, node) in enumerate(zip_longest(generations(call, turn.wanted.n), begun))
        ]

    async def sample(
        self,
        session: Session,
        turn: Turn,
        place: Place,
        choices: list[Wanted],
        call: str,
        previews: list[Preview],
        note: Work[None],
    ) -> list[Node]:
        """Ask the engine for every answer of the call and record them; they are durable when this returns.

        `previews`, if somebody streams: one for each answer. `note` admits the call in the store.
        """
        periods = array("d")
        try:
            given = await _all(self._answer(session, call, periods, *each) for each in zip_longest(choices, previews))
            failure = next((error for error in given if isinstance(error, BaseException)), None)
            nodes: list[Node] = []
            continued: list[int] = []
            for choice, answer in zip(choices, given, strict=True):
                generated = answer.kept if isinstance(answer, EngineFailed) else answer
                if isinstance(generated, BaseException) or not generated.tokens:
                    continue
                nodes.append(_node(session, turn, place, choice, generated, call))
                continued += [choice.begun.number] if choice.begun else []
            if nodes:
                overcome = place.prompt.hex() if failure is None else ""
                await self._record(session, turn, place, nodes, continued, overcome, note, periods.tobytes())
            if failure is not None:
                failed = not isinstance(failure, Interrupted)
                ran = periods.tobytes()
                self._store.write_soon(
                    lambda connection: record_failure(connection, call, time.time(), ran, failed=failed)
                )
                self._explain(session, place, failure)
            return nodes
        finally:
            self._unwanted.discard(call)

    async def interrupt(self, session: Session, pending: Pending) -> None:
        """Nobody waits for a call any more: its generations end, and the tokens that they have are kept. An engine that
        speaks chat cannot do so, and goes on to the end."""
        ids = generations(pending.id, pending.wanted.n)
        self._unwanted.add(pending.id)
        self._turnstiles.dismiss(session.run, ids)
        if self._engines.speaks(session.run) != Dialect.CHAT:
            pending.interrupted = True
            await self._engines.interrupt(ids)

    def _seed(self, session: Session, call: str, choice: int) -> int:
        """The same run on the same tasks draws the same numbers, whatever its ids and ports; not where several gateways
        count the calls of an attempt side by side."""
        place = call if self._store.shared else session.calls + 1
        name = f"{session.seed}/{session.index}/{place}/{choice}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())

    async def suspend(self, run: str) -> None:
        """Stop the generations of a run, which go on from their tokens when its turnstile opens."""
        closed = self._turnstiles.closed(run)
        if closed and self._engines.speaks(run) != Dialect.CHAT:
            ended = partial(self._turnstiles.ended, closed)
            await self._engines.interrupt(self._turnstiles.generations(run), ended)

    async def _answer(
        self, session: Session, call: str, periods: "array[float]", choice: Wanted, preview: Preview | None
    ) -> Generated:
        kept = _kept(choice.begun) if choice.begun else NOTHING
        run, rollout = session.run, session.attempt[0]
        while True:
            try:
                async with self._turnstiles.passing(run, choice.generation.id):
                    return await self._engines.generate(run, rollout, choice.generation, kept, preview, periods)
            except Left:
                gone = Interrupted("nobody waits for it")
                gone.kept = kept
                raise gone from None
            except Interrupted as error:
                if call in self._unwanted or session.outdated or session.ended:
                    raise
                kept = error.kept

    def _explain(self, session: Session, place: Place, failure: BaseException) -> NoReturn:
        """Tell the harness, in its terms, why it gets no answer."""
        if isinstance(failure, ContextTooLong):
            self.fault(session, LIMIT, "budget: the engine's context was reached")
            raise WireError(400, "context_length_exceeded", str(failure)) from failure
        if isinstance(failure, RequestRefused):
            raise WireError(400, "invalid_messages", str(failure)) from failure
        if isinstance(failure, Interrupted):
            if failure.trouble:  # the client may have left because of it
                self.fault(session, place.prompt.hex(), f"engine: {failure.trouble}")
            raise attempt_ended(session.attempt) from failure  # whoever else could hear it has left
        if isinstance(failure, EngineFailed):
            self.fault(session, place.prompt.hex(), f"engine: {failure}")
            raise WireError(503, "engine_failed", str(failure)) from failure
        raise failure

    async def _record(
        self,
        session: Session,
        turn: Turn,
        place: Place,
        nodes: list[Node],
        continued: list[int],
        overcome: str,
        note: Work[None],
        generated: bytes,
    ) -> None:
        waits_for(STORE)
        try:
            if session.outdated:
                raise Refused(503, str(read_again()))
            await self._store.write(
                lambda connection: record_answers(
                    connection, session.attempt, nodes, continued, overcome, note, generated
                )
            )
        except Refused as error:
            self._store.write_soon(lambda connection: record_failure(connection, nodes[0].call, time.time(), generated))
            if error.status == 503:
                session.outdated = True
                raise WireError(503, "store_failed", str(error)) from error
            session.ended = True
            raise attempt_ended(session.attempt) from error
        except Exception as error:  # whatever it was: what memory holds is ahead of the store, so it is loaded again
            session.outdated = True
            self._store.write_soon(lambda connection: record_failure(connection, nodes[0].call, time.time(), generated))
            raise WireError(503, "store_failed", f"the answer could not be stored: {error}") from error
        for node in nodes:
            session.tree.add(node, place.prompt)
            if node.finish == INTERRUPTED:
                session.interrupted.setdefault((place.prompt, turn.wanted), []).append(node)
        for number in continued:
            session.tree.nodes.pop(number, None)

    def fault(self, session: Session, request: str, what: str) -> None:
        """A request was refused (`budget: ...`) or failed (`engine: ...`)."""
        self._store.write_soon(lambda connection: record_fault(connection, session.attempt, request, what))


def _choice(
    session: Session,
    segment: Segment | None,
    sampled: Callable[..., Generation],
    begun: Node | None,
    most: int,
    free: int,
) -> Wanted:
    """`most`: tokens of the answer; `free`: those that may be sampled for it, where what it has was counted before."""
    if begun is None:
        return Wanted(segment, sampled(max_tokens=min(most, free)), None)
    # It goes on where it was begun, whatever the transcript has learnt since.
    segment = Segment(begun.parent, begun.segment, begun.cut, begun.split)
    prompt = session.tree.context(begun.parent, begun.cut) + begun.segment
    return Wanted(segment, sampled(max_tokens=min(most, free + begun.sampled), prompt=prompt), begun)


async def _all(answers: Iterable[Coroutine[Any, Any, Generated]]) -> list[Generated | BaseException]:
    """What each gives or raises. Most calls want one answer, which needs no task of its own."""
    first, *others = answers
    if others:
        return await asyncio.gather(first, *others, return_exceptions=True)
    try:
        return [await first]
    except Exception as error:  # noqa: BLE001  # as `gather` does
        return [error]


def generations(call: str, answers: int) -> list[str]:
    """The names that engines know the answers of a call by."""
    return [f"{call}.{choice}" for choice in range(answers)]


def _node(session: Session, turn: Turn, place: Place, choice: Wanted, generated: Generated, call: str) -> Node:
    """The record of one answer; the store numbers it."""
    segment = choice.segment or by_ids(session.tree, place, generated.prompt, session.template)
    message, broken = _message(session.template, generated, turn)
    return Node(
        number=0,
        parent=segment.parent,
        segment=segment.ids,
        answer=packed(generated.tokens),
        logprobs=array("f", generated.logprobs).tobytes(),
        versions=packed(generated.versions),
        temperature=choice.generation.temperature,
        finish=generated.finish,
        cut=segment.cut,
        delivered=False,
        follows=place.follows,
        split=segment.split,
        messages=place.new,
        message=message,
        broken_calls=broken,
        apart=_apart(session, turn),
        call=call,
        tools=[] if place.follows else turn.tools,
    )


def _apart(session: Session, turn: Turn) -> str:
    """The fate of an answer that is not trained for what the request is."""
    if turn.wanted.grammar:
        return Fate.CONSTRAINED
    if not session.side_calls:
        return ""
    system = "\n".join(_text(message) for message in turn.messages if message["role"] in ("system", "developer"))
    for kind in session.side_calls:
        tools = kind.tools is None or kind.tools == bool(turn.tools)
        if tools and (kind.system is None or re.search(kind.system, system)):
            return Fate.SIDE_CALL
    return ""


def _text(message: dict[str, Any]) -> str:
    content = text_of(message.get("content"))
    parts = content if isinstance(content, list) else [{"text": content}]
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _kept(node: Node) -> Generated:
    return Generated(
        array("i", node.answer).tolist(),
        array("f", node.logprobs).tolist(),
        array("i", node.versions).tolist(),
        node.finish,
    )


def _message(template: ChatTemplate, generated: Generated, turn: Turn) -> tuple[dict[str, Any], int]:
    """The answer as it is delivered, and how many texts in it opened a call and were none."""
    if generated.message is not None:  # the engine has read it
        calls = [call | {"id": _call_id()} for call in generated.message.get("tool_calls") or []]
        return generated.message | ({"tool_calls": calls} if calls else {}), 0
    stopped = generated.tokens[-1] in template.stop_ids
    text, _ = cut_at(template.text(generated.tokens, stopped=stopped), turn.wanted.stop)
    reader = turn.reader(template.format)
    piece = reader.end(text)
    message: dict[str, Any] = {"role": "assistant", "content": piece.text or (None if reader.calls else "")}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if reader.calls:
        message["tool_calls"] = [
            {"id": _call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in reader.calls
        ]
    return message, reader.broken


def _call_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return "".join(secrets.choice(CALL_ID_LETTERS) for _ in range(9))
