"""The transcript of one attempt: which answers a request repeats, and the exact tokens that lead to its end.

A request is a list of messages. Folding its messages one by one into a digest gives each beginning of it a name, and
the transcript knows the names of all conversations that end in one of its answers; so the deepest answer that a
request repeats is found in one pass. What follows it is new and becomes the segment of the next node; answers in there
that are known from elsewhere in the transcript (a history that was edited, compacted, or ends in a message that changes
from turn to turn) are spliced in by their sampled tokens. `exchange.py` is the only caller; what makes two messages the
same is in `matching.py`.
"""

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Any

import orjson

from harnessed.gateway.matching import Message, answer_identity, call_ids, prompt_identity, text_of
from harnessed.gateway.template import ChatTemplate
from harnessed.records import Node

Digest = bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in the transcript."""

    parent: int
    """Node whose answer the request continues; 0: it starts a conversation."""
    new: list[Message]
    """The messages after that answer."""
    known: dict[int, int]
    """Of these, by index, the answers that the transcript knows: their nodes."""
    prompt: Digest
    """Names the whole request; equal for identical requests."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The prompt tokens between the parent's answer and the next one."""

    ids: list[int]
    cut: int
    """Tokens at the end of the parent's answer that do not belong to this context: a sampled stop that the template
    writes differently in history (0 or 1)."""


@dataclass(slots=True)
class Tree:
    """All nodes of an attempt. It can always be made again from the stored nodes."""

    nodes: dict[int, Node] = field(default_factory=dict)
    _conversations: dict[Digest, list[int]] = field(default_factory=dict)
    """A conversation that ends in an answer -> the nodes with that answer, in order of recording."""
    _answers: dict[bytes, list[int]] = field(default_factory=dict)
    """The identity of an answer -> the nodes with that answer, wherever they stand."""
    _ids: dict[str, int] = field(default_factory=dict)
    """Id of a tool call -> the node that made it."""
    _prompts: dict[int, Digest] = field(default_factory=dict)
    """Node -> the digest of the request that it answers."""

    @classmethod
    def of(cls, nodes: list[Node]) -> "Tree":
        tree = cls()
        for node in nodes:
            digest = tree._after(node.parent) if node.parent else _start(node.tools)
            for message in node.messages:
                digest = tree._fold(digest, message)
            tree.add(node, digest)
        return tree

    def place(self, messages: list[Message], tools: list[Message]) -> Place:
        digest = _start(tools)
        parent, after = 0, 0
        for index, message in enumerate(messages):
            digest = self._fold(digest, message)
            if message["role"] == "assistant" and (same := self._conversations.get(digest)):
                parent, after = self._meant(message, same), index + 1
        new = messages[after:]
        # A conversation cannot begin with an answer: there was a prompt before it, which nobody knows any more.
        known = {i: node for i, m in enumerate(new) if (i or parent) and (node := self._known(m))}
        return Place(parent, new, known, digest)

    def segment(self, place: Place, tools: list[Message], template: ChatTemplate) -> Segment:
        """Encode what is new. Raises TemplateError."""
        ids: list[int] = []
        first_cut, before, begin = 0, place.parent, 0
        for end in [*place.known, len(place.new)]:
            piece = place.new[begin:end]
            if before:
                added, cut = template.next_segment(piece, tools, self._last_token(before))
                if begin:
                    ids = ids[: len(ids) - cut]
                else:
                    first_cut = cut
            else:
                added = template.first_segment(piece, tools)
            ids += added
            if end < len(place.new):
                before, begin = place.known[end], end + 1
                ids += array("i", self.nodes[before].answer)
        return Segment(ids, first_cut)

    def prove_delivered(self, place: Place) -> list[int]:
        """A request that repeats answers shows that they arrived; the nodes that were not known to have."""
        proven = []
        for number in (place.parent, *place.known.values()):
            while number and not self.nodes[number].delivered:
                self.nodes[number].delivered = True
                proven.append(number)
                number = self.nodes[number].parent
        return proven

    def add(self, node: Node, prompt: Digest) -> None:
        """Take in a recorded node, the answer to the request that `prompt` names."""
        self.nodes[node.number] = node
        self._prompts[node.number] = prompt
        self._ids |= dict.fromkeys(call_ids(node.message), node.number)
        self._answers.setdefault(_canonical(answer_identity(node.message)), []).append(node.number)
        self._conversations.setdefault(self._after(node.number), []).append(node.number)

    def context(self, number: int, cut: int = 0) -> bytes:
        """int32 ids of everything up to and including the answer of a node (0: nothing), without its last `cut`."""
        pieces: list[bytes] = []
        while number:
            node = self.nodes[number]
            pieces += (node.answer[: len(node.answer) - 4 * cut], node.segment)
            number, cut = node.parent, node.cut
        return b"".join(reversed(pieces))

    def undelivered(self) -> list[tuple[Digest, str, list[Node]]]:
        """Answers that nobody is known to have received: the request and the call that they answer, and they."""
        found: dict[tuple[Digest, str], list[Node]] = {}
        for number, node in self.nodes.items():
            if not node.delivered:
                found.setdefault((self._prompts[number], node.call), []).append(node)
        return [(prompt, call, nodes) for (prompt, call), nodes in found.items()]

    def _after(self, number: int) -> Digest:
        return self._fold(self._prompts[number], self.nodes[number].message)

    def _fold(self, digest: Digest, message: Message) -> Digest:
        if message["role"] == "assistant":
            named = self._named(message)
            identity = answer_identity(self.nodes[named].message if named else message)
        else:
            identity = prompt_identity(message)
        return hashlib.blake2b(_canonical(identity), key=digest, digest_size=16).digest()

    def _named(self, message: Message) -> int:
        """The node that an answer's call ids name; 0: none, or several."""
        nodes = {self._ids.get(id, 0) for id in call_ids(message)}
        return nodes.pop() if len(nodes) == 1 else 0

    def _known(self, message: Message) -> int:
        """The node whose answer this message is; 0: none."""
        if message["role"] != "assistant":
            return 0
        same = self._answers.get(_canonical(answer_identity(message)))
        return self._meant(message, same) if same else self._named(message)

    def _meant(self, message: Message, same: list[int]) -> int:
        """Of equal answers the one that the call ids name, else one with exactly this text, and of several such the one
        that was delivered last."""
        named = self._named(message)
        if named in same:
            return named
        exact = [n for n in same if text_of(self.nodes[n].message.get("content")) == text_of(message.get("content"))]
        same = exact or same
        return next((n for n in reversed(same) if self.nodes[n].delivered), same[-1])

    def _last_token(self, number: int) -> int:
        return array("i", self.nodes[number].answer[-4:])[0]


def _start(tools: list[Message]) -> Digest:
    return hashlib.blake2b(_canonical(tools), digest_size=16).digest()


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
