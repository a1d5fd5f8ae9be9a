"""A proxy on the loopback address, and the faults that it plays: each at one chosen request, all others pass.

It stands before a gateway or an engine. Every request has a connection of its own on both sides, and an answer of
unknown length ends with its connection: so the end of a stream may be a clean one that nobody can tell from its loss.
"""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
from listening import listen

LIMIT_S = 30
WHOLE = "application/json"
PATHS = ("/chat/completions", "/messages", "/responses", "/generate")
"""Of the requests that are counted."""


async def until(condition: Callable[[], object]) -> None:
    """Returns when it holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Request:
    """A request that stands in the proxy."""

    proxy: "Proxy"
    writer: asyncio.StreamWriter
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    chunked: bool = False

    def tell(self, status: int, *headers: str, body: bytes = b"") -> None:
        """An answer of the proxy's own, or the beginning of one."""
        lines = [f"HTTP/1.1 {status} Because", "connection: close", *headers]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    def reset(self) -> None:
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    @contextlib.asynccontextmanager
    async def asked(self) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to it from behind the proxy, from its first byte on; its connection is closed at the end."""
        kept = {name: value for name, value in self.headers.items() if name not in ("host", "connection")}
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        ) as session:
            url = self.proxy.target + self.path
            answer = await session.request(self.method, url, data=self.body, headers=kept)
            try:
                yield answer
            finally:
                answer.close()

    def begin(self, answer: aiohttp.ClientResponse, *, ends_unseen: bool = False) -> None:
        """An answer of unknown length comes in chunks, or its end is that of the connection."""
        names = ("content-type", "content-length", "retry-after")
        headers = [f"{name}: {answer.headers[name]}" for name in names if name in answer.headers]
        self.chunked = "content-length" not in answer.headers and not ends_unseen
        self.tell(answer.status, *headers, *(["transfer-encoding: chunked"] if self.chunked else []))

    async def send(self, piece: bytes) -> None:
        if piece:
            self.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)
            await self.writer.drain()

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n" if self.chunked else b"")

    async def pass_on(self) -> None:
        """All of it as it comes."""
        async with self.asked() as answer:
            self.begin(answer)
            async for piece in answer.content.iter_any():
                await self.send(piece)
            self.end()

    async def swallow(self) -> None:
        """All of it, and nothing comes through."""
        async with self.asked() as answer:
            await answer.read()


async def pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """As they come, or in one if all have."""
    if answer.content.at_eof():
        yield await answer.read()
    async for piece in answer.content.iter_any():
        yield piece


async def parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Events of a stream, each as soon as it is whole; any other answer in two halves."""
    if answer.content_type == WHOLE:
        whole = await answer.read()
        yield whole[: len(whole) // 2]
        yield whole[len(whole) // 2 :]
        return
    rest, end = b"", b"\n\n" if answer.content_type == "text/event-stream" else b"\n"
    async for piece in pieces(answer):
        *events, rest = (rest + piece).split(end)
        for event in events:
            yield event + end
    yield rest


Fault = Callable[[Request], Awaitable[None]]


def refuse(status: int, *headers: str) -> Fault:
    async def play(request: Request) -> None:
        request.tell(status, "content-type: application/json", *headers, body=b'{"error": {"message": "a fault"}}')

    return play


async def reset(request: Request) -> None:
    """It has not come through."""
    request.reset()


def reset_while_generating(tokens: int) -> Fault:
    """The gateway has seen its client leave when there were so many."""

    async def play(request: Request) -> None:
        asking = asyncio.create_task(request.swallow())
        await until(lambda: request.proxy.sampled() == tokens)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not request.proxy.clients())
        request.reset()

    return play


async def lose(request: Request) -> None:
    """The whole answer has come so far."""
    await request.swallow()
    request.reset()


def cut(after: bytes, *, resets: bool = True, late: bool = False) -> Fault:
    """Ends the connection after an event that matches, by a reset or like a server that has said all. If late, the
    whole answer has come so far before anything is passed on."""

    async def play(request: Request) -> None:
        async with request.asked() as answer:
            if late:
                await answer.read()
            request.begin(answer, ends_unseen=not resets)
            async for part in parts(answer):
                await request.send(part)
                if _matches(answer, part, after):
                    break
            else:
                raise AssertionError(f"nothing to cut: {after!r}")
            await asyncio.sleep(0.1)  # a reset may overtake what was written before
        await until(lambda: not request.proxy.clients())
        if resets:
            request.reset()

    return play


def wait(seconds: float, after: bytes = b"") -> Fault:
    """After an event that matches; before the first byte, if nothing is given."""

    async def play(request: Request) -> None:
        async with request.asked() as answer:
            if not after:
                await asyncio.sleep(seconds)
            request.begin(answer)
            waited = not after
            async for part in parts(answer):
                await request.send(part)
                if not waited and _matches(answer, part, after):
                    waited = True
                    await asyncio.sleep(seconds)
            request.end()
            assert waited

    return play


async def go_away(request: Request) -> None:
    """For a second."""

    async def come_back() -> None:
        await asyncio.sleep(1)
        await request.proxy.come()

    request.proxy.leave()
    request.proxy.coming = asyncio.create_task(come_back())
    request.reset()


def _matches(answer: aiohttp.ClientResponse, part: bytes, pattern: bytes) -> bool:
    return answer.content_type == WHOLE or bool(re.search(pattern, part))


@dataclass
class Proxy:
    """Use it as a context."""

    target: str
    clients: Callable[[], int] = lambda: 0
    """That the gateway still sees waiting, if it stands behind this."""
    sampled: Callable[[], int | None] = lambda: None
    """Tokens of the engine's second answer, if that was begun."""
    faults: dict[int, Fault] = field(default_factory=dict)
    """By the number of the request, from 1 in the order of arrival."""
    requests: list[Request] = field(default_factory=list)
    """Those that count."""
    failures: list[BaseException] = field(default_factory=list)
    """Of the proxy's own."""
    url: str = ""
    coming: asyncio.Task[None] | None = None
    _server: asyncio.Server | None = None
    _port: int = 0

    async def __aenter__(self) -> "Proxy":
        with listen() as listener:
            self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        await self.come()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()
        assert not (self.failures or self.faults), "a fault was not played, or not as meant"

    async def come(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    def leave(self) -> None:
        """Nobody listens here any more; what is being answered goes on."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):  # opened and not used
            writer.close()
            return
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, path, _ = first.split()
        request = Request(self, writer, method, path, headers, body)
        play: Fault = Request.pass_on
        if path.partition("?")[0].endswith(PATHS):
            self.requests.append(request)
            play = self.faults.pop(len(self.requests), play)
        playing, gone = asyncio.create_task(play(request)), asyncio.create_task(reader.read(1))
        await asyncio.wait({playing, gone}, return_when=asyncio.FIRST_COMPLETED)
        playing.cancel()  # whoever leaves here, leaves there too
        gone.cancel()
        failed, _ = await asyncio.gather(playing, gone, return_exceptions=True)
        if isinstance(failed, aiohttp.ClientError | ConnectionError):
            request.reset()
        elif isinstance(failed, Exception):
            self.failures.append(failed)
        writer.close()
