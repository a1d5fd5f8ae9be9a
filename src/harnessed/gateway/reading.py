"""Takes the text of an answer apart while it grows: reasoning, text, tool calls.

`preview.py` reads streams with it, `sampling.py` whole answers: what a stream has told is how the whole begins, however
the text was cut into pieces. Text that may open something is held back until it is clear what it is. What opens a call
and does not turn out to be one stays text, byte for byte. White space between the parts belongs to the format.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harnessed.gateway.formats import Call, CallFormat, Format, Types

_MOST_CLOSES = 4
"""So many ends are tried for a call before it is none."""
_MOST_BROKEN = 32
"""After so many that were none, no more are looked for: what repeats itself would cost the square of its length."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came new of an answer; reasoning stands before the text."""

    reasoning: str = ""
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text)

    def __add__(self, more: "Piece") -> "Piece":
        return Piece(self.reasoning + more.reasoning, self.text + more.text)


def cut_at(text: str, stop_strings: Sequence[str]) -> tuple[str, str]:
    """The text up to the first stop string in it, and that one; an engine that broke off may have missed it."""
    at, stop = min(((at, stop) for stop in stop_strings if (at := text.find(stop)) >= 0), default=(len(text), ""))
    return text[:at], stop


class Reader:
    """Reads one answer."""

    def __init__(self, format: Format, types: Types | None) -> None:
        """`types` of the declared tools; None: calls are not looked for."""
        self.calls: list[Call] = []
        self.broken = 0
        """Texts that opened a call and were none."""
        self._types = types or {}
        self._format = format.calls if types is not None else None
        self._open, self._close = format.thinks or ("", "")
        # No bound method: it would keep the reader until somebody looks for cycles.
        self._state: Callable[[Reader, bool], Piece] = (
            Reader._read_reasoning if format.thinking else Reader._read_beginning
        )
        self._thought = False
        """There was some reasoning."""
        self._held = ""

    def more(self, text: str) -> Piece:
        """What is clear of the answer with this text."""
        self._held += text
        return self._read(False)

    def end(self, text: str) -> Piece:
        """The rest of the answer, which ends with this text."""
        self._held += text
        return self._read(True)

    def _read(self, last: bool) -> Piece:
        return self._state(self, last)

    def _read_beginning(self, last: bool) -> Piece:
        begun = self._held.lstrip()
        if self._open and begun.startswith(self._open):
            self._held = begun.removeprefix(self._open)
            self._state = Reader._read_reasoning
            return self._read(last)
        if self._open and not last and self._open.startswith(begun):
            return Piece()
        return self._read_first(last)

    def _read_reasoning(self, last: bool) -> Piece:
        if not self._thought:
            self._held = self._held.lstrip()
        reasoning, closed, rest = self._held.partition(self._close)
        if not (closed or last):
            reasoning = reasoning[: len(reasoning) - _begun(reasoning, self._close)]
        piece = Piece(reasoning=self._take(len(reasoning.rstrip())))
        self._thought = self._thought or bool(piece)
        if not closed:
            return piece
        self._held = rest
        self._state = Reader._read_gap
        return piece + self._read(last)

    def _read_gap(self, last: bool) -> Piece:
        """Line breaks after the reasoning."""
        self._held = self._held.lstrip("\n")
        if not self._held:
            return Piece()
        return self._read_first(last)

    def _read_first(self, last: bool) -> Piece:
        """Where calls can only be the whole answer."""
        if self._format and self._format.first:
            begun = self._held.lstrip()
            if not last and self._format.opens.startswith(begun[: len(self._format.opens)]):
                return Piece()
            if not begun.startswith(self._format.opens):
                self._format = None
        self._state = Reader._read_text
        return self._read(last)

    def _read_text(self, last: bool) -> Piece:
        piece = Piece()
        while self._format and (at := self._held.find(self._format.opens)) >= 0:
            piece += Piece(text=self._take(len(self._held[:at].rstrip())))
            end = self._read_calls(self._format, last)
            if end is None:
                return piece
            if end:
                self._held = self._held[end:]
                continue
            self.broken += 1
            piece += Piece(text=self._take(self._held.index(self._format.opens) + len(self._format.opens)))
            if self._format.first or self.broken == _MOST_BROKEN:
                self._format = None
        if self._format is None:
            return piece + Piece(text=self._take(len(self._held)))
        if last:
            return piece + Piece(text=self._take(len(self._held.rstrip() if self.calls else self._held)))
        free = self._held[: len(self._held) - _begun(self._held, self._format.opens)]
        return piece + Piece(text=self._take(len(free.rstrip())))

    def _read_calls(self, format: CallFormat, last: bool) -> int | None:
        """Where the calls end that begin what is held; 0: they are none; None: they may become some."""
        begin = self._held.index(format.opens) + len(format.opens)
        if not format.closes:
            return self._add(format, self._held[begin:], len(self._held)) if last else None
        close = begin
        for _ in range(_MOST_CLOSES):  # the end of a call may stand in its arguments too
            close = self._held.find(format.closes, close)
            if close < 0:
                break
            end = close + len(format.closes)
            if self._add(format, self._held[begin:close], end):
                return end
            close = end
        else:
            return 0
        if not last:
            return None
        alone = self._held.find(format.opens, begin) < 0 and self._held.find(format.closes, begin) < 0
        return self._add(format, self._held[begin:], len(self._held)) if alone and not format.must_close else 0

    def _add(self, format: CallFormat, text: str, end: int) -> int:
        """Take in the calls of a text that ends there; 0: it has none."""
        calls = format.calls(text, self._types)
        self.calls += calls
        return end if calls else 0

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


def _begun(text: str, marker: str) -> int:
    """How much of the marker the text ends with, at most all but its last character."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
