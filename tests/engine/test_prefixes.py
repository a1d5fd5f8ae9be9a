"""What ended sequences leave for the next turn: how much is reused, when it is forgotten, that it changes nothing."""

import asyncio
import random
from itertools import takewhile

import pytest
import torch
from plain import assert_plain, make, prompts, run
from running_engine import VOCABULARY, running_engine
from transformers import MistralConfig, MistralForCausalLM

from harnessed.engine.generate import Batch, Sequence
from harnessed.engine.prefixes import LEAST_TOKENS, Prefixes
from harnessed.engine.queue import Failed, Queue, Unavailable
from harnessed.records import Version
from harnessed.weights import SharedWeights

MUCH = 2**24


def columns(count, value=0.0):
    """Of a model of two layers, a head and two dimensions."""
    return [(torch.full((1, count, 2), value), torch.full((1, count, 2), value)) for _ in range(2)]


def size(count):
    """Bytes of so many columns and their tokens."""
    return count * (2 * 2 * 2 * 4 + 4)


def told(draw, count):
    return [draw.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture
def counted(model):
    """The model, and how many columns each of its forward passes computes."""
    computed = []
    model.register_forward_pre_hook(
        lambda _, __, arguments: computed.append(tuple(arguments["input_ids"].shape)), with_kwargs=True
    )
    return model, computed


def test_each_turn_computes_only_what_is_new(counted):
    model, computed = counted
    draw, prefixes = random.Random(0), Prefixes(MUCH)
    history = told(draw, 50)
    for turn in range(6):
        computed.clear()
        [sequence] = run(model, [make(history, turn, 30)], prefixes=prefixes)
        # All of the first prompt; then the last token of the answer, which nothing had followed, and what came after.
        assert computed[0] == (1, 50 if turn == 0 else 1 + 20)
        assert_plain(model, sequence)
        history = history + sequence.tokens + told(draw, 20)
    assert prefixes.reused_tokens == sum(50 + 50 * turn - 21 for turn in range(1, 6))
    assert len(prefixes) == 1, "a conversation is kept once"


def test_conversations_of_all_lengths_side_by_side_say_what_they_say_without_reuse(model):
    def talk(prefixes):
        draw, said = random.Random(3), []
        histories = prompts(7, 5, 1, 60)
        for turn in range(6):
            sequences = [make(history, 10 * turn + i, 5 + 7 * i) for i, history in enumerate(histories)]
            strangers = [make(p, i) for i, p in enumerate(prompts(2, turn, 1, 90))]
            run(model, sequences[:4] + strangers, sequences[4:], prefixes=prefixes)
            for i, sequence in enumerate(sequences):
                assert_plain(model, sequence)
                histories[i] = histories[i] + sequence.tokens + told(draw, draw.randint(1, 40))
            for stranger in strangers:
                assert_plain(model, stranger)
            said += sequences
        return said

    prefixes = Prefixes(MUCH)
    for one, other in zip(talk(prefixes), talk(None), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert prefixes.reused_tokens > 1000


def test_a_kept_beginning_is_used_up_to_where_a_prompt_differs_and_never_as_a_whole(model):
    prefixes = Prefixes(MUCH)
    [before] = run(model, [make(prompts(1, 1, 60, 60)[0], max_tokens=10)], prefixes=prefixes)
    known = before.prompt + before.tokens[:-1]
    for prompt, reused in [
        ([*known[:40], (known[40] + 1) % VOCABULARY, 1, 2], 40),
        (known, len(known) - 1),
        (known[:30], 29),
        (known[:LEAST_TOKENS], 0),
        ([*known[:LEAST_TOKENS], (known[LEAST_TOKENS] + 1) % VOCABULARY], LEAST_TOKENS),
        (prompts(1, 2, 60, 60)[0], 0),
    ]:
        so_far = prefixes.reused_tokens
        [sequence] = run(model, [make(prompt)], prefixes=prefixes)
        assert prefixes.reused_tokens - so_far == reused
        assert_plain(model, sequence)


def test_the_rollouts_of_a_group_share_a_kept_beginning_and_go_on_from_their_own(model):
    prefixes = Prefixes(MUCH)
    system = prompts(1, 1, 40, 40)[0]
    run(model, [make(system, max_tokens=1)], prefixes=prefixes)
    groups = [make(system + p, seed) for p in prompts(3, longest=20) for seed in range(4)]
    for sequence in run(model, groups, prefixes=prefixes):
        assert_plain(model, sequence)
    assert 3 * 30 <= prefixes.reused_tokens <= 3 * 40, "each prompt once"
    so_far = prefixes.reused_tokens
    turns = [make(row.prompt + row.tokens + [1, 2, 3], i) for i, row in enumerate(groups)]
    for sequence in run(model, turns, prefixes=prefixes):
        assert_plain(model, sequence)
    assert prefixes.reused_tokens - so_far == sum(len(row.prompt) - 4 for row in turns)


def test_what_an_interruption_left_is_gone_on_with(model):
    prefixes = Prefixes(MUCH)
    [whole] = run(model, [make(prompts(1, 1, 40, 40)[0], max_tokens=20, temperature=0)])
    cut = make(whole.prompt, max_tokens=20, temperature=0)
    batch = Batch(model, prefixes)
    batch.advance([cut], lambda: len(cut.tokens) == 7)
    cut.interrupted = True
    batch.advance([], lambda: False)
    assert (cut.finish, len(cut.tokens)) == ("interrupted", 8)
    batch.keep()
    [rest] = run(model, [make(cut.prompt + cut.tokens, max_tokens=12, temperature=0)], prefixes=prefixes)
    assert cut.tokens + rest.tokens == whole.tokens
    assert prefixes.reused_tokens == 40 + 8 - 1


def test_a_cache_that_cannot_be_joined_is_not_kept():
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
    model, prefixes = MistralForCausalLM(config).eval(), Prefixes(MUCH)
    [before] = run(model, [make(prompts(1, 1, 60, 60)[0])], prefixes=prefixes)
    [after] = run(model, [make(before.prompt + before.tokens)], prefixes=prefixes)
    assert_plain(model, after)
    assert (len(prefixes), prefixes.reused_tokens) == (0, 0)


def test_memory_is_bounded_and_holds_no_batch_alive(model):
    prefixes, most = Prefixes(200_000), 200_000
    for i in range(12):
        run(model, [make(p, i, 1 + i) for p in prompts(5, i, 20, 120)], prefixes=prefixes)
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for layers in prefixes._kept.values()
            for layer in layers
            for tensor in layer
        }
        assert 0 < sum(held.values()) + sum(map(len, prefixes._kept)) == prefixes.size <= most
        assert prefixes._order == sorted(prefixes._kept)
    assert len(prefixes) > 2
    prefixes.clear()
    assert (len(prefixes), prefixes.size) == (0, 0)


def test_the_least_recently_used_goes_first_and_what_is_too_large_is_not_kept():
    draw = random.Random(0)
    prefixes = Prefixes(size(3 * 20))
    one, two, three, four = (told(draw, 20) for _ in range(4))
    for ids in (one, two, three):
        prefixes.keep(ids, columns(20))
    assert prefixes.find([*one, 1])[1] == 20
    prefixes.keep(two[:18], columns(18))  # known already, and used by that
    prefixes.keep(four, columns(20))
    assert [prefixes.find([*ids, 1])[1] for ids in (one, two, three, four)] == [20, 20, 0, 20]
    prefixes.keep(told(draw, 61), columns(61))
    assert len(prefixes) == 3
    prefixes.keep(told(draw, LEAST_TOKENS - 1), columns(LEAST_TOKENS - 1))
    assert len(prefixes) == 3
    nothing = Prefixes(0)
    nothing.keep(one, columns(20))
    assert (len(nothing), nothing.find(one)) == (0, ([], 0))


def test_the_longest_kept_beginning_is_found():
    draw, prefixes = random.Random(1), Prefixes(MUCH)
    known = []
    for _ in range(300):
        begun = draw.choice(known)[: draw.randint(0, 60)] if known else []
        ids = begun + [draw.randrange(2) for _ in range(draw.randint(0, 30))] + told(draw, draw.randint(0, 30))
        layers, length = prefixes.find(ids) if ids else ([], 0)
        shared = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, k, strict=False))) for k in known]
        expected = min(max(shared, default=0), len(ids) - 1)
        assert length == (expected if expected >= LEAST_TOKENS else 0)
        if length:  # what is found was computed of a sequence with this beginning
            owner = known[int(layers[0][0][0, 0, 0])]
            assert owner[:length] == ids[:length]
        if len(ids) >= LEAST_TOKENS:
            prefixes.keep(ids, columns(len(ids), len(known)))
            known.append(ids)


class Weights:
    """Shared weights whose trainer is the test."""

    def __init__(self):
        self.version = Version(0, 0)

    def readable(self):
        return self.version


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)


@pytest.fixture
async def served(model):
    """A queue, and a function that asks it."""
    weights = Weights()
    queue = Queue(model, weights, most=8, threads=1, kept_bytes=MUCH)
    running = asyncio.create_task(queue.run())

    async def ask(prompt, tokens=12):
        sequence = Sequence(prompt, tokens, 1.0, 0, frozenset())
        await queue.generate(sequence, asyncio.get_running_loop().create_future())
        return sequence

    yield queue, weights, ask
    queue.end()
    running.cancel()


async def test_other_weights_reuse_nothing(served, model):
    queue, weights, ask = served
    prompt = prompts(1, 1, 60, 60)[0]
    for number in range(3):
        weights.version = Version(0, number)
        await ask(prompt)
        assert queue.reused_tokens == 59 * number
        assert_plain(model, await ask(prompt))
        assert queue.reused_tokens == 59 * (number + 1)
        change(model)


async def test_what_was_computed_while_somebody_wrote_is_forgotten(served, model):
    queue, weights, ask = served
    prompt = prompts(1, 1, 60, 60)[0]
    neighbour = asyncio.create_task(ask(prompts(1, 2, 60, 60)[0], 300))
    await ask(prompt)
    async with asyncio.timeout(10):  # it is kept while the neighbour goes on
        while len(queue._prefixes) < 1:
            await asyncio.sleep(0)
    weights.version = Version(0, 1)
    with pytest.raises(Unavailable, match="written during the generation"):
        await neighbour
    weights.version = Version(0, 0)  # as bad as it gets: the old name, and what was kept under it is gone
    await ask(prompt)
    assert queue.reused_tokens == 0


async def test_a_generation_that_failed_leaves_nothing(served, model):
    queue, _, ask = served
    await ask(prompts(1, 1, 60, 60)[0])
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(Failed):
        await ask([1])
    assert len(queue._prefixes) == 0


def test_an_engine_reuses_within_a_version_and_not_across(folder, model, tmp_path):
    trained = SharedWeights.create(tmp_path / "weights", model, Version(0, 0))
    prompt = prompts(1, 1, 60, 60)[0]
    with running_engine(folder, tmp_path / "weights") as engine:
        for number in range(1, 4):
            for reused in (59 * (number - 1), 59 * number):
                answer = engine.generate(prompt=prompt, temperature=0)
                [expected] = run(model, [make(prompt, max_tokens=8, temperature=0)])
                assert answer["tokens"] == expected.tokens
                assert engine.health()["reused_tokens"] == reused
            with engine.paused(), trained.writing(Version(0, number)):
                change(model)
