"""How each kind of engine is asked for an answer, and how its answer is read. Pure functions; `engines.py` sends.

`tokens` is the protocol of `engine/app.py`: token ids in, token ids out. `chat` is OpenAI's Chat Completions with
`return_token_ids` (vLLM): the engine applies the chat template, and says which tokens it was given and which it
sampled. vLLM gives log-probabilities of the sampled distribution with `--logprobs-mode processed_logprobs`; at
temperature 1 and top_p 1 its default means the same.
"""

from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from harnessed.records import UNKNOWN_VERSION, Dialect, EngineSpec

PATHS = {Dialect.TOKENS: "/generate", Dialect.CHAT: "/v1/chat/completions"}
STREAM = "application/x-ndjson"
"""The content type of an answer with previews."""
_FINISHES = {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "interrupted"}


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine is asked for."""

    prompt: bytes
    """int32 ids; empty for engines that speak chat."""
    max_tokens: int
    temperature: float
    seed: int
    stop: list[int]
    stop_strings: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """With `tools`, for engines that speak chat."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    grammar: str = ""
    """`response_format` as JSON, for engines that speak chat."""
    id: str = ""
    """To interrupt it by."""
    top_p: float = 1.0
    begun: int = 0
    """So many of the prompt's last tokens were sampled for it before; the engine draws the numbers that come next."""

    def after(self, kept: "Generated") -> "Generation":
        """The rest of an answer that was broken off, as if it had not been."""
        sampled = len(kept.tokens)
        if not sampled:
            return self
        return replace(
            self,
            prompt=self.prompt + array("i", kept.tokens).tobytes(),
            max_tokens=self.max_tokens - sampled,
            begun=sampled,
        )


@dataclass(frozen=True, slots=True)
class Generated:
    """What it gave: one entry per sampled token in each list."""

    tokens: list[int]
    logprobs: list[float]
    """Empty: it gave none."""
    versions: list[int]
    finish: str
    """`stop`, `length` or `interrupted`."""
    prompt: list[int] = field(default_factory=list)
    """Of engines that speak chat: what they made of the messages."""
    message: dict[str, Any] | None = None
    """Of engines that speak chat: the assistant message."""

    def then(self, more: "Generated") -> "Generated":
        """An answer that was broken off, with what followed."""
        if not self.tokens:
            return more
        with_logprobs = len(self.logprobs) == len(self.tokens) and len(more.logprobs) == len(more.tokens)
        return replace(
            more,
            tokens=self.tokens + more.tokens,
            logprobs=self.logprobs + more.logprobs if with_logprobs else [],
            versions=self.versions + more.versions,
        )


NOTHING = Generated([], [], [], "interrupted")
"""Before the first token."""


class NoAnswer(Exception):
    """What the engine said is no answer of its protocol; the text says why."""


def ask(engine: EngineSpec, generation: Generation, *, stream: bool = False) -> bytes:
    """The request's body. `stream`: with previews, from an engine that speaks tokens."""
    common = {
        "max_tokens": generation.max_tokens,
        "temperature": generation.temperature,
        "top_p": generation.top_p,  # also where it is 1: otherwise vLLM takes the model's generation_config.json
        "seed": generation.seed,
    }
    if engine.speaks == Dialect.CHAT:
        chat = {
            "model": engine.model,
            "messages": generation.messages,
            "logprobs": True,
            "return_token_ids": True,
            "stop_token_ids": generation.stop,
            # These, too, vLLM would take from there.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            **({"tools": generation.tools} if generation.tools else {}),
            **({"response_format": orjson.Fragment(generation.grammar)} if generation.grammar else {}),
            **({"stop": generation.stop_strings} if generation.stop_strings else {}),
        }
        return orjson.dumps(common | chat)
    strings = {"stop_strings": generation.stop_strings} if generation.stop_strings else {}
    tokens = {
        "prompt": np.frombuffer(generation.prompt, np.int32),
        "stop": generation.stop,
        "stream": stream,
        "id": generation.id,
        "begun": generation.begun,
    }
    return orjson.dumps(common | tokens | strings, option=orjson.OPT_SERIALIZE_NUMPY)


def read_preview(line: bytes) -> Generated | None:
    """What a stream says next, with log-probabilities and versions if the engine gives them before the end; None: the
    line is its last. Raises NoAnswer."""
    try:
        said = orjson.loads(line)
        if "finish" in said:
            return None
        new = Generated(said["tokens"], said.get("logprobs", []), said.get("versions", []), NOTHING.finish)
        _check_storable(new)
        return new
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise NoAnswer(f"broke its stream off: {line[:200].decode(errors='replace')}") from None


def shown(pieces: list[Generated]) -> Generated:
    """What a stream has said of an answer whose end is lost; nothing, if the engine tells the rest of its tokens only
    with the end."""
    if any(not len(piece.tokens) == len(piece.logprobs) == len(piece.versions) for piece in pieces):
        return NOTHING
    return Generated(
        [token for piece in pieces for token in piece.tokens],
        [logprob for piece in pieces for logprob in piece.logprobs],
        [version for piece in pieces for version in piece.versions],
        NOTHING.finish,
    )


def read(engine: EngineSpec, body: bytes) -> Generated:
    """The answer in a body of status 200. Raises NoAnswer."""
    try:
        answer = orjson.loads(body)
        generated = _read_chat(answer) if engine.speaks == Dialect.CHAT else _read_tokens(answer)
        _check_storable(generated)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise NoAnswer(f"gave no answer of the protocol: {error!r}") from error
    tokens = len(generated.tokens)
    if tokens != len(generated.versions) or not (tokens or generated.finish == "interrupted"):
        raise NoAnswer(f"gave {tokens} tokens, {len(generated.versions)} versions")
    if len(generated.logprobs) not in (0, tokens):
        raise NoAnswer(f"gave {len(generated.logprobs)} log-probabilities for its {tokens} tokens")
    return generated


def _check_storable(generated: Generated) -> None:
    """Raises ValueError, TypeError or OverflowError."""
    for numbers, kind in ((generated.tokens, "i"), (generated.logprobs, "f"), (generated.versions, "i")):
        array(kind, numbers)
    if min([*array("i", generated.prompt), *generated.tokens], default=0) < 0:
        raise ValueError("a token id is negative")


def _read_tokens(answer: dict[str, Any]) -> Generated:
    if answer["finish"] not in _FINISHES.values():
        raise ValueError(f"its finish is {answer['finish']!r}")
    return Generated(answer["tokens"], answer["logprobs"], answer["versions"], answer["finish"])


def _read_chat(answer: dict[str, Any]) -> Generated:
    choice = answer["choices"][0]
    tokens, prompt = choice.get("token_ids"), answer.get("prompt_token_ids")
    if not tokens or not prompt:
        raise ValueError("it holds no token ids; does the engine know `return_token_ids`?")
    logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    message = {key: value for key, value in choice["message"].items() if value} | {"role": "assistant"}
    message.setdefault("content", None)
    if isinstance(reasoning := message.pop("reasoning", None), str):  # vLLM's newer name of it
        message.setdefault("reasoning_content", reasoning)
    if not isinstance(message["content"], str | None):
        raise ValueError("its content is no text")
    orjson.dumps(message)  # what is recorded has to be written again
    if not all(isinstance(call, dict) for call in message.get("tool_calls", [])):
        raise ValueError("its tool calls are no objects")
    return Generated(
        tokens, logprobs, [UNKNOWN_VERSION] * len(tokens), _FINISHES[choice["finish_reason"]], prompt, message
    )
