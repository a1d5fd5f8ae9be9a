"""What transcripts cost: rows, a long conversation in the gateway, a rollout in the store, the neighbours of giants.

    make benchmarks      or: python benchmarks/transcripts.py MODEL      (any folder with a real tokenizer)

Prints one table with each figure, its limit, and a baseline of the same run.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from figures import Figure, tell
from neighbours import measure_neighbours

from harnessed.gateway import lifecycle, recording
from harnessed.gateway.store import Store
from harnessed.gateway.template import ChatTemplate
from harnessed.gateway.transcript import Tree
from harnessed.gateway.wire.turn import Turn
from harnessed.records import Attempt, GroupSpec, Node, Outcome, Purpose, Rollout, RunSpec, State, Transcript
from harnessed.training.samples import build

WORDS = "the agent reads a file and runs the tests again because one of them failed with an error in line".split()


def conversation(template: ChatTemplate, turns: int, tokens: int) -> tuple[list[Node], float, int]:
    """An attempt of so many turns and tokens as the gateway records it, the seconds that it took, the bytes received.

    Each request repeats the whole history, as harnesses do; the engine's part is left out.
    """
    tree, messages, seconds, received = Tree(), [], 0.0, 0
    answer = [*template.encode(" ".join(WORDS * 5)), template.stop_ids[0]]
    text = " ".join(WORDS[i % len(WORDS)] for i in range(tokens // turns - len(answer) - 8))
    for number in range(1, turns + 1):
        messages.append({"role": "user", "content": f"{number} {text}"})
        body = orjson.dumps({"messages": messages})
        received += len(body)
        started = time.perf_counter()
        place = tree.place(orjson.loads(body)["messages"], [])
        tree.prove_delivered(place)
        segment = tree.segment(place, [], template)
        prompt = tree.context(segment.parent, segment.cut) + segment.ids
        orjson.dumps(array("i", prompt).tolist())
        node = Node(
            number=number,
            parent=segment.parent,
            segment=segment.ids,
            answer=array("i", answer).tobytes(),
            logprobs=array("f", [-0.5] * len(answer)).tobytes(),
            versions=array("i", [0] * len(answer)).tobytes(),
            temperature=1.0,
            finish="stop",
            cut=segment.cut,
            delivered=True,
            follows=place.follows,
            call=f"call{number}",
            messages=place.new,
            message={"role": "assistant", "content": template.text(answer, stopped=True)},
        )
        tree.add(node, place.prompt)
        seconds += time.perf_counter() - started
        messages.append(node.message)
    return list(tree.nodes.values()), seconds, received


def transcript(nodes: list[Node]) -> Transcript:
    rollout = Rollout(
        id="g.0", run="r", group="g", index=0, purpose=Purpose.TRAIN, state=State.FINISHED, attempt=1,
        outcome=Outcome.OK, reward=1.0, created=0.0,
    )  # fmt: skip
    return Transcript(rollout, [Attempt(1, nodes)])


def best_of(times: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def token_by_token(nodes: list[Node]) -> list[tuple[int, bool, float]]:
    """The same row in plain Python."""
    row: list[tuple[int, bool, float]] = []
    for node in nodes:
        row += [(int(token), False, 0.0) for token in np.frombuffer(node.segment, np.int32)]
        logprobs = np.frombuffer(node.logprobs, np.float32)
        row += [(int(t), True, float(p)) for t, p in zip(np.frombuffer(node.answer, np.int32), logprobs, strict=True)]
    return row


def rows(template: ChatTemplate) -> list[Figure]:
    figures: list[Figure] = []
    for turns, tokens in ((200, 100_000), (50, 64_000)):
        nodes, _, _ = conversation(template, turns, tokens)
        whole = transcript(nodes)
        built = len(build(whole).rows[0].tokens)
        ours, plain = best_of(5, lambda w=whole: build(w)), best_of(2, lambda n=nodes: token_by_token(n))
        what, baseline = (
            f"rows of {turns} turns, {built:,} tokens: ms per 1,000 tokens",
            f"{plain / ours:.0f}x in plain Python",
        )
        figures.append(Figure(what, ours / built * 1e6, 2, baseline))
    return figures


def long_conversation(template: ChatTemplate) -> list[Figure]:
    _, half, half_bytes = conversation(template, 100, 50_000)
    nodes, whole, whole_bytes = conversation(template, 200, 100_000)
    again = best_of(1, lambda: [template.encode(template.written(_context(nodes, n))) for n in range(1, 201)])
    growth = (whole / whole_bytes) / (half / half_bytes)
    return [
        Figure("gateway's work for 200 turns of 100k tokens: s", whole, 1, f"{again / whole:.0f}x encoding all again"),
        Figure("200 turns against 100: time per byte received", growth, 1.25, "1: linear"),
    ]


def _context(nodes: list[Node], turns: int) -> list[int]:
    return array("i", b"".join(node.segment + node.answer for node in nodes[:turns])).tolist()


async def stored(template: ChatTemplate, folder: Path) -> list[Figure]:
    nodes, _, received = conversation(template, 50, 64_000)
    database = folder / "gateway.db"
    store = Store(f"sqlite:///{database}")
    await store.write(lambda c: lifecycle.create_run(c, RunSpec(id="r", policy="p"), 0.0))
    await store.write(lambda c: lifecycle.create_groups(c, [GroupSpec(id="g", run="r", task={}, n=1)], 0.0))
    await store.write(lambda c: lifecycle.claim(c, "r", "me", 1, 1, 0.0))
    empty = _size(database)
    for node in nodes:
        await store.write(
            lambda c, n=node: recording.admit(
                c, ("g.0", 1), recording.Admitted(n.call, "", b"", 0, 0.0), Turn([], [], "m")
            )
        )
        await store.write(lambda c, n=node: recording.record_answers(c, ("g.0", 1), [n], [], "", 0.0, b""))
    read = []
    for _ in range(5):
        started = time.perf_counter()
        await store.read(lambda c: recording.load_transcript(c, "g.0"))
        read.append(time.perf_counter() - started)
    await store.close()
    size, ms = (_size(database) - empty) / 1e6, min(read) * 1e3
    tokens = sum(len(node.segment) // 4 + node.sampled for node in nodes)
    requests = f"{received / 1e6 / size:.0f}x the requests as they came"
    return [
        Figure(f"store of 50 turns, {tokens:,} tokens: MB", size, 3, requests),
        Figure("reading it back: ms", ms, 50),
    ]


def _size(database: Path) -> int:
    return sum(file.stat().st_size for file in database.parent.glob(database.name + "*"))


def main() -> None:
    parser = argparse.ArgumentParser(description="What transcripts cost.")
    parser.add_argument("model", type=Path, help="a policy's folder")
    model: Path = parser.parse_args().model
    template = ChatTemplate(model)
    with tempfile.TemporaryDirectory() as folder:
        figures = rows(template) + long_conversation(template) + asyncio.run(stored(template, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        figures += measure_neighbours(model.resolve(), Path(folder))
    tell(figures)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
