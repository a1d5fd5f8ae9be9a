"""Batched sampling from a transformers causal language model: token ids in, token ids and log-probabilities out.

`queue.py` makes a `Batch` and calls `advance` from its worker thread. Knows nothing of text, HTTP or where the weights
come from. All sequences grow at the same column of one cache, with padding on the left; new ones join after any step,
ended ones leave. Neither its neighbours nor what `prefixes.py` has of its prompt change a sequence's tokens, up to the
rounding of float32.
"""

import functools
import inspect
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from harnessed.engine.prefixes import Layers, Prefixes
from harnessed.records import UNKNOWN_VERSION

LOWEST_TEMPERATURE = 1e-3
"""Above 0: logits divided by less could leave the range of float32."""
PREFILL_TOKENS = 1024
"""Most prompt tokens, padding included, in one forward pass, unless a single prompt is longer. Measured with the demo's
model, 64 prompts of 40 to 120 tokens take 90 ms in such parts and 175 ms in one."""


class Sequence:
    """One prompt and what is sampled after it."""

    __slots__ = (
        "ended",
        "finish",
        "interrupted",
        "logprobs",
        "max_tokens",
        "prompt",
        "stop",
        "temperature",
        "tokens",
        "top_p",
        "uniform",
        "version",
    )

    def __init__(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        stop: frozenset[int],
        ended: Callable[[list[int]], bool] | None = None,
        top_p: float = 1.0,
        begun: int = 0,
    ) -> None:
        """`begun`: so many of the prompt's last tokens were sampled for the same answer, before an interruption; it
        goes on with the numbers that it would have drawn without."""
        self.prompt = prompt
        """Not empty; prompt and max_tokens fit the model's context."""
        self.max_tokens = max_tokens
        self.temperature = temperature
        """0: greedy, with log-probability 0."""
        self.top_p = top_p
        """Above 0, up to 1: sampled from the fewest likeliest tokens whose probabilities sum to at least this."""
        self.stop = stop
        """The first of these ends the sequence."""
        self.ended = ended
        """Whether the tokens sampled so far hold a text that ends the sequence, by the last of them."""
        self.uniform = random.Random(seed).random
        """The next number for the draw, in [0, 1)."""
        for _ in range(begun):
            self.uniform()
        self.tokens: list[int] = []
        """Sampled, the stop included."""
        self.logprobs: list[float] = []
        """One per token, of the distribution that it was drawn from."""
        self.version = UNKNOWN_VERSION
        """Packed, of the weights that sample it; set by whoever makes it grow."""
        self.interrupted = False
        """Set from another thread: nobody wants more than the next token, nor the rest of a prompt to be computed."""
        self.finish = ""
        """`stop`, `length` or `interrupted`; empty while it grows."""

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop or (self.ended and self.ended(self.tokens)):
            self.finish = "stop"
        elif len(self.tokens) == self.max_tokens:
            self.finish = "length"
        elif self.interrupted:
            self.finish = "interrupted"


class Batch:
    """Sequences that grow together.

    `prefixes`: used for prompts and filled by what ends, where the model's cache can be joined.
    """

    def __init__(self, model: Any, prefixes: Prefixes | None = None) -> None:
        self._model = model
        self._prefixes = prefixes if prefixes is not None and joinable(model) else Prefixes(0)
        self._rows: list[Sequence] = []
        """In the order of the block's rows; ended ones among them until they leave."""
        self._block: _Block | None = None
        """All tokens but each row's last one."""
        self._just_ended: list[int] = []
        """The rows whose last token was the last one drawn."""

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def advance(self, new: list[Sequence], attend: Callable[[], bool]) -> None:
        """Append at least one token to each sequence; return when one ends, or after a token when `attend()` is true.

        Something must grow already, or be `new`. New ones join; where the model's cache cannot be joined (`joinable`),
        only when nothing grows. Those that are interrupted before their prompts are computed end without a token.
        Raises FloatingPointError if the model gives no probabilities; the batch is then of no more use.
        """
        self.keep()
        self._drop_ended(at_once=bool(new))
        logits = [self._step()] if self._rows else []
        if new:
            logits += self._admit(new)
        ended = any(row.finish for row in new)
        if logits:
            ended |= self._draw(torch.cat(logits))
        while not (ended or attend()):
            ended = self._draw(self._step())

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def keep(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Keep what is computed of sequences that have ended, for prompts that begin with it; `enough()`: no more of
        it. `advance` does so first: whoever waits for an answer or an interruption does not wait for that."""
        while self._just_ended and not enough():
            self._keep(self._just_ended.pop())
        self._just_ended.clear()

    def _drop_ended(self, at_once: bool) -> None:
        left = [i for i, row in enumerate(self._rows) if not row.finish]
        # To leave costs a copy of the cache: it waits for a copy that is made anyway, or until half have ended.
        # Measured for 16 and 64 rows of the demo's model, that beats leaving at once by 4 and 5 %.
        if len(left) == len(self._rows) or not (at_once or 2 * len(left) <= len(self._rows)):
            return
        self._rows = [self._rows[i] for i in left]
        if not left:
            self._block = None
        elif self._block:
            self._block.select(torch.tensor(left))

    def _admit(self, new: list[Sequence]) -> list[torch.Tensor]:
        """Append rows; the logits [new row, vocabulary] after their prompts. Nothing, if all are interrupted."""
        # The rollouts of a group begin with the same prompt, which is computed once.
        asking: dict[tuple[int, ...], list[Sequence]] = {}
        for row in new:
            asking.setdefault(tuple(row.prompt), []).append(row)
        prompts = [_Prompt(ids, *self._prefixes.find(ids), rows) for ids, rows in asking.items()]
        prompts.sort(key=lambda prompt: prompt.rest)
        blocks, logits, added = [], [], []
        for part in _parts(self._model, prompts):
            filled = _prefill(self._model, part)
            rows = [(i, row) for i, prompt in enumerate(part) for row in prompt.rows]
            if filled is None:
                for _, row in rows:
                    row.finish = "interrupted"
                continue
            block, after = filled
            if len(rows) > len(part):
                order = torch.tensor([i for i, _ in rows])
                block.select(order)
                after = after[order]
            self._prefixes.reused_tokens += sum(prompt.used(part) for prompt in part)
            blocks.append(block)
            logits.append(after)
            added += [row for _, row in rows]
        if blocks:
            self._block = _join([self._block, *blocks] if self._block else blocks)
            self._rows += added
        return logits

    def _step(self) -> torch.Tensor:
        """Enter each row's last token; the logits [row, vocabulary] after it."""
        assert self._block is not None
        last = torch.tensor([[row.tokens[-1]] for row in self._rows])
        return self._block.forward(self._model, last, torch.ones_like(last))

    def _draw(self, logits: torch.Tensor) -> bool:
        """Sample from logits [row, vocabulary] into all that grow; whether one has ended by that."""
        tokens, logprobs = _sample(logits, self._rows)
        ended = False
        drawn = zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True)
        for i, (row, token, logprob) in enumerate(drawn):
            if not row.finish:
                row.append(token, logprob)
                if row.finish:
                    ended = True
                    self._just_ended.append(i)
        return ended

    def _keep(self, i: int) -> None:
        """What is computed of a row that ended with the last draw; later its last token is entered again and again."""
        assert self._block is not None
        ids = self._rows[i].prompt + self._rows[i].tokens[:-1]
        layers = self._block.cache.layers if self._prefixes.takes(len(ids)) else []
        if layers:
            first = layers[0].keys.shape[2] - len(ids)
            self._prefixes.keep(ids, [(layer.keys[i, :, first:], layer.values[i, :, first:]) for layer in layers])


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that is to be computed."""

    ids: tuple[int, ...]
    kept: Layers
    """What is known already: the first `known` columns are those of its first tokens."""
    known: int
    rows: list[Sequence]
    """Those that it is computed for."""

    @property
    def rest(self) -> int:
        return len(self.ids) - self.known

    def used(self, part: "list[_Prompt]") -> int:
        """How much of what is known serves if this is computed as one of the part, whose longest rest comes last.

        All rows of a part compute as many columns, so they may as well hold tokens in place of padding, which then is
        on the left only.
        """
        return max(len(self.ids) - part[-1].rest, 0)

    @property
    def wanted(self) -> bool:
        return not all(row.interrupted for row in self.rows)


class _Block:
    """The model's cache for some rows, and its mask [row, column]: 1, or 0 for the padding on the left."""

    def __init__(self, cache: DynamicCache, mask: torch.Tensor) -> None:
        self.cache = cache
        self.mask = mask

    def forward(self, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Append ids and their mask [row, new column]; the logits [row, vocabulary] after the last."""
        self.mask = torch.cat([self.mask, mask], 1)
        output = model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=(self.mask.cumsum(1)[:, -ids.shape[1] :] - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{_cache_argument(model.__class__): self.cache},
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows [row], in this order; they may repeat. Columns that are padding in all of them go."""
        self.mask = self.mask[rows]
        self.cache.batch_select_indices(rows)
        padding = int(self.mask.argmax(1).min())
        if padding and _plain(self.cache):
            self.mask = self.mask[:, padding:]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, padding:], layer.values[:, :, padding:]


def joinable(model: Any) -> bool:
    """Whether rows can join a batch that grows already. Layers that keep a window or a state do not allow it."""
    return _plain(DynamicCache(config=model.config))


def _plain(cache: DynamicCache) -> bool:
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _join(blocks: list[_Block]) -> _Block:
    """One block of all rows, as wide as the widest; the others are used up."""
    first = blocks[0]
    if len(blocks) > 1:
        width = max(block.mask.shape[1] for block in blocks)
        first.mask = torch.cat([_pad_left(block.mask, width, 1) for block in blocks])
        for layers in zip(*(block.cache.layers for block in blocks), strict=True):
            # [row, head, column, dimension]
            layers[0].keys = torch.cat([_pad_left(layer.keys, width, 2) for layer in layers])
            layers[0].values = torch.cat([_pad_left(layer.values, width, 2) for layer in layers])
    return first


def _pad_left(tensor: torch.Tensor, width: int, dimension: int) -> torch.Tensor:
    """Zeros before the tensor, so that the dimension has that width."""
    shape = list(tensor.shape)
    shape[dimension] = width - shape[dimension]
    return torch.cat([tensor.new_zeros(shape), tensor], dimension) if shape[dimension] else tensor


def _parts(model: Any, prompts: list[_Prompt]) -> Iterator[list[_Prompt]]:
    """Cut prompts, shortest rest first, into parts that are computed together: little padding, little memory."""
    if not joinable(model):
        yield prompts
        return
    part: list[_Prompt] = []
    for prompt in prompts:
        if part and prompt.rest * (len(part) + 1) > PREFILL_TOKENS:
            yield part
            part = []
        part.append(prompt)
    yield part


def _prefill(model: Any, part: list[_Prompt]) -> tuple[_Block, torch.Tensor] | None:
    """A block of some prompts, shortest rest first, and the logits [row, vocabulary] after them; None: nobody wants
    them any more."""
    width = part[-1].rest
    ends = [prompt.ids[-width:] for prompt in part]
    # Any id serves as padding, since nothing attends to it.
    ids = torch.tensor([[0] * (width - len(end)) + list(end) for end in ends])  # [row, column]
    mask = _mask([len(end) for end in ends], width)
    block, logits = _begun(model, part), None
    # What is longer than a part is one prompt, without padding.
    most = PREFILL_TOKENS if len(part) == 1 and _plain(block.cache) else width
    for begin in range(0, width, most):
        if not any(prompt.wanted for prompt in part):
            return None
        logits = block.forward(model, ids[:, begin : begin + most], mask[:, begin : begin + most])
    assert logits is not None
    return block, logits


def _begun(model: Any, part: list[_Prompt]) -> _Block:
    """What is known of some prompts and used; no column if that is nothing."""
    used = [prompt.used(part) for prompt in part]
    width = max(used)
    cache = DynamicCache(config=model.config)
    # The prompts that are known at all have the same layers.
    known = next((prompt.kept for prompt in part if prompt.kept), []) if width else []
    for number, layer in enumerate(known):
        # [row, head, column, dimension]
        keys, values = (t.new_zeros(len(part), t.shape[0], width, t.shape[2]) for t in layer)
        for i, (prompt, columns) in enumerate(zip(part, used, strict=True)):
            if columns:
                keys[i, :, width - columns :] = prompt.kept[number][0][:, :columns]
                values[i, :, width - columns :] = prompt.kept[number][1][:, :columns]
        cache.update(keys, values, number)
    return _Block(cache, _mask(used, width))


def _mask(lengths: list[int], width: int) -> torch.Tensor:
    """[row, column]: 1 for so many columns on the right."""
    return (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()


def _sample(logits: torch.Tensor, rows: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """One token [row] for each row of logits [row, vocabulary], and its log-probability [row].

    p = softmax(logits / temperature), cut to the nucleus where top_p is below 1, and the token is the first whose
    cumulated p exceeds u, where u is the next number of the sequence's own generator. `torch.multinomial` draws for the
    whole batch from one generator, so that an answer would depend on which requests happened to be neighbours; here it
    depends on prompt, seed and weights alone.
    The sum is in float64: in float32 its error over a large vocabulary would exceed the probability of rare tokens.
    """
    temperatures = torch.tensor([[row.temperature] for row in rows])  # [row, 1]
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits / temperatures.masked_fill(greedy, 1.0), -1)  # [row, vocabulary]
    if narrow := [i for i, row in enumerate(rows) if row.top_p < 1 and row.temperature]:
        # In place: the other rows keep every bit.
        logprobs[narrow] = _nucleus(logprobs[narrow], torch.tensor([[rows[i].top_p] for i in narrow]))
    cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    if not math.isfinite(total.sum().item()):
        raise FloatingPointError("the model's output is not finite: its weights hold infinite or undefined values")
    uniform = torch.tensor([[row.uniform()] for row in rows], dtype=torch.float64)
    # u < 1 leaves u * total below total, in float64 too, so some token's sum exceeds it.
    tokens = torch.searchsorted(cumulated, uniform * total, right=True)  # [row, 1]
    chosen = logprobs.gather(-1, tokens)
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
        chosen = chosen.masked_fill(greedy, 0.0)
    return tokens[:, 0], chosen[:, 0]


def _nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The distribution over the fewest likeliest tokens that sum to top_p [row, 1]: log-probabilities like those given,
    [row, vocabulary]."""
    ordered, ids = logprobs.sort(descending=True, stable=True)
    probabilities = ordered.exp().double()
    # A token is out if those before it suffice. The likeliest has none before it, and 0 is less than any top_p.
    out = probabilities.cumsum(-1) - probabilities >= top_p.double()
    kept = logprobs.masked_fill(torch.zeros_like(out).scatter(-1, ids, out), -math.inf)
    return kept - kept.logsumexp(-1, keepdim=True)


@functools.cache
def _cache_argument(model_class: Any) -> str:
    """Name of the argument that takes the cache: `past_key_values` until transformers renamed it to `cache`."""
    parameters = inspect.signature(model_class.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
