"""What packing saves and costs: branches over one long prefix, and the bookkeeping of a step with very many rows.

    make benchmarks      or: python benchmarks/prefixes.py

One thread. Prints one table with each figure, its limit, and a baseline of the same run.
"""

import multiprocessing
import resource
import time
from array import array
from multiprocessing.connection import Connection

import numpy as np
import torch
from figures import Figure, tell
from transformers import Qwen3Config, Qwen3ForCausalLM

from harnessed.config import Advantage
from harnessed.records import Attempt, Node, Outcome, Purpose, Rollout, State, Transcript
from harnessed.training.advantages import advantages as advantages_of
from harnessed.training.backends.attention import attend_by_trees
from harnessed.training.backends.policy import distributions
from harnessed.training.batching import deal, scored
from harnessed.training.packing import Pack, Scored, pack
from harnessed.training.samples import Sample, build

VOCABULARY = 2048
BUDGET = 16_384
"""Of a micro-batch, as `trainer.micro_batch_tokens` is set by default."""
PREFIX, BRANCHES, BRANCH = 2_000, 8, 200
"""Tokens, number, tokens."""
GROUPS, MEMBERS, MOST_ROWS = 64, 8, 100
TURN = 20
"""Tokens of a segment in the conversations with many rows, and of an answer."""
EVERY = 20
"""One pack of so many is computed to know the time of the step."""


def model(hidden: int, layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    made = Qwen3ForCausalLM(config).eval()
    attend_by_trees(made)
    return made


def sample(name: str, nodes: list[Node], reward: float) -> Transcript:
    rollout = Rollout(
        id=name, run="r", group=name.rpartition(".")[0], index=0, purpose=Purpose.TRAIN, state=State.FINISHED,
        attempt=1, outcome=Outcome.OK, reward=reward, created=0.0,
    )  # fmt: skip
    return Transcript(rollout, [Attempt(1, nodes)])


def node(number: int, parent: int, segment: np.ndarray, answer: np.ndarray) -> Node:
    return Node(
        number=number, parent=parent, segment=segment.astype(np.int32).tobytes(),
        answer=answer.astype(np.int32).tobytes(), logprobs=array("f", [-6.9] * len(answer)).tobytes(),
        versions=bytes(4 * len(answer)), temperature=1.0, finish="stop", cut=0, delivered=True,
    )  # fmt: skip


def branches() -> list[list[list[Scored]]]:
    """One rollout: a prompt, and answers to it that were each dropped but the last, as best-of-n makes them."""
    chance = np.random.default_rng(0)
    first = node(1, 0, chance.integers(0, VOCABULARY, PREFIX - 1), chance.integers(0, VOCABULARY, 1))
    others = [node(i, 1, *chance.integers(0, VOCABULARY, (2, BRANCH // 2))) for i in range(2, BRANCHES + 2)]
    return [scored([build(sample("g.0", [first, *others], 1.0))], [1.0], "rollout")]


def compute(policy: Qwen3ForCausalLM, packs: list[Pack]) -> float:
    """CPU seconds of forward and backward passes: on one thread those that it takes, whatever else the machine does."""
    started = time.process_time()
    for each in packs:
        logprobs, _ = distributions(policy, each, entropy_trained=False)
        (logprobs * torch.from_numpy(each.weights * each.advantages)).sum().backward()
    return time.process_time() - started


def over_branches(told: Connection, share: bool, budget: int) -> None:
    """A process of its own, so that its peak is its own: seconds, MB."""
    torch.set_num_threads(1)
    policy = model(256, 4)
    packs = pack(branches(), budget, share)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = min(compute(policy, packs) for _ in range(2))
    told.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3))


def measured(share: bool, budget: int) -> tuple[float, float]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=over_branches, args=(there, share, budget))
    process.start()
    if not here.poll(600):
        raise TimeoutError("no result of the branches within ten minutes")
    result: tuple[float, float] = here.recv()
    process.join(30)
    return result


def measure_branches() -> list[Figure]:
    figures: list[Figure] = []
    for budget in (BUDGET, PREFIX + BRANCH):
        (apart_s, apart_mb), (shared_s, shared_mb) = measured(False, budget), measured(True, budget)
        what = f"{BRANCHES} branches over {PREFIX:,}, packs of {budget:,}"
        limits = (1 / 3, 1) if budget == BUDGET else (np.inf, np.inf)
        figures += [
            Figure(f"{what}: time, shared / not", shared_s / apart_s, limits[0], f"{apart_s:.1f} s"),
            Figure(f"{what}: memory, shared / not", shared_mb / apart_mb, limits[1], f"{apart_mb:.0f} MB"),
        ]
    return figures


def bushy(chance: np.random.Generator, prompt: np.ndarray, rows: int) -> list[Node]:
    """A conversation with so many rows: a line of turns, and answers beside it that were dropped."""
    nodes = [node(1, 0, prompt, chance.integers(0, VOCABULARY, TURN))]
    line = [1]
    for number in range(2, rows + 1 + rows // 4):
        turn = node(number, int(chance.choice(line)), *chance.integers(0, VOCABULARY, (2, TURN)))
        nodes.append(turn)
        if turn.parent == line[-1]:
            line.append(number)
    return nodes


def transcripts() -> list[list[Transcript]]:
    chance = np.random.default_rng(0)
    groups = []
    for group in range(GROUPS):
        prompt = chance.integers(0, VOCABULARY, 200)
        groups.append(
            [
                sample(f"g{group}.{i}", bushy(chance, prompt, int(chance.integers(1, MOST_ROWS))), float(i % 2))
                for i in range(MEMBERS)
            ]
        )
    return groups


def bookkeeping(groups: list[list[Transcript]]) -> tuple[list[list[Sample]], list[Pack], dict[str, float]]:
    """Everything of a step but the model's part, with CPU seconds for each part."""
    times = [time.process_time()]
    samples = [[build(each) for each in group] for group in groups]
    times.append(time.process_time())
    flat = [each for group in samples for each in group]
    rewards = [[sample.reward or 0.0 for sample in group] for group in samples]
    advantages = [each for group in advantages_of(rewards, Advantage()) for each in group]
    rows = iter(scored(flat, [*advantages], "rollout"))
    weighted = [[next(rows) for _ in group] for group in samples]
    times.append(time.process_time())
    packs = pack(weighted, BUDGET, share=True)
    times.append(time.process_time())
    deal(packs, 8)
    times.append(time.process_time())
    return samples, packs, dict(zip(("rows", "weights", "packs", "ranks"), np.diff(times).tolist(), strict=True))


def measure_step() -> list[Figure]:
    torch.set_num_threads(1)
    samples, packs, parts = bookkeeping(transcripts())
    rows = [row for group in samples for each in group for row in each.rows]
    trained, tokens = sum(int(row.trained.sum()) for row in rows), sum(len(row.tokens) for row in rows)
    policy = model(128, 2)  # the demo's
    some = packs[EVERY // 2 :: EVERY]
    seconds = compute(policy, some) * sum(len(p.tokens) for p in packs) / sum(len(p.tokens) for p in some)
    lost = trained - sum(each.trained_tokens for each in packs)
    size = f"{len(rows):,} rows of {GROUPS * MEMBERS} rollouts"
    spent = ", ".join(f"{name} {taken:.2f} s" for name, taken in parts.items())
    packed = sum(len(each.tokens) for each in packs)
    return [
        Figure(f"{size}: trained tokens that no pack holds", lost, 0, f"{trained:,} trained of {tokens:,}"),
        Figure(f"{size}: packed tokens for each in a row", packed / tokens, 1, f"{packed:,} in {len(packs)} packs"),
        Figure(f"{size}: bookkeeping against computing", sum(parts.values()) / seconds, 0.05, spent),
        Figure(f"the model's part of it, from {len(some)} packs: s", seconds, np.inf, f"{sum(parts.values()):.1f} s"),
    ]


def main() -> None:
    figures = measure_branches() + measure_step()
    tell(figures)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
