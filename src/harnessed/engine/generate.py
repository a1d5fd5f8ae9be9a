"""Batched sampling from a transformers causal language model: token ids in, token ids and log-probabilities out.

Called by `waves.py`, one wave of requests at a time. Knows nothing of text, HTTP or where the weights come from. The
wave is padded on the left, so that all sequences grow at the same column of one cache; a sequence that has ended
leaves the batch. A request's answer does not depend on its neighbours, up to the rounding of float32.
"""

import functools
import inspect
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

LOWEST_TEMPERATURE = 1e-3
"""Lowest temperature above 0: logits divided by less could leave the range of float32."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked for."""

    tokens: list[int]
    """Not empty; tokens and answer fit the model's context."""
    max_tokens: int
    temperature: float
    """0: greedy, with log-probability 0."""
    seed: int
    stop: frozenset[int]
    """An answer ends with the first of these."""


@dataclass(slots=True)
class Answer:
    """What was sampled."""

    version: int
    """Packed version of the policy that sampled all of it."""
    tokens: list[int] = field(default_factory=list)
    """The stop token included, if it was sampled."""
    logprobs: list[float] = field(default_factory=list)
    """One per token, of the distribution that it was drawn from."""
    finish: str = ""
    """`stop` or `length`; empty while it grows."""


class Interrupted(Exception):
    """The engine is about to end."""


@torch.inference_mode()  # type: ignore[untyped-decorator]
def generate(model: Any, prompts: list[Prompt], version: int, interrupted: Callable[[], bool]) -> list[Answer]:
    """Answer all prompts, in their order; the time is that of the longest answer.

    Raises Interrupted within a step once `interrupted()` is true, and FloatingPointError if the model gives no
    probabilities.
    """
    answers = [Answer(version) for _ in prompts]
    rows = [_Row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    batch, logits = _Batch.prefill(model, [prompt.tokens for prompt in prompts])
    while True:
        tokens, logprobs = _sample(logits, rows)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.take(token, logprob)
        left = [i for i, row in enumerate(rows) if not row.answer.finish]
        if not left:
            return answers
        if interrupted():
            raise Interrupted
        if len(left) < len(rows):
            rows = [rows[i] for i in left]
            kept = torch.tensor(left)
            tokens = tokens[kept]
            batch.keep(kept)
        logits = batch.step(tokens)


class _Row:
    """One sequence of the batch."""

    __slots__ = ("answer", "prompt", "random")

    def __init__(self, prompt: Prompt, answer: Answer) -> None:
        self.prompt = prompt
        self.answer = answer
        self.random = random.Random(prompt.seed).random

    def take(self, token: int, logprob: float) -> None:
        answer = self.answer
        answer.tokens.append(token)
        answer.logprobs.append(logprob)
        if token in self.prompt.stop:
            answer.finish = "stop"
        elif len(answer.tokens) == self.prompt.max_tokens:
            answer.finish = "length"


class _Batch:
    """The model's cache, attention mask and positions for the sequences that still grow."""

    def __init__(self, model: Any, cache: DynamicCache, mask: torch.Tensor, positions: torch.Tensor) -> None:
        self._model = model
        self._cache = cache
        self._mask = mask  # [row, column], 0 where padded
        self._positions = positions  # [row, 1] of the newest token

    @classmethod
    def prefill(cls, model: Any, prompts: list[list[int]]) -> tuple["_Batch", torch.Tensor]:
        """Also gives the logits [row, vocabulary] after the prompts."""
        # The rollouts of a group begin with the same prompt, which is computed once.
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        width = max(map(len, distinct))
        padding = [width - len(prompt) for prompt in distinct]
        # Any id serves as padding, since nothing attends to it.
        ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, distinct, strict=True)])
        mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()  # [row, column], as ids
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        batch = cls(model, DynamicCache(config=model.config), mask, positions)
        logits = batch._forward(ids)
        batch._positions = positions[:, -1:]
        if len(distinct) < len(prompts):
            rows = torch.tensor([distinct[tuple(prompt)] for prompt in prompts])
            batch.keep(rows)
            logits = logits[rows]
        return batch, logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token [row] to each sequence; the logits [row, vocabulary] after it."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        self._positions = self._positions + 1
        return self._forward(tokens[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Make the given rows [row] the batch, in their order; they may repeat."""
        self._mask = self._mask[rows]
        self._positions = self._positions[rows]
        self._cache.batch_select_indices(rows)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        # ids: [row, new column]
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            use_cache=True,
            logits_to_keep=1,
            **{_cache_argument(type(self._model)): self._cache},
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


def _sample(logits: torch.Tensor, rows: list[_Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """One token [row] for each row of logits [row, vocabulary], and its log-probability [row].

    p = softmax(logits / temperature), and the token is the first whose cumulated p exceeds u, where u is the next
    number of the request's own generator. `torch.multinomial` draws for the whole batch from one generator, so that an
    answer would depend on which requests happened to be neighbours; here it depends on prompt, seed and weights alone.
    The sum is in float64: in float32 its error over a large vocabulary would exceed the probability of rare tokens.
    """
    temperatures = torch.tensor([[row.prompt.temperature] for row in rows])  # [row, 1]
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits / temperatures.masked_fill(greedy, 1.0), -1)  # [row, vocabulary]
    cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    if not math.isfinite(total.sum().item()):
        raise FloatingPointError("the model's output is not finite: its weights hold infinite or undefined values")
    uniform = torch.tensor([[row.random()] for row in rows], dtype=torch.float64)
    # u < 1 leaves u * total below total, in float64 too, so some token's sum exceeds it.
    tokens = torch.searchsorted(cumulated, uniform * total, right=True)  # [row, 1]
    chosen = logprobs.gather(-1, tokens)
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
        chosen = chosen.masked_fill(greedy, 0.0)
    return tokens[:, 0], chosen[:, 0]


@functools.cache
def _cache_argument(model_class: type) -> str:
    """Name of the argument that takes the cache: `past_key_values` until transformers renamed it to `cache`."""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "cache" if "cache" in parameters else "past_key_values"
