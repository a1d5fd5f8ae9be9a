"""Tokens by a look-up for each word are those of the package."""

import random
import string

import pytest
from families import FOLDER
from policies import make_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from harnessed.gateway import words
from harnessed.gateway.words import Words

FAMILIES = sorted(FOLDER.glob("*/tokenizer.json"))
LOOKED_UP = {"llama3_2", "mistral_nemo", "qwen2_5", "qwen3"}
SNIPPETS = [
    *"'s 'T 'Re I'LL don't x's 's".split(" "),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\x0b", "\x0c", "\x1c", "\x1f", "\x00", "\x7f"),
    *("123", "1234567", "0x1F", "3.14", "a1b2", "CamelCase", "HTTPServer", "snake_case", "ÿ"[:0]),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "<tool_call>",
        "</tool_call>",
        "[INST]",
        "[/INST]",
        "<|im_end|><|im_end|>",
    ),
    *("://", "==", "->", "...", "!?", "\\n", "{}", "```python\n", "# ", "    return", "e" * 40, "9" * 40, "=" * 80),
]


def texts(seed: int, count: int) -> list[str]:
    """Of ASCII alone: snippets on which dialects of regular expressions might differ, and random letters."""
    draw = random.Random(seed)
    letters = [chr(code) for code in range(128)]
    pieces = [*SNIPPETS, *letters, *string.ascii_letters]
    return ["".join(draw.choices(pieces, k=draw.randrange(30))) for _ in range(count)]


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.parent.name)
def test_tokens_are_those_of_the_package(path):
    tokenizer = Tokenizer.from_file(str(path))
    known = Words.of(tokenizer)
    assert (known is not None) == (path.parent.name in LOOKED_UP)
    for text in [*letters_alone(), *texts(0, 4_000)] if known is not None else []:
        found = known.encode(text)
        assert found is not None
        assert found.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)


def letters_alone() -> list[str]:
    return [chr(one) + chr(two) for one in range(128) for two in range(128)]


def gpt2(**how) -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **how)
    return tokenizer


def test_so_are_those_of_a_tokenizer_that_cuts_as_gpt2_does():
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("two words", normalized=False), AddedToken("two", normalized=False)])
    known = Words.of(tokenizer)
    for text in [*texts(1, 4_000), "in two words", "two two wordstwo", " two words "]:
        assert known.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)


def test_text_beyond_ascii_is_left_to_the_package():
    assert Words.of(gpt2()).encode("caf\u00e9") is None


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(words, "MOST", 10)
    known = Words.of(gpt2())
    for number in range(100):
        known.encode(f"word {number} {'x' * (words.LONGEST + 1)}")
        assert len(known) <= 10
    assert all(len(word) <= words.LONGEST for word in known)


def split(pattern: str, **how) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), **({"behavior": "isolated"} | how))
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": split(r"\s+", behavior="merged_with_next")},
        {"pre_tokenizer": split(r"\s+", invert=True)},
        {"pre_tokenizer": split(r"\p{Latin}+")},
        {"pre_tokenizer": split(r"\P{L}+")},
        {"pre_tokenizer": split(r"\h+")},
        {"pre_tokenizer": split(r"[a-z&&[^aeiou]]+")},
        {"model": models.BPE(dropout=0.1)},
        {"model": models.WordLevel()},
        {"tokens": [AddedToken("a", lstrip=True)]},
        {"tokens": [AddedToken("a", normalized=True), AddedToken("b", normalized=False)]},
    ],
    ids=str,
)
def test_tokenizers_of_another_making_are_left_to_the_package(change):
    tokenizer = gpt2()
    for name, value in change.items():
        tokenizer.add_tokens(value) if name == "tokens" else setattr(tokenizer, name, value)
    assert Words.of(tokenizer) is None


def test_a_piece_that_the_package_would_cut_again_is_left_to_it():
    """Alone it does not end where it does in the text: `a` before `b` is one piece, and then there is none."""
    tokenizer = make_tokenizer()
    tokenizer.pre_tokenizer = split(r"xa(?=b)|x|a|b")
    known = Words.of(tokenizer)
    assert known is None or known.encode("xab") is None


def test_text_that_the_expression_leaves_out_is_left_to_the_package():
    tokenizer = make_tokenizer()
    tokenizer.pre_tokenizer = split(r"[a-z]+")
    assert Words.of(tokenizer).encode("abc def") is None
    assert Words.of(tokenizer).encode("abc") is not None
