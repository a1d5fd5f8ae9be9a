"""Claude Code, unmodified, through the gateway: Anthropic Messages as it really speaks it."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from packages import FOLDER
from scripted_engine import Scripted
from texts import answer

from harnessed.client import end_attempt, get_totals, get_transcripts
from harnessed.records import Dialect, Ending, Outcome
from harnessed.training.samples import build

CLAUDE = FOLDER / "node_modules" / ".bin" / "claude"
pytestmark = pytest.mark.skipif(not CLAUDE.exists(), reason="`make harnesses` fetches it")
LIMIT_S = 120


@pytest.fixture
async def claude(house, tmp_path):
    """Runs it in one workspace and HOME, with an attempt's key and nothing else; gives what it printed."""
    house.engine.context = 10**7
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    async def run(key, *arguments):
        environment = {
            "HOME": str(home),
            "PATH": f"{Path(shutil.which('node')).parent}:{os.defpath}",
            "ANTHROPIC_BASE_URL": house.url,
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_MODEL": "any",
            "ANTHROPIC_SMALL_FAST_MODEL": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        }
        process = await asyncio.create_subprocess_exec(
            CLAUDE,
            *arguments,
            "--dangerously-skip-permissions",
            cwd=work,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        except TimeoutError:
            process.kill()
            raise
        assert process.returncode == 0, said
        return said.decode().strip()

    return run


async def ended(house, attempt):
    """The rows of its rollout; its books are checked on the way."""
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    sample, totals = build(transcript), await house.admin(get_totals("r"))
    assert sum(sample.fates.values()) == totals.sampled_tokens == house.engine.sampled_tokens
    assert (totals.lost, totals.undelivered) == (0, 0)
    return sample.rows


async def test_a_conversation_of_three_prompts_is_one_row(house, claude):
    """Its cache marks move and its system messages change their shape from call to call."""
    await house.make_run(context=10**6)
    (attempt,) = await house.attempts()
    assert await claude(attempt.key, "-p", "hello") == "answer 1"
    assert await claude(attempt.key, "-c", "-p", "and then?") == "answer 2"
    assert await claude(attempt.key, "-c", "-p", "and now?") == "answer 3"
    first, second, third = house.engine.log
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert third.prompt[: len(second.prompt)] == second.prompt
    (row,) = await ended(house, attempt)
    assert row.tokens.tolist() == third.prompt + third.answer
    assert row.trained.sum() == house.engine.sampled_tokens


async def test_a_tool_call_runs_and_its_answer_is_found_again(house, claude, tmp_path):
    arguments = '{"description": "Write",  "command": "echo caf\\u00e9 > out.txt"}'
    calls = [{"type": "function", "function": {"name": "Bash", "arguments": arguments}}]
    message = {"role": "assistant", "content": "I will write.", "tool_calls": calls}
    house.engine.script = lambda prompt, call: Scripted(
        answer(f"answer {call}"), message=message if call == 1 else None
    )
    await house.make_run(speaks=Dialect.CHAT, context=10**6)
    (attempt,) = await house.attempts()
    assert await claude(attempt.key, "-p", "write a file") == "answer 2"
    assert (tmp_path / "work" / "out.txt").read_text() == "café\n"
    assert [node.follows for node in await house.nodes()] == [0, 1]
    await ended(house, attempt)
