"""HTTP/1.1 to the engines: a body is posted, and its answer awaited whole, or shown piece by piece while it comes.

`engines.py` asks for every generation through here, because a general client takes four times as much CPU for it. What
is rare, health and interruption, it asks through such a client. Redirects are not followed.
"""

import asyncio
import socket
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast
from urllib.parse import quote, unquote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from harnessed.gateway.dialects import STREAM, NoAnswer

CONNECT_LIMIT_S = 5.0
IDLE_LIMIT_S = 4.0
"""A connection that was unused for longer is not used again: uvicorn, and so vLLM, closes it after 5 s, and if that
happens at the moment at which it is used, a generation is lost."""

_STREAM = STREAM.encode()

Follow = Callable[[bytes], bytes | None]
"""Takes the next piece of a stream; gives the whole answer as soon as that has come."""


class Lost(Exception):
    """The connection broke, or was never made; the text says how."""


class Channels:
    """Connections to all engines, kept for the next request. Close it at the end."""

    def __init__(self) -> None:
        self._addresses: dict[str, _Address] = {}
        """By URL."""
        self._open: set[_Connection] = set()
        self._tls: ssl.SSLContext | None = None

    async def post(self, url: str, body: bytes, follow: Follow | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to a body of JSON; of a stream (STREAM), what `follow` gave.

        `follow` is called from the event loop, and what it raises is raised here. Whoever is cancelled here closes the
        connection. Raises Lost, or NoAnswer for what is not HTTP.
        """
        address = self._addresses.get(url)
        if address is None:
            address = self._addresses[url] = _Address(url)
        connection = address.unused() or await self._connect(address)
        return await connection.ask(address.head, body, follow)

    def close(self) -> None:
        """What is on its way is lost."""
        for connection in tuple(self._open):
            connection.abort()

    async def _connect(self, address: "_Address") -> "_Connection":
        if address.tls and self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        make = partial(_Connection, address, self._open)
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                transport, connection = await asyncio.get_running_loop().create_connection(
                    make, address.host, address.port, ssl=self._tls if address.tls else None
                )
            _watch(transport.get_extra_info("socket"))
        except OSError as error:  # a TimeoutError is one
            said = str(error) or f"no connection within {CONNECT_LIMIT_S:g} s"
            raise Lost(f"{type(error).__name__} {said}") from error
        return connection


class _Address:
    """Where requests go, and its unused connections. Raises NoAnswer for a URL that leads nowhere."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self.host = (parts.hostname or "").encode("idna").decode()
            port = parts.port
        except ValueError as error:
            raise NoAnswer(f"has a URL that cannot be read: {error}") from None
        if parts.scheme not in ("http", "https") or not self.host:
            raise NoAnswer("has a URL that does not begin with http:// or https:// and a host")
        self.tls = parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self._idle: deque[_Connection] = deque()
        """Those that were used last are at its right end, and are used next. Some are closed by now."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {_quoted(parts.path) or '/'}{'?' + _quoted(parts.query) if parts.query else ''} HTTP/1.1",
            f"Host: {host}:{port}" if port else f"Host: {host}",
            "Content-Type: application/json",
        ]
        if parts.username is not None or parts.password is not None:
            user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            lines.append(f"Authorization: Basic {b64encode(user.encode('latin-1')).decode()}")
        self.head = "\r\n".join([*lines, "Content-Length: "]).encode()
        """Of a request, up to the length of its body."""

    def unused(self) -> "_Connection | None":
        oldest = asyncio.get_running_loop().time() - IDLE_LIMIT_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def keep(self, connection: "_Connection") -> None:
        connection.idle_since = now = asyncio.get_running_loop().time()
        self._idle.append(connection)
        while self._idle[0].idle_since < now - IDLE_LIMIT_S:
            self._idle.popleft().abort()


class _Connection(asyncio.Protocol):
    """One connection, on which at most one request is on its way. Also takes what the parser finds in the answer."""

    idle_since = 0.0
    """In the time of the event loop."""
    _transport: asyncio.Transport
    _answer: "asyncio.Future[tuple[int, bytes]] | None" = None
    """Until the last byte of an answer is there; for the answer of a stream, that may be later than the answer."""
    _follow: Follow | None = None
    _status = 0
    """0: the head of the answer is not there."""
    _streams = False
    _bounded = False
    """The head says where the body ends; else it ends with the connection."""

    def __init__(self, address: _Address, open: "set[_Connection]") -> None:
        self._address = address
        self._open = open
        self._parser = HttpResponseParser(self)
        self._pieces: list[bytes] = []

    async def ask(self, head: bytes, body: bytes, follow: Follow | None) -> tuple[int, bytes]:
        self._follow = follow
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.writelines((head, b"%d\r\n\r\n" % len(body), body))
        try:
            return await answer
        except asyncio.CancelledError:
            # Not if the answer has come meanwhile: then somebody else may be using the connection.
            if answer is self._answer and answer.cancelled():
                self.abort()
            raise

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such class
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(NoAnswer(f"does not answer in HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)
        if self._answer is None:
            return
        if error is None and self._status and not self._bounded:
            self.on_message_complete()
        else:
            closed = "the connection was closed " + ("within the answer" if self._status else "before an answer")
            self._fail(Lost(f"{type(error).__name__} {error}" if error else closed))

    def on_message_begin(self) -> None:
        if self._answer is None:
            raise HttpParserError("nobody has asked")
        self._streams = self._bounded = False

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._streams = self._follow is not None and value.split(b";")[0].strip().lower() == _STREAM
            case b"content-length":
                self._bounded = True
            case b"transfer-encoding":
                self._bounded = b"chunked" in value.lower()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if not (self._streams and self._follow):
            self._pieces.append(piece)
        elif self._answer and not self._answer.done():
            try:
                whole = self._follow(piece)
            except Exception as error:  # noqa: BLE001  # whoever asked has to know
                self._fail(error)
            else:
                if whole is not None:
                    self._answer.set_result((self._status, whole))

    def on_message_complete(self) -> None:
        status, self._status = self._status, 0
        if status < 200:  # the answer is still to come
            return
        answer, pieces, self._answer, self._pieces, self._follow = self._answer, self._pieces, None, [], None
        if answer and not answer.done():
            if self._streams:
                answer.set_exception(NoAnswer("ended its stream without an answer"))
            else:
                answer.set_result((status, b"".join(pieces)))
        # An answer that came before its request was taken leaves the rest of that in the way.
        if self._parser.should_keep_alive() and not self._transport.get_write_buffer_size():
            self._address.keep(self)
        else:
            self.abort()

    def _fail(self, error: Exception) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()


def _watch(connected: socket.socket) -> None:
    """A generation may say nothing for long; that the machine at its other end is gone is noticed in half a minute."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has these. The last is for a request that is not acknowledged, in milliseconds.
    for name, value in {"KEEPIDLE": 10, "KEEPINTVL": 5, "KEEPCNT": 4, "USER_TIMEOUT": 30_000}.items():
        if option := getattr(socket, f"TCP_{name}", None):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _quoted(part: str) -> str:
    """What is quoted already stays as it is."""
    return quote(part, safe="!$%&'()*+,/:;=?@~[]")
