"""Sampling, in this process, against a plain forward pass of one sequence."""

import math
import random
from collections import Counter

import pytest
import torch
from plain import assert_plain, make, prompts, run
from running_engine import VOCABULARY
from transformers import MistralConfig, MistralForCausalLM

from harnessed.engine import generate
from harnessed.engine.generate import Batch, Sequence, joinable


def test_logprobs_are_those_of_a_plain_forward_whatever_the_lengths(model):
    for i, sequence in enumerate(run(model, [make(p, i, max_tokens=1 + i) for i, p in enumerate(prompts(20))])):
        assert len(sequence.tokens) == 1 + i
        assert_plain(model, sequence)


def test_logprobs_are_those_of_the_tempered_distribution(model):
    for sequence in run(model, [make(p, temperature=t) for p, t in zip(prompts(4), (0.3, 0.7, 1.3, 3), strict=True)]):
        assert_plain(model, sequence)


def test_sequences_that_join_and_leave_a_growing_batch_do_not_disturb_it(model):
    lengths = random.Random(1)
    waves = [[make(p, i, lengths.randint(3, 40)) for p in prompts(3, i, longest=60)] for i in range(8)]
    for sequence in run(model, *waves):
        assert_plain(model, sequence)


def test_a_prompt_longer_than_a_prefill_part_changes_nothing(model):
    sequences = run(model, [make(p) for p in [*prompts(3), *prompts(2, 1, 900, 1100)]])
    for sequence in sequences:
        assert_plain(model, sequence)


def test_a_model_with_a_sliding_window_generates_as_in_a_plain_forward():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        initializer_range=0.3,
    )
    model = MistralForCausalLM(config).eval()
    assert not joinable(model)
    for i, sequence in enumerate(run(model, [make(p, i, 4 + 4 * i) for i, p in enumerate(prompts(6))])):
        assert len(sequence.tokens) == 4 + 4 * i
        assert_plain(model, sequence)


def test_an_answer_is_the_same_alone_and_among_others(model):
    mine = prompts(1, 7)[0]
    [alone] = run(model, [make(mine, 5, 20)])
    among = run(model, [make(p, i, 30) for i, p in enumerate(prompts(9))], [make(mine, 5, 20)], [make(mine, 6, 20)])
    assert among[9].tokens == alone.tokens
    assert among[9].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert among[10].tokens != alone.tokens, "another seed"


def test_the_rollouts_of_a_group_share_a_prompt_and_not_an_answer(model):
    group = run(model, [make(p, seed) for p in prompts(3) for seed in range(8)])
    assert len({tuple(sequence.tokens) for sequence in group}) == 24
    for sequence in group:
        assert_plain(model, sequence)


def test_greedy_takes_the_likeliest_token_with_logprob_0_beside_sampled_neighbours(model):
    greedy, sampled = run(model, [make(p, temperature=t) for p, t in zip(prompts(2), (0, 1), strict=True)])
    with torch.inference_mode():
        ids = torch.tensor([greedy.prompt + greedy.tokens])
        likeliest = model(input_ids=ids).logits[0, len(greedy.prompt) - 1 : -1].argmax(-1).tolist()
    assert greedy.tokens == likeliest
    assert greedy.logprobs == [0.0] * 12
    assert_plain(model, sampled)


def test_a_stop_token_ends_the_answer_and_belongs_to_it(model):
    [free] = run(model, [make([1, 2, 3], max_tokens=12)])
    stop = free.tokens[5]
    [stopped] = run(model, [make([1, 2, 3], max_tokens=12, stop=[stop])])
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (stopped.finish, free.finish) == ("stop", "length")


def test_tokens_come_as_often_as_their_probability_says(model):
    temperature, draws = 0.7, 4000
    sequences = run(model, [make([3, 1, 4], seed, 1, temperature) for seed in range(draws)])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[3, 1, 4]])).logits[0, -1]
    expected = torch.softmax(logits / temperature, -1) * draws
    found = torch.bincount(torch.tensor([sequence.tokens[0] for sequence in sequences]), minlength=VOCABULARY)
    frequent = expected >= 5  # the rest is one class, as the test of Pearson asks
    expected = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
    found = torch.cat([found[frequent], found[~frequent].sum()[None]])
    statistic = ((found - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    assert freedom > 5, "the model is too sure of itself for this test"
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, f"chi-square {statistic:.1f} with {freedom} degrees"


@torch.inference_mode()
def nucleus(model, ids, temperature, top_p):
    """The probability of each token in it, by a plain walk from the likeliest."""
    probabilities = torch.softmax(model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature, -1)
    kept, total = {}, 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if total >= top_p:
            break
        kept[token] = probabilities[token].item()
        total += kept[token]
    return {token: probability / total for token, probability in kept.items()}


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.9), (0.5, 0.7), (2.0, 0.3), (1.0, 0.999)])
def test_top_p_samples_from_the_fewest_likeliest_tokens_with_their_own_logprobs(model, temperature, top_p):
    for sequence in run(model, [make(p, i, 8, temperature, top_p=top_p) for i, p in enumerate(prompts(6))]):
        for i, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
            kept = nucleus(model, sequence.prompt + sequence.tokens[:i], temperature, top_p)
            assert logprob == pytest.approx(math.log(kept[token]), abs=1e-5)


def test_tokens_of_the_nucleus_come_as_often_as_their_probability_in_it_says(model):
    draws = 4000
    sequences = run(model, [make([3, 1, 4], seed, 1, 1.5, top_p=0.8) for seed in range(draws)])
    kept = nucleus(model, [3, 1, 4], 1.5, 0.8)
    found = Counter(sequence.tokens[0] for sequence in sequences)
    assert found.keys() == kept.keys()
    assert len(kept) > 2
    for token, probability in kept.items():
        assert abs(found[token] - draws * probability) < 4 * (draws * probability) ** 0.5


def test_rows_without_top_p_keep_every_bit_beside_rows_with_it(model):
    def batch(top_p):
        return [make(p, i, 12, 0.7 if i % 4 else 0, top_p=top_p if i % 2 else 1.0) for i, p in enumerate(prompts(12))]

    for i, (with_it, without) in enumerate(zip(run(model, batch(0.5)), run(model, batch(1.0)), strict=True)):
        if i % 2 == 0:
            assert (with_it.tokens, with_it.logprobs) == (without.tokens, without.logprobs)
        else:
            assert with_it.logprobs != without.logprobs


def test_weights_that_are_not_finite_are_an_error_and_no_token(model):
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    for top_p in (1.0, 0.5):
        with pytest.raises(FloatingPointError, match="weights hold infinite or undefined values"):
            Batch(model).advance([make([1], top_p=top_p)], lambda: True)


def test_a_batch_stops_for_each_end_and_for_whoever_asks(model):
    short, long = make([1], max_tokens=3), make([2], max_tokens=30)
    others = [make([3], max_tokens=50) for _ in range(6)]
    batch = Batch(model)
    batch.advance([short, long, *others], lambda: len(long.tokens) == 2)
    assert len(short.tokens) == 2, "asked"
    batch.advance([], lambda: False)
    assert (short.finish, len(long.tokens)) == ("length", 3)
    batch.advance([], lambda: False)
    assert (long.finish, len(others[0].tokens)) == ("length", 30)


def test_prompts_that_are_interrupted_are_not_computed_to_their_end(model, monkeypatch):
    """Neither the next part of one long prompt, nor the prompts after it; what grows goes on."""
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 64)
    grows, long, short, longest = (make(prompts(1, i, n, n)[0], max_tokens=9) for i, n in enumerate((5, 300, 50, 400)))
    batch, computed = Batch(model), []
    forward = model.forward

    def counted(input_ids, **more):
        computed.append(input_ids.shape[1])
        long.interrupted = longest.interrupted = computed[-1] > 1 and computed.count(64) == 2
        return forward(input_ids=input_ids, **more)

    batch.advance([grows], lambda: True)
    monkeypatch.setattr(model, "forward", counted)
    batch.advance([long, short, longest], lambda: True)
    assert computed == [1, 50, 64, 64]
    assert [(row.finish, len(row.tokens)) for row in (long, longest)] == [("interrupted", 0)] * 2
    while not (grows.finish and short.finish):
        batch.advance([], lambda: False)
    assert_plain(model, grows)
    assert_plain(model, short)


def test_a_long_prompt_is_computed_in_parts(model, monkeypatch):
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 64)
    [sequence] = run(model, [make(prompts(1, 7, 300, 300)[0], max_tokens=9)])
    assert_plain(model, sequence)


def test_what_is_gone_on_with_draws_the_numbers_that_come_next(model):
    [whole] = run(model, [make(prompts(1, 3, 20, 20)[0], max_tokens=30)])
    for cut in (1, 7, 29):
        rest = Sequence(whole.prompt + whole.tokens[:cut], 30 - cut, 1.0, 0, frozenset(), begun=cut)
        run(model, [rest])
        assert whole.tokens[:cut] + rest.tokens == whole.tokens
