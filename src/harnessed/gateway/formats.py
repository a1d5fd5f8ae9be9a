"""How model families write reasoning and tool calls.

`family.py` finds out which of these formats a policy has, and `reading.py` takes answers apart by it. They are the
formats of the families' own templates, as the parsers of vLLM and SGLang read them. Those parsers, and the package
`renderers`, read answers only when they are whole, and drop text beside calls: here a stream has to end as the whole.
"""

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
    read: Callable[[str, Types], list[Call] | None]
    """The calls between the two; None: there are none. May raise ValueError, TypeError or KeyError for the same."""
    markers: tuple[str, ...] = ()
    """Special tokens of the format, which have to stay in the text."""
    first: bool = False
    """Calls are an answer's beginning or they are none."""
    must_close: bool = False
    """Without its end nothing shows that a call is whole."""

    def calls(self, text: str, types: Types) -> list[Call]:
        """The calls in the text between `opens` and `closes`; empty if it is no text of this format."""
        try:
            return self.read(text, types) or []
        except (ValueError, TypeError, KeyError):
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


def _arguments(value: Any) -> str:
    """An object as JSON, as clients get it."""
    if not isinstance(value, dict):
        raise TypeError("arguments are an object")
    return orjson.dumps(value).decode()


def _object(value: Any) -> Call:
    """A call as an object with its name and its arguments, which Llama calls parameters."""
    name = value["name"]
    if not isinstance(name, str) or not name:
        raise TypeError("a name is a text")
    return name, _arguments(value["arguments"] if "arguments" in value else value["parameters"])


def _json(text: str, _: Types) -> list[Call]:
    return [_object(orjson.loads(text))]


def _json_list(text: str, _: Types) -> list[Call]:
    return [_object(value) for value in orjson.loads(text)]


def _json_first(text: str, types: Types) -> list[Call]:
    """One object, or several with semicolons between them."""
    try:
        return _json("{" + text, types)
    except orjson.JSONDecodeError:
        return _json_list("[{" + re.sub(r"}\s*;\s*{", "},{", text) + "]", types)


def _named(text: str, _: Types) -> list[Call] | None:
    """`name[ARGS]{...}`, or `name{...}`, and more of them after the marker."""
    found = [re.fullmatch(r"\s*([\w.:/-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*({.*})\s*", each, re.S)
             for each in text.split("[TOOL_CALLS]")]  # fmt: skip
    return [(each[1], _arguments(orjson.loads(each[2]))) for each in found if each] if all(found) else None


def _parts(text: str, pattern: str) -> list[tuple[str, ...]]:
    """The groups of each part; raises ValueError if anything but white space stands between the parts."""
    parts = [match.groups() for match in re.finditer(pattern, text, re.S)]
    if not parts or re.sub(pattern, "", text, flags=re.S).strip():
        raise ValueError("there is something else than calls")
    return parts


def _deepseek(text: str, _: Types) -> list[Call]:
    """V3 writes the arguments as a block of code after the name, V3.1 as they are."""
    pattern = (
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```|(.*?)<｜tool▁sep｜>(.*?))"
        r"(?:<｜tool▁call▁end｜>|$)"
    )
    return [(a or c, _arguments(orjson.loads(b or d))) for a, b, c, d in _parts(text, pattern)]


def _kimi(text: str, _: Types) -> list[Call]:
    name = r"<\|tool_call_begin\|>\s*(?:functions\.)?([^:<]+)(?::\d+)?\s*"
    pattern = name + r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
    return [(name.strip(), _arguments(orjson.loads(arguments))) for name, arguments in _parts(text, pattern)]


def _qwen_xml(text: str, types: Types) -> list[Call]:
    calls = []
    for name, body in _parts(text, r"<function=([^>\n]+)>(.*?)</function>"):
        given = _parts(body, r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>") if body.strip() else []
        calls.append((name, _arguments({key: _typed(value, types.get(name, {}).get(key)) for key, value in given})))
    return calls


def _glm(text: str, types: Types) -> list[Call]:
    name, _, body = text.partition("<arg_key>")
    pattern = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    given = _parts("<arg_key>" + body, pattern) if body else []
    name = name.strip()
    if not re.fullmatch(r"[\w.:/-]+", name):
        raise ValueError("a name stands first")
    values = {key.strip(): _typed(value, types.get(name, {}).get(key.strip())) for key, value in given}
    return [(name, _arguments(values))]


def _typed(value: str, schema: Any) -> Any:
    """A value that is written without quotes: a text where the tool declares one, else JSON where it is."""
    if isinstance(schema, dict) and schema.get("type") in ("string", ["string"]):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


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
