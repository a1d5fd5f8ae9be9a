"""Between client and gateway: passes everything on and remembers what the gateway said."""

import asyncio
import contextlib
from urllib.parse import urlsplit


class Wiretap:
    """Use it as a context; `url` is in the place of the gateway's."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.url = ""
        self.heard: list[bytearray] = []
        """Of each connection, in the order of their opening."""
        self.resets = 0
        """Connections that the gateway reset."""

    async def __aenter__(self) -> "Wiretap":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        gateway, to_gateway = await asyncio.open_connection(self._target.hostname, self._target.port)

        async def listen() -> None:
            while piece := await gateway.read(2**16):
                heard.extend(piece)
                to_client.write(piece)

        async def ask() -> None:
            while piece := await client.read(2**16):
                to_gateway.write(piece)

        passing = [asyncio.create_task(listen()), asyncio.create_task(ask())]
        _, going = await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        self.resets += passing[0].done() and isinstance(passing[0].exception(), ConnectionResetError)
        for each in going:
            each.cancel()
        for each in (to_client, to_gateway):  # what one side ends, or resets, ends for the other
            each.transport.abort()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(*passing)
