"""SDKs and harnesses that work through a task of three model calls: the clients of `test_faults.py`.

Each is given a stage: where it calls (`url`), with which key, and the `word` that its prompts have to hold.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from test_claude_code import claude
from test_codex import codex

PROMPT = "Go on, please."
BROKEN = ("APIConnectionError", "ReadError", "RemoteProtocolError")
"""What SDKs raise in the middle of a stream, of their own or of their HTTP clients."""


@dataclass(frozen=True)
class Client:
    play: Callable[..., Awaitable[list[str]]]
    """Works through the task; the texts that it ended up with: an SDK's each, a harness's last."""
    streams: bool = True
    counts: bool = False
    """Its retries say that they are some, until it tells its caller."""
    takes_parts: bool = False
    """A stream that just ends is a whole answer to it."""
    shell: str = ""
    """How it is told to write a file."""


async def converse(stage, ask) -> list[str]:
    """What a harness on an SDK does: it asks again where the SDK gave up, and takes every answer for a whole one."""
    messages, texts = [], []
    for _ in range(3):
        messages.append({"role": "user", "content": f"{PROMPT} {stage.word}"})
        for tries in range(5):
            try:
                content, said = await ask(messages)
                break
            except Exception as error:
                if type(error).__name__ not in BROKEN or tries == 4:
                    raise
        messages.append({"role": "assistant", "content": content})
        texts.append(said)
    return texts


async def play_openai(stage):
    client = stage.house.openai(stage.attempt.key, max_retries=2)
    client = client.with_options(base_url=f"{stage.url}/v1", timeout=600)

    async def ask(messages):
        asked = await client.chat.completions.create(model="m", messages=messages, stream=stage.client.streams)
        if stage.client.streams:
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in asked if chunk.choices])
        else:
            said = asked.choices[0].message.content
        return said, said

    return await converse(stage, ask)


async def play_anthropic(stage):
    client = stage.house.anthropic(stage.attempt.key)
    client = client.with_options(base_url=stage.url, max_retries=2, timeout=600)

    async def ask(messages):
        if stage.client.streams:
            async with client.messages.stream(model="m", max_tokens=1000, messages=messages) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(model="m", max_tokens=1000, messages=messages)
        return message.content, "".join(block.text for block in message.content if block.type == "text")

    return await converse(stage, ask)


async def play_codex(stage):
    return [await codex(stage, stage.place, stage.attempt.key, f"write a file {stage.word}")]


async def play_claude(stage):
    return [await claude(stage, stage.place, stage.attempt.key, "-p", f"write a file {stage.word}")]


SHELL = {"description": "Write", "command": "echo café >> out.txt"}
CODEX = json.dumps({"name": "exec_command", "arguments": {"cmd": SHELL["command"]}})
CLAUDE = json.dumps({"name": "Bash", "arguments": SHELL})
CLIENTS = {
    "openai": Client(play_openai, streams=False, counts=True),
    "openai-streamed": Client(play_openai, counts=True, takes_parts=True),
    "anthropic": Client(play_anthropic, streams=False, counts=True),
    "anthropic-streamed": Client(play_anthropic, counts=True, takes_parts=True),
    "codex": Client(play_codex, shell=CODEX),
    "claude": Client(play_claude, shell=CLAUDE),
}
