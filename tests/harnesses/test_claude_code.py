"""Claude Code, unmodified, through the gateway: Anthropic Messages as it really speaks it."""

import pytest
from driving import binary, calls_once, ended

from harnessed.records import Dialect

CLAUDE = binary("claude")
pytestmark = pytest.mark.skipif(not CLAUDE.exists(), reason="`make harnesses` fetches it")


async def claude(house, place, key, *arguments):
    said = await place.run(
        CLAUDE,
        *arguments,
        "--dangerously-skip-permissions",
        ANTHROPIC_BASE_URL=house.url,
        ANTHROPIC_AUTH_TOKEN=key,
        ANTHROPIC_MODEL="any",
        ANTHROPIC_SMALL_FAST_MODEL="any",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",
    )
    return said.strip()


async def test_a_conversation_of_three_prompts_is_one_row(house, place):
    """Its cache marks move and its system messages change their shape from call to call."""
    await house.make_run(context=10**6)
    (attempt,) = await house.attempts()
    assert await claude(house, place, attempt.key, "-p", "hello") == "answer 1"
    assert await claude(house, place, attempt.key, "-c", "-p", "and then?") == "answer 2"
    assert await claude(house, place, attempt.key, "-c", "-p", "and now?") == "answer 3"
    first, second, third = house.engine.log
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert third.prompt[: len(second.prompt)] == second.prompt
    (row,) = await ended(house, attempt)
    assert row.tokens.tolist() == third.prompt + third.answer
    assert row.trained.sum() == house.engine.sampled_tokens


async def test_a_tool_call_runs_and_its_answer_is_found_again(house, place):
    """It writes arguments back in an order of its own."""
    house.engine.script = calls_once(house, "Bash", '{"description": "Write",  "command": "echo caf\\u00e9 > out.txt"}')
    await house.make_run(speaks=Dialect.CHAT, context=10**6)
    (attempt,) = await house.attempts()
    assert await claude(house, place, attempt.key, "-p", "write a file") == "answer 2"
    assert (place.work / "out.txt").read_text() == "café\n"
    assert [node.follows for node in await house.nodes()] == [0, 1]
    await ended(house, attempt)
