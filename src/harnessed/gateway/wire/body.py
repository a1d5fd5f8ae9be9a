"""Reading a request body: what all protocols check in the same way. Everything raises WireError (400)."""

from typing import Any

import orjson

from harnessed.gateway.wire.growing import Beginning, beginning_of
from harnessed.gateway.wire.turn import WireError

MOST_STOP_STRINGS = 16


def invalid(message: str) -> WireError:
    return WireError(400, "invalid_request", message)


def read_object(body: bytes) -> dict[str, Any]:
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise invalid("the body must be a JSON object")
    try:
        orjson.dumps([[[[[[[[request]]]]]]]])  # what is recorded has to be written again, within other things
    except orjson.JSONEncodeError as error:
        raise invalid(f"the request cannot be kept: {error}") from None
    return request


def read_growing(body: bytes, name: str, before: Beginning | None) -> tuple[dict[str, Any], int, Beginning | None]:
    """A request with a list of objects that grows from request to request; how many of these are those of `before`,
    with which the body begins; and its own beginning."""
    if before and before.name == name and (read := before.go_on(body)):
        return read[0], len(before.items), read[1]
    request = read_object(body)
    return request, 0, beginning_of(body, request, name)


def objects(request: dict[str, Any], name: str, known: int = 0) -> list[dict[str, Any]]:
    """A list, of which so many items were read before."""
    value = request.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in (value[known:] if known else value)):
        raise invalid(f"`{name}` must be a list of objects")
    return value


def texts(request: dict[str, Any], name: str) -> tuple[str, ...]:
    """Stop strings."""
    value = request.get(name) or []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(each, str) and each for each in strings):
        raise invalid(f"`{name}` must be a text or a list of texts")
    if len(strings) > MOST_STOP_STRINGS:
        raise invalid(f"`{name}` holds more than {MOST_STOP_STRINGS} texts")
    return tuple(strings)


def image(url: Any) -> dict[str, Any]:
    """A picture as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": str(url)}}


def grammar_of(request: dict[str, Any], name: str) -> str:
    """`response_format` as JSON; empty where any text will do."""
    value = request.get(name) or {}
    if not isinstance(value, dict):
        raise invalid(f"`{name}` must be an object")
    return orjson.dumps(value).decode() if value.get("type") not in (None, "text") else ""


def whole_number(request: dict[str, Any], name: str, most: int | None = None) -> int | None:
    """From 1 to `most`; None where it is left out."""
    value = request.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or value < 1 or (most and value > most):
        raise invalid(f"`{name}` must be a whole number from 1{f' to {most}' if most else ''}")
    return value
