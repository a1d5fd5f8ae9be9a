"""The transcript of one attempt: which answers a request repeats, and the exact tokens that lead to its end.

A request is a list of messages. Folding its messages one by one into a digest gives each beginning of it a name, and
the transcript knows the names of all conversations that end in one of its answers; so the deepest answer that a
request repeats is found in one pass. What follows it is new and becomes the segment of the next node; answers in there
that are known from elsewhere in the transcript (a history that was edited, compacted, or ends in a message that changes
from turn to turn) are spliced in by their sampled tokens. `intake.py` is the only caller; what makes two messages the
same is in `matching.py`.
"""

import hashlib
import operator
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from harnessed.gateway.matching import Message, answer_identity, call_ids, prompt_identity, text_of
from harnessed.gateway.template import ChatTemplate
from harnessed.records import Node, Split

Digest = bytes
INTERRUPTED = "interrupted"
"""The finish of an answer that its engine broke off."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in the transcript, by what its messages mean."""

    follows: int
    """Node whose conversation the request continues; 0: it starts one."""
    new: list[Message]
    """The messages after that node's answer."""
    known: dict[int, int]
    """Of these, by index, the answers that the transcript knows: their nodes."""
    prompt: Digest
    """Names the whole request; equal for identical requests."""
    messages: list[Message]
    """All of the request."""
    digests: list[Digest]
    """Of its beginnings, from the empty one on."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The prompt tokens between the answer that a context continues and the next answer."""

    parent: int
    """The node with that answer; 0: none."""
    ids: bytes
    """int32."""
    cut: int
    """Tokens at the end of the parent's answer that do not belong to this context: a sampled stop that the template
    writes differently in history (0 or 1)."""
    split: str = ""
    """A records.Split, where the context leaves an answer that the request repeats."""


@dataclass(slots=True)
class Tree:
    """All nodes of an attempt. It can always be made again from the stored nodes."""

    nodes: dict[int, Node] = field(default_factory=dict)
    children: dict[int, list[int]] = field(default_factory=dict)
    """Node -> the nodes whose tokens go on from it; 0: those that start a context."""
    texts: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    """Node -> its tokens as text, once `splits.py` has needed it."""
    _conversations: dict[Digest, list[int]] = field(default_factory=dict)
    """A conversation that ends in an answer -> the nodes with that answer, in order of recording."""
    _answers: dict[bytes, list[int]] = field(default_factory=dict)
    """The identity of an answer -> the nodes with that answer, wherever they stand."""
    _ids: dict[str, int] = field(default_factory=dict)
    """Id of a tool call -> the node that made it."""
    _prompts: dict[int, Digest] = field(default_factory=dict)
    """Node -> the digest of the request that it answers."""
    _calls: dict[str, list[int]] = field(default_factory=dict)
    """Call -> the nodes that answer it."""
    _ends: dict[int, Digest] = field(default_factory=dict)
    """Node -> the digest of the conversation that ends in it."""
    _lengths: dict[int, int] = field(default_factory=dict)
    """Node -> the tokens of everything up to and including its answer."""
    _context: tuple[int, bytes] = (0, b"")
    """The node whose context was asked for last, and that context; most go on from it."""
    _last: tuple[list[Message], list[Digest]] = field(default_factory=lambda: ([], []))
    """Messages of the last request, and the digests of its beginnings, from the empty one on."""

    @classmethod
    def of(cls, nodes: list[Node]) -> "Tree":
        tree = cls()
        for node in nodes:
            tree.restore(node)
        return tree

    def restore(self, node: Node) -> None:
        """Take in a node as it was stored; what it follows is here."""
        digest = self._ends[node.follows] if node.follows else _start(node.tools)
        for message in node.messages:
            digest = self._fold(digest, message)
        self.add(node, digest)

    def place(self, messages: list[Message], tools: list[Message]) -> Place:
        digests = self._beginnings(messages, _start(tools))
        ends = (end for end in range(len(messages), 0, -1) if digests[end] in self._conversations)
        after = next(ends, 0)
        follows = self._meant(messages[after - 1], self._conversations[digests[after]]) if after else 0
        new = messages[after:]
        # A conversation cannot begin with an answer: there was a prompt before it, which nobody knows any more.
        known = {i: node for i, m in enumerate(new) if (i or follows) and (node := self._known(m))}
        return Place(follows, new, known, digests[-1], messages, digests)

    def _beginnings(self, messages: list[Message], start: Digest) -> list[Digest]:
        """The digests of all beginnings of a request. What begins with the very messages of the last one is known, as
        far as their call ids were: the others may yet come to name an answer."""
        before, known = self._last
        same = 0
        if known and known[0] == start:
            pairs = map(operator.is_, before, messages)
            same = next((i for i, is_same in enumerate(pairs) if not is_same), min(len(before), len(messages)))
        digests = known[: same + 1] if known and same else [start]
        for message in messages[same:]:
            digests.append(self._fold(digests[-1], message))
        settled = next((i for i, m in enumerate(messages[same:], same) if not self._is_settled(m)), len(messages))
        self._last = messages[:settled], digests[: settled + 1]
        return digests

    def _is_settled(self, message: Message) -> bool:
        return message["role"] != "assistant" or all(id in self._ids for id in call_ids(message))

    def segment(self, place: Place, tools: list[Message], template: ChatTemplate) -> Segment:
        """Encode what is new, after exactly what was sampled (`history: exact`). Raises TemplateError."""
        ids = array("i")
        first_cut, before, begin = 0, place.follows, 0
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
        return Segment(place.follows, ids.tobytes(), first_cut, Split.EDITED if place.known else "")

    def prove_delivered(self, place: Place) -> list[int]:
        """A request that repeats answers shows that they arrived; the nodes that were not known to have."""
        proven = []
        for number in (place.follows, *place.known.values()):
            while number and not self.nodes[number].delivered:
                proven += self._prove(number)
                number = self.nodes[number].follows
        return proven

    def prove_repeated(self, number: int) -> list[int]:
        """So does a bare prompt that goes on from a node's answer."""
        return [each for on_path in self.path(number) for each in self._prove(on_path)]

    def _prove(self, number: int) -> list[int]:
        """The answers of one call arrive together."""
        of_call = [self.nodes[each] for each in self._calls[self.nodes[number].call] if each in self.nodes]
        proven = [node for node in of_call if not node.delivered and node.finish != INTERRUPTED]
        for node in proven:
            node.delivered = True
        return [node.number for node in proven]

    def add(self, node: Node, prompt: Digest) -> None:
        """Take in a recorded node, the answer to the request that `prompt` names."""
        self.nodes[node.number] = node
        self._prompts[node.number] = prompt
        self._calls.setdefault(node.call, []).append(node.number)
        self._lengths[node.number] = self.length(node.parent) + len(node.segment) // 4 + node.sampled - node.cut
        if node.finish == INTERRUPTED:
            return  # nobody got it, so nobody can repeat it
        self.children.setdefault(node.parent, []).append(node.number)
        self._ids |= dict.fromkeys(call_ids(node.message), node.number)
        identity = _canonical(answer_identity(node.message))
        self._answers.setdefault(identity, []).append(node.number)
        self._ends[node.number] = end = _following(prompt, identity)
        self._conversations.setdefault(end, []).append(node.number)

    def conversation(self, number: int) -> list[int]:
        """The nodes whose answers a conversation repeats, up to this node."""
        return self._from_the_start(number, lambda node: node.follows)

    def said(self, call: str) -> list[Message] | None:
        """All messages of a conversation up to the answer of a call; None: there is none."""
        number = self._answered(call)
        if not number:
            return None
        nodes = [self.nodes[each] for each in self.conversation(number)]
        return [message for node in nodes for message in (*node.messages, node.message)]

    def answer(self, name: str) -> Message | None:
        """The answer of a call, or the one that made a tool call of that id; None: there is none."""
        number = self._answered(name) or self._ids.get(name, 0)
        return self.nodes[number].message if number else None

    def answers(self, call: str) -> list[Node]:
        """The whole answers of a call."""
        return [self.nodes[number] for number in self._calls.get(call, []) if number in self._ends]

    def repeated(self, place: Place, number: int) -> Message:
        """The answer of a node of the conversation that a request follows, as the request repeats it."""
        return place.messages[place.digests.index(self._ends[number]) - 1]

    def prompt(self, number: int) -> Digest:
        """Names the request that a node answers."""
        return self._prompts[number]

    def length(self, number: int) -> int:
        """Tokens of everything up to and including the answer of a node (0: none)."""
        return self._lengths[number] if number else 0

    def path(self, number: int) -> list[int]:
        """The nodes whose tokens lead to a node's answer, with it."""
        return self._from_the_start(number, lambda node: node.parent)

    def context(self, number: int, cut: int = 0) -> bytes:
        """int32 ids of everything up to and including the answer of a node (0: nothing), without its last `cut`."""
        known, tokens = self._context
        if known != number:
            tokens = self._joined(number)
            self._context = number, tokens
        return tokens[: len(tokens) - 4 * cut]

    def _joined(self, number: int) -> bytes:
        known, tokens = self._context
        pieces: list[bytes] = []
        cut = 0
        while number != known and number:
            node = self.nodes[number]
            pieces += (node.answer[: len(node.answer) - 4 * cut], node.segment)
            number, cut = node.parent, node.cut
        if number:
            pieces.append(tokens[: len(tokens) - 4 * cut])
        return b"".join(reversed(pieces))

    def _answered(self, call: str) -> int:
        """The node that answers a call; 0: none, or nobody got it because it was broken off."""
        return next((number for number in self._calls.get(call, []) if number in self._ends), 0)

    def _from_the_start(self, number: int, before: Callable[[Node], int]) -> list[int]:
        path = []
        while number:
            path.append(number)
            number = before(self.nodes[number])
        return path[::-1]

    def _fold(self, digest: Digest, message: Message) -> Digest:
        if message["role"] == "assistant":
            named = self._named(message)
            identity = answer_identity(self.nodes[named].message if named else message)
        else:
            identity = prompt_identity(message)
        return _following(digest, _canonical(identity))

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
        text, best = text_of(message.get("content")), (False, False, 0)
        for number in reversed(same):
            node = self.nodes[number]
            best = max(best, (text_of(node.message.get("content")) == text, node.delivered, number))
            if best[:2] == (True, True):
                break
        return best[2]

    def _last_token(self, number: int) -> int:
        return array("i", self.nodes[number].answer[-4:])[0]


def packed(ids: list[int]) -> bytes:
    """As int32, the way that nodes hold them."""
    return array("i", ids).tobytes()


def _following(conversation: Digest, identity: bytes) -> Digest:
    """Names a conversation with one more message."""
    return hashlib.blake2b(identity, key=conversation, digest_size=16).digest()


def _start(tools: list[Message]) -> Digest:
    return hashlib.blake2b(_canonical(tools), digest_size=16).digest()


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
