"""A policy's tokenizer and chat template: the text of messages, and the tokens of segments.

Uses tokenizer.json by `tokenizers` and the chat template by `jinja2`, set up as transformers sets it up, because
importing transformers costs seconds and torch. `exchange.py` asks for the first segment of a conversation (all its
messages rendered) and for later ones, which are encoded *by difference*: what the template adds after a fixed stub
conversation that ends in an assistant turn. So a later segment never depends on earlier text, and nothing that was
sampled is ever encoded again.
"""

import copy
import datetime
import json
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import orjson
from tokenizers import Tokenizer

from harnessed.config import ConfigError
from harnessed.gateway.bytelevel import TokenBytes, is_byte_level
from harnessed.gateway.family import format_of
from harnessed.gateway.words import Words

Messages = list[dict[str, Any]]

PIECE = 2**16
"""Characters, at least, that are encoded at a time: to take over the tokens keeps other threads waiting."""
SHORT = 2**12
"""Characters, at most, that are looked up word by word: for so long other threads wait."""
_USER = {"role": "user", "content": "stub"}
_PROBE = "probe"
_CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": f'{{"at": "{_PROBE}"}}'}}
    ],
}
"""An answer that only calls."""


class _Way(NamedTuple):
    """How a template is given calls."""

    nothing: str | None
    """Content of a message with calls and no text."""
    parsed: bool
    """Arguments as an object, as servers hand them over; else as JSON."""


_WAYS = [_Way("", True), _Way(None, True), _Way("", False), _Way(None, False)]
"""Tried in this order. DeepSeek's V3 writes calls for null only, and its arguments are a text."""
_ANSWER = "\u2402answer\u2403"
"""The stub's assistant text: found again in every rendering, and no template changes or trims it."""


class TemplateError(Exception):
    """The template refuses these messages; the text is the template's own."""


class ChatTemplate:
    """Encodes and decodes for one policy. Made once per policy folder; safe to use for every run."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder lacks what is needed."""
        if not folder.is_dir():
            raise ConfigError(f"policy.model: there is no folder {folder}")
        self._tokenizer = _read_tokenizer(folder)
        self._bytes = TokenBytes(self._tokenizer) if is_byte_level(self._tokenizer) else None
        self._words = Words.of(self._tokenizer)
        settings = _read_json(folder / "tokenizer_config.json")
        self._separate = _separate(self._tokenizer)
        self._special = {name: _token_text(settings[name]) for name in _SPECIAL if settings.get(name)}
        self._templates = {name: _compile(source) for name, source in _template_sources(folder, settings).items()}
        self._now = datetime.datetime.now()
        way = next((way for way in _WAYS if self._writes_calls_in(way)), None)
        self._way = way or _WAYS[0]
        self.writes_calls = way is not None
        self.stop_ids = self._stop_ids(folder)
        stops = [text for id in self.stop_ids if (text := self._tokenizer.id_to_token(id))]
        self.format = format_of(self._try, "".join(_template_sources(folder, settings).values()), stops)
        """How it writes reasoning and tool calls."""
        special = {id: each.content for id, each in self._tokenizer.get_added_tokens_decoder().items() if each.special}
        shown = set(self.format.markers)
        self._silent = {id for id, text in special.items() if text not in shown} | set(self.stop_ids)

    @property
    def size(self) -> int:
        """Number of token ids."""
        return int(self._tokenizer.get_vocab_size())

    def at(self, created: float) -> "ChatTemplate":
        """The same template for a run: what it writes as today's date is the day on which the run was created."""
        view = copy.copy(self)
        view._now = datetime.datetime.fromtimestamp(created)
        return view

    def first_segment(self, messages: Messages, tools: Messages) -> "array[int]":
        """Tokens of a conversation from its beginning to the generation prompt."""
        return self.encode(self.render(messages, tools))

    def next_segment(self, messages: Messages, tools: Messages, last: int) -> "tuple[array[int], int]":
        """Tokens between an answer and the next generation prompt, `messages` being what was said in between.

        `last` is the answer's last token. If it is the stop that the template writes, the segment starts after it. If
        it is another stop (gpt-oss samples `<|return|>` and writes `<|end|>`), the second value is 1: the context goes
        on before it. If it is no stop (length, a stop string), the template's stop comes first in the segment.
        """
        text = self.added(messages, tools)
        if last not in self.stop_ids:
            return self.encode(text), 0
        stop = self._tokenizer.id_to_token(last)  # None: a row of the model without a token
        if stop and text.startswith(stop):
            return self.encode(text.removeprefix(stop)), 0
        return self.encode(text), 1

    def added(self, messages: Messages, tools: Messages) -> str:
        """What the template writes after an answer for `messages`, its own stop token first. Raises TemplateError."""
        stub = [_USER, {"role": "assistant", "content": _ANSWER}]
        _, found, text = self.render(stub + messages, tools).partition(_ANSWER)  # later ones are somebody's text
        if not found:
            raise TemplateError("the chat template drops or changes assistant text, so no turn can follow an answer")
        return text

    def text(self, answer: list[int], *, stopped: bool) -> str:
        """The text of sampled tokens, without the stop token; a character cut in two by the end is left out."""
        return self.said(answer[:-1]) if stopped else self.said(answer).rstrip("\ufffd")

    def said(self, ids: list[int]) -> str:
        """The text of tokens, without special ones but those that mark the parts of an answer."""
        return self.written([id for id in ids if id not in self._silent])

    def is_silent(self, id: int) -> bool:
        """Whether a token has no text in an answer: special ones, and stops."""
        return id in self._silent

    def is_byte(self, id: int) -> bool:
        """Whether a token stands for one byte (byte fallback): the text of such a run is only known at its end."""
        return re.fullmatch("<0x[0-9A-Fa-f]{2}>", self._tokenizer.id_to_token(id) or "") is not None

    def written(self, ids: list[int]) -> str:
        """Tokens as they stand in the text, special ones too."""
        if self._bytes is not None:
            return self._bytes.text(ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def encode(self, text: str) -> "array[int]":
        ids = array("i")
        begin = 0
        while begin < len(text):
            found = self._separate.search(text, begin + PIECE)
            end = found.start() if found else len(text)
            ids.extend(self._piece(text[begin:end]))
            begin = end
        return ids

    def _piece(self, text: str) -> Sequence[int]:
        if len(text) <= SHORT and self._words is not None and (ids := self._words.encode(text)) is not None:
            return ids
        # Of a batch, since only that lets other threads run meanwhile.
        found: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found

    def render(self, messages: Messages, tools: Messages) -> str:
        """What the template writes for a conversation, up to the generation prompt. Raises TemplateError."""
        template = self._templates.get("tool_use") if tools else None
        try:
            return (template or self._templates["default"]).render(
                messages=[_message(message, self._way) for message in messages],
                tools=tools or None,
                add_generation_prompt=True,
                strftime_now=self._now.strftime,
                raise_exception=_raise,
                **self._special,
            )
        except Exception as error:  # a template is somebody's program: it may raise anything
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error

    def _writes_calls_in(self, way: "_Way") -> bool:
        self._way = way
        text = self._try([_USER, _CALLING], [])
        return _PROBE in text and "'at'" not in text  # as a template writes an object that it takes for JSON

    def _try(self, messages: Messages, tools: Messages) -> str:
        try:
            return self.render(messages, tools)
        except TemplateError:
            return ""

    def _stop_ids(self, folder: Path) -> list[int]:
        ids = _read_json(folder / "generation_config.json").get("eos_token_id")
        if ids is None:
            ids = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        if ids is None:
            raise ConfigError(f"{folder} names no stop token: set eos_token_id in generation_config.json")
        return [ids] if isinstance(ids, int) else list(ids)


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Where harnesses and servers put it; templates read one of the first two, so both are filled."""


def _message(message: dict[str, Any], way: _Way) -> dict[str, Any]:
    """As transformers and servers hand it to templates."""
    text = _text(message.get("content"))
    shown = message | {"content": way.nothing if message.get("tool_calls") and text == "" else text}
    if message.get("tool_calls") and way.parsed:
        shown["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        shown = {"thinking": reasoning} | shown | {"reasoning_content": reasoning}
    return shown


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object, as servers hand them to templates: some write an object's items one by one."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
        orjson.dumps(arguments)  # what is nested deeper than can be written stays a text
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _text(content: Any) -> Any:
    """The text that templates expect, of parts too (OpenHands sends them). A policy that is asked by token ids gets no
    pictures and the like: what was there is named."""
    if not isinstance(content, list):
        return "" if content is None else content
    parts = [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content]
    texts = [part.get("text") or "" if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts]
    return "\n".join(map(str, texts))


def _read_tokenizer(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json: save the policy with a fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the package raises nothing more special
        raise ConfigError(f"{path} is no tokenizer: {error}") from None
    # Some are saved as their training used them; here every token counts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _separate(tokenizer: Any) -> re.Pattern[str]:
    """Special tokens that a tokenizer takes out of the text before all else, whatever stands around them: it encodes
    what comes before one and what begins with it apart from each other."""
    added = tokenizer.get_added_tokens_decoder().values()
    apart = [each for each in added if not (each.normalized or each.lstrip or each.single_word)]
    return re.compile("|".join(re.escape(each.content) for each in apart if each.special) or "(?!)")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = dict(orjson.loads(path.read_bytes())) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return settings


def _token_text(token: str | dict[str, str]) -> str:
    return token if isinstance(token, str) else token["content"]


def _template_sources(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates by name as transformers finds them: files, which go first, or a field of tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    try:
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template in {folder} cannot be read: {error}") from None
    field = settings.get("chat_template")
    if not sources and isinstance(field, list):
        sources = {entry["name"]: entry["template"] for entry in field}
    elif not sources and isinstance(field, str):
        sources = {"default": field}
    if "default" not in sources:
        raise ConfigError(f"{folder} has no chat template: add chat_template.jinja")
    return sources


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for transformers' masks; what stands in it is written as it is."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Finds the fields of messages at once, which a sandbox looks for among the methods of a mapping first."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _METHODS:
            return obj[attribute]
        return super().getattr(obj, attribute)


_METHODS = frozenset(dir(dict))


def _compile(source: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template does not compile: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter: raw Unicode and no HTML escapes, as models were trained on. Same arguments, in the
    same order, as transformers' filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
