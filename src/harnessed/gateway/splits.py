"""Contexts that others made: where they follow the transcript, and why they leave it.

With `history: exact` a request goes on from the tokens of the answer that it repeats (`transcript.py`). Here the
deployed template (`history: template`), an engine that only speaks chat, or a harness (bare prompts) made the context.
It follows the deepest answer, of *all* branches, that it repeats to the last character or token; where that is not the
answer that the messages repeat, the conversation goes on in a new row, and the kind of the split is kept with the node.
`intake.py` calls this.
"""

from array import array
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from harnessed.gateway.matching import as_delivered
from harnessed.gateway.template import ChatTemplate, Messages
from harnessed.gateway.transcript import Place, Segment, Tree, packed
from harnessed.records import Node, Split

Text = TypeVar("Text", str, bytes)


class _Reached(NamedTuple):
    end: int
    """Of what the context repeats, in characters or bytes."""
    meant: bool
    """The node belongs to the conversation that the request follows: preferred to its equals."""
    node: int
    cut: int


def by_text(tree: Tree, place: Place, messages: Messages, tools: Messages, template: ChatTemplate) -> Segment:
    """The context is what the template writes for all messages. Raises TemplateError."""
    return by_written(tree, place, template.render(messages, tools), template)


def by_written(tree: Tree, place: Place, text: str, template: ChatTemplate, *, bare: bool = False) -> Segment:
    """The context is this text, special tokens and all. `bare`: a harness wrote it, and no messages say what it
    repeats."""

    def pieces(node: Node) -> tuple[str, str, str]:
        if node.number not in tree.texts:
            tree.texts[node.number] = _texts(node, template)
        return tree.texts[node.number]

    reached = _deepest(tree, place, text, pieces, bare)
    split = _split(tree, place, reached.node, lambda: text, template)
    return Segment(reached.node, template.encode(text[reached.end :]).tobytes(), reached.cut, split)


def by_ids(tree: Tree, place: Place, ids: list[int], template: ChatTemplate, *, bare: bool = False) -> Segment:
    """The context is these tokens, which an engine made of the messages or a harness gave (`bare`)."""
    context = packed(ids)

    def pieces(node: Node) -> tuple[bytes, bytes, bytes]:
        stopped = array("i", node.answer[-4:])[0] in template.stop_ids
        return node.segment, node.answer, node.answer[:-4] if stopped else b""

    reached = _deepest(tree, place, context, pieces, bare)
    split = _split(tree, place, reached.node, lambda: template.written(ids), template)
    return Segment(reached.node, context[reached.end :], reached.cut, split)


def _texts(node: Node, template: ChatTemplate) -> tuple[str, str, str]:
    sampled = array("i", node.answer).tolist()
    return (
        template.written(array("i", node.segment).tolist()),
        template.written(sampled),
        template.written(sampled[:-1]) if sampled[-1] in template.stop_ids else "",
    )


def _deepest(
    tree: Tree, place: Place, context: Text, pieces: Callable[[Node], tuple[Text, Text, Text]], bare: bool
) -> _Reached:
    """`pieces` gives a node's segment, its answer, and the answer without a stop that history may write differently.

    Who repeats an answer has got it; an equal one that nobody got is not meant. Of a `bare` prompt nothing else shows
    that an answer arrived, where the gateway died before it had noted that, or another one has not noted it yet.
    """
    meant = set(tree.conversation(place.follows))
    best = _Reached(0, False, 0, 0)
    ends = [best]
    while ends:
        before = ends.pop()
        best = max(best, before)
        arrived: list[_Reached] = []
        unproven: list[_Reached] = []
        for number in tree.children.get(before.node, ()):
            node = tree.nodes[number]
            if node.cut != before.cut:
                continue
            segment, answer, unstopped = pieces(node)
            if not context.startswith(segment, before.end):
                continue
            start = before.end + len(segment)
            for sampled, cut in ((answer, 0), (unstopped, 1)):
                if sampled and context.startswith(sampled, start):
                    reached = _Reached(start + len(sampled), number in meant, number, cut)
                    (arrived if node.delivered else unproven).append(reached)
        ends += arrived or (unproven if bare else [])
    return best


def _split(tree: Tree, place: Place, reached: int, text: Callable[[], str], template: ChatTemplate) -> str:
    """Why a context, given as text, leaves an answer that the request repeats; empty if it does not."""
    if place.known:
        return Split.EDITED
    followed = set(tree.path(reached))
    left = next((number for number in tree.conversation(place.follows) if number not in followed), None)
    if left is None:
        return ""
    if text().startswith(template.written(array("i", tree.context(left)).tolist())):
        return Split.RETOKENISED
    if not as_delivered(tree.repeated(place, left), tree.nodes[left].message):
        return Split.EDITED
    return Split.TEMPLATE
