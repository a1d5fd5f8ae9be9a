"""Runs a harness as a user would, in a HOME and a workspace of its own, and nothing else from this machine."""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from packages import FOLDER
from scripted_engine import Scripted
from texts import answer

from harnessed.client import end_attempt, get_totals, get_transcripts
from harnessed.records import Ending, Outcome
from harnessed.training.samples import build

LIMIT_S = 120


def binary(name: str) -> Path:
    return FOLDER / "node_modules" / ".bin" / name


@dataclass
class Workplace:
    home: Path
    work: Path
    limit_s: float = LIMIT_S
    may_fail: bool = False

    async def run(self, command: Path, *arguments: str, status: int = 0, **environment: str) -> str:
        """What it printed; it has to end with that status."""
        path = f"{Path(shutil.which('node') or '/').parent}:{os.defpath}"
        process = await asyncio.create_subprocess_exec(
            command,
            *arguments,
            cwd=self.work,
            env={"HOME": str(self.home), "PATH": path} | environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), self.limit_s)
        except TimeoutError:
            process.kill()
            raise
        assert process.returncode == status or self.may_fail, said
        return said.decode()


def calls_once(house, tool: str, arguments: str):
    """A script for an engine that speaks chat: the first request with tools is answered by a call, others by text."""
    calls = [{"type": "function", "function": {"name": tool, "arguments": arguments}}]
    message = {"role": "assistant", "content": "I will write.", "tool_calls": calls}
    called = []

    def next_answer(_, call):
        if not house.engine.log[call - 1].tools or called:
            return answer(f"answer {call}")
        called.append(call)
        return Scripted(answer(f"answer {call}"), message=message)

    return next_answer


async def ended(house, attempt):
    """The rows of the attempt's rollout; its books are checked on the way."""
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    sample, totals = build(transcript), await house.admin(get_totals("r"))
    assert sum(sample.fates.values()) == totals.sampled_tokens == house.engine.sampled_tokens
    assert (totals.lost, totals.undelivered) == (0, 0)
    return sample.rows
