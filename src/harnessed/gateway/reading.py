"""Takes the text of an answer apart while it grows: reasoning, text, tool calls.

`preview.py` reads streams with it, `sampling.py` whole answers: what a stream has told is how the whole begins, however
the text was cut into pieces. Text that may open something is held back until it is clear what it is. What opens a call
and does not turn out to be one stays text, byte for byte. White space between the parts belongs to the format.
"""

from dataclasses import dataclass

from harnessed.gateway.formats import Call, Format, Types


@dataclass(frozen=True, slots=True)
class Piece:
    """What came new of an answer; reasoning stands before the text."""

    reasoning: str = ""
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text)

    def __add__(self, more: "Piece") -> "Piece":
        return Piece(self.reasoning + more.reasoning, self.text + more.text)


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
        self._read = self._read_reasoning if format.thinking else self._read_beginning
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

    def _read_beginning(self, last: bool) -> Piece:
        begun = self._held.lstrip()
        if self._open and begun.startswith(self._open):
            self._held = begun.removeprefix(self._open)
            self._read = self._read_reasoning
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
        self._read = self._read_gap
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
        self._read = self._read_text
        return self._read(last)

    def _read_text(self, last: bool) -> Piece:
        if self._format is None:
            return Piece(text=self._take(len(self._held)))
        piece = Piece()
        while (at := self._held.find(self._format.opens)) >= 0:
            piece += Piece(text=self._take(len(self._held[:at].rstrip())))
            before, _, rest = self._held.partition(self._format.opens)
            inside, closed, rest = rest.partition(self._format.closes) if self._format.closes else (rest, "", "")
            if not closed and not last:
                return piece
            whole = closed or not self._format.must_close
            if whole and (calls := self._format.calls(inside, self._types)):
                self.calls += calls
                self._held = rest
            else:
                self.broken += 1
                piece += Piece(text=self._take(len(before) + len(self._format.opens)))
                if self._format.first:
                    self._format = None
                    return piece + self._read_text(last)
        if last:
            return piece + Piece(text=self._take(len(self._held.rstrip() if self.calls else self._held)))
        free = self._held[: len(self._held) - _begun(self._held, self._format.opens)]
        return piece + Piece(text=self._take(len(free.rstrip())))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


def _begun(text: str, marker: str) -> int:
    """How much of the marker the text ends with, at most all but its last character."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
