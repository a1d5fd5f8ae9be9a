"""Sequences to sample, and what a plain forward pass says of them."""

import random

import torch
from running_engine import VOCABULARY

from harnessed.engine.generate import Batch, Sequence


def make(prompt, seed=0, max_tokens=12, temperature=1.0, stop=(), top_p=1.0):
    return Sequence(prompt, max_tokens, temperature, seed, frozenset(stop), top_p=top_p)


def prompts(count, seed=0, shortest=1, longest=30):
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def run(model, *joining, prefixes=None):
    """Each list of sequences joins two tokens after the one before; all grow to their end."""
    batch = Batch(model, prefixes)
    everything = [sequence for new in joining for sequence in new]
    for new in joining:
        batch.advance(new, lambda: True)
        if not all(sequence.finish for sequence in new):
            batch.advance([], lambda: True)
    while not all(sequence.finish for sequence in everything):
        batch.advance([], lambda: False)
    batch.keep()
    return everything


@torch.inference_mode()
def plain_logprobs(model, sequence):
    """Of the sampled tokens, from one forward pass without padding or cache."""
    ids = torch.tensor([sequence.prompt + sequence.tokens])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(sequence.prompt) - 1 : -1].float()
    return torch.log_softmax(logits / sequence.temperature, -1).gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]


def assert_plain(model, sequence):
    torch.testing.assert_close(torch.tensor(sequence.logprobs), plain_logprobs(model, sequence), atol=1e-5, rtol=0)
