import random

import pytest
from families import FOLDER
from policies import make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders

from harnessed.gateway.bytelevel import TokenBytes, is_byte_level


def with_added_tokens() -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("é☃"), AddedToken("Ġas is")])
    return tokenizer


def tokenizers() -> list[Tokenizer]:
    return [with_added_tokens(), *(Tokenizer.from_file(str(path)) for path in sorted(FOLDER.glob("*/tokenizer.json")))]


def test_the_text_of_tokens_is_the_one_of_the_package():
    """Of every token, those that there are not too, and of random ones: most are no UTF-8."""
    draw = random.Random(0)
    for tokenizer in filter(is_byte_level, tokenizers()):
        known, rows = TokenBytes(tokenizer), tokenizer.get_vocab_size() + 5
        some = [[draw.randrange(min(rows, 600)) for _ in range(draw.randrange(12))] for _ in range(5_000)]
        for ids in [*([id] for id in range(rows)), *some]:
            assert known.text(ids) == tokenizer.decode(ids, skip_special_tokens=False), ids


def test_ids_without_a_token_are_not_kept():
    known = TokenBytes(with_added_tokens())
    assert known.text([100_000, 2**31 - 1]) == ""
    assert not known


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Sequence([decoders.Fuse()]), decoders.WordPiece()])
def test_other_tokenizers_are_left_to_the_package(decoder: decoders.Decoder):
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoder
    assert not is_byte_level(tokenizer)
