"""How an answer reaches the client: whole, or as a stream while it is sampled. `exchange.py` calls `deliver`.

A client that waits is told that it does, whatever it waits for: its own timers, or those of what stands in between,
would else cut it off (docs/harnesses.md, "Waiting").
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

from starlette.types import Send

from harnessed.gateway.preview import Broken, Unfolding
from harnessed.gateway.progress import current
from harnessed.gateway.reading import cut_at
from harnessed.gateway.session import Pending, Session
from harnessed.gateway.wire.turn import Choice, Reply, Turn, Wire, WireError
from harnessed.records import Node

PING_S = 15.0
"""Of silence, before a sign of life."""
PATIENCE_S = 30.0
"""The same where the answer goes out whole: with its first byte the status is out too, 200, and a failure has none."""
CONNECTION = "harnessed.connection"
"""The extension of a scope that holds its connection."""


class Connection(Protocol):
    """The connection of a client."""

    gone: asyncio.Future[None]
    """Done when the client is gone."""

    def watch(self) -> None:
        """See when the client leaves: its request was read. Of one that is longer than what is read ahead, nothing more
        would be read before somebody asks for it, not even its end."""

    def reset(self) -> None:
        """Nothing more is sent, and whoever reads is told that it broke."""


_EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
_ONE_VALUE = [(b"content-type", b"application/json"), (b"cache-control", b"no-cache")]


async def deliver(
    send: Send, gone: "asyncio.Future[None]", wire: Wire, session: Session, pending: Pending, turn: Turn
) -> bool:
    """Send a call's answer; False if it did not arrive whole. Raises WireError before the first byte."""
    return await (_stream if turn.stream else _whole)(send, gone, wire, session, pending, turn)


class _Body:
    """The body of an answer with status 200; its headers go out with the first piece."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.begun = False
        self.silent_since = time.monotonic()

    async def tell(self, piece: bytes, *, more: bool = True) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self.silent_since = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.silent_since


async def _whole(
    send: Send, gone: "asyncio.Future[None]", wire: Wire, session: Session, pending: Pending, turn: Turn
) -> bool:
    """Send the answer once it is recorded; False if the client left before, or if it failed when white space that says
    that it is waited for had gone out. Raises WireError before the first byte."""
    body = _Body(send, _ONE_VALUE)
    await asyncio.sleep(0)  # a client that has left is seen to have
    while not (pending.answers.done() or gone.done()):
        wait_s = (PING_S if body.begun else PATIENCE_S) - body.silent_s
        if wait_s > 0:
            await _first(pending.answers, gone, [], wait_s)
        else:
            await body.tell(b" ")
    if gone.done():
        return False
    try:
        answer = wire.render(_reply(session, pending, turn))
    except WireError:
        if body.begun:
            return False
        raise
    if body.begun:
        await body.tell(answer, more=False)
    else:
        await send_json(send, 200, answer)
    return True


async def _stream(
    send: Send, gone: "asyncio.Future[None]", wire: Wire, session: Session, pending: Pending, turn: Turn
) -> bool:
    """Send the answer as it is made, its end once it is recorded; False if the client left before.

    Raises WireError before the first byte. After it there is no status to tell of a failure: the caller then resets the
    connection, so that no client takes the end of what it got for the end of the answer.
    """
    stream = wire.Stream(turn, pending.id, time.time())
    texts = [Unfolding(session.template, turn) for _ in range(turn.wanted.n)]
    body = _Body(send, _EVENTS if turn.events else _ONE_VALUE)

    async def tell(events: Callable[[], bytes], *, more: bool = True) -> None:
        before = b"" if body.begun else stream.begin(turn.wanted.n)
        await body.tell(before + events(), more=more)

    try:
        await asyncio.sleep(0)  # a client that has left is seen to have
        while not pending.answers.done():
            changes = [preview.changed for preview in pending.previews]
            new = [text.more(preview) for text, preview in zip(texts, pending.previews, strict=False)]
            if any(new):
                current().shows()
                await tell(lambda: b"".join(map(stream.more, count(), new)))  # noqa: B023  # called at once
            elif body.silent_s >= PING_S:
                await tell(stream.ping)
            await _first(pending.answers, gone, changes, PING_S - body.silent_s)
            if gone.done():
                return False
        reply = _reply(session, pending, turn)
        rests = [text.end(choice.message) for text, choice in zip(texts, reply.choices, strict=True)]
    except (Broken, WireError):
        if body.begun:
            return False
        raise
    if gone.done():
        return False
    current().shows()
    await tell(lambda: stream.end(reply, rests), more=False)
    return True


def _reply(session: Session, pending: Pending, turn: Turn) -> Reply:
    nodes = pending.answers.result()
    prompt_tokens = session.tree.length(nodes[0].number) - nodes[0].sampled
    choices = [
        Choice(
            node.message,
            "tool_calls" if node.message.get("tool_calls") else node.finish,
            node.sampled,
            _stop(session, node, turn),
            _logprobs(session, node) if turn.logprobs else [],
        )
        for node in nodes
    ]
    return Reply(pending.id, turn.model, time.time(), prompt_tokens, choices, turn.namespaces)


def _stop(session: Session, node: Node, turn: Turn) -> str:
    """The stop string that ended an answer."""
    if not turn.wanted.stop:
        return ""
    return cut_at(session.template.said(array("i", node.answer).tolist()), turn.wanted.stop)[1]


def _logprobs(session: Session, node: Node) -> list[tuple[str, float]]:
    tokens = [session.template.written([id]) for id in array("i", node.answer)]
    return list(zip(tokens, array("f", node.logprobs), strict=False))


async def _first(
    answers: "asyncio.Future[list[Node]]",
    gone: "asyncio.Future[None]",
    changes: "list[asyncio.Future[None]]",
    limit_s: float,
) -> None:
    """Returns when there are answers, new tokens, or nobody to send them to; or after so long."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[None] = loop.create_future()

    def end(_: Any = None) -> None:
        if not first.done():
            first.set_result(None)

    # `asyncio.wait` does the same at twice the cost, for every piece of every stream.
    timer = loop.call_later(max(limit_s, 0), end)
    waited: list[asyncio.Future[Any]] = [answers, gone, *changes]
    for each in waited:
        each.add_done_callback(end)
    try:
        await first
    finally:
        timer.cancel()
        for each in waited:
            each.remove_done_callback(end)


async def send_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
