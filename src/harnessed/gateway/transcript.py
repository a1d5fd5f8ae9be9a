"""The transcript of one attempt: which answers a request repeats, and the exact tokens that lead to its end.

A request is a list of messages. Folding its messages one by one into a digest gives each beginning of it a name, and
the transcript knows the names of all conversations that end in one of its answers; so the deepest answer that a
request repeats is found in one pass. What follows that answer is new and becomes the segment of the next node.
Prompt messages have to be equal once their shape is normalised; answers are compared by meaning only, because
harnesses write them back in their own way. `exchange.py` is the only caller.
"""

import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import Any

import orjson

from harnessed.records import Node

Digest = bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in the transcript."""

    parent: int
    """Node whose answer the request continues; 0: it starts a conversation."""
    new: list[dict[str, Any]]
    """The messages after that answer."""
    prompt: Digest
    """Names the whole request; equal for identical requests."""


@dataclass(slots=True)
class Tree:
    """All nodes of an attempt. It can always be made again from the stored nodes."""

    nodes: dict[int, Node] = field(default_factory=dict)
    _answers: dict[Digest, list[int]] = field(default_factory=dict)
    """Conversation that ends in an answer -> the nodes with that answer, in order of recording."""
    _prompts: dict[int, Digest] = field(default_factory=dict)
    """Node -> the digest of the request that it answers."""

    @classmethod
    def of(cls, nodes: list[Node]) -> "Tree":
        tree = cls()
        for node in nodes:
            before = tree._after(node.parent) if node.parent else _start(node.tools)
            for message in node.messages:
                before = _fold(before, message)
            tree.add(node, before)
        return tree

    def place(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Place:
        digest = _start(tools)
        parent, after = 0, 0
        for index, message in enumerate(messages):
            digest = _fold(digest, message)
            if message["role"] == "assistant" and digest in self._answers:
                parent, after = self._latest(self._answers[digest]), index + 1
        return Place(parent, messages[after:], digest)

    def add(self, node: Node, prompt: Digest) -> None:
        """Take in a recorded node, the answer to the request that `prompt` names."""
        self.nodes[node.number] = node
        self._prompts[node.number] = prompt
        self._answers.setdefault(_fold(prompt, node.message), []).append(node.number)

    def tokens(self, number: int) -> bytes:
        """int32 ids of everything up to and including the answer of a node (0: nothing)."""
        pieces: list[bytes] = []
        while number:
            node = self.nodes[number]
            pieces += (node.answer, node.segment)
            number = node.parent
        return b"".join(reversed(pieces))

    def undelivered(self) -> dict[Digest, list[Node]]:
        """Answers that nobody is known to have received, by the request that they answer."""
        found: dict[Digest, list[Node]] = {}
        for number, node in self.nodes.items():
            if not node.delivered:
                found.setdefault(self._prompts[number], []).append(node)
        return found

    def _after(self, number: int) -> Digest:
        return _fold(self._prompts[number], self.nodes[number].message)

    def _latest(self, numbers: list[int]) -> int:
        """Of answers with equal text, the one delivered last is meant."""
        return next((n for n in reversed(numbers) if self.nodes[n].delivered), numbers[-1])


def _start(tools: list[dict[str, Any]]) -> Digest:
    return hashlib.blake2b(_canonical(tools), digest_size=16).digest()


def _fold(digest: Digest, message: dict[str, Any]) -> Digest:
    meaning = answer_meaning(message) if message["role"] == "assistant" else prompt_shape(message)
    return hashlib.blake2b(_canonical(meaning), key=digest, digest_size=16).digest()


def prompt_shape(message: dict[str, Any]) -> dict[str, Any]:
    """A prompt message without the shapes that mean the same: text as string or one block; null, absent or empty
    content; `cache_control` marks, which move from turn to turn (Claude Code)."""
    shape = {key: value for key, value in message.items() if key != "cache_control" and value is not None}
    shape["content"] = text_of(message.get("content"))
    return shape


def answer_meaning(message: dict[str, Any]) -> dict[str, Any]:
    """An answer without what harnesses change when they send it back: white space around the text (Hermes), missing
    reasoning (OpenHands, LangChain), rewritten call ids (OpenClaw), re-serialised arguments (most)."""
    content = text_of(message.get("content"))
    return {
        "text": content.strip() if isinstance(content, str) else content,
        "calls": [_call_meaning(call) for call in message.get("tool_calls") or []],
    }


def text_of(content: Any) -> Any:
    """Content as a string where it is text alone."""
    if content is None:
        return ""
    if isinstance(content, list):
        blocks = [{k: v for k, v in b.items() if k != "cache_control"} if isinstance(b, dict) else b for b in content]
        if not blocks:
            return ""
        if len(blocks) == 1 and isinstance(blocks[0], dict) and blocks[0].get("type") == "text":
            return blocks[0].get("text", "")
        return blocks
    return content


def _call_meaning(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    with contextlib.suppress(orjson.JSONDecodeError, TypeError):  # broken JSON is compared as it stands
        arguments = orjson.loads(arguments)
    return [function.get("name"), arguments]


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
