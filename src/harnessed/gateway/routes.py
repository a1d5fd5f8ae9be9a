"""The routes that serve the model, for each protocol; also under `/a/KEY`, for harnesses that only take an address.

`app.py` mounts them beside the control routes of `api.py`.
"""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from harnessed.gateway.exchange import Exchange
from harnessed.gateway.wire import chat, messages, responses
from harnessed.gateway.wire.turn import Wire, WireError

WIRES: dict[str, Wire] = {"/v1/chat/completions": chat, "/v1/messages": messages, "/v1/responses": responses}


@dataclass(frozen=True)
class _Calls:
    """The calls of one protocol, as an ASGI application."""

    exchange: Exchange
    wire: Wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.exchange.serve(self.wire, scope, receive, send)


def model_routes(exchange: Exchange) -> list[Route]:
    async def models(request: Request) -> Response:
        """What SDKs ask before they call. Every name is served by the run's policy."""
        wire = messages if "anthropic-version" in request.headers else chat
        try:
            exchange.key(request.scope)
        except WireError as error:
            return _json(wire.render_error(error), error.status)
        return _json(wire.render_models(request.path_params.get("model")))

    async def count_tokens(request: Request) -> Response:
        try:
            tokens = await exchange.count_tokens(messages, request.scope, request.receive)
        except WireError as error:
            return _json(messages.render_error(error), error.status)
        return _json(messages.render_count(tokens))

    async def no_socket(_: Request) -> Response:
        """Codex tries a WebSocket first; by this status it turns to requests at once."""
        return Response(status_code=426)

    return [
        route
        for at in ("", "/a/{key}")
        for route in (
            *(Route(at + path, _Calls(exchange, wire), methods=["POST"]) for path, wire in WIRES.items()),
            Route(f"{at}/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            Route(f"{at}/v1/responses", no_socket, methods=["GET"]),
            Route(f"{at}/v1/models", models),
            Route(f"{at}/v1/models/{{model:path}}", models),
        )
    ]


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
