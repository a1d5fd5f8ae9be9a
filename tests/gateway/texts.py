"""Text to tokens and back for the policy of these tests."""

from policies import make_tokenizer

TOKENIZER = make_tokenizer()
STOP = TOKENIZER.token_to_id("<|im_end|>")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def answer(text: str) -> list[int]:
    """A sampled answer that ends with its stop token."""
    return [*ids(text), STOP]
