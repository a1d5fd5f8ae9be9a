"""Random groups, tiny models, and the loss and gradients of packs: for the tests of packing."""

import os

import numpy as np
import torch
import torch.distributed as dist
from transcripts import node, transcript
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from harnessed.config import Importance, Objective
from harnessed.training.backends.attention import attend_by_trees
from harnessed.training.backends.policy import distributions
from harnessed.training.batching import deal, scored
from harnessed.training.losses import Terms, objective_loss
from harnessed.training.packing import Pack, pack
from harnessed.training.samples import build

VOCABULARY = 97
STOP = 96


def tiny(kind="qwen3", dtype=torch.float64, **settings):
    """Two layers; two heads share each key head."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,  # logits that tell tokens apart
    } | settings
    model = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
    }[kind]()
    return model.to(dtype).eval()


def prepared(kind="qwen3", dtype=torch.float64):
    model = tiny(kind, dtype)
    attend_by_trees(model)
    return model


def random_nodes(rng, start, count, most=9):
    """A transcript of any shape: answers that were dropped, sub-agents with a prompt that begins alike, cut stops."""
    nodes = []
    for number in range(1, count + 1):
        parent = int(rng.choice([0, *(each.number for each in nodes if each.delivered)]))
        segment = rng.integers(0, STOP, int(rng.integers(0, most)) + (not parent)).tolist()
        answer = [*rng.integers(0, STOP, int(rng.integers(1, most))).tolist(), STOP]
        nodes.append(
            node(
                number,
                parent,
                segment if parent else start[: int(rng.integers(0, len(start) + 1))] + segment,
                answer,
                # About those of a uniform distribution, so that clipping acts.
                logprobs=rng.normal(-4.6, 0.3, len(answer)).tolist() if rng.random() < 0.9 else [],
                temperature=float(rng.choice([1.0, 0.7])),
                cut=int(parent > 0 and rng.random() < 0.3),
                delivered=rng.random() < 0.95,
            )
        )
    return nodes


def random_groups(rng, groups=2, members=3, count=6, most=9):
    """Samples of each group."""
    made = []
    for group in range(groups):
        start = rng.integers(0, STOP, int(rng.integers(1, 40))).tolist()
        nodes = [random_nodes(rng, start, int(rng.integers(0, count + 1)), most) for _ in range(members)]
        made.append([build(transcript(each, id=f"g{group}.{member}")) for member, each in enumerate(nodes)])
    return made


def scored_groups(groups, advantages, normalisation="rollout", constant=None):
    """Rows by group and sample, weighted over all groups."""
    flat = [sample for group in groups for sample in group]
    rows = iter(scored(flat, advantages, normalisation, constant))
    return [[next(rows) for _ in group] for group in groups]


def loss_of(logprobs, engine, advantages, weights):
    """pi_old is the engine's: ratios are far from 1, and some are clipped."""
    as_real = [x.to(logprobs.dtype) for x in (engine, engine + 0.1, advantages, weights)]
    terms = Terms(
        logprobs, *as_real, answers=torch.zeros(len(logprobs), dtype=torch.int64), entropies=logprobs.detach()
    )
    return objective_loss(terms, Objective(importance=Importance(cap=1.05)))[0]


def gradients(model):
    zeros = torch.zeros_like
    return torch.cat([(zeros(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def of_packs(model, packs: list[Pack]):
    """Loss and gradients [parameters], summed over packs."""
    model.zero_grad()
    total = 0.0
    for each in packs:
        logprobs, _ = distributions(model, each, entropy_trained=False)
        inputs = (each.engine_logprobs, each.advantages, each.weights)
        loss = loss_of(logprobs, *map(torch.from_numpy, inputs))
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def of_rows(model, groups):
    """The same from the definition: every row alone, by attention as transformers has it."""
    model.zero_grad()
    total = 0.0
    for each in (row for group in groups for sample in group for row in sample):
        row = each.row
        at = torch.from_numpy(np.flatnonzero(row.trained))
        logits = model(input_ids=torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
        logits = logits / torch.from_numpy(row.temperatures).roll(-1)[:, None].to(logits.dtype)
        logprobs = torch.log_softmax(logits, -1)[at - 1, torch.from_numpy(row.tokens)[at].long()]
        inputs = (row.logprobs, each.advantages, each.weights)
        loss = loss_of(logprobs, *(torch.from_numpy(x)[at] for x in inputs))
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def close(one, other, relative=1e-6):
    """Losses and gradients agree."""
    scale = max(abs(other[0]), other[1].norm().item(), 1e-12)
    return abs(one[0] - other[0]) <= relative * scale and (one[1] - other[1]).norm().item() <= relative * scale


def rank_main(rank, file, out, seed, most):
    """One of `most` processes: loss and gradients with 1, 2, ... ranks, each with its dealt packs, by all-reduce."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=most)
    model = prepared()
    rng = np.random.default_rng(seed)
    groups = random_groups(rng)
    weighted = scored_groups(groups, rng.normal(size=6).tolist())
    results = []
    for ranks in range(1, most + 1):
        members = dist.new_group(list(range(ranks)))
        if rank < ranks:
            loss, grads = of_packs(model, deal(pack(weighted, 60, share=True), ranks)[rank])
            total = torch.cat([torch.tensor([loss], dtype=torch.float64), grads])
            dist.all_reduce(total, group=members)
            results.append(total)
    dist.destroy_process_group()
    if rank == 0:
        torch.save(results, out)
    os._exit(0)  # no interpreter shutdown: gloo's threads may outlive it
