"""OpenCode, unmodified, through the gateway: streamed Chat Completions, with a title call beside the conversation."""

import json

import pytest
from driving import binary, calls_once, ended
from policies import CALLING, make_policy
from texts import answer, text

from harnessed.records import Dialect

OPENCODE = binary("opencode")
pytestmark = pytest.mark.skipif(not OPENCODE.exists(), reason="`make harnesses` fetches it")


async def opencode(house, place, key, *arguments, status=0):
    options = {"baseURL": f"{house.url}/v1", "apiKey": key}
    models = {"any": {"limit": {"context": 200_000, "output": 4000}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    settings = place.home / ".config" / "opencode" / "opencode.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps({"model": "mock/any", "provider": {"mock": provider}}))
    return await place.run(
        OPENCODE,
        "run",
        *arguments,
        status=status,
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_AUTOUPDATE="1",
    )


async def test_a_conversation_of_two_prompts_is_one_row_and_its_title_another(house, place):
    await house.make_run(context=10**6)
    (attempt,) = await house.attempts()
    assert "answer" in await opencode(house, place, attempt.key, "hello")
    assert "answer 3" in await opencode(house, place, attempt.key, "-c", "and then?")
    rows = await ended(house, attempt)
    assert len(rows) == 2
    last = house.engine.log[2]
    assert last.prompt + last.answer in [row.tokens.tolist() for row in rows]
    assert sum(row.trained.sum() for row in rows) == house.engine.sampled_tokens


async def test_a_tool_call_runs_and_its_answer_is_found_again(house, place):
    """It writes arguments back compactly, and null content as an empty text."""
    house.engine.script = calls_once(house, "bash", '{"description": "Write",  "command": "echo caf\\u00e9 > out.txt"}')
    await house.make_run(speaks=Dialect.CHAT, context=10**6)
    (attempt,) = await house.attempts()
    assert "answer 3" in await opencode(house, place, attempt.key, "write a file")
    assert (place.work / "out.txt").read_text() == "café\n"
    nodes = await house.nodes()
    (called,) = [node.number for node in nodes if node.message.get("tool_calls")]
    assert nodes[-1].follows == called
    await ended(house, attempt)


async def test_a_conversation_that_outgrows_the_context_is_compacted_and_goes_on(house, place):
    """It knows the gateway's refusal; the summary and what follows are rows of their own."""
    make_policy(house.policy, CALLING)
    await house.restart()
    await house.make_run(context=60_000)
    call = json.dumps({"name": "bash", "arguments": {"description": "Fill", "command": "printf 'x%.0s' {1..15000}"}})

    def script(prompt, number):
        said = text(prompt)
        if "<|im_start|>tools" not in said:
            return answer("The summary: x was printed." if "xxxxxxxxxx" in said else "A title")
        compacted = "The summary: x was printed." in said
        return answer("done" if compacted else f"<tool_call>\n{call}\n</tool_call>")

    house.engine.script = script
    (attempt,) = await house.attempts()
    # It ends with status 1 since it has shown an error, whatever came after.
    assert "done" in await opencode(house, place, attempt.key, "print much", status=1)
    assert max(len(each.prompt) for each in house.engine.log) <= 60_000
    rows = await ended(house, attempt)
    assert sum(row.trained.sum() for row in rows) == house.engine.sampled_tokens
    said = [text(each.prompt) for each in house.engine.log]
    assert any("The summary" in each and "xxxxxxxxxx" not in each for each in said), "it went on with the summary"
