"""Every page of the dashboard in a real browser, over what a real gateway recorded."""

import asyncio

import pytest
from conversation import DONE, ISSUE, TOKENIZER, Agent, play_group, prepare

from harnessed.client import (
    claim,
    close_turnstile,
    create_groups,
    end_attempt,
    get_transcripts,
    open_turnstile,
    post_fates,
    post_metrics,
)
from harnessed.records import CloseMode, Ending, Fate, GroupSpec, Metrics, Outcome

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)"><b id=planted>'


async def open_page(house, page, address):
    await page.goto(f"{house.url}/ui/#/{address}")
    await page.wait_for_load_state("domcontentloaded")


async def test_runs_show_how_far_they_are(house, page):
    await house.attempts(3)
    await house.admin(end_attempt("g.0", 1, Ending(outcome=Outcome.OK, reward=0.5), 3))
    for step, reward in ((1, 0.1), (2, 0.25)):
        await house.admin(post_metrics("r", Metrics(step=step, values={"reward_mean": reward})))
    await page.wait_for_selector(".card.run:has-text('0.25')")
    assert (await page.locator(".card.run .legend").inner_text()).split() == ["ok", "1", "running", "2"]
    card = await page.locator(".card.run").inner_text()
    for said in ("mean reward", "0.5", "0.25", "last activity"):
        assert said in card
    await page.click(".card.run")
    await page.wait_for_selector("h1:text-is('r')")


async def test_a_run_shows_its_curves_and_they_grow(house, page):
    await house.attempts(2)
    for step in range(1, 4):
        values = {"reward_mean": step / 10, "entropy": 1 / step, "kl": 0.001}
        await house.admin(post_metrics("r", Metrics(step=step, values=values)))
    await open_page(house, page, "run/r")
    reward = page.locator("figure:has-text('Reward')")
    await reward.locator("b:text-is('0.3')").wait_for()
    assert await page.locator("figure:has-text('Held-out') .empty").count() == 1
    box = await reward.locator("svg").bounding_box()
    await page.mouse.move(box["x"] + box["width"] * 0.12, box["y"] + 50)
    await reward.locator("b:text-is('0.1')").wait_for()
    assert "step 1" in await page.locator("figure:has-text('Entropy')").inner_text()  # the charts move together
    await page.mouse.move(0, 0)
    await page.check("label:has-text('all metrics') input")
    await page.locator("figure:has-text('kl')").wait_for()
    await house.admin(post_metrics("r", Metrics(step=4, values={"held_out": 0.75, "reward_mean": 0.9})))
    await page.locator("figure:has-text('Held-out') b:text-is('0.75')").wait_for()
    await reward.locator("b:text-is('0.9')").wait_for()


async def test_a_new_state_appears_without_a_reload(house, page):
    await open_page(house, page, "run/r")
    await page.wait_for_selector(".list .empty")
    await page.evaluate("window.here = true")
    await house.admin(create_groups([GroupSpec(id="g", run="r", task={}, n=2)]))
    await page.wait_for_selector("tr[data-id='g.1'] .pill.queued")
    await house.admin(claim("r", "me", 1, 1))
    await page.wait_for_selector("tr[data-id='g.0'] .pill.running")
    await house.admin(end_attempt("g.0", 1, Ending(outcome=Outcome.AGENT_EXIT, reward=0.0, reason="it fell"), 1))
    await page.wait_for_selector("tr[data-id='g.0']:has-text('it fell') .pill.agent_exit")
    assert await page.evaluate("window.here")


async def test_a_run_shows_its_turnstile_and_who_waits_for_it(house, page):
    attempts = await house.attempts(3)
    await house.admin(close_turnstile("r", "the trainer", CloseMode.FINISH, lease_s=60))
    asked = [{"role": "user", "content": "hi"}]
    clients = [house.openai(each.key) for each in attempts[:2]]
    calls = [asyncio.create_task(each.chat.completions.create(model="m", messages=asked)) for each in clients]
    await open_page(house, page, "run/r")
    await page.wait_for_selector(".gate.closed")
    await page.wait_for_selector(".panel:has-text('by the trainer (finish), since')")
    for attempt in attempts[:2]:
        await page.wait_for_selector(f".panel tr:has(a:text-is('{attempt.rollout}')):has-text('turnstile')")
    queue = page.locator(".panel:has-text('queue')")
    await queue.locator("div:has(dt:text-is('held')) dd:text-is('2')").wait_for()
    assert "engine e" in await page.inner_text(".panel:has-text('Engines')")
    assert "controller controller" in await page.inner_text(".panel:has-text('Engines')")
    await house.admin(open_turnstile("r", "the trainer"))
    await asyncio.gather(*calls)
    await page.wait_for_selector(".gate.open")
    await page.wait_for_selector(".panel:has-text('nobody waits')")


async def test_a_gateway_that_was_away_is_followed_again(house, page):
    await house.attempts()
    await open_page(house, page, "run/r")
    await page.wait_for_selector("tr[data-id='g.0'] .pill.running")
    await house.restart()
    await house.admin(end_attempt("g.0", 1, Ending(outcome=Outcome.OK, reward=1.0), 1))
    await page.wait_for_selector("tr[data-id='g.0'] .pill.ok")


async def test_a_group_shows_its_members_and_compares_them(house, page):
    await prepare(house)
    await play_group(house)
    await open_page(house, page, "group/g")
    await page.wait_for_selector(".member >> nth=2")
    assert await page.locator(".member .pill").all_inner_texts() == ["ok", "ok", "agent exit"]
    text = await page.inner_text("main")
    for said in (*ISSUE.splitlines(), "ranges.py", "exit status 1: no patch was written", "0.25", "0.417"):
        assert said in text
    await page.check(".member >> nth=2 >> input")
    await page.click("a:text('Compare 3 transcripts')")
    await page.wait_for_selector(".transcript >> nth=2")
    assert await page.locator(".transcript h1").all_inner_texts() == [".0", ".1", ".2"]
    await page.click(".sibling >> nth=1")
    await page.wait_for_function("() => document.querySelectorAll('.transcript').length === 2")


async def test_a_transcript_shows_its_tree_with_every_branch(house, page):
    await prepare(house)
    await play_group(house)
    nodes = await house.nodes()
    await open_page(house, page, "rollout/g.0")
    await page.wait_for_selector(".map button >> nth=8")
    assert "9 answers, 7 branches" in await page.inner_text("aside")
    labels = [" ".join(each.split()) for each in await page.locator(".map button").all_inner_texts()]
    assert labels == [
        f"#{node.number} {node.sampled} tok" + said
        for node, said in zip(
            nodes, [" side call", "", " length", "", " undelivered, interrupted", *[""] * 4], strict=True
        )
    ]
    edges = await page.locator(".map .edge").count()
    assert edges == sum(bool(node.follows) for node in nodes) == 5
    # The longest conversation, with what was said in it as it was delivered.
    assert await page.locator(".node > header > b").all_inner_texts() == ["#2", "#6", "#8"]
    said = await page.inner_text(".conversation")
    for part in ("reasoning", "text.split('-') gives ['5', '']", "12 passed in 0.31s", DONE, "1 tool: bash"):
        assert part in said
    # Another branch, by its place in the map and by the mark where it parts.
    await page.click(".map button[data-node='5']")
    await page.wait_for_selector(".node[data-number='5'] .fate.undelivered")
    await page.click(".node[data-number='5'] .beside button:text-is('#4')")
    await page.wait_for_selector(".node[data-number='4']:has-text('Try again, shorter')")
    # The attempt before, which another one followed.
    await page.click("button:has-text('attempt 1')")
    await page.wait_for_selector(".node .fate.superseded_attempt")
    assert await page.locator(".node").count() == 1


@pytest.mark.parametrize(
    "booked", [{}, {Fate.TRAINED: 337}, {Fate.GROUP_SKIPPED: 337}], ids=["open", "trained", "skipped"]
)
async def test_tokens_are_coloured_by_fate_and_tell_what_is_known(house, page, booked):
    await prepare(house)
    await play_group(house)
    if booked:
        await house.admin(post_fates("r", {"g.0": booked | {Fate.UNDELIVERED: 6}}))
    await open_page(house, page, "rollout/g.0?tokens=1")
    fate = next(iter(booked), "for_training")
    node = (await house.nodes())[5]
    shown = page.locator(".node[data-number='6'] .token.sampled")
    await shown.nth(node.sampled - 1).wait_for()
    assert await shown.count() == node.sampled
    assert await page.locator(f".node[data-number='6'] .token.sampled.{fate}").count() == node.sampled
    await shown.nth(7).scroll_into_view_if_needed()
    await shown.nth(7).hover()
    tip = await page.locator(".tip").inner_text()
    (id,) = memoryview(node.answer).cast("i")[7:8]
    (logprob,) = memoryview(node.logprobs).cast("f")[7:8]
    for said in (str(id), f"{logprob:.4f}", "0.1", fate.replace("_", " "), TOKENIZER.decode([id]).strip()):
        assert said in tip
    await page.select_option("select[name=colour]", "logprob")
    await page.wait_for_selector(".node[data-number='6'] .token.heat")
    assert "colour=logprob" in page.url
    prompt = page.locator(".node[data-number='6'] .token.prompt").first
    await prompt.hover()
    assert "not sampled" in await page.locator(".tip").inner_text()


async def test_a_transcript_grows_while_its_agent_works(house, page):
    (attempt,) = await house.attempts()
    await open_page(house, page, "rollout/g.0")
    await page.wait_for_selector("text=Nothing was recorded")
    client = house.openai(attempt.key)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
    await page.wait_for_selector(".node:has-text('answer 1') .fate.undecided")
    await house.admin(end_attempt("g.0", 1, Ending(outcome=Outcome.OK, reward=1.0), 1))
    await page.wait_for_selector(".node .fate.for_training")


async def test_what_agents_and_models_write_stays_text(house, page):
    await prepare(house)
    task = {"issue": HOSTILE, HOSTILE: {"files": [HOSTILE]}}
    await house.admin(create_groups([GroupSpec(id="g", run="r", task=task, n=1)]))
    (attempt,) = await house.admin(claim("r", HOSTILE, 1, 1))
    agent = Agent(house, attempt.key)
    messages = [
        {"role": "system", "content": HOSTILE},
        {"role": "user", "content": [{"type": "text", "text": HOSTILE}]},
    ]
    tool = {"type": "function", "function": {"name": "bash", "description": HOSTILE, "parameters": {"type": "object"}}}
    call = '{"name": "bash", "arguments": {"command": ' + '"<img src=x onerror=alert(3)>"}}'
    await agent.ask(messages, f"<think>{HOSTILE}</think>{HOSTILE}\n<tool_call>\n{call}\n</tool_call>", tools=[tool])
    ending = Ending(outcome=Outcome.AGENT_EXIT, reason=HOSTILE, reward=0.0, parts={HOSTILE: 1.0})
    await house.admin(end_attempt("g.0", 1, ending, 1))
    (transcript,) = await house.admin(get_transcripts("g"))
    assert transcript.attempts[0].nodes[0].message["tool_calls"]
    for address, holds in (("run/r", 1), ("group/g", 4), ("rollout/g.0", 5), ("rollout/g.0?tokens=1", 1)):
        await page.goto("about:blank")
        await open_page(house, page, address)
        await page.wait_for_function(
            "n => document.querySelector('main').textContent.split('alert(1)').length > n", arg=holds
        )
        if "tokens" in address:
            await page.wait_for_selector(".token.sampled")
        assert await page.locator("main script, main img, #planted").count() == 0, address
    await page.wait_for_timeout(200)  # what would run, has run: the fixture has seen no dialog


async def test_what_is_not_there_is_said(house, page):
    for address, said in (
        ("run/nothing", "no run nothing"),
        ("group/nothing", "no group"),
        ("rollout/x", "no rollout x"),
        ("nowhere", "no page"),
    ):
        await open_page(house, page, address)
        await page.wait_for_selector(f".failure:has-text('{said}')")
