"""The routes that serve the model, for each protocol; also under `/a/KEY`, for harnesses that only take an address.

`app.py` mounts them beside the control routes of `api.py`.
"""

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from harnessed.gateway.exchange import Exchange
from harnessed.gateway.progress import Calls
from harnessed.gateway.wire import chat, completions, gemini, messages, responses
from harnessed.gateway.wire.turn import Wire, WireError

WIRES: dict[str, Wire] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/{version}/models/{model:path}:{method}": gemini,
}


class _Listing(Wire, Protocol):
    """A protocol that lists models."""

    def render_models(self, name: str | None) -> bytes: ...


class _Counting(Wire, Protocol):
    """A protocol that counts the tokens of a prompt."""

    def render_count(self, tokens: int) -> bytes: ...


@dataclass(frozen=True)
class _Calls:
    """The calls of one protocol, as an ASGI application."""

    exchange: Exchange
    calls: Calls
    wire: Wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.calls.open(self.wire.__name__.rpartition(".")[2]) as progress:
            await self.exchange.serve(self.wire, scope, receive, progress.sending(send))


@dataclass(frozen=True)
class _Count:
    """Counts the tokens of a prompt, as an ASGI application."""

    exchange: Exchange
    calls: Calls
    wire: _Counting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.calls.open("count_tokens") as progress:
            try:
                response = _json(self.wire.render_count(await self.exchange.count_tokens(self.wire, scope, receive)))
            except WireError as error:
                progress.error = error
                response = _json(self.wire.render_error(error), error.status)
            await response(scope, receive, progress.sending(send))


def model_calls(exchange: Exchange, calls: Calls) -> dict[str, ASGIApp]:
    """What is served by POST at the paths without parameters."""
    return {path: _Calls(exchange, calls, wire) for path, wire in WIRES.items() if "{" not in path}


def model_routes(exchange: Exchange, calls: Calls) -> list[Route]:
    async def models(request: Request) -> Response:
        """What SDKs ask before they call. Every name is served by the run's policy."""
        wire = _listing(request)
        try:
            exchange.key(request.scope)
        except WireError as error:
            return _json(wire.render_error(error), error.status)
        return _json(wire.render_models(request.path_params.get("model")))

    async def no_socket(_: Request) -> Response:
        """Codex tries a WebSocket first; by this status it turns to requests at once."""
        return Response(status_code=426)

    return [
        route
        for at in ("", "/a/{key}")
        for route in (
            Route(f"{at}/v1/messages/count_tokens", _Count(exchange, calls, messages), methods=["POST"]),
            Route(
                f"{at}/{{version}}/models/{{model:path}}:countTokens", _Count(exchange, calls, gemini), methods=["POST"]
            ),
            *(Route(at + path, _Calls(exchange, calls, wire), methods=["POST"]) for path, wire in WIRES.items()),
            Route(f"{at}/v1/responses", no_socket, methods=["GET"]),
            Route(f"{at}/{{version}}/models", models),
            Route(f"{at}/{{version}}/models/{{model:path}}", models),
        )
    ]


def _listing(request: Request) -> _Listing:
    """The protocol of a request for models: three have a path `/v1/models`."""
    headers = request.headers
    if request.path_params["version"] != "v1" or "x-goog-api-key" in headers or "key" in request.query_params:
        return gemini
    return messages if "anthropic-version" in headers else chat


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
