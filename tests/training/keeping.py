"""Checkpoints with next to nothing in them, and processes that keep them until they are killed."""

import itertools
import os
import random
import signal

import torch
from safetensors.torch import save_file

from harnessed.training.backends.checkpoint import appearing, write_training
from harnessed.training.checkpoints import Checkpoints


def write(folder, size=2000):
    with appearing(folder) as unfinished:
        write_training(unfinished, {"step": int(folder.name[-5:])}, {"moments": torch.zeros(size)})
        save_file({"weights": torch.zeros(size)}, unfinished / "model.safetensors")


def opened(folder, keep=2, keep_best=1, note=print):
    return Checkpoints(folder, keep=keep, keep_best=keep_best, note=note)


def keep_on(folder, say):
    """Saves and scores until it is killed."""
    checkpoints = opened(folder)
    draw = random.Random(os.getpid())
    newest = checkpoints.newest()
    for step in itertools.count(int(newest.name[-5:]) + 1 if newest else 1):
        checkpoints.save(step, write)
        say.send(step)
        checkpoints.scored(step, draw.random())


def die_removing(folder):
    unlink = os.unlink

    def once(*arguments, **more):
        unlink(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    os.unlink = once
    opened(folder, keep=1).save(20, write)
