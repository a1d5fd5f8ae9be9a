"""Loss and gradients of packs are those of the definition, row by row, however the step is packed, shared and dealt."""

import dataclasses
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import close, of_packs, of_rows, prepared, random_groups, rank_main, scored_groups, tiny
from transcripts import node, transcript
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from harnessed.config import ConfigError
from harnessed.training.backends import attention, blocks, policy
from harnessed.training.backends.attention import attend_by_trees
from harnessed.training.backends.policy import distributions, distributions_at
from harnessed.training.batching import deal
from harnessed.training.packing import pack
from harnessed.training.samples import build

KINDS = ["qwen3", "llama"]


@pytest.fixture(scope="module")
def models():
    """A prepared model and the same one as transformers computes it, for each kind."""
    return {kind: (prepared(kind), tiny(kind)) for kind in KINDS}


def step(seed, **shape):
    rng = np.random.default_rng(seed)
    groups = random_groups(rng, **shape)
    return groups, rng.normal(size=sum(map(len, groups))).tolist()


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 40, 100, 10_000]), st.booleans(), st.sampled_from(KINDS))
def test_any_budget_shared_or_not_gives_the_loss_and_gradients_of_the_definition(models, seed, budget, share, kind):
    ours, plain = models[kind]
    weighted = scored_groups(*step(seed))
    assert close(of_packs(ours, pack(weighted, budget, share)), of_rows(plain, weighted))


@pytest.mark.parametrize(
    ("long", "queries", "kinds"),
    [(1, 1, {False}), (16, 7, {False, True}), (16, 64, {False, True}), (10_000, 256, {True})],
)
def test_long_runs_of_a_row_and_blocks_of_short_ones_give_the_same(models, monkeypatch, long, queries, kinds):
    monkeypatch.setattr(blocks, "LONG", long)
    monkeypatch.setattr(blocks, "QUERIES", queries)
    ours, plain = models["qwen3"]
    weighted = scored_groups(*step(3, groups=4, members=4, count=8, most=40))
    packs = pack(weighted, 2000, share=True) + pack(weighted, 2000, share=False)
    made = [blocks.blocks_of(each.positions, each.reach) for each in packs]
    assert {block.masked for pack_blocks in made for block in pack_blocks} == kinds
    for each, pack_blocks in zip(packs, made, strict=True):
        assert [block.begin for block in pack_blocks] == [0, *(block.end for block in pack_blocks[:-1])]
        assert pack_blocks[-1].end == len(each.tokens)
    loss, gradients = of_rows(plain, weighted)
    assert close(of_packs(ours, packs), (2 * loss, 2 * gradients))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_the_order_of_rollouts_does_not_matter(models, seed):
    ours, _ = models["qwen3"]
    groups, advantages = step(seed)
    chance = np.random.default_rng(seed)
    expected = of_packs(ours, pack(scored_groups(groups, advantages), 80, share=True))
    flat = dict(zip((sample.rollout for group in groups for sample in group), advantages, strict=True))
    mixed = [[group[i] for i in chance.permutation(len(group))] for group in groups][::-1]
    again = scored_groups(mixed, [flat[sample.rollout] for group in mixed for sample in group])
    assert close(of_packs(ours, pack(again, 80, share=True)), expected)


def split(sample, chance):
    """Each row with several answers becomes two: the second begins with the first and trains the answers after it."""
    rows = []
    for row in sample.rows:
        answers = np.unique(row.answers[row.trained])
        if len(answers) < 2:
            rows.append(row)
            continue
        later = np.isin(row.answers, answers[chance.integers(1, len(answers)) :])
        end = int(np.flatnonzero(row.trained & ~later)[-1]) + 1
        arrays = {
            f.name: value[:end]
            for f in dataclasses.fields(row)
            if isinstance(value := getattr(row, f.name), np.ndarray)
        }
        kept = sum(begin < end for begin in row.begins)
        first = dataclasses.replace(row, **arrays, path=row.path[:kept], begins=row.begins[:kept])
        rows += [first, dataclasses.replace(row, trained=row.trained & later)]
    return dataclasses.replace(sample, rows=rows)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["rollout", "token", "constant"]), st.booleans())
def test_rows_may_be_split_and_merged_at_answers(models, seed, normalisation, share):
    ours, _ = models["qwen3"]
    groups, advantages = step(seed, count=9)
    chance = np.random.default_rng(seed)
    parted = [[split(sample, chance) for sample in group] for group in groups]
    one, two = (scored_groups(each, advantages, normalisation, 50) for each in (groups, parted))
    assert close(of_packs(ours, pack(two, 150, share)), of_packs(ours, pack(one, 10_000, share)))


def test_only_normalisation_by_samples_depends_on_how_rows_are_split(models):
    ours, _ = models["qwen3"]
    nodes = [node(1, 0, [1, 2], [3, 96]), node(2, 1, [4], [5, 6, 96])]
    others = [build(transcript([node(1, 0, [1], [7, 96])], id=f"g.{i}")) for i in (1, 2)]
    groups = [[build(transcript(nodes)), *others]]
    parted = [[split(groups[0][0], np.random.default_rng(0)), *others]]
    assert len(parted[0][0].rows) == 2
    for normalisation in ("rollout", "token", "constant", "sample"):
        one, two = (scored_groups(each, [1.0, -1.0, 0.5], normalisation, 50) for each in (groups, parted))
        same = close(of_packs(ours, pack(two, 100, share=True)), of_packs(ours, pack(one, 100, share=True)))
        assert same == (normalisation != "sample")


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32))
def test_normalisation_by_samples_depends_on_nothing_else(models, seed):
    ours, plain = models["qwen3"]
    weighted = scored_groups(*step(seed), "sample")
    assert close(of_packs(ours, pack(weighted, 60, share=True)), of_rows(plain, weighted))


def test_one_to_four_processes_give_the_same_loss_and_gradients(models, tmp_path):
    groups, advantages = step(11)
    expected = of_packs(models["qwen3"][0], pack(scored_groups(groups, advantages), 60, share=True))
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["packed"])
    arguments = (str(tmp_path / "meet"), str(tmp_path / "results"), 11, 4)
    processes = [forked.Process(target=rank_main, args=(rank, *arguments)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    results = torch.load(tmp_path / "results")
    assert len(results) == 4
    for total in results:
        assert close((total[0].item(), total[1:]), expected)


def test_ranks_without_work_of_their_own_have_gradients_of_zero(models):
    ours, _ = models["qwen3"]
    groups, advantages = step(11)
    dealt = deal(pack(scored_groups(groups, advantages), 10_000, share=True), 4)
    loss, gradients = of_packs(ours, dealt[-1])
    assert not dealt[-1][0].trained_tokens
    assert loss == 0
    assert all(parameter.grad is not None for parameter in ours.parameters())
    assert not gradients.any()


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes_change_nothing_that_float32_shows(kind):
    ours = prepared(kind, torch.float32)
    weighted = scored_groups(*step(5, groups=2, members=4, count=8, most=40))
    shared, apart = (of_packs(ours, pack(weighted, 4000, share)) for share in (True, False))
    assert close(shared, apart, 1e-5)


def test_under_autocast_shared_and_unshared_rows_give_what_transformers_gives():
    ours, plain = prepared("qwen3", torch.float32), tiny("qwen3", torch.float32)
    weighted = scored_groups(*step(5, groups=2, members=4, count=8, most=60))
    exact, exact_gradients = of_rows(plain, weighted)
    with torch.autocast("cpu", torch.bfloat16):
        _, theirs = of_rows(plain, weighted)
        results = [of_packs(ours, pack(weighted, 4000, share)) for share in (True, False)]
    usual = (theirs - exact_gradients).norm()
    for loss, gradients in results:
        assert loss == pytest.approx(exact, rel=0.1)
        assert (gradients - exact_gradients).norm() < 1.5 * usual


def test_logits_in_parts_are_those_of_the_whole(models, monkeypatch):
    ours, _ = models["qwen3"]
    packs = pack(scored_groups(*step(2)), 10_000, share=True)
    whole = of_packs(ours, packs)
    monkeypatch.setattr(policy, "MOST_LOGITS", 97 * 5)
    assert close(of_packs(ours, packs), whole)


def test_entropies_are_those_of_the_distribution_and_have_a_gradient_where_asked(models):
    head = torch.nn.Linear(8, 5, bias=False, dtype=torch.float64)
    hidden = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    temperatures = torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)
    for asked in (True, False):
        _, entropies = distributions_at(head, hidden, torch.tensor([0, 1, 2]), temperatures, entropy_trained=asked)
        expected = torch.distributions.Categorical(logits=head(hidden) / temperatures[:, None]).entropy()
        assert torch.allclose(entropies, expected)
        assert entropies.requires_grad == asked


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mask_of_cuda_is_the_same(models, monkeypatch):
    """FlexAttention computes on CPUs as well, without gradients."""
    ours, _ = models["qwen3"]
    (only,) = pack(scored_groups(*step(4)), 10_000, share=True)
    cpu = torch.device("cpu")
    with torch.no_grad():
        expected, _ = distributions(ours, only, entropy_trained=False)
        mask = attention._block_mask(torch.from_numpy(only.reach))
        monkeypatch.setattr(attention, "_flex", lambda: attention.flex_attention)
        monkeypatch.setattr(policy, "seen", lambda *_: attention.seen(only, cpu) | {"trees": attention.Seen([], mask)})
        logprobs, _ = distributions(ours, only, entropy_trained=False)
    assert torch.allclose(logprobs, expected)


SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


def test_models_that_see_less_than_all_before_are_refused():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sliding = MistralForCausalLM(MistralConfig(**SMALL, **heads, sliding_window=8))
    with pytest.raises(ConfigError, match=r"policy\.model: .*MistralForCausalLM.*sliding_attention"):
        attend_by_trees(sliding)
    mixed = tiny(sliding_window=8, use_sliding_window=True, max_window_layers=1)
    with pytest.raises(ConfigError, match="sliding_attention"):
        attend_by_trees(mixed)
    attend_by_trees(MistralForCausalLM(MistralConfig(**SMALL, **heads, sliding_window=None)))


def test_models_without_attention_are_refused():
    with pytest.raises(ConfigError, match="MambaForCausalLM"):
        attend_by_trees(MambaForCausalLM(MambaConfig(**SMALL, state_size=4, conv_kernel=2)))


def test_models_that_compute_something_else_are_refused(monkeypatch):
    """A model whose layers add something to the scores that our attention does not know."""
    model = tiny()
    kept = attention.tree_attention

    def shifted(module, query, key, value, mask, **kwargs):
        return kept(module, query * 2, key, value, mask, **kwargs)

    monkeypatch.setattr(attention, "tree_attention", shifted)
    with pytest.raises(ConfigError, match="depends on more than"):
        attend_by_trees(model)


def test_models_with_positions_that_are_learned_work_too():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    attend_by_trees(model)
