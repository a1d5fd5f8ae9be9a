"""Attacks on the dashboard. Each test fails as long as the defect that its docstring names is there."""

from test_pages import open_page

from harnessed.client import close_turnstile, end_attempt
from harnessed.records import CloseMode, Ending, Outcome


async def test_a_change_is_shown_although_asking_for_it_failed_once(house, page):
    """`follow` moves its cursor before what changed has been read and drawn. Where that fails (the gateway is started
    again between the two requests) the change is never asked for again: the page says `running` until something else
    happens, which after the last rollout of a run is never, while the light says that all is well."""
    await house.attempts(1)
    await open_page(house, page, "run/r")
    await page.wait_for_selector("tr[data-id='g.0'] .pill.running")
    failed = []

    async def fail_once(route):
        if failed:
            await route.continue_()
        else:
            failed.append(route.request.url)
            await route.abort()

    await page.route("**/ui/data/runs/r/rollouts*", fail_once)
    await house.admin(end_attempt("g.0", 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    await page.wait_for_function("document.documentElement.dataset.connected === 'yes'")
    await page.wait_for_selector("tr[data-id='g.0'] .pill.ok", timeout=15_000)
    assert failed


async def test_a_turnstile_says_that_its_owner_is_gone(house, page):
    """docs/running.md: `harnessed status and the dashboard say that it is gone`. The page goes on saying
    `its lease ends in 0.0 s`, for the ten minutes until the gateway opens."""
    await house.attempts(1)
    await house.admin(close_turnstile("r", "trainer-1", CloseMode.FINISH, lease_s=0.5, drain_s=0))
    await open_page(house, page, "run/r")
    await page.wait_for_selector(".live :text('trainer-1')")
    panel = page.locator(".live .panel").first
    await panel.get_by_text("gone").or_(panel.get_by_text("lease ended")).first.wait_for(timeout=10_000)


async def test_an_address_that_cannot_be_read_is_told(house, page):
    """`#/run/%` (a shared address that was cut) throws before the page's own error handling: nothing is drawn, nothing
    is said."""
    await page.goto(f"{house.url}/ui/#/run/%")
    await page.wait_for_selector(".failure", timeout=10_000)


async def test_a_page_that_every_object_has_is_none(house, page):
    """The table of pages is a plain object: `#/constructor` finds a function there and shows an empty page."""
    await page.goto(f"{house.url}/ui/#/constructor")
    await page.wait_for_selector(".failure", timeout=10_000)


async def test_a_log_out_that_failed_is_told(house, page):
    """Without a gateway (or through a proxy that refuses) `Log out` does nothing and says nothing: whoever leaves the
    machine believes that the week-long cookie is gone."""
    await page.route("**/ui/logout", lambda route: route.abort())
    await page.click("button:text('Log out')")
    await page.get_by_role("alert").or_(page.locator(".failure")).first.wait_for(timeout=10_000)


async def test_a_deep_tool_call_does_not_take_its_transcript_away(house, page):
    """The arguments of a call are drawn field by field, as deep as the model nested them: a few thousand levels are
    more than the browser's stack, and the whole transcript (and each that stands beside it) cannot be shown."""
    await house.make_run(context=200_000)
    (attempt,) = await house.attempts(group="deep")
    arguments = '{"a":' * 6000 + "1" + "}" * 6000
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "done"},
    ]
    await house.openai(attempt.key).chat.completions.create(model="m", messages=messages)
    await open_page(house, page, f"rollout/{attempt.rollout}")
    await page.wait_for_selector(".message.user, .failure", timeout=15_000)
    assert "hello" in await page.locator("#page").inner_text()
