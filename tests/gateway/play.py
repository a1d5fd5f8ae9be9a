"""An attempt played on the tree alone: requests in, nodes out, and a log of what an engine would have been given."""

import json
from array import array
from dataclasses import dataclass, field

from policies import make_policy
from texts import STOP, ids

from harnessed.gateway.splits import by_text
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.transcript import Tree
from harnessed.records import Attempt, Node, Outcome, Purpose, Rollout, State, Transcript


def packed(values) -> bytes:
    return array("i", values).tobytes()


def make_node(number, parent, segment, sampled, **fields) -> Node:
    """A delivered answer; further fields as given."""
    defaults = {"temperature": 1.0, "finish": "stop", "cut": 0, "delivered": True}
    return Node(
        number=number,
        parent=parent,
        segment=packed(segment),
        answer=packed(sampled),
        logprobs=array("f", [-1.0] * len(sampled)).tobytes(),
        versions=packed([0] * len(sampled)),
        **defaults | fields,
    )


@dataclass
class Play:
    template: ChatTemplate
    tree: Tree = field(default_factory=Tree)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    """Node -> the tokens that the engine was given for it."""
    by_template: bool = False
    """As with `history: template`."""

    @classmethod
    def on(cls, folder, stops=(STOP,)) -> "Play":
        policy = make_policy(folder)
        (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops)}))
        return cls(ChatTemplate(policy))

    def ask(self, messages, text="ok", *, tools=(), stop=STOP, delivered=True, calls=(), sampled=None) -> Node:
        """The node of a request whose sampled answer has this text, or these tokens; `stop=None`: it was cut."""
        place = self.tree.place(list(messages), list(tools))
        self.tree.prove_delivered(place)
        if self.by_template:
            segment = by_text(self.tree, place, list(messages), list(tools), self.template)
        else:
            segment = self.tree.segment(place, list(tools), self.template)
        prompt = array("i", self.tree.context(segment.parent, segment.cut) + segment.ids).tolist()
        if sampled is None:
            sampled = ids(text) + ([] if stop is None else [stop])
        else:
            text = self.template.text(sampled, stopped=True)
        message = {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})
        node = make_node(
            len(self.tree.nodes) + 1,
            segment.parent,
            array("i", segment.ids),
            sampled,
            finish="length" if stop is None else "stop",
            cut=segment.cut,
            delivered=delivered,
            call=f"call {len(self.tree.nodes) + 1}",
            follows=place.follows,
            split=segment.split,
            messages=place.new,
            message=message,
            tools=[] if place.follows else list(tools),
        )
        self.prompts[node.number] = prompt
        self.tree.add(node, place.prompt)
        return node

    def parents(self) -> list[int]:
        return [node.parent for node in self.tree.nodes.values()]

    def reload(self) -> None:
        """As after a restart of the gateway."""
        self.tree = Tree.of(list(self.tree.nodes.values()))

    def transcript(self) -> Transcript:
        rollout = Rollout(
            id="g.0",
            run="r",
            group="g",
            index=0,
            purpose=Purpose.TRAIN,
            state=State.FINISHED,
            attempt=1,
            outcome=Outcome.OK,
            reward=1.0,
            created=0.0,
        )
        return Transcript(rollout, [Attempt(1, list(self.tree.nodes.values()))])
