"""Harnesses repeat the whole conversation with each request, so that most of a body begins as an earlier one did. What
is known of it is not read again. The protocols read through here; `exchange.py` keeps the beginnings of an attempt.

What is read of a body and what is left out give the same as the whole: where a known beginning ends, a list has just
had an item, and a mark in the place of all its items leaves the rest of the body to mean what it meant.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Any

import orjson

Request = dict[str, Any]
MOST_BYTES = 4 * 2**20
"""Longer beginnings are not kept."""
_MARK = secrets.token_hex(16)
"""Stands for the items that are known; nobody can send it."""
_QUOTED_MARK = f'"{_MARK}"'.encode()
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
"""Of JSON, what nests and what may hide that."""
_OPENS = re.compile(rb"\s*:\s*\[")
_NESTS = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}


@dataclass(frozen=True, slots=True)
class Beginning:
    """A body up to the last item of one of its lists."""

    name: str
    """Of the list, a field of the request."""
    head: bytes
    """Up to the list's bracket, with it."""
    whole: bytes
    """Up to the end of the last item."""
    items: list[dict[str, Any]]
    protocol: str = ""
    """That has read it; set by who keeps it, as the next."""
    refers: bool = False
    """It may refer to what it does not hold itself."""

    def begins(self, body: bytes) -> bool:
        return body.startswith(self.whole)

    def go_on(self, body: bytes) -> "tuple[Request, Beginning] | None":
        """A request that begins so, with the same items in its list and further ones, and its own beginning; None: it
        has to be read as a whole."""
        request = _try(self.head + _QUOTED_MARK + body[len(self.whole) :])
        new = request.get(self.name) if request else None
        if not request or not isinstance(new, list) or new[:1] != [_MARK]:  # else the field comes again
            return None
        items = self.items + new[1:]
        end = _end(body, len(self.whole)) or len(self.whole)
        return request | {self.name: items}, Beginning(self.name, self.head, body[:end], items)


def beginning_of(body: bytes, request: Request, name: str) -> Beginning | None:
    """Up to the last item of a list of a valid request; None: it has none, or one that is written as nobody does."""
    items = request.get(name)
    if not items or not isinstance(items, list) or len(body) > MOST_BYTES:
        return None
    key, depth = f'"{name}"'.encode(), 0
    for token in _TOKEN.finditer(body):
        depth += _NESTS.get(token[0], 0)
        if depth == 1 and token[0] == key and (opens := _OPENS.match(body, token.end())):
            head, end = body[: opens.end()], _end(body, opens.end())
            rest = _try(head + _QUOTED_MARK + body[end:])
            found = rest is not None and rest.get(name) == [_MARK]  # else the field comes again
            return Beginning(name, head, body[:end], items) if found else None
    return None


def _end(body: bytes, begin: int) -> int:
    """Where the last object of a list ends, from within the list on, between its items; 0: there is none."""
    depth, end = 0, 0
    for token in _TOKEN.finditer(body, begin):
        nests = _NESTS.get(token[0], 0)
        depth += nests
        if depth < 0:
            break
        if depth == 0 and nests:
            end = token.end()
    return end


def _try(body: bytes) -> Request | None:
    try:
        request = orjson.loads(body)
        orjson.dumps([[[[[[[[request]]]]]]]])  # as `body.read_object` has it
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    return request if isinstance(request, dict) else None
