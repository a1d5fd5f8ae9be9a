"""The text of tokens that stand for bytes, as those of GPT-2 and of most families since do. `template.py` decodes so.

The tokenizers package makes a text of each token before it makes one of all; here each is looked up.
"""

from typing import Any

from tokenizers.decoders import ByteLevel


class TokenBytes(dict[int, bytes]):
    """Token -> its bytes, of those that were looked up."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: one that `is_byte_level`."""
        super().__init__()
        self._token = tokenizer.id_to_token

    def __missing__(self, id: int) -> bytes:
        token: str | None = self._token(id)
        if token is None:  # a row of the model without a token; not kept, or an engine could fill the memory
            return b""
        try:
            self[id] = found = bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token: it stands for itself
            self[id] = found = token.encode()
        return found

    def text(self, ids: list[int]) -> str:
        """What is no UTF-8 becomes U+FFFD."""
        return b"".join(map(self.__getitem__, ids)).decode(errors="replace")


def is_byte_level(tokenizer: Any) -> bool:
    return isinstance(tokenizer.decoder, ByteLevel)


def _bytes() -> dict[str, int]:
    """Letter -> the byte that it stands for: a printable one for itself, the others for those that are none, in order
    (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _bytes()
