"""How model families write reasoning and tool calls.

`family.py` finds out which of these formats a policy has, and `reading.py` takes answers apart by it. They are the
formats of the families' own templates, as the parsers of vLLM and SGLang read them. Those parsers, and the package
`renderers`, read answers only when they are whole, and drop text beside calls: here a stream has to end as the whole.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

Call = tuple[str, str]
"""The name of a function, and its arguments as JSON."""
Types = dict[str, dict[str, Any]]
"""Function -> parameter -> its JSON schema. Formats that write values without quotes need it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes the calls of an answer."""

    opens: str
    closes: str
    """Empty: calls go on to the end of the answer."""
    read: Callable[[str, Types], list[Call]]
    """The calls between the two. Whatever it raises for a text means that there are none."""
    markers: tuple[str, ...] = ()
    """Special tokens of the format, which have to stay in the text."""
    first: bool = False
    """Calls are an answer's beginning or they are none."""
    must_close: bool = False
    """Without its end nothing shows that a call is whole."""

    def calls(self, text: str, types: Types) -> list[Call]:
        """The calls in the text between `opens` and `closes`; empty if it is no text of this format."""
        try:
            return self.read(text, types)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []


@dataclass(frozen=True, slots=True)
class Format:
    """How a policy writes what is not the text of its answers."""

    calls: CallFormat | None = None
    thinks: tuple[str, str] | None = None
    """What opens and closes reasoning."""
    thinking: bool = False
    """The generation prompt opens it already."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*(self.calls.markers if self.calls else ()), *(self.thinks or ()))


def declared(tools: list[dict[str, Any]]) -> Types:
    """The types of the parameters of declared tools."""
    types: Types = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            types[str(function.get("name"))] = properties if isinstance(properties, dict) else {}
    return types


def _loads(text: str) -> Any:
    """JSON with numbers of any length, and without what is none: NaN, or half a character."""
    text.encode()
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _arguments(value: Any) -> str:
    """An object as JSON, as clients get it."""
    if not isinstance(value, dict):
        raise TypeError("arguments are an object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Protocols write it again, as an object within others; this raises for halves of characters, too.
    orjson.dumps([[[[[[[[orjson.loads(text)]]]]]]]])
    return text


def _object(value: Any) -> Call:
    """A call as an object with its name and its arguments, which Llama calls parameters."""
    name = value["name"]
    if not isinstance(name, str) or not name:
        raise TypeError("a name is a text")
    name.encode()
    return name, _arguments(value["arguments"] if "arguments" in value else value["parameters"])


def _json(text: str, _: Types) -> list[Call]:
    return [_object(_loads(text))]


def _json_list(text: str, _: Types) -> list[Call]:
    return [_object(value) for value in _loads(text)]


def _json_first(text: str, _: Types) -> list[Call]:
    """One object, or several with semicolons between them; the opening brace is gone."""
    return [_object(value) for _, value in _values("{" + text, re.compile(r"\s*"), ";")]


def _named(text: str, _: Types) -> list[Call]:
    """`name[ARGS]{...}`, or `name{...}`, and more of them after the marker."""
    begin = re.compile(r"\s*([\w.:/-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
    return [(found[1], _arguments(value)) for found, value in _values(text, begin, "[TOOL_CALLS]")]


def _values(text: str, begin: re.Pattern[str], between: str) -> list[tuple[re.Match[str], Any]]:
    """JSON values, each after a beginning, with a text between two of them."""
    text.encode()
    decoder, values, end = json.JSONDecoder(parse_constant=_refuse), [], 0
    while found := begin.match(text, end):
        value, end = decoder.raw_decode(text, found.end())
        values.append((found, value))
        rest = text[end : end + len(between) + 80].lstrip()
        if not text[end:].strip():
            return values
        if not rest.startswith(between):
            break
        end = text.index(between, end) + len(between)
    raise ValueError("there is something else than calls")


def _between(text: str, opens: str, closes: str) -> list[str]:
    """What stands between these, with white space around it; raises ValueError for anything else."""
    parts = []
    while text := text.lstrip():
        part, closed, rest = text.removeprefix(opens).partition(closes)
        if not closed or not text.startswith(opens):
            raise ValueError("there is something else than calls")
        parts.append(part)
        text = rest
    return parts


def _deepseek(text: str, _: Types) -> list[Call]:
    """V3 writes the arguments as a block of code after the name, V3.1 as they are."""
    calls = []
    for part in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        name, _sep, arguments = part.partition("<｜tool▁sep｜>")
        if name == "function":
            name, _sep, arguments = arguments.partition("\n```json\n")
            arguments = arguments.removesuffix("\n```")
        calls.append((_name(name), _arguments(_loads(arguments))))
    return calls


def _kimi(text: str, _: Types) -> list[Call]:
    calls = []
    for part in _between(text, "<|tool_call_begin|>", "<|tool_call_end|>"):
        name, _sep, arguments = part.partition("<|tool_call_argument_begin|>")
        name = name.strip().removeprefix("functions.").partition(":")[0]
        calls.append((_name(name), _arguments(_loads(arguments))))
    return calls


def _qwen_xml(text: str, types: Types) -> list[Call]:
    calls = []
    for part in _between(text, "<function=", "</function>"):
        name, _sep, body = part.partition(">")
        given = [each.partition(">") for each in _between(body, "<parameter=", "</parameter>")]
        known = types.get(name, {})
        values = {key: _typed(value.removeprefix("\n").removesuffix("\n"), known.get(key)) for key, _, value in given}
        calls.append((_name(name), _arguments(values)))
    return calls


def _glm(text: str, types: Types) -> list[Call]:
    name, key, body = text.partition("<arg_key>")
    given = [each.partition("</arg_key>") for each in _between(key + body, "<arg_key>", "</arg_value>")]
    name = _name(name.strip())
    known = types.get(name, {})
    values = {key.strip(): _typed(_value(value), known.get(key.strip())) for key, _, value in given}
    return [(name, _arguments(values))]


def _value(text: str) -> str:
    """Of GLM's argument, after its key."""
    value = text.lstrip()
    if not value.startswith("<arg_value>"):
        raise ValueError("a key has no value")
    return value.removeprefix("<arg_value>")


def _name(name: str) -> str:
    if not re.fullmatch(r"[\w.:/-]+", name):
        raise ValueError("a call has no name")
    return name


def _typed(value: str, schema: Any) -> Any:
    """A value that is written without quotes: a text where the tool takes nothing but texts, else JSON where it is."""
    kinds = _kinds(schema)
    if "string" in kinds and kinds <= {"string", "null"}:
        return None if value == "null" and "null" in kinds else value
    try:
        return _loads(value)
    except (ValueError, RecursionError):
        return value


def _kinds(schema: Any) -> set[str]:
    """The types that a JSON schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    kinds: set[str] = set()
    branches = [schema, *(each for name in ("anyOf", "oneOf") for each in _list(schema.get(name)))]
    for kind in [branch.get("type") for branch in branches if isinstance(branch, dict)]:
        kinds |= {each for each in [kind, *_list(kind)] if isinstance(each, str)}
    choices = schema.get("enum")
    if not kinds and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        kinds = {"string"}
    return kinds


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_DEEPSEEK = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
_KIMI = ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")

THINKING = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
"""What opens and closes reasoning."""
CALL_FORMATS = [
    CallFormat("<tool_call>", "</tool_call>", _json, ("<tool_call>", "</tool_call>")),  # Hermes, Qwen 2.5 and 3
    CallFormat("<tool_call>", "</tool_call>", _qwen_xml, ("<tool_call>", "</tool_call>")),  # Qwen3-Coder, Qwen3.5
    CallFormat("<tool_call>", "</tool_call>", _glm, ("<tool_call>", "</tool_call>"), must_close=True),  # GLM
    CallFormat("[TOOL_CALLS]", "", _json_list, ("[TOOL_CALLS]",)),  # Mistral until 2024
    CallFormat("[TOOL_CALLS]", "", _named, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),  # and since
    CallFormat(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek, tuple(f"<｜tool▁{name}｜>" for name in _DEEPSEEK)
    ),
    CallFormat(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi, tuple(f"<|tool_{name}|>" for name in _KIMI)
    ),
    CallFormat("{", "", _json_first, first=True),  # Llama 3
]
