"""The dashboard's routes: its files, the login, and what its pages ask for beside the control routes.

`app.py` mounts them. Files hold no data and are open to all; everything else needs the admin key, as a bearer key or as
the cookie of a login. Pages follow `/api/changes` and `/api/status` with the same cookie.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from harnessed.gateway.attempts import Attempts
from harnessed.gateway.keys import ADMIN, Keyring
from harnessed.gateway.operations import Operation
from harnessed.gateway.store import Store
from harnessed.gateway.web import cookie, queries
from harnessed.gateway.web.queries import Wanted

STATIC = Path(__file__).parent / "static"
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
MOST_LOGIN_BYTES = 4096
GUARDED = {
    # What agents wrote is shown here: no script but our files runs, and nothing turns text into markup.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Pages:
    """The routes of one gateway's dashboard."""

    def __init__(self, store: Store, attempts: Attempts, keyring: Keyring) -> None:
        self._store = store
        self._attempts = attempts
        self._keyring = keyring
        self._files = {file.name: file.read_bytes() for file in STATIC.iterdir()}

    def routes(self) -> list[Route]:
        """Data is opened as the control routes are, by the key in a header or in the cookie."""
        data = [
            Operation("GET", "/ui/data/runs", self.list_runs),
            Operation("GET", "/ui/data/runs/{run}", self.get_run),
            Operation("GET", "/ui/data/runs/{run}/rollouts", self.list_rollouts),
            Operation("GET", "/ui/data/runs/{run}/groups", self.list_groups),
            Operation("GET", "/ui/data/groups/{group}", self.show_group),
            Operation("GET", "/ui/data/rollouts/{rollout}", self.show_rollout),
            Operation("GET", "/ui/data/rollouts/{rollout}/{attempt:int}/{number:int}", self.tokens),
        ]
        return [
            Route("/", _to_pages),
            Route("/ui/", self.file),
            Route("/ui/login", self.login, methods=["POST"]),
            Route("/ui/logout", self.logout, methods=["POST"]),
            *(each.route(self._keyring) for each in data),
            Route("/ui/{file}", self.file),
        ]

    async def file(self, request: Request) -> Response:
        name = request.path_params.get("file", "index.html")
        if name not in self._files:
            return _error(404, f"the dashboard has no file {name}")
        headers = GUARDED | {"cache-control": "no-cache"}
        return Response(self._files[name], headers=headers, media_type=MEDIA[Path(name).suffix])

    async def login(self, request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_LOGIN_BYTES:
                return _error(413, "this is no key")
        key = self._keyring.read(body.decode(errors="replace").strip())
        if key is None:
            return _error(401, "this is no key of this gateway")
        if key != ADMIN:
            return _error(403, f"the dashboard needs the admin key; this one is of scope {key.scope}")
        response = Response(status_code=204)
        cookie.give(response, self._keyring, secure=request.url.scheme == "https")
        return response

    async def logout(self, _: Request) -> Response:
        response = Response(status_code=204)
        cookie.take(response, self._keyring)
        return response

    async def list_runs(self, _: Request) -> Response:
        return await self._read(queries.list_runs)

    async def get_run(self, request: Request) -> Response:
        return await self._read(queries.get_run, request.path_params["run"])

    async def list_rollouts(self, request: Request) -> Response:
        return await self._read(queries.list_rollouts, request.path_params["run"], _wanted(request))

    async def list_groups(self, request: Request) -> Response:
        return await self._read(queries.list_groups, request.path_params["run"], _wanted(request))

    async def show_group(self, request: Request) -> Response:
        return await self._read(queries.show_group, request.path_params["group"])

    async def show_rollout(self, request: Request) -> Response:
        return await self._read(queries.show_rollout, request.path_params["rollout"])

    async def tokens(self, request: Request) -> Response:
        names = request.path_params

        def load(connection: Connection) -> dict[str, Any]:
            return queries.load_tokens(connection, names["rollout"], names["attempt"], names["number"])

        node = await self._store.read(load)
        return _answer(await asyncio.to_thread(self._written, node))

    def _written(self, node: dict[str, Any]) -> dict[str, Any]:
        """A node's tokens with the text of each. A character that is cut in two shows as U+FFFD in both."""
        template = self._attempts.policy(node["policy"])
        segment, answer = array("i", node["segment"]), array("i", node["answer"])
        return {
            "segment": segment.tolist(),
            "answer": answer.tolist(),
            "texts": {str(id): template.written([id]) for id in {*segment, *answer}},
            "logprobs": [round(value, 4) for value in array("f", node["logprobs"])],
            "versions": array("i", node["versions"]).tolist(),
        }

    async def _read(self, query: Callable[..., Any], *arguments: Any) -> Response:
        return _answer(await self._store.read(lambda connection: query(connection, *arguments)))


async def _to_pages(_: Request) -> Response:
    return RedirectResponse("/ui/")


def _wanted(request: Request) -> Wanted:
    asked = request.query_params
    names = ("outcome", "purpose", "text", "after", "before")
    return Wanted(
        **{name: asked.get(name, "") for name in names},
        sort=asked.get("sort", "created"),
        descending=asked.get("order", "desc") != "asc",
    )


def _answer(value: Any) -> Response:
    return _json({"now": time.time(), "data": value}, 200)


def _error(status: int, message: str) -> Response:
    return _json({"error": {"message": message}}, status)


def _json(value: Any, status: int) -> Response:
    # The name of a column that SQL reserves is a subclass of str.
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, status, GUARDED | {"cache-control": "no-store"}, "application/json")
