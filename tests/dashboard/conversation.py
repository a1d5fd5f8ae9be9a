"""An agent at work, played to a real gateway: one rollout whose conversations go apart in every way there is.

Tests and the screenshots of docs/dashboard.md use it. The policy's tokenizer is trained on what is said here, so that
tokens look like those of a real one.
"""

import asyncio
import itertools
import json
from random import Random

from policies import CALLING, make_policy, make_tokenizer
from scripted_engine import Scripted
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harnessed.client import claim, create_groups, create_run, end_attempt
from harnessed.records import Ending, GroupSpec, Limits, Outcome, RunSpec, SideCall, Version

SYSTEM = {"role": "system", "content": "You are a careful software engineer. Fix the issue, then run the tests."}
ISSUE = (
    "parse_range('5-') raises ValueError. An open range has no end: it should give Range(5, None).\n"
    "The tests are in tests/test_ranges.py."
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command in the repository.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
SOURCE = (
    "def parse_range(text):\n    begin, end = text.split('-')\n    return Range(int(begin), int(end))\n\n"
    "def format_range(range):\n    return f'{range.begin}-{range.end}'\n"
)
FAILED = "E       ValueError: invalid literal for int() with base 10: ''\nranges.py:14: ValueError\n1 failed, 11 passed"
PASSED = "............\n12 passed in 0.31s"


def call(command: str, thought: str = "", say: str = "") -> str:
    """An answer that runs a command, as Qwen3 writes it."""
    think = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    tool = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{think}{say}\n<tool_call>\n{tool}\n</tool_call>" if say else f"{think}<tool_call>\n{tool}\n</tool_call>"


LOOK = call(
    "cat ranges.py",
    "The error comes from int(''), so the end is empty. Let me look at the parser first.",
    "I look at the parser.",
)
EDIT = call(
    'sed -i "s/int(end)/int(end) if end else None/" ranges.py && pytest -q tests/test_ranges.py',
    "text.split('-') gives ['5', '']. An empty end means an open range.",
)
WRONG = call('sed -i "s/int(end)/int(end or 0)/" ranges.py && pytest -q tests/test_ranges.py', "Let me use a default.")
DONE = "parse_range('5-') now gives Range(5, None), and all 12 tests pass."
BROKEN = '<tool_call>\n{"name": "bash", "arguments": {"command": "cat ran'
REVIEW = "The change is small and right: an empty end is None. format_range should write '5-' for it as well."
SUMMARY = "So far: the parser is fixed and 12 tests pass. Open: format_range writes 'None' for an open range."
LATE = "I could also rewrite the parser with a regular expression, which would be"
EVERYTHING = [
    SYSTEM["content"],
    ISSUE,
    SOURCE,
    FAILED,
    PASSED,
    LOOK,
    EDIT,
    WRONG,
    DONE,
    REVIEW,
    SUMMARY,
    LATE,
    json.dumps(TOOLS),
]


def merges() -> tuple[tuple[str, str], ...]:
    """Of a tokenizer that was trained on all of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(EVERYTHING, trainer)
    return tuple(map(tuple, json.loads(tokenizer.to_str())["model"]["merges"]))


MERGES = merges()
TOKENIZER = make_tokenizer(MERGES)


def tokens(text: str, *, stop: bool = True) -> list[int]:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return [*ids, TOKENIZER.token_to_id("<|im_end|>")] if stop else ids


def surprise(call: int, count: int) -> list[float]:
    """Log-probabilities as a trained policy has them: most tokens nearly certain, a few not."""
    random = Random(call)
    return [-min(8.0, random.expovariate(1) ** 3 / 4) for _ in range(count)]


class Agent:
    """One attempt. `ask` says what the model answers to it."""

    def __init__(self, house, key):
        self.house = house
        self.client = house.openai(key)

    async def ask(self, messages, answer, *, tools=TOOLS, stop=True, pace_s=0.0):
        scripted = Scripted(tokens(answer, stop=stop), finish="stop" if stop else "length", pace_s=pace_s)
        self.house.engine.script = lambda prompt, number: scripted
        completion = await self.client.chat.completions.create(
            model="m", messages=messages, **({"tools": tools} if tools else {})
        )
        return completion.choices[0].message.to_dict()

    async def leave(self, messages, answer):
        """Goes away while the answer is made: it is recorded and never delivered."""
        before = len(self.house.engine.log)
        asking = asyncio.create_task(self.ask(messages, answer, pace_s=0.05))
        while len(self.house.engine.log) == before or len(self.house.engine.log[-1].answer) < 6:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await self.house.left()


def result(message, text):
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


async def prepare(house, run="r"):
    """A run with this policy, whose titles are side calls."""
    make_policy(house.policy, CALLING, MERGES)
    await house.restart()
    house.engine.logprobs = surprise
    side = [SideCall(system="short title")]
    await house.admin(
        create_run(RunSpec(id=run, policy=str(house.policy), limits=Limits(context=4000), side_calls=side))
    )


async def play(house, key):
    """A conversation with five branches, and one of its answers undelivered."""
    agent, engine = Agent(house, key), house.engine
    messages = [SYSTEM, {"role": "user", "content": ISSUE}]
    await agent.ask([{"role": "system", "content": "Write a short title."}, messages[1]], "Open ranges", tools=())
    looked = await agent.ask(messages, LOOK)
    messages += [looked, result(looked, SOURCE)]
    await agent.ask(messages, BROKEN, stop=False)  # dropped: the harness asks again
    await agent.ask([*messages, {"role": "user", "content": "Your call was cut off. Try again, shorter."}], WRONG)
    await agent.leave(messages, LATE)
    engine.version = Version(0, engine.version.number + 1)
    edited = await agent.ask([*messages, {"role": "user", "content": "Do it."}], EDIT)
    messages += [{"role": "user", "content": "Do it."}, edited, result(edited, PASSED)]
    await agent.ask([SYSTEM, {"role": "user", "content": f"Review this change:\n{EDIT}"}], REVIEW)
    done = await agent.ask(messages, DONE)
    compacted = [SYSTEM, {"role": "user", "content": f"{ISSUE}\n\n{SUMMARY}"}]
    await agent.ask([*compacted, {"role": "user", "content": "Go on."}], call("grep -n format_range ranges.py"))
    return done


async def play_group(house, run="r", group="g", rewards=(1.0, 0.25, 0.0)):
    """A finished group: its first rollout has five branches after an attempt that was superseded."""
    task = {"issue": ISSUE, "repository": "ranges", "files": {"ranges.py": SOURCE}}
    await house.admin(create_groups([GroupSpec(id=group, run=run, task=task, n=len(rewards))]))
    first, *others = await house.admin(claim(run, "controller-1", len(rewards), 3))
    lost = Agent(house, first.key)
    await lost.ask([SYSTEM, {"role": "user", "content": ISSUE}], LOOK)
    machine = Ending(outcome=Outcome.INFRASTRUCTURE, reason="the machine went away")
    await house.admin(end_attempt(first.rollout, 1, machine, 3))
    (again,) = await house.admin(claim(run, "controller-2", 1, 3))
    await play(house, again.key)
    for assignment, text in zip(others, itertools.cycle((WRONG, BROKEN, EDIT, DONE)), strict=False):
        agent, messages = Agent(house, assignment.key), [SYSTEM, {"role": "user", "content": ISSUE}]
        looked = await agent.ask(messages, LOOK)
        await agent.ask([*messages, looked, result(looked, SOURCE)], text)
    for number, assignment, reward in zip((2, *[1] * len(others)), (again, *others), rewards, strict=True):
        outcome = Outcome.OK if reward else Outcome.AGENT_EXIT
        ending = Ending(
            outcome=outcome,
            reward=reward,
            parts={"tests": reward, "style": 0.5 * reward},
            reason="" if reward else "exit status 1: no patch was written",
        )
        await house.admin(end_attempt(assignment.rollout, number, ending, 3))
