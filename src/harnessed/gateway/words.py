"""Text to tokens by a look-up for each word. `template.py` encodes so where the tokenizer allows it.

Byte-level tokenizers (GPT-2 and most families since) cut a text by one regular expression and encode each piece by
itself. The package does all of that anew for every text; here a piece is encoded by the package once, and the cut is
made by Python's `re`. Only ASCII text is cut so: beyond it, regular expressions differ in what a letter is.
"""

import re
from array import array
from typing import Any

import orjson
from tokenizers.models import BPE

MOST = 2**15
"""Words that are kept: about 8 MB."""
LONGEST = 32
"""Letters of one that is kept."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the package's ByteLevel cuts by, unless another step has cut before."""
_NEVER = "\x80"
"""No letter of an ASCII text."""
_ASCII = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": _NEVER, "Lm": _NEVER, "Lo": _NEVER, "M": _NEVER}
"""Classes of Unicode, as far as ASCII has them."""


class Strange(Exception):
    """A piece that the package would cut in another way."""


class Words(dict[str, list[int]]):
    """Piece -> its tokens, of those that were looked up."""

    def __init__(self, tokenizer: Any, cut: re.Pattern[str]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._cut = cut
        self._added = {each.content: id for id, each in tokenizer.get_added_tokens_decoder().items()}
        # The longest of those that begin at a place, as in the package.
        texts = sorted(filter(None, self._added), key=len, reverse=True)
        self._apart = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    @classmethod
    def of(cls, tokenizer: Any) -> "Words | None":
        """None: it has to be left to the package."""
        added = tokenizer.get_added_tokens_decoder().values()
        if not isinstance(tokenizer.model, BPE) or tokenizer.model.dropout or tokenizer.truncation:
            return None
        if any(each.lstrip or each.rstrip or each.single_word for each in added):
            return None
        if len({each.normalized for each in added}) > 1:  # those are looked for one kind after the other
            return None
        normalizer = _state(tokenizer.normalizer)
        if normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
            return None
        cut = _cut(_state(tokenizer.pre_tokenizer))
        return None if cut is None else cls(tokenizer, cut)

    def __missing__(self, word: str) -> list[int]:
        if len(self._tokenizer.pre_tokenizer.pre_tokenize_str(word)) != 1:
            raise Strange(word)
        ids: list[int] = self._tokenizer.encode(word, add_special_tokens=False).ids
        if len(word) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> "array[int] | None":
        """None: this text has to be left to the package."""
        if not text.isascii():
            return None
        ids = array("i")
        try:
            for part in self._apart.split(text) if self._apart else [text]:
                if part in self._added:
                    ids.append(self._added[part])
                    continue
                words = self._cut.findall(part)
                if sum(map(len, words)) != len(part):
                    return None
                for found in map(self.__getitem__, words):
                    ids.extend(found)
        except Strange:
            return None
        return ids


def _state(part: Any) -> Any:
    """A part of a tokenizer, as its file describes it."""
    return None if part is None else orjson.loads(part.__getstate__())


def _cut(pre_tokenizer: Any) -> re.Pattern[str] | None:
    """The one regular expression that it cuts by. None: it does something else."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _translated(_GPT2)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return _translated(pattern)
    return None


def _translated(pattern: str) -> re.Pattern[str] | None:
    """For ASCII text, in the dialect of `re`. None: it holds what is not known to mean the same."""
    translated, in_brackets = "", False
    for token in re.findall(r"\\[pP]\{\^?\w+\}|\\.|\[\[|&&|.", pattern, re.DOTALL):
        if token in ("[[", "&&") or token[:2] == "\\P" or "^" in token[2:]:
            return None
        if token[:2] == "\\p":
            letters = _ASCII.get(token[3:-1])
            if letters is None:
                return None
            translated += letters if in_brackets else f"[{letters}]"
            continue
        if len(token) == 2 and token[1].isalpha() and token[1] not in "rntsS":
            return None
        in_brackets = token == "[" or (in_brackets and token != "]")
        translated += token
    try:
        return re.compile(translated, re.ASCII)
    except re.error:
        return None
