"""Any mix of what harnesses, engines and crashes do, over real HTTP; then the books of what was recorded.

The engine stamps every token of a test with a log-probability of its own, so each trained position can be traced to the
call that sampled it, and its context compared with what the engine was given.
"""

import asyncio
import json
import os
import secrets
from collections import deque
from random import Random

import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from policies import TEMPLATE, make_policy
from scripted_engine import Scripted
from test_splits import STRIPPING
from texts import STOP, ids

from harnessed.client import claim, end_attempt, get_totals, get_transcripts
from harnessed.records import Dialect, Ending, Fate, History, Outcome
from harnessed.training.samples import build

OTHER_STOP = ids("<|endoftext|>")[0]
SYSTEM = {"role": "system", "content": "be good"}
ACTS = (
    "go_on go_on go_on drop fork compact edit volatile side twice parallel leave crash crash_while_generating".split()
)
TEXTS = ["yes", " yes ", "no\n", "<think>hm</think>ls", "é", "x" * 30]
ARGUMENTS = ['{"command":  "ls", "timeout": 20.0}', '{"command": "echo hel']


def user(content):
    return {"role": "user", "content": content}


class Failed(Exception):
    """The gateway refused, or the engine failed: the harness carries on without an answer."""


class RandomHarness:
    """One attempt. Each thread is a conversation that goes on by itself.

    Hypothesis chooses the acts and a seed; the rest is drawn from that, because the order in which parallel calls end
    is not hypothesis' to know.
    """

    def __init__(self, house, random, key, *, chats):
        self.house = house
        self.random = random
        self.client = house.openai(key)
        self.chats = chats
        self.threads = [[SYSTEM, user("task")]]
        self.received = []
        """(call, texts) of every answer that arrived."""
        self.lost = 0
        """Tokens that the engine sampled for a gateway that died."""
        self.planned = deque()
        house.engine.script = lambda prompt, call: (
            self.planned.popleft() if self.planned else Scripted([*ids("."), STOP])
        )

    def one_of(self, *choices):
        return self.random.choice(choices)

    async def step(self, act):
        thread = self.random.choice(self.threads)
        try:
            await getattr(self, act)(thread)
        except Failed:
            thread.append(user("again"))

    async def go_on(self, thread):
        answer = await self.ask(thread)
        thread += [self.resend(answer), self.prompt()]

    async def drop(self, thread):
        await self.ask(thread)
        thread.append(user("format error"))

    async def fork(self, thread):
        answer = await self.ask(thread)
        self.threads.append([*thread, self.resend(answer), user("the other way")])
        thread += [self.resend(answer), self.prompt()]

    async def compact(self, thread):
        summary = await self.ask([*thread, user("summarise")])
        thread[:] = [SYSTEM, user("so far:"), self.resend(summary), user("continue")]

    async def edit(self, thread):
        place = self.random.randrange(len(thread))
        thread[place] = thread[place] | {"content": f"edited {len(thread)}"}
        await self.go_on(thread)

    async def volatile(self, thread):
        answer = await self.ask([*thread, user(f"volatile {len(self.received)}")])
        thread += [self.resend(answer), self.prompt()]

    async def side(self, thread):
        await self.ask([user("a title, please")], tools=[{"type": "function", "function": {"name": "title"}}])

    async def twice(self, thread):
        """Best of several: one request for more answers, and the same request again."""
        await self.ask(thread, n=self.one_of(1, 2, 3))
        await self.go_on(thread)

    async def parallel(self, thread):
        """Sub-agents, and the same request more than once at the same time."""
        asked = [self.ask(thread), self.ask(thread), self.ask([SYSTEM, user(f"sub-agent {len(self.received)}")])]
        answers = [a for a in await asyncio.gather(*asked, return_exceptions=True) if not isinstance(a, Failed)]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        if answers:
            self.threads.append([*thread, self.resend(answers[0]), self.prompt()])

    async def leave(self, thread):
        """The client goes away while its answer is made, and comes back: at once, later, or after a crash."""
        engine = self.house.engine
        await self.settled()
        how = self.one_of("at once", "later", "after a crash", "never")
        engine.interruptible = self.one_of(True, False)
        self.planned.clear()  # what was planned for a request that was replayed instead
        answers = [self.planned_answer("stop")]
        if how != "at once" and self.one_of(True, False):
            await self.leave_in_the_middle(thread, answers, how)
            return
        known = {node.number for node in await self.stored()}
        engine.paused, before = True, len(engine.log)
        asking = asyncio.create_task(self.ask(thread, answers=answers))
        while len(engine.log) == before and not asking.done():
            await asyncio.sleep(0.002)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await self.house.left()
        again = asyncio.create_task(self.ask(thread, answers=[])) if how == "at once" else None
        engine.paused = False
        if again:
            thread += [self.resend(await again), self.prompt()]
        elif how != "never":
            await self.settled()
            if how == "after a crash":
                await self.house.restart()
            (*_, waiting) = [None, *(n for n in await self.stored() if not n.delivered and n.number not in known)]
            answer = await self.ask(thread, answers=[])
            if waiting and waiting.finish != "interrupted":  # else it goes on from there, as a call of its own
                assert self.received[-1][0] == waiting.call, "the retry did not get what was stored"
            thread += [self.resend(answer), self.prompt()]

    async def leave_in_the_middle(self, thread, answers, how):
        """Some tokens are there when it goes away."""
        answers[0].pace_s, before = 0.004, len(self.house.engine.log)
        asking = asyncio.create_task(self.ask(thread, answers=answers))
        while not (asking.done() or any(call.answer for call in self.house.engine.log[before:])):
            await asyncio.sleep(0.002)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await self.house.left()
        if how == "never":
            return
        if how == "after a crash":
            await self.settled()
            await self.house.restart()
        thread += [self.resend(await self.ask(thread)), self.prompt()]

    async def crash(self, thread):
        await self.settled()
        await self.house.restart()
        await self.go_on(thread)

    async def crash_while_generating(self, thread):
        """What the engine makes for a gateway that died is lost, and the request is a new one."""
        engine, answers = self.house.engine, [self.planned_answer("stop", "cut")]
        await self.settled()
        engine.paused, before = True, len(engine.log)
        asking = asyncio.create_task(self.ask(thread, answers=answers))
        while len(engine.log) == before and not asking.done():
            await asyncio.sleep(0.002)
        await self.house.restart()
        engine.paused = False
        while engine.waiting or engine.running:
            await asyncio.sleep(0.002)
        self.lost += sum(len(call.answer) for call in engine.log[before:])
        await asyncio.gather(asking, return_exceptions=True)
        await self.go_on(thread)

    async def settled(self):
        """Nothing is being generated or recorded for anybody."""
        while any(not pending.answers.done() for pending in self.house.calls_in_progress()):
            await asyncio.sleep(0.002)

    async def ask(self, messages, *, n=1, tools=(), answers=None):
        """One answer as the harness keeps it. Raises Failed."""
        self.planned += [self.planned_answer() for _ in range(n)] if answers is None else answers
        streams = self.random.random() < 0.5
        try:
            url = self.house.urls[self.random.random() < 0.5] if self.house.settings.database else self.house.url
            completion = await self.client.with_options(base_url=f"{url}/v1").chat.completions.create(
                model="m", messages=list(messages), n=n, stream=streams, **({"tools": list(tools)} if tools else {})
            )
            if streams:
                state = ChatCompletionStreamState()
                async for chunk in completion:
                    state.handle_chunk(chunk)
                completion = state.current_completion_snapshot
        except openai.APIStatusError as error:
            assert error.status_code in (400, 503), error
            raise Failed from error
        except openai.APIConnectionError as error:  # the gateway died
            raise Failed from error
        messages = [choice.message.to_dict() for choice in completion.choices]
        self.received.append((completion.id.removeprefix("chatcmpl-"), [m.get("content") or "" for m in messages]))
        return self.random.choice(messages)

    def planned_answer(self, *kinds):
        kind = self.one_of(
            *(kinds or ("stop", "stop", "stop", "stop", "other stop", "cut", "half", "interrupted", "500"))
        )
        sampled, message = ids(self.one_of(*TEXTS)), None
        if kind == "500":
            return Scripted(status=500)
        if kind in ("stop", "other stop"):
            sampled = [*sampled, STOP if kind == "stop" else OTHER_STOP]
            if self.chats and self.random.random() < 0.5:
                function = {"name": "bash", "arguments": self.one_of(*ARGUMENTS)}
                call = {"id": "chatcmpl-tool-1", "type": "function", "function": function}
                message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
        if kind == "half":
            sampled = ids("né")[:-1]
        return Scripted(
            sampled, finish={"cut": "length", "half": "length"}.get(kind, kind.split()[-1]), message=message
        )

    def prompt(self):
        return {"role": self.one_of("user", "user", "system"), "content": f"result {self.random.randrange(3)}"}

    def resend(self, message):
        """An answer as this or that harness writes it into its history."""
        message = json.loads(json.dumps(message))
        text = message.get("content") or ""
        shape = self.one_of("as it is", "block", "stripped", "nulls", "reasoning")
        if shape == "block":
            message["content"] = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
        elif shape == "stripped":
            message["content"] = text.strip()
        elif shape == "nulls":
            message |= {"refusal": None, "annotations": None, "provider_specific_fields": {"a": 1}}
        elif shape == "reasoning":
            message.pop("reasoning_content", None)
        for call in message.get("tool_calls") or []:
            function = call["function"]
            try:
                arguments = json.loads(function["arguments"])
            except json.JSONDecodeError:
                arguments = {"__unparsedToolInput": {"raw": function["arguments"], "len": len(function["arguments"])}}
            else:
                arguments = {"timeout": 20, "command": arguments["command"]}
            function["arguments"] = self.one_of(function["arguments"], json.dumps(arguments))
        return message

    async def stored(self):
        (transcript,) = await self.house.admin(get_transcripts(self.group))
        return transcript.attempts[-1].nodes


def check_contexts(sample, log):
    """Each trained token has in front of it what the engine had, and none is trained twice."""
    seen = set()
    for row in sample.rows:
        for place in np.flatnonzero(row.trained):
            number, offset = divmod(round(-float(row.logprobs[place]) * 2**20) - 1, 1024)
            assert (number, offset) not in seen
            seen.add((number, offset))
            call = log[number - 1]
            assert row.tokens[: place + 1].tolist() == call.prompt + call.answer[: offset + 1]
    assert len(seen) == sample.trained_tokens


def check_received(harness, nodes):
    """What a client got is what is stored, and it is marked as delivered."""
    for call, texts in harness.received:
        answers = [node for node in nodes if node.call == call]
        assert [node.message.get("content") or "" for node in answers] == texts
        assert all(node.delivered for node in answers)


EXAMPLES = int(os.environ.get("RANDOM_HARNESS_EXAMPLES", "20"))
WORLDS = {
    "exact": (History.EXACT, Dialect.TOKENS, TEMPLATE),
    "template": (History.TEMPLATE, Dialect.TOKENS, STRIPPING),
    "chat": (History.EXACT, Dialect.CHAT, STRIPPING),
}


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    first=st.lists(st.sampled_from(ACTS), max_size=10),
    second=st.none() | st.lists(st.sampled_from(ACTS)),
    seed=st.integers(0, 2**32),
)
async def test_any_mix_of_what_harnesses_do_keeps_the_books(house, world, first, second, seed):
    history, speaks, template = WORLDS[world]
    if house.world != world:  # the house is the same for all examples
        make_policy(house.policy, template)
        (house.policy / "generation_config.json").write_text(json.dumps({"eos_token_id": [STOP, OTHER_STOP]}))
        await house.restart()
        await house.make_run(history=history, speaks=speaks)
        house.world = world
    await play_attempts(
        house, [first] if second is None else [first, second], Random(seed), chats=speaks == Dialect.CHAT
    )


async def play_attempts(house, acts, random, *, chats):
    """A rollout, by one or two attempts; then its books."""
    engine, group, lost = house.engine, f"g{secrets.token_hex(4)}", 0
    engine.log.clear()
    counted, before = engine.sampled_tokens, await house.admin(get_totals("r"))
    (attempt,) = await house.attempts(group=group, max_tokens=40)
    for number, chosen in enumerate(acts, 1):
        if number > 1:
            (attempt,) = await house.admin(claim("r", "controller", 1, 2))
        harness = RandomHarness(house, random, attempt.key, chats=chats)
        harness.group = group
        for act in chosen:
            await harness.step(act)
        lost += harness.lost
        last = number == len(acts)
        ending = Ending(outcome=Outcome.OK, reward=1.0) if last else Ending(outcome=Outcome.INFRASTRUCTURE)
        await house.admin(end_attempt(attempt.rollout, number, ending, len(acts)))
        (transcript,) = await house.admin(get_transcripts(group))
        check_received(harness, transcript.attempts[-1].nodes)
    sample = build(transcript)
    sampled = (await house.admin(get_totals("r"))).sampled_tokens - before.sampled_tokens
    assert sum(sample.fates.values()) == sampled == engine.sampled_tokens - counted - lost
    assert set(sample.fates) <= {Fate.TRAINED, Fate.UNDELIVERED, Fate.SUPERSEDED_ATTEMPT, Fate.INFRASTRUCTURE}
    check_contexts(sample, engine.log)
