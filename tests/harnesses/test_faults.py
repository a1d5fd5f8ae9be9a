"""Networks, engines and gateways fail under SDKs and harnesses: the task is done all the same, and the books hold.

A task is three model calls. A fault is played at the second, to all clients at once, each with a run of its own.
With HARNESSED_LONG=1 (`make harnesses-long`, about ten minutes) the waits are played too that clients tell from short
ones: a first byte after 65 s, and streams that stall until Codex and Claude Code cut them off at 300 s.
"""

import asyncio
import os
from dataclasses import dataclass, field

import faulty
import pytest
from clients import CLIENTS, PROMPT, Client
from driving import Workplace, binary
from house import House
from policies import CALLING, make_policy
from scripted_engine import Logged, Scripted
from test_random_harness import check_contexts
from texts import answer, ids, text

from harnessed.client import (
    claim,
    create_groups,
    create_run,
    end_attempt,
    get_totals,
    get_transcripts,
    register_engine,
    renew,
)
from harnessed.records import Assignment, Ending, EngineSpec, Fate, GroupSpec, Limits, Outcome, RunSpec, Sampling
from harnessed.training.samples import build

BEGIN = ids("<|im_start|>assistant\n")
THOUGHT = rb'reasoning_text\.delta|thinking_delta|"reasoning_content":"[^"]'
TEXT = rb'output_text\.delta|text_delta|"content":"[^"]'
TOKENS = rb'"tokens"'


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
    """The gateway, while all wait for the engine."""
    engine: dict = field(default_factory=dict)
    """How the engine answers."""
    stalls: bool = False
    """It stalls where the text has begun, if that is streamed, until nobody wants it."""
    part: int | None = None
    """It gives only so many tokens."""
    otherwise: bool = False
    """What it says from then on is something else."""
    calls: int = 3
    """Of the engine."""
    whole_calls: int = 0
    """Where answers are not streamed; 0: as many."""
    lost: int = 0
    """Calls that the gateway cannot answer, where answers are streamed."""
    whole_lost: int = 0
    """Where they are not."""
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
    clients: tuple[str, ...] = tuple(CLIENTS)
    long: bool = False


IN_TEXT = {"keeps": ("codex",), "gives_up": ("claude",)}
"""Codex keeps the thought, which was whole. Claude Code ends: with an error, or after a clean end with no words."""
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
    "broken when all was said": Fault(faulty.cut(THOUGHT, late=True), calls=4, whole_calls=3),
    "ended in the thought": Fault(faulty.cut(THOUGHT, resets=False), **LEFT, ends=True),
    "ended in the text": Fault(faulty.cut(TEXT, resets=False), **LEFT, **IN_TEXT, ends=True),
    "late": Fault(faulty.wait(2)),
    "stalled": Fault(faulty.wait(2, TEXT)),
    "engine answers 500": Fault(engine={"status": 500}, calls=4, lost=1, whole_lost=1),
    "engine is reset": Fault(back=faulty.cut(TOKENS), calls=4, wastes=True),
    "engine ends too early": Fault(back=faulty.cut(TOKENS, resets=False), calls=4, wastes=True, lost=1),
    "engine hangs up and says something else": Fault(
        part=THINKS, engine={"hang_up": True, "stall_at": THINKS, "stall_s": 0.5}, otherwise=True, calls=4, wastes=True
    ),
    "engine is away": Fault(back=faulty.go_away),
    "gateway restarts before the first token": Fault(restarts=True, engine={"delay_s": 30}, calls=4),
    "gateway restarts in the middle": Fault(restarts=True, engine={"stall_at": THINKS}, calls=4),
    "65 s late": Fault(faulty.wait(65), long=True),
    "stalled for 95 s": Fault(faulty.wait(95, TEXT), long=True),
    "stalled for 310 s": Fault(faulty.wait(310, THOUGHT), unseen=True, clients=("codex", "claude"), long=True),
}


@dataclass
class Stage:
    """One client with its task: it calls `url`."""

    house: House
    name: str
    fault: Fault
    place: Workplace
    attempt: Assignment
    url: str = ""
    calls: list[Logged] = field(default_factory=list)
    """Of the engine."""

    @property
    def client(self) -> Client:
        return CLIENTS[self.name]

    @property
    def word(self) -> str:
        """In all of its prompts."""
        return f"<{self.name}>"

    @property
    def gives_up(self) -> bool:
        return self.name in self.fault.gives_up

    @property
    def takes_part(self) -> bool:
        return self.fault.ends and self.client.takes_parts

    def waiting(self) -> int:
        sessions = self.house.memory._sessions
        session = sessions.get((self.attempt.rollout, 1))
        return sum(pending.waiting for pending in session.calls_in_progress()) if session else 0

    def sampled(self) -> int | None:
        return len(self.calls[1].answer) if len(self.calls) == 2 else None

    def next_answer(self, prompt, logged) -> Scripted:
        """The policy: it goes on from what is there of its answer, and plays the engine's faults."""
        self.calls.append(logged)
        begun = max(i for i in range(len(prompt)) if prompt[i : i + len(BEGIN)] == BEGIN) + len(BEGIN)
        step = text(prompt).count("<|im_start|>tool\n") + 1 if self.client.shell else text(prompt).count(PROMPT)
        other = self.fault.otherwise and len(self.calls) > 2
        whole = answer(say(step, self.client.shell, "Ah" if other else "Hm"))
        kept = prompt[begun:]
        assert whole[: len(kept)] == kept
        if len(self.calls) != 2:
            return Scripted(whole[len(kept) :])
        stalls = {"stall_at": STALL} if self.fault.stalls and self.client.streams else {}
        return Scripted(whole[: self.fault.part], **self.fault.engine, **stalls)

    async def play(self) -> None:
        front = faulty.Proxy(self.house.url, self.waiting, self.sampled)
        back = faulty.Proxy(self.house.engine.url)
        front.faults |= {2: self.fault.front} if self.fault.front else {}
        back.faults |= {2: self.fault.back} if self.fault.back else {}
        async with front, back:
            await self.house.admin(register_engine(EngineSpec(id=self.name, url=back.url, run=self.name, model="m")))
            self.url = front.url
            texts = await self.client.play(self)
        await faulty.until(lambda: all(call.finish for call in self.calls if call.answer))
        await self.check(texts)

    async def check(self, texts) -> None:
        fault, client, calls = self.fault, self.client, self.calls
        await self.house.admin(end_attempt(self.attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
        (transcript,) = await self.house.admin(get_transcripts(self.name))
        nodes = transcript.attempts[-1].nodes
        sample, totals = build(transcript), await self.house.admin(get_totals(self.name))

        # No token is lost, and none is there twice.
        sampled = sum(len(call.answer) for call in calls) - (len(calls[1].answer) if fault.wastes else 0)
        assert sum(sample.fates.values()) == totals.sampled_tokens == sampled
        check_contexts(sample, self.house.engine.log)
        undelivered = [node for node in nodes if not node.delivered]
        assert sample.fates[Fate.UNDELIVERED] == sum(node.sampled for node in undelivered)
        parts = self.gives_up or self.takes_part or self.name in fault.keeps
        assert len(undelivered) == totals.undelivered == parts
        assert totals.lost == (fault.lost if client.streams else fault.whole_lost)

        # What was whole is not sampled again.
        expected = fault.calls if client.streams else fault.whole_calls or fault.calls
        expected += (fault.unseen and not client.counts) - self.takes_part
        assert len(calls) == (2 if self.gives_up else expected)

        # What the client has is what is stored.
        stored = [node.message["content"] for node in conversation(nodes)]
        if self.takes_part:
            assert nodes[1].message["content"].startswith(texts.pop(1))
        if not client.shell:
            assert stored == texts
        elif not self.gives_up:
            assert stored[2].strip() in texts[0]
            assert (self.place.work / "out.txt").read_text() == "café\n" * 2
            assert len(stored) == 3


def conversation(nodes):
    """That ends in the last answer."""
    by_number, number, found = {node.number: node for node in nodes}, nodes[-1].number, []
    while number:
        found.append(by_number[number])
        number = by_number[number].follows
    return found[::-1]


async def restart(house, stages) -> None:
    """The gateway, while the second answers are made."""
    tokens = stages[0].fault.engine.get("stall_at", 0)
    await faulty.until(lambda: all(stage.sampled() == tokens for stage in stages))
    await house.restart()
    for stage in stages:
        stage.calls[1].interrupted.set()


async def renewed(house) -> None:
    """All attempts stay ours."""
    while True:
        await asyncio.sleep(5)
        await house.admin(renew("controller"))


@pytest.mark.parametrize("name", FAULTS)
async def test_a_task_goes_on_after_a_fault_and_every_token_is_accounted_for(house, tmp_path, name):
    fault = FAULTS[name]
    if fault.long and not os.environ.get("HARNESSED_LONG"):
        pytest.skip("HARNESSED_LONG=1 plays it")
    policy, stages = make_policy(tmp_path / "calling", CALLING), {}
    house.engine.context = 10**7
    for client in fault.clients:
        if CLIENTS[client].shell and not binary(client).exists():
            continue  # `make harnesses` fetches it
        place = Workplace(tmp_path / client / "home", tmp_path / client / "work", 600, client in fault.gives_up)
        place.home.mkdir(parents=True)
        place.work.mkdir()
        await house.admin(create_run(RunSpec(id=client, policy=str(policy), limits=Limits(context=10**6))))
        sampling = Sampling(max_tokens=4000)
        await house.admin(create_groups([GroupSpec(id=client, run=client, task={}, n=1, sampling=sampling)]))
        (attempt,) = await house.admin(claim(client, "controller", 1, 3))
        stages[client] = Stage(house, client, fault, place, attempt)

    def next_answer(prompt, call):
        (stage,) = [stage for stage in stages.values() if stage.word in text(prompt)]
        return stage.next_answer(prompt, house.engine.log[call - 1])

    house.engine.script = next_answer
    playing = [stage.play() for stage in stages.values()]
    if fault.restarts:
        playing.append(restart(house, list(stages.values())))
    renewing = asyncio.create_task(renewed(house))
    ends = await asyncio.gather(*playing, return_exceptions=True)
    renewing.cancel()
    failed = [end for end in ends if end is not None]
    for client, end in zip(stages, ends, strict=False):
        if end is not None:
            end.add_note(f"{name}: {client}")
    if failed:
        raise ExceptionGroup(name, failed)
