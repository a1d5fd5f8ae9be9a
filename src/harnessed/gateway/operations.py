"""A control route: what it takes and gives, whose keys open it, and the endpoint that holds it to that.

`api.py` has the table of them, `openapi.py` describes it. A handler takes the request and, where it names them, the
`key` that was sent and the `body`; its annotations are the types that are checked and described. What it returns goes
out as JSON, a `Response` as it is.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, get_type_hints

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from harnessed.config import ConfigError
from harnessed.gateway.keys import Keyring, Scope
from harnessed.gateway.store import Refused
from harnessed.gateway.web.cookie import sent_key

T = TypeVar("T")
MOST_NUMBER = 2**31 - 1
"""What the store counts to."""


class Packed(Response):
    """Values as msgpack, so that arrays stay bytes."""

    media_type = "application/msgpack"


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    """Its name is that of the function in `client.py` that describes it."""
    opens: tuple[Scope, ...] = (Scope.ADMIN,)
    """Scopes whose keys may ask; the handler looks whether the key is of the right attempt or rollout."""
    query: Mapping[str, type] = field(default_factory=dict)
    """Names that the query must have."""
    most_bytes: int | None = None
    """Of the body."""

    @property
    def name(self) -> str:
        return self.handler.__name__

    @cached_property
    def types(self) -> dict[str, Any]:
        """What the handler takes and, as `return`, gives."""
        return get_type_hints(self.handler, include_extras=True)

    def route(self, keyring: Keyring) -> Route:
        async def endpoint(request: Request) -> Response:
            key = keyring.read(sent_key(request, keyring))
            if key is None:
                return _error(401, "send a key that this gateway made as `Authorization: Bearer KEY`")
            if key.scope not in self.opens:
                needed = " or ".join(f"the {scope} key" for scope in self.opens)
                return _error(403, f"this route needs {needed}; a key of scope {key.scope} was sent")
            numbers = (value for value in request.path_params.values() if isinstance(value, int))
            if any(value > MOST_NUMBER for value in numbers):
                return _error(404, f"there is no {request.url.path}")
            given: dict[str, Any] = {"key": key} if "key" in self.types else {}
            try:
                if "body" in self.types:
                    given["body"] = await _body(request, self.types["body"], self.most_bytes)
                answer = await self.handler(request, **given)
            except Refused as error:
                return _error(error.status, str(error))
            except (ConfigError, ValueError) as error:
                return _error(400, " ".join(str(error).split()))
            except ClientDisconnect:  # with its body half sent; nobody reads this
                return _error(400, "the connection was closed before the request was complete")
            return answer if isinstance(answer, Response) else _json(answer)

        return Route(self.path, endpoint, methods=[self.method])


def query(request: Request, name: str) -> str:
    """Raises ValueError (400)."""
    value = request.query_params.get(name)
    if value is None:
        raise ValueError(f"the query needs {name}=")
    return value


def number(request: Request, name: str) -> int:
    """Of the query, as the store can keep it. Raises ValueError (400)."""
    value = int(query(request, name))
    if abs(value) > MOST_NUMBER:
        raise ValueError(f"{name}: there is no {value}")
    return value


async def _body(request: Request, type_: type[T], most: int | None) -> T:
    """The request's body as a record. Raises ValueError (400), or Refused for more than `most` bytes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if most is not None and len(body) > most:
            raise Refused(413, f"this request has at most {most} bytes")
    try:
        given = TypeAdapter(type_).validate_json(body)
        orjson.dumps(given, default=_as_json, option=orjson.OPT_NON_STR_KEYS)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}") from None
    except orjson.JSONEncodeError as error:  # a number of more than 64 bits, say
        raise ValueError(f"the body cannot be kept: {error}") from None
    return given


def _json(value: Any) -> Response:
    return Response(orjson.dumps({} if value is None else value, default=_as_json), media_type="application/json")


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} does not cross the wire")


def _error(status: int, message: str) -> Response:
    return Response(orjson.dumps({"error": {"message": message}}), status, media_type="application/json")
