"""Codex, unmodified, through the gateway: streamed Responses, the whole history in every request."""

import json

import pytest
from driving import binary, calls_once, ended

from harnessed.records import Dialect

CODEX = binary("codex")
pytestmark = pytest.mark.skipif(not CODEX.exists(), reason="`make harnesses` fetches it")


async def codex(house, place, key, *arguments):
    settings = place.home / ".codex" / "config.toml"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(
        'model = "any"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{house.url}/v1"\nenv_key = "LOCAL_KEY"\nwire_api = "responses"\n'
    )
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return await place.run(CODEX, "exec", *flags, *arguments, LOCAL_KEY=key)


async def test_a_conversation_of_two_prompts_is_one_row(house, place):
    await house.make_run(context=10**6)
    (attempt,) = await house.attempts()
    assert "answer 1" in await codex(house, place, attempt.key, "hello")
    assert "answer 2" in await codex(house, place, attempt.key, "resume", "--last", "and then?")
    (row,) = await ended(house, attempt)
    last = house.engine.log[1]
    assert row.tokens.tolist() == last.prompt + last.answer
    assert row.trained.sum() == house.engine.sampled_tokens


async def test_a_tool_call_runs_and_its_answer_is_found_again(house, place):
    house.engine.script = calls_once(house, "exec_command", json.dumps({"cmd": "echo café > out.txt"}))
    await house.make_run(speaks=Dialect.CHAT, context=10**6)
    (attempt,) = await house.attempts()
    assert "answer 2" in await codex(house, place, attempt.key, "write a file")
    assert (place.work / "out.txt").read_text() == "café\n"
    assert [node.follows for node in await house.nodes()] == [0, 1]
    await ended(house, attempt)
