"""An answer while it is sampled, for those who stream it: its tokens as the engine gives them, and their text.

`engines.py` shows tokens, `delivery.py` sends text. What is shown is not recorded: an engine may fail and begin again.
So a stream only ends well if what was recorded begins with what was sent.
"""

import asyncio
from typing import Any

from harnessed.gateway.reading import Piece
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.wire.turn import Turn

_BEFORE = 6
"""Tokens that are decoded again in front of new ones: a token's text may depend on the ones before it."""


class Preview:
    """The tokens of one answer so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.beginnings = 0
        """How often it was begun, with the tokens that were kept."""
        self._changed: asyncio.Future[None] | None = None
        """Somebody waits for it."""

    def begin(self, kept: list[int]) -> None:
        self.tokens = list(kept)
        self.beginnings += 1

    def add(self, new: list[int]) -> None:
        self.tokens += new
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    @property
    def changed(self) -> "asyncio.Future[None]":
        """Done with the next tokens. Take it before looking at them, so that nothing falls between."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed


class Broken(Exception):
    """What was sent is not how the answer begins."""


class Unfolding:
    """What one answer says, as far as more tokens cannot change it."""

    _tokens: list[int]
    _same: int
    """So many of them were seen since the answer was last begun."""
    _shown: list[int]
    """Those that have a text."""
    _known: int
    """So many of these have theirs in `sent` or in `_held`."""
    _held: str
    """A stop string may begin in it."""

    def __init__(self, template: ChatTemplate, turn: Turn) -> None:
        self.sent = Piece()
        self._template = template
        self._turn = turn
        self._longest_stop = max(map(len, turn.wanted.stop), default=0)
        self._beginnings = 0
        self._forget()

    def more(self, preview: Preview) -> Piece:
        """What can be sent now. Raises Broken."""
        self._read(preview)
        begin = max(self._known - _BEFORE, 0)
        before, text = (self._template.said(self._shown[begin:end]) for end in (self._known, len(self._shown)))
        if text.endswith("\ufffd") or (self._shown and self._template.is_byte(self._shown[-1])):
            return Piece()  # a character is not whole yet
        self._known = len(self._shown)
        self._held += text[len(before) :]
        if any(stop in self._held for stop in self._turn.wanted.stop):
            return Piece()  # the end of the answer says where it was cut
        free = max(len(self._held) - max(self._longest_stop - 1, 0), 0)
        new, self._held = self._reader.more(self._held[:free]), self._held[free:]
        self.sent += new
        return new

    def end(self, message: dict[str, Any]) -> Piece:
        """The rest of the whole answer. Raises Broken."""
        reasoning, text = message.get("reasoning_content") or "", message.get("content") or ""
        if not (reasoning.startswith(self.sent.reasoning) and text.startswith(self.sent.text)):
            raise Broken("the answer that was recorded is not the one that was sent")
        return Piece(reasoning[len(self.sent.reasoning) :], text[len(self.sent.text) :])

    def _read(self, preview: Preview) -> None:
        """Take in new tokens; of an answer that was begun again, those that were known have to come again."""
        if preview.beginnings != self._beginnings:
            self._beginnings, self._same = preview.beginnings, 0
        same = slice(self._same, min(len(preview.tokens), len(self._tokens)))
        if preview.tokens[same] != self._tokens[same]:
            if self.sent:
                raise Broken("the answer was begun again with other tokens")
            self._forget()
        new = preview.tokens[len(self._tokens) :]
        self._tokens += new
        self._same = min(len(preview.tokens), len(self._tokens))
        self._shown += [id for id in new if not self._template.is_silent(id)]

    def _forget(self) -> None:
        self._tokens, self._shown, self._held = [], [], ""
        self._same = self._known = 0
        self._reader = self._turn.reader(self._template.format)
