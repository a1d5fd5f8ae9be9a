"""Harnesses work on through a turnstile that is closed for two minutes: their calls wait, and none sees an error.

Each harness has four attempts at once. In two of them the engine stands still in the middle of an answer when the
turnstile closes, for one run in mode `finish` and for the other in mode `interrupt`: the first comes to its end and the
next call stands at the turnstile, as it is being closed; the second is broken off and goes on afterwards. The other two
attempts begin while it is closed. With HARNESSED_LONG=1 (`make harnesses-long`) it is closed for five and a half
minutes, which is longer than the timers of Codex, Claude Code and others.
"""

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from policies import CALLING, make_policy
from scripted_engine import Scripted
from test_tasks import CASES, Case, configuration, sdk, write
from texts import answer, ids, text

from harnessed.client import (
    claim,
    close_turnstile,
    create_groups,
    create_run,
    end_attempt,
    get_held_seconds,
    get_totals,
    get_transcripts,
    get_turnstile,
    open_turnstile,
    register_engine,
    renew,
    renew_turnstile,
)
from harnessed.config import Gateway
from harnessed.controller.local import LocalRunner
from harnessed.records import Assignment, CloseMode, EngineSpec, Fate, GroupSpec, Limits, Outcome, RunSpec
from harnessed.training.samples import build

NAMES = ("mini-swe-agent", "claude-code", "codex", "openai, chat", "openai, chat streamed", "anthropic")
CLIENTS: dict[str, Case] = {name: CASES[name] for name in NAMES} | {"anthropic, whole": sdk("anthropic_unstreamed")}
MODES = ("finish", "interrupt")
OWNER = "trainer"
START_LIMIT_S = 150
"""For all of them to come to the middle of their second answers."""
SHORT_S, LONG_S = 120, 330
TIME_LIMIT_S = 120
"""Of an attempt, without the time for which it is held."""


@dataclass
class Attempt:
    name: str
    mode: str
    early: bool
    """It is at work before the turnstile closes."""
    assignment: Assignment | None = None
    calls: int = 0
    """Of the engine."""
    statuses: list[int] = field(default_factory=list)
    """Of all answers that it got for a call."""

    @property
    def word(self) -> str:
        return f"{self.name.replace(', ', '-').replace(' ', '-')}-{self.mode}-{'early' if self.early else 'late'}"

    @property
    def run(self) -> str:
        return self.mode


class Stage:
    """All attempts, and what the engine says to them."""

    def __init__(self, house, folder: Path) -> None:
        self.house, self.folder = house, folder
        self.attempts = [
            Attempt(name, mode, early)
            for name, case in CLIENTS.items()
            if not case.needs or case.needs.exists()
            for mode in MODES
            for early in (True, False)
        ]
        self.stalled: Counter[str] = Counter()
        """Early attempts in the middle of an answer, by mode."""
        self.go = False
        """The answers that stand still go on."""
        self.runners: dict[str, LocalRunner] = {}
        self.asked: list[tuple[float, str]] = []
        """When the engine was asked for which run."""

    def early(self, mode: str) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.early and attempt.mode == mode]

    def next_answer(self, prompt, call) -> Scripted:
        said = text(prompt)
        (attempt,) = [attempt for attempt in self.attempts if f"the word {attempt.word} into" in said]
        case, step = (
            CLIENTS[attempt.name],
            said.rpartition("<|im_start|>assistant\n")[0].count("<|im_start|>assistant\n"),
        )
        kept = ids(said.rpartition("<|im_start|>assistant\n")[2])
        last = write(case, case.last) if case.last else " \nDone,  it is written. "
        whole = answer([write(case, f"echo '{attempt.word}  é' > out.txt"), write(case, "cat out.txt"), last][step])
        assert whole[: len(kept)] == kept, "a broken-off answer is gone on with"
        attempt.calls += 1
        self.asked.append((time.monotonic(), attempt.run))
        if attempt.early and attempt.calls == 2:
            self.stalled[attempt.mode] += 1
            return Scripted(whole, stall_at=len(whole) // 2, stall_until=lambda: self.go)
        return Scripted(whole[len(kept) :])

    async def start(self, early: bool) -> None:
        for attempt in self.attempts:
            if attempt.early == early:
                self.runners[attempt.name].start(attempt.assignment)

    async def make(self) -> None:
        house = self.house
        for mode in MODES:
            await house.admin(create_run(RunSpec(id=mode, policy=str(house.policy), limits=Limits(context=10**6))))
            await house.admin(register_engine(EngineSpec(id=mode, url=house.engine.url, run=mode, model="m")))
        for name in {attempt.name for attempt in self.attempts}:
            folder = self.folder / name.replace(", ", "-").replace(" ", "-")
            folder.mkdir()
            config = configuration(CLIENTS[name], house, folder)
            limited = config.controller.model_copy(update={"time_limit_s": TIME_LIMIT_S})
            config = config.model_copy(update={"controller": limited})
            self.runners[name] = LocalRunner(config, house.url, folder / "attempts", asyncio.Event(), self.held)
            await self.runners[name].open()
            for attempt in self.attempts:
                if attempt.name == name:
                    task = {"prompt": f"Write the word {attempt.word} into out.txt.", "word": attempt.word}
                    group = GroupSpec(id=attempt.word, run=attempt.run, task=task, n=1, sampling=config.sampling)
                    await house.admin(create_groups([group]))
                    (attempt.assignment,) = await house.admin(claim(attempt.run, "controller", 1, 3))

    async def held(self, assignment: Assignment) -> float:
        return await self.house.admin(get_held_seconds(assignment.rollout, assignment.attempt))

    def listen(self) -> None:
        """Note the status of every answer that the gateway gives."""
        serve, exchange = self.house.exchange.serve, self.house.exchange
        by_rollout = {attempt.assignment.rollout: attempt for attempt in self.attempts}

        async def noted(wire, scope, receive, send):
            attempt = by_rollout[exchange.key(scope).rollout]

            async def noting(message):
                if message["type"] == "http.response.start":
                    attempt.statuses.append(message["status"])
                await send(message)

            await serve(wire, scope, receive, noting)

        exchange.serve = noted

    async def alive(self) -> None:
        """Attempts and turnstiles stay ours."""
        while True:
            await asyncio.sleep(5)
            await self.house.admin(renew("controller"))
            for mode in MODES:
                if (await self.house.admin(get_turnstile(mode))).state != "open":
                    await self.house.admin(renew_turnstile(mode, OWNER))

    async def ended(self) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            while not all(all(runner.attempts().values()) for runner in self.runners.values()):
                await asyncio.sleep(0.2)

    async def check(self, attempt: Attempt) -> None:
        """It ended as if nothing had been."""
        ending = self.runners[attempt.name].attempts()[f"{attempt.assignment.rollout}/1"].ending
        log = "".join(
            log.read_text()[-3000:] for log in self.folder.glob(f"*/attempts/{attempt.assignment.rollout}*/log.txt")
        )
        assert (ending.outcome, ending.reward) == (Outcome.OK, 1.0), (ending, log)
        assert attempt.statuses == [200] * 3, (attempt.statuses, log)
        await self.house.admin(end_attempt(attempt.assignment.rollout, 1, ending, 3))
        (transcript,) = await self.house.admin(get_transcripts(attempt.word))
        (tried,) = transcript.attempts
        assert len(tried.nodes) == 3 and all(node.delivered for node in tried.nodes)
        sample = build(transcript)
        assert len(sample.rows) == 1 and set(sample.fates) == {Fate.TRAINED}
        broken_off = attempt.early and attempt.mode == "interrupt"
        assert attempt.calls == 3 + broken_off


@pytest.mark.parametrize("closed_s", [SHORT_S, LONG_S])
async def test_harnesses_work_on_through_a_closed_turnstile(house, tmp_path, closed_s):
    if closed_s == LONG_S and not os.environ.get("HARNESSED_LONG"):
        pytest.skip("HARNESSED_LONG=1 plays it")
    make_policy(house.policy, CALLING)
    house.settings = Gateway(generation_limit_s=2 * START_LIMIT_S)
    await house.restart()
    stage = Stage(house, tmp_path)
    house.engine.context, house.engine.script = 10**7, stage.next_answer
    await stage.make()
    stage.listen()
    living = asyncio.create_task(stage.alive())
    try:
        await stage.start(early=True)
        async with asyncio.timeout(START_LIMIT_S):
            while not all(stage.stalled[mode] == len(stage.early(mode)) for mode in MODES):
                await asyncio.sleep(0.1)
        closing = time.monotonic()
        for mode, state in zip(MODES, ("closing", "closed"), strict=True):
            drain_s = 0 if state == "closing" else 30
            turnstile = await house.admin(close_turnstile(mode, OWNER, CloseMode(mode), 60, drain_s))
            assert turnstile.state == state
        stage.go = True
        await stage.start(early=False)
        closed = {mode: await shut(house, mode) for mode in MODES}
        await asyncio.sleep(closing + closed_s - time.monotonic())
        assert not [run for at, run in stage.asked if at > closed[run]], "nothing is asked for while it is closed"
        assert not any(end for runner in stage.runners.values() for end in runner.attempts().values())
        for mode in MODES:
            await house.admin(open_turnstile(mode, OWNER))
        await stage.ended()
        for attempt in stage.attempts:
            await stage.check(attempt)
    finally:
        living.cancel()
        await asyncio.gather(*(runner.close() for runner in stage.runners.values()))
    await check_books(house, stage)


async def shut(house, mode: str) -> float:
    """Since when it is closed."""
    async with asyncio.timeout(START_LIMIT_S):
        while (await house.admin(get_turnstile(mode))).state != "closed":
            await asyncio.sleep(0.1)
    return time.monotonic()


async def check_books(house, stage) -> None:
    totals = [await house.admin(get_totals(mode)) for mode in MODES]
    assert sum(each.sampled_tokens for each in totals) == house.engine.sampled_tokens
    assert [(each.lost, each.undelivered) for each in totals] == [(0, 0)] * 2
