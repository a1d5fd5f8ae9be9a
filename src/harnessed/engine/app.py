"""The engine's HTTP interface, used by the gateway (generate, health) and the trainer (pause, resume).

    POST /generate  {"prompt": [id], "max_tokens": int, "temperature": float, "top_p": float, "seed": int,
                     "stop": [id], "stop_strings": [text], "stream": bool, "id": text, "begun": int}
                 -> {"tokens": [id], "logprobs": [float], "versions": [packed version],
                     "finish": "stop" | "length" | "interrupted"}
                    With `stream`, lines of {"tokens": [id], "logprobs": [float], "versions": [packed version]} come
                    before it: what was sampled since the last one. Whoever loses the end can go on from them.
                    `begun`: so many of the prompt's last tokens are the beginning of this answer, which was broken off.
    POST /interrupt {"ids": [text]} -> {"found": [text]}
                    What is generated under these ids ends with the tokens that it has; answers when it has ended, which
                    is at the next token. Its own answers come after that.
    GET  /health -> {"status": "ok" | "unusable", "reason": why it is unusable, "model": name, "version": packed,
                     "sampled_tokens": int, "reused_tokens": prompt tokens that were not computed again, "running": int,
                     "waiting": int, "paused": bool, "context": tokens}
    POST /pause     answers when no generation runs any more; later ones wait
    POST /resume

What goes wrong is answered as {"error": {"message": ..., "code": ...}}. There are no keys: an engine listens where only
gateway and trainer reach it.

Why a short loop of our own: transformers' continuous batching, on a CPU and for the demo's model, took 16 to 25 s for
64 prompts and 1,300 tokens; `generate.py` takes 0.2 s.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import AfterValidator, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from harnessed.engine.generate import LOWEST_TEMPERATURE, Sequence
from harnessed.engine.queue import Failed, Queue, Unavailable
from harnessed.records import Record

T = TypeVar("T", bound=Record)


def _samplable(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {LOWEST_TEMPERATURE}")
    return temperature


class GenerateRequest(Record):
    """The body of POST /generate."""

    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: Annotated[float, AfterValidator(_samplable)] = Field(ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1: sampled from the likeliest tokens that sum to it, and the log-probabilities are of those alone."""
    seed: int = Field(ge=0)
    """The same seed, prompt and weights give the same answer, whatever else is generated at the time."""
    stop: list[int] = Field(default_factory=list)
    stop_strings: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stream: bool = False
    id: str = ""
    """To interrupt it by."""
    begun: int = Field(0, ge=0)
    """So many of the prompt's last tokens were sampled for the same answer. It goes on as if it had not been broken
    off: with the numbers that come next, and with what there is already of a stop string."""


class InterruptRequest(Record):
    """The body of POST /interrupt."""

    ids: list[Annotated[str, Field(min_length=1)]]


class Refusal(Exception):
    """Becomes the answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Routes:
    """The routes of one model: its queue, its name for people, its number of token ids, its longest sequence, and its
    tokenizer, which stop strings need."""

    def __init__(self, queue: Queue, name: str, vocabulary: int, context: int, tokenizer: Tokenizer | None) -> None:
        self._queue = queue
        self._tokenizer = tokenizer
        self._name = name
        self._vocabulary = vocabulary
        self._context = context

    async def generate(self, request: Request) -> Response:
        asked = _body(await request.body(), GenerateRequest)
        sequence, stream = self._sequence(asked), asked.stream
        grown = asyncio.Event()
        # After the body, the next message says that the client went away.
        gone = asyncio.ensure_future(request.receive())
        answer = asyncio.create_task(self._answer(sequence, gone, asked.id, grown if stream else None))
        if stream:
            answer.add_done_callback(asyncio.Future.exception)  # nobody may be left to hear it
            await _first(answer, grown)
        if not stream or answer.done():  # a refusal keeps its status
            return _json(await answer)
        return StreamingResponse(_lines(sequence, answer, grown), media_type="application/x-ndjson")

    async def _answer(
        self, sequence: Sequence, gone: asyncio.Future[Any], id: str, grown: asyncio.Event | None
    ) -> dict[str, Any]:
        """What is answered when the sequence has ended. Raises Refusal."""
        try:
            version = await self._queue.generate(sequence, gone, id, grown)
        except Unavailable as error:
            raise Refusal(503, "unavailable", str(error)) from error
        except Failed as error:
            raise Refusal(500, "generation_failed", str(error)) from error
        finally:
            gone.cancel()
        if version is None:
            raise Refusal(499, "client_gone", "the client closed its connection before the generation began")
        return {
            "tokens": sequence.tokens,
            "logprobs": sequence.logprobs,
            "versions": [version.pack()] * len(sequence.tokens),
            "finish": sequence.finish,
        }

    def _sequence(self, asked: GenerateRequest) -> Sequence:
        """What is to be sampled. Raises Refusal."""
        for name, ids in (("prompt", asked.prompt), ("stop", asked.stop)):
            if ids and (min(ids) < 0 or max(ids) >= self._vocabulary):
                wrong = next(token for token in ids if not 0 <= token < self._vocabulary)
                known = f"the model's token ids are 0 to {self._vocabulary - 1}: encode with its own tokenizer"
                raise Refusal(400, "unknown_token", f"{name} holds {wrong}, but {known}")
        prompt, answer = len(asked.prompt), asked.max_tokens
        if prompt + answer > self._context:
            asks = f"{prompt} prompt tokens and max_tokens {answer} exceed the model's context of {self._context}"
            raise Refusal(400, "context", f"{asks}: shorten the prompt or ask for fewer tokens")
        if asked.begun > prompt:
            raise Refusal(400, "bad_request", f"begun: {asked.begun} tokens cannot be of a prompt of {prompt}")
        ended = None
        if asked.stop_strings:
            if self._tokenizer is None:
                raise Refusal(400, "no_tokenizer", "stop_strings need a tokenizer.json in the model's folder")
            ended = _ended(self._tokenizer, asked.stop_strings, asked.prompt[prompt - asked.begun :])
        stop = frozenset(asked.stop)
        sampled = asked.max_tokens, asked.temperature, asked.seed, stop, ended, asked.top_p, asked.begun
        return Sequence(asked.prompt, *sampled)

    async def interrupt(self, request: Request) -> Response:
        asked = _body(await request.body(), InterruptRequest)
        return _json({"found": sorted(await self._queue.interrupt(set(asked.ids)))})

    async def health(self, _: Request) -> Response:
        version, reason = self._queue.served()
        return _json(
            {
                "status": "unusable" if reason else "ok",
                "reason": reason,
                "model": self._name,
                "version": version.pack(),
                "sampled_tokens": self._queue.sampled_tokens,
                "reused_tokens": self._queue.reused_tokens,
                "running": self._queue.running,
                "waiting": self._queue.waiting,
                "paused": self._queue.paused,
                "context": self._context,
            }
        )

    async def pause(self, _: Request) -> Response:
        await self._queue.pause()
        return _json({})

    async def resume(self, _: Request) -> Response:
        self._queue.resume()
        return _json({})


def make_app(queue: Queue, name: str, vocabulary: int, context: int, tokenizer: Tokenizer | None = None) -> Starlette:
    """The application of one model; its queue runs while it does."""
    routes = Routes(queue, name, vocabulary, context, tokenizer)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(queue.run())
        yield
        queue.end()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    return Starlette(
        routes=[
            Route("/generate", routes.generate, methods=["POST"]),
            Route("/interrupt", routes.interrupt, methods=["POST"]),
            Route("/health", routes.health),
            Route("/pause", routes.pause, methods=["POST"]),
            Route("/resume", routes.resume, methods=["POST"]),
        ],
        exception_handlers={Refusal: _on_refusal, HTTPException: _on_http_error},
        lifespan=lifespan,
    )


async def _first(answer: "asyncio.Task[dict[str, Any]]", grown: asyncio.Event) -> None:
    """Returns when there are new tokens, or all."""
    growing = asyncio.create_task(grown.wait())
    await asyncio.wait({answer, growing}, return_when=asyncio.FIRST_COMPLETED)
    growing.cancel()
    grown.clear()


async def _lines(
    sequence: Sequence, answer: "asyncio.Task[dict[str, Any]]", grown: asyncio.Event
) -> AsyncIterator[bytes]:
    told = 0
    while not answer.done():
        logprobs = sequence.logprobs[told:]  # first, for it grows in another thread, after the tokens
        tokens = sequence.tokens[told : told + len(logprobs)]
        told += len(tokens)
        if tokens:
            new = {"tokens": tokens, "logprobs": logprobs, "versions": [sequence.version] * len(tokens)}
            yield orjson.dumps(new, option=orjson.OPT_APPEND_NEWLINE)
        await _first(answer, grown)
    try:
        yield orjson.dumps(answer.result(), option=orjson.OPT_APPEND_NEWLINE)
    except Refusal as error:
        yield orjson.dumps({"error": {"message": str(error), "code": error.code}}, option=orjson.OPT_APPEND_NEWLINE)


def _body(body: bytes, model: type[T]) -> T:
    """Raises Refusal."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "the body"
        raise Refusal(400, "bad_request", f"{where}: {fault['msg']}") from None


def _ended(tokenizer: Tokenizer, strings: list[str], begun: list[int]) -> Callable[[list[int]], bool]:
    """Whether one of the strings ends in the last token. `begun`: the tokens before the first."""
    # A token stands for at least one byte of text, so the strings lie within so many tokens.
    most = max(len(string.encode()) for string in strings)
    begun = begun[-most:]

    def ended(tokens: list[int]) -> bool:
        last = tokens[-most:]
        text = tokenizer.decode((begun + last)[-most:])
        return any(string in text for string in strings)

    return ended


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error(status: int, code: str, message: str) -> Response:
    return _json({"error": {"message": message, "code": code}}, status)


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _error(error.status, error.code, str(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, "no_such_route", f"{request.method} {request.url.path}: {error.detail}")
