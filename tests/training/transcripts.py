"""Transcripts for tests of the training side, made without a gateway."""

from array import array

from harnessed.records import Attempt, Node, Outcome, Purpose, Rollout, State, Transcript


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def node(number, parent, segment, answer, *, delivered=True, logprobs=None, version=0, temperature=1.0, cut=0) -> Node:
    logprobs = [-0.5 - 0.01 * i for i in range(len(answer))] if logprobs is None else logprobs
    return Node(
        number=number,
        parent=parent,
        segment=ints(*segment),
        answer=ints(*answer),
        logprobs=array("f", logprobs).tobytes(),
        versions=ints(*[version] * len(answer)),
        temperature=temperature,
        finish="stop",
        cut=cut,
        delivered=delivered,
    )


def rollout(id="g.0", *, outcome=Outcome.OK, reward=1.0, attempt=1, purpose=Purpose.TRAIN) -> Rollout:
    return Rollout(
        id=id,
        run="r",
        group=id.rpartition(".")[0],
        index=0,
        purpose=purpose,
        state=State.FINISHED,
        attempt=attempt,
        outcome=outcome,
        reward=reward,
        created=0.0,
    )


def transcript(nodes: list[Node], **settings) -> Transcript:
    return Transcript(rollout(**settings), [Attempt(1, nodes)])
