"""Cases at the edge of what docs/algorithms.md says, each of which was wrong once."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import close, of_packs, of_rows, scored_groups, tiny
from policies import add_model, make_policy
from test_packing import trained_by_packs, trained_by_rows
from transcripts import node, transcript
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from harnessed.config import Advantage, ConfigError, Objective, Trainer
from harnessed.loading import load
from harnessed.records import Fate, Overlong
from harnessed.training.advantages import all_equal
from harnessed.training.backends.attention import attend_by_trees
from harnessed.training.backends.critic import Critic
from harnessed.training.losses import policy_objective
from harnessed.training.marking import by_call
from harnessed.training.packing import pack
from harnessed.training.samples import Bound, build

STOP = 96
CUTS = [Overlong.TRUNCATE, Overlong.DROP]


def test_a_prompt_ends_where_an_answer_was_a_stop_alone():
    """Nothing of the answer 1 stands in the rows that cut its stop off, and what follows it belongs to each alone."""
    start = [1, 2, 3, 4]
    nodes = [
        node(1, 0, start, [STOP]),
        node(2, 1, [5, 6, 7, 8], [9], cut=1),
        node(3, 1, [10, 11, 12], [13], cut=1),
        node(4, 1, [16], [17]),
    ]
    other = [node(1, 0, [*start, 5, 6, 7, 8, 14], [15])]
    samples = [build(transcript(each, id=f"g.{i}")) for i, each in enumerate((nodes, other))]
    groups = scored_groups([samples], [1.0, -1.0])
    assert trained_by_packs(pack(groups, 1000, share=True)) == trained_by_rows(groups)


def alike(rng, count):
    """Nodes whose tokens are few, so that what differs often looks the same; answers may be a stop alone."""
    nodes = []
    for number in range(1, count + 1):
        parent = int(rng.integers(0, min(number, 3)))
        segment, answer = (rng.integers(0, 2, int(rng.integers(0, most))).tolist() for most in (4, 2))
        made = node(number, parent, segment or [1], [*answer, STOP])
        made.cut, made.apart = int(parent > 0 and rng.random() < 0.6), "side_call" if rng.random() < 0.2 else ""
        nodes.append(made)
    return nodes


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 20, 40, 1000]), st.none() | st.integers(1, 25), st.sampled_from(CUTS))
def test_tokens_that_look_alike_are_not_mistaken_for_shared_ones(seed, budget, tokens, overlong):
    rng = np.random.default_rng(seed)
    bound = Bound(tokens, overlong)
    samples = [build(transcript(alike(rng, int(rng.integers(2, 8))), id=f"g.{i}"), bound) for i in range(3)]
    groups = scored_groups([samples], rng.normal(size=3).tolist())
    assert trained_by_packs(pack(groups, budget, share=True)) == trained_by_rows(groups)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_models_whose_positions_depend_on_the_longest_row_of_a_pack_are_refused(kind):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0} | (factors if kind == "longrope" else {})
    with pytest.raises(ConfigError, match=rf"its positions \({kind}\)"):
        attend_by_trees(tiny("llama", rope_parameters=rope, max_position_embeddings=64))
    attend_by_trees(tiny("llama", rope_parameters=rope | {"rope_type": "linear"}, max_position_embeddings=64))


SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "model",
    [
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25, eos_token_id=STOP)),
    ],
)
def test_models_that_scale_their_logits_are_refused(model):
    """The trainer multiplies hidden states with the output layer, and would train another distribution."""
    with pytest.raises(ConfigError, match="it scales or bounds its logits"):
        attend_by_trees(model())


@pytest.mark.parametrize(
    "model",
    [
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=64)),
        lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    ],
)
def test_models_with_other_names_for_their_parts_are_trained(model):
    ours, plain = model().double().eval(), model().double().eval()
    plain.load_state_dict(ours.state_dict())
    attend_by_trees(ours)
    samples = [build(transcript([node(1, 0, [1, 2, 3, i], [4, STOP])], id=f"g.{i}")) for i in (0, 1)]
    groups = scored_groups([samples], [1.0, -1.0])
    assert close(of_packs(ours, pack(groups, 100, share=True)), of_rows(plain, groups))


def test_a_call_counts_once_in_the_critics_loss_in_however_many_packs_its_answers_are(tmp_path):
    """Two answers to one request, in rows of their own, and another call."""
    nodes = [node(1, 0, [1, 2], [3, STOP]), node(2, 0, [1, 2], [4, STOP]), node(3, 0, [5], [6, STOP])]
    nodes[0].call = nodes[1].call = "two answers"
    sample = build(transcript(nodes))
    assert len(sample.calls) == 2
    critic = Critic(add_model(make_policy(tmp_path / "policy")), Trainer(advantage=Advantage(kind="gae")))
    losses = []
    for budget in (1000, 1):
        packs = by_call([[sample]], Trainer(micro_batch_tokens=budget, share_prefixes=False))
        losses.append(sum(loss.item() for loss in critic._losses(packs, np.zeros(2), np.array([1.0, 2.0]))))
    assert losses == [pytest.approx((1 + 4) / 2)] * 2


def test_a_side_call_that_is_too_long_ends_no_run():
    """It is no training row. Harnesses ask for a title with all that was said so far."""
    nodes = [node(1, 0, [1, 2], [3, STOP]), node(2, 0, [4] * 20, [5, STOP])]
    nodes[1].apart = Fate.SIDE_CALL
    sample = build(transcript(nodes), Bound(8, Overlong.FAIL))
    assert [row.path for row in sample.rows] == [(1,)]
    assert sample.fates == {Fate.TRAINED: 2, Fate.SIDE_CALL: 2}


def test_greedy_answers_are_not_trained_on():
    """The engine says that their probability is 1, and the trainer has no such distribution."""
    with pytest.raises(ConfigError, match=r"sampling\.temperature: greedy answers cannot be trained on"):
        load(Path("examples/demo/demo.yaml"), ["sampling.temperature=0"])
    assert load(Path("examples/demo/demo.yaml"), ["evaluation.sampling.temperature=0"]).evaluation.sampling


def test_rewards_that_differ_by_rounding_are_equal():
    assert all_equal([[0.1 + 0.2], [0.3]])
    assert not all_equal([[0.3], [0.3001]])


def test_side_calls_are_calls():
    """An evaluator that knows the answers that the harness got has a reward for each of them."""
    nodes = [node(1, 0, [1], [2, STOP]), node(2, 0, [3], [4, STOP])]
    nodes[0].apart = Fate.SIDE_CALL
    assert build(transcript(nodes)).calls == [[1], [2]]


def test_a_token_counts_as_clipped_where_the_bound_is_what_counts():
    """Ratios e^-1 and e^1, each with both signs of A: two of the four have the unclipped term as the smaller one."""
    log_ratio = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    terms = SimpleNamespace(advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]), answers=torch.arange(4))
    _, counts = policy_objective(log_ratio, terms, Objective())
    assert (counts["clip_fraction_low"], counts["clip_fraction_high"]) == (1, 1)
