"""Networks, engines and gateways fail under SDKs and harnesses: the task is done all the same, and the books hold.

A task is three model calls; a fault is played at the second. With HARNESSED_LONG=1 (`make harnesses-long`, some ten
minutes) the waits are played too that clients tell from short ones: a first byte after 65 s, and streams that stall
until Codex and Claude Code cut them off at 300 s.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import faulty
import pytest
from driving import binary
from policies import CALLING, make_policy
from scripted_engine import Scripted
from test_claude_code import claude
from test_codex import codex
from test_random_harness import check_contexts
from texts import answer, ids, text

from harnessed.client import end_attempt, get_totals, get_transcripts, register_engine
from harnessed.records import Ending, EngineSpec, Fate, Outcome
from harnessed.training.samples import build

PROMPT = "Go on, please."
BEGIN = ids("<|im_start|>assistant\n")
THOUGHT = rb'reasoning_text\.delta|thinking_delta|"reasoning_content":"[^"]'
TEXT = rb'output_text\.delta|text_delta|"content":"[^"]'
TOKENS = rb'"tokens"'
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


async def converse(ask) -> list[str]:
    """What a harness on an SDK does: it asks again where the SDK gave up, and takes every answer for a whole one."""
    messages, texts = [], []
    for _ in range(3):
        messages.append({"role": "user", "content": PROMPT})
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


async def play_openai(house, front, place, key, streams):
    client = house.openai(key, max_retries=2).with_options(base_url=f"{front.url}/v1", timeout=600)

    async def ask(messages):
        asked = await client.chat.completions.create(model="m", messages=messages, stream=streams)
        if streams:
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in asked if chunk.choices])
        else:
            said = asked.choices[0].message.content
        return said, said

    return await converse(ask)


async def play_anthropic(house, front, place, key, streams):
    client = house.anthropic(key).with_options(base_url=front.url, max_retries=2, timeout=600)

    async def ask(messages):
        if streams:
            async with client.messages.stream(model="m", max_tokens=1000, messages=messages) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(model="m", max_tokens=1000, messages=messages)
        return message.content, "".join(block.text for block in message.content if block.type == "text")

    return await converse(ask)


async def play_codex(house, front, place, key):
    return [await codex(front, place, key, "write a file")]


async def play_claude(house, front, place, key):
    return [await claude(front, place, key, "-p", "write a file")]


SHELL = {"description": "Write", "command": "echo café >> out.txt"}
CODEX = json.dumps({"name": "exec_command", "arguments": {"cmd": SHELL["command"]}})
CLAUDE = json.dumps({"name": "Bash", "arguments": SHELL})
CLIENTS = {
    "openai": Client(partial(play_openai, streams=False), streams=False, counts=True),
    "openai, streamed": Client(partial(play_openai, streams=True), counts=True, takes_parts=True),
    "anthropic": Client(partial(play_anthropic, streams=False), streams=False, counts=True),
    "anthropic, streamed": Client(partial(play_anthropic, streams=True), counts=True, takes_parts=True),
    "codex": Client(play_codex, shell=CODEX),
    "claude": Client(play_claude, shell=CLAUDE),
}


def say(step: int, shell: str = "", thought: str = "Hm") -> str:
    """The policy's answers: a thought, a text, and the call of a shell."""
    call = f"\n<tool_call>\n{shell}\n</tool_call>" if shell and step < 3 else ""
    return f"<think>\n {thought},\n so. \n</think>\n\n Step {step},  done as asked, in full. {call}"


THINKS, STALL = (len(ids(say(2).partition(word)[0])) for word in ("so.", "asked"))


@dataclass(frozen=True)
class Fault:
    """What happens at the second call."""

    front: faulty.Fault | None = None
    """Before the gateway."""
    back: faulty.Fault | None = None
    """Before the engine."""
    restarts: bool = False
    """The gateway, when there is a part of the answer."""
    engine: dict = field(default_factory=dict)
    """How the engine answers."""
    stalls: bool = False
    """It stalls where the text has begun, if that is streamed, until nobody wants it."""
    otherwise: bool = False
    """What it says from then on is something else."""
    calls: int = 3
    """Of the engine."""
    whole_calls: int = 0
    """Where answers are not streamed; 0: as many."""
    lost: int = 0
    whole_lost: int = 0
    """Calls that the gateway cannot answer."""
    wastes: bool = False
    """The engine's second answer cannot reach the gateway."""
    ends: bool = False
    """The answer has an end, but not its own."""
    unseen: bool = False
    """To the gateway the answer was delivered: only a retry that says so is known for one."""
    keeps: tuple[str, ...] = ()
    """Clients whose retry holds a part of what was broken off, so that it is another request."""
    gives_up: tuple[str, ...] = ()
    """Clients that end their task with this."""
    long: tuple[str, ...] = ()
    """The clients of a fault that is only played in the long suite."""


IN_TEXT = {"keeps": ("codex",), "gives_up": ("claude",)}
"""Codex keeps the thought, which was whole. Claude Code says that a part of the answer was lost, and ends."""
LEFT = {"stalls": True, "calls": 4, "whole_calls": 3}
FAULTS = {
    "429": Fault(faulty.refuse(429, "retry-after: 1")),
    "500": Fault(faulty.refuse(500)),
    "reset before the gateway": Fault(faulty.reset),
    "reset before the first token": Fault(faulty.reset_while_generating(0), engine={"delay_s": 30}, calls=4),
    "reset while generating": Fault(faulty.reset_while_generating(STALL), engine={"stall_at": STALL}, calls=4),
    "reset after the whole answer": Fault(faulty.lose, unseen=True),
    "broken in the thought": Fault(faulty.cut(THOUGHT), **LEFT),
    "broken in the text": Fault(faulty.cut(TEXT), **LEFT, **IN_TEXT),
    "ended in the thought": Fault(faulty.cut(THOUGHT, resets=False), **LEFT, ends=True),
    "ended in the text": Fault(faulty.cut(TEXT, resets=False), **LEFT, **IN_TEXT, ends=True),
    "late": Fault(faulty.wait(2)),
    "stalled": Fault(faulty.wait(2, TEXT)),
    "engine answers 500": Fault(engine={"status": 500}, calls=4, lost=1, whole_lost=1),
    "engine is reset": Fault(back=faulty.cut(TOKENS), calls=4, wastes=True),
    "engine ends too early": Fault(back=faulty.cut(TOKENS, resets=False), calls=4, wastes=True, lost=1),
    "engine hangs up and says something else": Fault(
        engine={"hang_up": True, "stall_at": THINKS, "stall_s": 0.5}, otherwise=True, calls=4, wastes=True
    ),
    "engine is away": Fault(back=faulty.go_away),
    "gateway restarts before the first token": Fault(
        restarts=True, engine={"delay_s": 30}, calls=4, lost=1, whole_lost=1
    ),
    "gateway restarts in the middle": Fault(
        restarts=True, engine={"stall_at": THINKS}, calls=4, lost=1, whole_lost=1, wastes=True
    ),
    "65 s late": Fault(faulty.wait(65), long=tuple(CLIENTS)),
    "stalled for 95 s": Fault(faulty.wait(95, TEXT), long=tuple(CLIENTS)),
    "stalled for 310 s": Fault(faulty.wait(310, TEXT), unseen=True, long=("codex", "claude")),
}


def cases():
    for fault, what in FAULTS.items():
        for client in what.long or CLIENTS:
            missing = client in ("codex", "claude") and not binary(client).exists()
            skips = [
                pytest.mark.skipif(missing, reason="`make harnesses` fetches it"),
                pytest.mark.skipif(bool(what.long and not os.environ.get("HARNESSED_LONG")), reason="HARNESSED_LONG"),
            ]
            yield pytest.param(fault, client, marks=skips, id=f"{fault}-{client}")


def script(house, client, fault):
    """The policy: it goes on from what is there of its answer, and plays the engine's faults at its second call."""
    stalls = {"stall_at": STALL} if fault.stalls and client.streams else {}

    def next_answer(prompt, call):
        begun = max(i for i in range(len(prompt)) if prompt[i : i + len(BEGIN)] == BEGIN) + len(BEGIN)
        step = text(prompt).count("<|im_start|>tool\n" if client.shell else PROMPT)
        thought = "Ah" if fault.otherwise and call > 2 else "Hm"
        whole = answer(say(step + bool(client.shell), client.shell, thought))
        kept = prompt[begun:]
        assert whole[: len(kept)] == kept
        return Scripted(whole[len(kept) :], **(fault.engine | stalls if call == 2 else {}))

    return next_answer


async def restart(house, fault):
    """The gateway, while the second answer is made."""
    tokens = fault.engine.get("stall_at", 0)
    await faulty.until(lambda: len(house.engine.log) == 2 and len(house.engine.log[1].answer) == tokens)
    await house.restart()
    house.engine.log[1].interrupted.set()


@pytest.mark.parametrize(("fault", "client"), list(cases()))
async def test_a_task_goes_on_after_a_fault_and_every_token_is_accounted_for(house, place, fault, client):
    name, fault, client = client, FAULTS[fault], CLIENTS[client]
    gives_up, takes_part = name in fault.gives_up, fault.ends and client.takes_parts
    place.limit_s, place.may_fail = 600, gives_up
    make_policy(house.policy, CALLING)
    await house.restart()
    house.engine.script = script(house, client, fault)
    await house.make_run(context=10**6)
    (attempt,) = await house.attempts(max_tokens=4000)
    async with faulty.Proxy(house.url, house) as front, faulty.Proxy(house.engine.url, house) as back:
        if fault.front:
            front.faults[2] = fault.front
        if fault.back:
            back.faults[2] = fault.back
            await house.admin(register_engine(EngineSpec(id="e", url=back.url, run="r", model="m")))
        restarting = asyncio.create_task(restart(house, fault)) if fault.restarts else None
        texts = await client.play(house, front, place, attempt.key)
        if restarting:
            await restarting

    log = house.engine.log
    await faulty.until(lambda: all(call.finish for call in log if call.answer))
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
    (transcript,) = await house.admin(get_transcripts("g"))
    nodes = transcript.attempts[-1].nodes
    sample, totals = build(transcript), await house.admin(get_totals("r"))

    # No token is lost, and none is there twice.
    wasted = len(log[1].answer) if fault.wastes else 0
    assert sum(sample.fates.values()) == totals.sampled_tokens == house.engine.sampled_tokens - wasted
    check_contexts(sample, log)
    undelivered = [node for node in nodes if not node.delivered]
    assert sample.fates[Fate.UNDELIVERED] == sum(node.sampled for node in undelivered)
    assert totals.lost == (fault.lost if client.streams else fault.whole_lost)
    assert len(undelivered) == totals.undelivered == (gives_up or takes_part or name in fault.keeps)

    # What was whole is not sampled again.
    calls = fault.calls if client.streams else fault.whole_calls or fault.calls
    again = fault.unseen and not client.counts
    assert len(log) == (2 if gives_up else calls - takes_part + again)

    # What the client has is what is stored.
    if gives_up:
        return
    stored = [node.message["content"] for node in conversation(nodes)]
    part = [texts.pop(1)] if takes_part else []
    assert all(nodes[1].message["content"].startswith(text) for text in part)
    if client.shell:
        assert stored[2] in texts[0] + " "
        assert (place.work / "out.txt").read_text() == "café\n" * 2
        assert len(stored) == 3
    else:
        assert stored == texts


def conversation(nodes):
    """That ends in the last answer."""
    by_number, number, found = {node.number: node for node in nodes}, nodes[-1].number, []
    while number:
        found.append(by_number[number])
        number = by_number[number].follows
    return found[::-1]
