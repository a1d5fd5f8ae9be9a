"""From the bytes of a request to what it asks for: the turn, its place in the transcript, and its new tokens.

`exchange.py` reads every call through here. Small requests are read at once, others in one thread, so that they slow
nobody else; of one that begins with the bytes of an earlier one (`wire/growing.py`) only the rest is read.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.types import Receive

from harnessed.gateway.engines import Engines
from harnessed.gateway.progress import ENCODER, waits_for
from harnessed.gateway.session import Session
from harnessed.gateway.splits import by_ids, by_text, by_written
from harnessed.gateway.template import ChatTemplate, TemplateError
from harnessed.gateway.transcript import Place, Segment, Tree
from harnessed.gateway.wire.growing import Beginning
from harnessed.gateway.wire.turn import REFERENCE, Address, Turn, Wire, WireError
from harnessed.records import Dialect, History

T = TypeVar("T")
ASIDE_BYTES = 32 * 2**10
"""Requests with so much that is new are read and encoded in the thread."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read."""

    turn: Turn
    place: Place
    proven: list[int]
    """Answers that it proves to have arrived."""
    segment: Segment | None
    """Its new tokens; None: the engine makes them."""
    chat_length: int
    """About how long the engine will make the prompt, where it does."""


class Intake:
    """Reads the requests of one gateway."""

    def __init__(self, engines: Engines, most_body_bytes: int) -> None:
        self._engines = engines
        self._most_body_bytes = most_body_bytes
        self._encoder = ThreadPoolExecutor(1, "encode")
        """One thread: what came first is read first, so that a retry meets the call that it repeats."""

    def close(self) -> None:
        self._encoder.shutdown(wait=False)

    async def body(self, receive: Receive) -> bytes:
        """Raises WireError."""
        return await _read_body(receive, self._most_body_bytes)

    async def read(self, wire: Wire, session: Session, body: bytes, at: Address) -> Asked:
        """Raises WireError."""
        known = session.beginning(body, wire.__name__)
        asked = await self._read(wire, session, body, at, known)
        if asked.turn.beginning:
            beginning = replace(asked.turn.beginning, protocol=wire.__name__, refers=_refers(body, known))
            session.remember(beginning, known)
        return asked

    async def count(self, wire: Wire, session: Session, body: bytes, at: Address) -> int:
        """Tokens of the prompt of a request. Raises WireError."""

        def count() -> int:
            turn = _parse(wire, session, body, at, None)
            segment = self._encode(session, turn, session.tree.place(turn.messages, turn.tools))
            return session.tree.length(segment.parent) - segment.cut + len(segment.ids) // 4

        return count() if _is_short(body, None) else await self._aside(session, count)

    async def _read(self, wire: Wire, session: Session, body: bytes, at: Address, known: Beginning | None) -> Asked:
        """At once if there is little to do, else in the thread."""

        def place() -> tuple[Turn, Place, list[int]]:
            turn = _parse(wire, session, body, at, known)
            place = session.tree.place(turn.messages, turn.tools)
            return turn, place, session.tree.prove_delivered(place)

        def encode(turn: Turn, at: Place, proven: list[int]) -> Asked:
            segment, chat_length = self._segment(session, turn, at)
            if turn.prompt is not None and segment is not None:
                proven = session.tree.prove_repeated(segment.parent)
            return Asked(turn, at, proven, segment, chat_length)

        if session.read_aside or not _is_short(body, known):
            return await self._aside(session, lambda: encode(*place()))
        placed = place()
        if session.history == History.TEMPLATE or not _are_short(placed[1].new):
            return await self._aside(session, lambda: encode(*placed))
        return encode(*placed)

    async def _aside(self, session: Session, work: Callable[[], T]) -> T:
        session.read_aside += 1
        waits_for(ENCODER)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
        finally:
            session.read_aside -= 1

    def _segment(self, session: Session, turn: Turn, place: Place) -> tuple[Segment | None, int]:
        if self._engines.speaks(session.run) == Dialect.CHAT:
            if turn.prompt is not None:
                raise WireError(400, "chat_only", "the engine only speaks chat: it takes messages, and no bare prompt")
            return None, self._chat_length(session, turn, place)
        if turn.wanted.grammar:
            why = "this engine samples under no grammar: leave out `response_format` (`text.format`)"
            raise WireError(400, "no_grammar", why)
        return self._encode(session, turn, place), 0

    def _chat_length(self, session: Session, turn: Turn, place: Place) -> int:
        """About how long an engine that speaks chat will make a prompt: it makes it itself, of the messages."""
        try:
            segment = session.tree.segment(place, turn.tools, session.template)
        except TemplateError:  # the engine's own may take it
            return session.tree.length(place.follows)
        return session.tree.length(segment.parent) - segment.cut + len(segment.ids) // 4

    def _encode(self, session: Session, turn: Turn, place: Place) -> Segment:
        """The prompt's new tokens."""
        if turn.prompt is not None:
            return prompted(session.tree, place, turn.prompt, session.template)
        try:
            if session.history == History.TEMPLATE:
                return by_text(session.tree, place, turn.messages, turn.tools, session.template)
            return session.tree.segment(place, turn.tools, session.template)
        except TemplateError as error:
            raise WireError(400, "invalid_messages", str(error)) from error


def _is_short(body: bytes, known: Beginning | None) -> bool:
    """Whether a request is read at once: what is new of it is small, and it says all itself."""
    new = len(body) - (len(known.whole) if known else 0)
    return new < ASIDE_BYTES and not _refers(body, known)


def _refers(body: bytes, known: Beginning | None) -> bool:
    """Whether a request may refer to what it does not hold itself."""
    if known and known.refers:
        return True
    new = body[len(known.whole) :] if known else body
    return b"item_reference" in new or b"previous_response_id" in new


def _are_short(messages: list[dict[str, Any]]) -> bool:
    """Whether messages are encoded at once. Those of a known beginning are new where a request changes its tools."""
    contents = [message.get("content") for message in messages]
    return (
        len(messages) < 100
        and sum(len(each) if isinstance(each, str) else len(repr(each)) for each in contents) < ASIDE_BYTES
    )


def _parse(wire: Wire, session: Session, body: bytes, at: Address, known: Beginning | None) -> Turn:
    """The request, with the history that it leaves to the gateway. Raises WireError."""
    turn = wire.parse(body, at, known)
    if any(REFERENCE in message for message in turn.messages[turn.known :]):
        turn = replace(turn, messages=[_referred(session, message) for message in turn.messages])
    if not turn.after:
        return turn
    history = session.tree.said(turn.after)
    if history is None:
        raise WireError(400, "previous_response_not_found", f"this attempt has had no response resp_{turn.after}")
    return turn.following(history)


def _referred(session: Session, message: dict[str, Any]) -> dict[str, Any]:
    """The answer that stands in the place of a reference to it."""
    if REFERENCE not in message:
        return message
    answer = session.tree.answer(str(message[REFERENCE]))
    if answer is None:
        raise WireError(400, "item_not_found", f"this attempt has had no item with the id {message[REFERENCE]}")
    return answer


def prompted(tree: Tree, place: Place, prompt: str | list[int], template: ChatTemplate) -> Segment:
    """A context that the harness wrote itself. Where it repeats one with its answer, it goes on from there. Raises
    WireError (400)."""
    if isinstance(prompt, str):
        segment = by_written(tree, place, prompt, template, bare=True)
        if not (segment.ids or segment.parent):
            raise WireError(400, "invalid_request", "`prompt` has no tokens")
        return segment
    if max(prompt) >= template.size:
        raise WireError(400, "invalid_request", f"`prompt` holds a token id that is not below {template.size}")
    return by_ids(tree, place, prompt, template, bare=True)


async def _read_body(receive: Receive, most: int) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise WireError(400, "incomplete", "the connection was closed before the request was complete")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most:
            raise WireError(413, "too_large", f"the request is larger than {most} bytes, the setting gateway.body_mb")
        if not message.get("more_body"):
            return b"".join(pieces)
