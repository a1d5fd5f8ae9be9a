"""When two messages are the same: small pure rules, each with the harness that needs it.

Prompt messages have to be equal once their shape is normalised. Answers are compared by meaning only, because harnesses
write them back in their own way; what was sampled is found again by it, and is never encoded again. `transcript.py`
folds the identities into digests.
"""

import contextlib
from typing import Any

import orjson

from harnessed.gateway.wire.turn import INSTRUCTIONS

Message = dict[str, Any]


def prompt_identity(message: Message) -> Any:
    """Everything that a prompt message says, without the shapes that mean the same."""
    ignored = ("cache_control", INSTRUCTIONS)
    shape = {key: value for key, value in message.items() if key not in ignored and value is not None}
    shape["content"] = text_of(message.get("content"))
    if "tool_call_id" in shape:
        shape["tool_call_id"] = plain_id(shape["tool_call_id"])
    return shape


def answer_identity(message: Message) -> Any:
    """The text and the calls of an answer.

    Left out is what harnesses drop, move or add: reasoning (OpenHands, Hermes, LangChain drop it, Qwen Code trims it),
    `refusal`, `annotations` and other nulls (openai-python), `provider_specific_fields` (mini-swe-agent), call ids.
    """
    content = text_of(message.get("content"))
    return {
        "text": trimmed(content),
        "calls": [call_identity(call) for call in message.get("tool_calls") or []],
    }


def as_delivered(repeated: Message, delivered: Message) -> bool:
    """Whether an answer came back letter by letter: its text, its reasoning, its calls."""
    return bool(_letters(repeated) == _letters(delivered))


def text_of(content: Any) -> Any:
    """Text alone as a string: null, absent and empty content (OpenCode, OpenClaw, litellm), one text block in place of
    a string (OpenHands, Qwen Code, Claude Code's system messages), `cache_control` marks that move (Claude Code)."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    blocks = [{k: v for k, v in b.items() if k != "cache_control"} if isinstance(b, dict) else b for b in content]
    if not blocks:
        return ""
    if len(blocks) == 1 and isinstance(blocks[0], dict) and blocks[0].get("type") == "text":
        return blocks[0].get("text", "")
    return blocks


def trimmed(content: Any) -> Any:
    """Without white space around the text (Hermes strips answers)."""
    return content.strip() if isinstance(content, str) else content


def call_identity(call: Message) -> Any:
    """Name and arguments of a tool call."""
    function = call.get("function")
    if not isinstance(function, dict):
        return [function, None]
    return [function.get("name"), arguments_of(function.get("arguments", ""))]


def arguments_of(arguments: Any) -> Any:
    """Arguments as the values that they mean: re-serialised (OpenHands, OpenCode, LangChain), keys in another order
    (Claude Code, Hermes), numbers normalised (OpenCode, Claude Code). Broken JSON is compared as it stands, out of
    Claude Code's wrapping of it."""
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):
            parsed = orjson.loads(arguments)
            orjson.dumps(parsed)  # nested deeper than can be written, it stays a text
            arguments = parsed
    if isinstance(arguments, dict) and isinstance(wrapped := arguments.get("__unparsedToolInput"), dict):
        return wrapped.get("raw")
    return _plain_numbers(arguments)


def plain_id(id: Any) -> Any:
    """A call id without what OpenClaw removes from it, in calls and results alike."""
    return "".join(filter(str.isalnum, id)) if isinstance(id, str) else id


def call_ids(message: Message) -> list[str]:
    """Ids of an answer's tool calls. They name the answer even where its text is another's, or was rewritten: broken
    arguments come back in a wrapping of the harness's own (OpenCode, OpenHands) or repaired (Qwen Code)."""
    return [plain_id(call.get("id")) for call in message.get("tool_calls") or [] if isinstance(call.get("id"), str)]


def _letters(message: Message) -> Any:
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = [call.get("function") for call in message.get("tool_calls") or []]
    return text_of(message.get("content")), reasoning, calls


def _plain_numbers(value: Any) -> Any:
    """20.0 as 20."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    return value
