"""The JSON of an event in a stream. Every protocol that streams writes its events through here."""

from typing import Any

import orjson

_BREAKS = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))
"""What `str.splitlines` takes for the end of a line, and JSON may hold as it is."""


def written(value: Any) -> bytes:
    """As JSON on one line, for clients too that break lines as Python does (httpx's `iter_lines`), where the protocol
    (html.spec.whatwg.org, "Server-sent events") knows only CR and LF."""
    text = orjson.dumps(value)
    for raw, escaped in _BREAKS:
        if raw in text:
            text = text.replace(raw, escaped)
    return text
