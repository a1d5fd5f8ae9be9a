"""The baseline of `gateway.py`: a plain relay of chats that keeps what it has seen in a list. Nothing is durable."""

import socket
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

WITH_TOKENS = {"logprobs": True, "return_token_ids": True}


def serve(listener: socket.socket, upstream: str) -> None:
    """Serve on a bound socket, with the server settings of the gateway."""
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []
    client = httpx.AsyncClient(timeout=None)  # the upstream is part of the benchmark

    async def relay(request: Request) -> Response:
        asked = await request.json()
        response = await client.post(f"{upstream}/v1/chat/completions", json=asked | WITH_TOKENS)
        answer = response.json()
        seen.append((asked, answer))
        return JSONResponse(answer, response.status_code)

    application = Starlette(routes=[Route("/v1/chat/completions", relay, methods=["POST"])])
    config = uvicorn.Config(
        application,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=3600,
    )
    uvicorn.Server(config).run(sockets=[listener])
