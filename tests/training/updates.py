"""Optimiser steps to take in tests of backends, and what to compare afterwards."""

from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from safetensors.torch import load_file
from transcripts import node, transcript

from harnessed.config import Objective
from harnessed.training.batching import scored
from harnessed.training.packing import pack
from harnessed.training.samples import build


def rollouts(number=0):
    """Two rollouts with advantages, one of them with two rows; other tokens for each number."""
    chance = np.random.default_rng(number)

    def answer(length):
        return [*chance.integers(1, 250, length - 1).tolist(), 258]

    first = [
        node(1, 0, [1, 2 + number], answer(3)),
        node(2, 1, [4], answer(4)),
        node(3, 1, [4, 4], answer(2)),
    ]
    second = [node(1, 0, [1], answer(3))]
    return [build(transcript(first, id="g.0")), build(transcript(second, id="g.1", reward=0.0))], [1.5, -0.5]


def groups_of(rewards):
    """Samples of a group for each pair of rewards."""
    return [
        [build(transcript([node(1, 0, [1], [2, 3 + i, 258])], id=f"g{g}.{i}", reward=r)) for i, r in enumerate(pair)]
        for g, pair in enumerate(rewards)
    ]


def step(number=0, budget=1000, advantages=None):
    """The packs of one optimiser step."""
    samples, usual = rollouts(number)
    return pack([scored(samples, advantages or usual, "rollout")], budget, share=True)


def train(backend, numbers, objective=None, standing_still=None):
    """Updates of one optimiser step each."""
    for number in numbers:
        assert take(backend, [step(number)], objective, standing_still).applied


def take(backend, steps, objective=None, standing_still=None):
    return backend.update(steps, objective or Objective(), standing_still or nullcontext())


def served(folder):
    """What an engine maps, as it is now: [values]."""
    return torch.from_numpy(np.fromfile(folder / "weights.bin", np.float32))


def kept(checkpoint):
    """The weights that transformers loads from a checkpoint."""
    return load_file(checkpoint / "model.safetensors")


@contextmanager
def watching(folder, seen):
    """In place of an engine that stands still: appends what it would see before and after the write."""
    seen.append(served(folder))
    yield
    seen.append(served(folder))
