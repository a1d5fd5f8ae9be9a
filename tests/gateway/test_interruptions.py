"""What is interrupted by an update goes on as if it had not been: with the real engine, over HTTP."""

import asyncio
from array import array
from dataclasses import replace
from random import Random

import pytest
import torch
from policies import CALLING, add_model, make_policy
from running_engine import running_engine
from test_agreement import CALL, PROTOCOLS, asked, without_ids
from texts import STOP, ids
from transformers import GPT2Config, GPT2LMHeadModel

from harnessed.client import close_turnstile, get_totals, open_turnstile, register_engine
from harnessed.gateway.engines import Engines, Interrupted
from harnessed.records import CloseMode, EngineSpec, TurnstileState

TOKENS = 150
BEGIN = 300
"""Where the text of the model that knows one begins: after the longest prompt."""
TEXT = f"é☃ and 🎈🎈 so it says STOPPED, at the end: {CALL}"


@pytest.fixture
async def house(house):
    """Its policy knows calls."""
    make_policy(house.policy, CALLING)
    await house.restart()
    return house


@pytest.fixture(scope="module")
def guessing(tmp_path_factory):
    """A random model, whose text is of any bytes, and hardly ever ends."""
    folder = add_model(make_policy(tmp_path_factory.mktemp("guessing") / "policy", CALLING), spread=0.3)
    with running_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    """A model that says TEXT from a place on and dots before, whatever it is asked."""
    folder = make_policy(tmp_path_factory.mktemp("knowing") / "policy", CALLING)
    said = [*ids("." * BEGIN), *ids(TEXT), STOP]
    size = len(said) + 200
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=259,
            n_positions=size,
            n_embd=size,
            n_layer=1,
            n_head=1,
            n_inner=8,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=STOP,
        )
    )
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(size))
        model.transformer.ln_f.weight.fill_(1)
        for place in range(size - 1):
            model.lm_head.weight[said[min(place + 1, len(said) - 1)], place] = 1
    model.save_pretrained(folder)
    with running_engine(folder) as engine:
        yield engine


async def told(house, engine, group, times, draw, protocol, streamed, *, most=TOKENS, temperature=0.0, **more):
    """What an answer says and its record, if it is interrupted so often."""
    await house.admin(register_engine(EngineSpec(id="e", url=engine.url, run="r")))
    (attempt,) = await house.attempts(group=group, max_tokens=most, temperature=temperature)
    asking = asyncio.create_task(asked(house, attempt.key, protocol, streamed, **more))
    turnstile = house.turnstiles
    for _ in range(times):
        await until(lambda: turnstile.in_flight("r") or asking.done())
        await asyncio.sleep(draw.choice([0, draw.random() * 0.1, draw.random() * 0.4]))
        closed = await house.admin(close_turnstile("r", "t", CloseMode.INTERRUPT))
        assert closed.state == TurnstileState.CLOSED
        await until(lambda: turnstile.held("r") or asking.done())
        await house.admin(open_turnstile("r", "t"))
    said = await asyncio.wait_for(asking, 60)
    (node,) = await house.nodes(group)
    return without_ids(said), node


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def assert_equal(one, other):
    (said, node), (also_said, also) = one, other
    assert said == also_said
    assert array("i", node.answer).tolist() == array("i", also.answer).tolist()
    assert list(array("f", node.logprobs)) == pytest.approx(list(array("f", also.logprobs)), abs=1e-3)
    assert (node.finish, node.versions, node.message["content"]) == (
        also.finish,
        also.versions,
        also.message["content"],
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("protocol", "temperature"), [*((each, 0.0) for each in PROTOCOLS), ("chat", 1.0)])
async def test_an_interrupted_answer_is_the_one_that_it_would_have_been(
    house, guessing, protocol, streamed, temperature
):
    draw = Random(f"{protocol} {streamed} {temperature}")

    async def answer(group, times):
        return await told(house, guessing, group, times, draw, protocol, streamed, temperature=temperature)

    whole = await answer("whole", 0)
    assert whole[1].sampled == TOKENS or temperature
    for times in (1, 2, 5):
        assert_equal(whole, await answer(f"broken-{times}", times))
    totals = await house.admin(get_totals("r"))
    assert (totals.sampled_tokens, totals.lost) == (4 * whole[1].sampled, 0)


@pytest.mark.parametrize("stop", [[], ["STOPPED"]])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
async def test_calls_and_stop_strings_are_read_across_breaks(house, knowing, monkeypatch, protocol, streamed, stop):
    """After every token there is a break: within the stop string, of which the engine has sampled the beginning before,
    within a call, within each character of several bytes, and before the last token."""
    if stop and protocol == "responses":
        pytest.skip("it has no stop strings")
    more = {{"messages": "stop_sequences", "chat": "stop"}[protocol]: stop} if stop else {}

    async def answer(group):
        return await told(house, knowing, group, 0, Random(0), protocol, streamed, most=400, **more)

    whole = await answer("whole")
    tokens = array("i", whole[1].answer).tolist()
    assert tokens[-1] == (ids("D")[0] if stop else STOP)
    assert bool(whole[1].message.get("tool_calls")) == (not stop)
    generate, asks = Engines.generate, []

    async def one_token(self, run, rollout, generation, kept, preview, periods):
        """As if an update interrupted it then."""
        asks.append(len(kept.tokens))
        most = min(generation.max_tokens, len(kept.tokens) + 1)
        given = await generate(self, run, rollout, replace(generation, max_tokens=most), kept, preview, periods)
        if given.finish == "stop" or len(given.tokens) == generation.max_tokens:
            return given
        broken = Interrupted("as if by an update")
        broken.kept = replace(given, finish="interrupted")
        raise broken

    monkeypatch.setattr(Engines, "generate", one_token)
    assert_equal(whole, await answer("broken"))
    assert asks == list(range(len(tokens)))
