"""Which format a policy's answers have. `template.py` asks once per policy.

It is found by trial, not by a model's name: the template is given calls, and the format is the one that reads them back
from what it writes.
"""

from collections.abc import Callable, Iterable
from typing import Any

from harnessed.gateway.formats import CALL_FORMATS, THINKING, CallFormat, Format, declared
from harnessed.gateway.reading import Reader

_USER = {"role": "user", "content": "stub"}
_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "Probe.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}]  # fmt: skip


def format_of(render: Callable[[Any, Any], str], source: str, stops: Iterable[str]) -> Format:
    """`render` is given messages and tools, and gives nothing for what the template refuses."""
    thinks = next((pair for pair in THINKING if pair[1] in source), None)
    thinking = thinks is not None and render([_USER], []).rstrip().endswith(thinks[0])
    # Llama's template refuses several calls, and DeepSeek's V3 does not close a single one.
    calls = next((each for n in (2, 1) for each in CALL_FORMATS if _writes(render, each, n, stops)), None)
    return Format(calls, thinks, thinking)


def _writes(render: Callable[[Any, Any], str], format: CallFormat, n: int, stops: Iterable[str]) -> bool:
    """Whether the format reads n calls in what the template writes for them."""
    prompt, text = render([_USER], _TOOLS), render([_USER, _calling(n)], _TOOLS)
    begin = next((at for at, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
    end = min([at for stop in stops if (at := text.find(stop, begin)) >= 0], default=len(text))
    reader = Reader(Format(format), declared(_TOOLS))
    reader.end(text[begin:end])
    return reader.calls == [("probe", f'{{"at":"door {i}"}}') for i in range(n)]


def _calling(n: int) -> dict[str, Any]:
    functions = [{"name": "probe", "arguments": f'{{"at": "door {i}"}}'} for i in range(n)]
    calls = [{"id": f"call0000{i}", "type": "function", "function": each} for i, each in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}
