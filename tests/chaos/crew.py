"""The controller of these tests: claims rollouts, plays each as one linear conversation, and reports its end.

An attempt that was claimed while the answer was lost is given back, as the real controller does it.
"""

import asyncio
import itertools
import time
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from talkers import BROKEN, TALKERS, Connections, Heard

from harnessed.client import ApiError, AsyncClient, claim, end_attempt, renew
from harnessed.records import Assignment, Ending, Outcome

ATTEMPTS = 100
CALLS = 20
"""Of each."""
SLOTS = 32
TRIES = 5
"""Attempts of a rollout."""
REPEATS = 10
"""Of a request by its caller, at most."""
RENEW_S = 5.0
LIMIT_S = 600
OWNER = "crew"


@dataclass
class Story:
    """What became of one attempt."""

    protocol: str
    heard: list[Heard] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    """When, by the monotonic clock."""
    streamed: int = 0
    """Calls."""
    repeats: list[str] = field(default_factory=list)
    """Why the caller asked again."""


class Crew:
    """Each call, and each repetition by its caller, goes to the next gateway."""

    def __init__(self, run: str, admins: list[AsyncClient], connections: Connections, seed: int, lasts_s: float):
        """`admins`: one for each gateway. Over `lasts_s` seconds calls begin, if they end in time."""
        self.run = run
        self.admins = itertools.cycle(admins)
        self.urls = itertools.cycle([admin.url for admin in admins])
        self.connections = connections
        self.seed = seed
        self.begin_at = time.monotonic()
        self.apart_s = lasts_s / (ATTEMPTS * CALLS)
        self.calls = 0
        """Begun."""
        self.stories: dict[str, Story] = {}
        """By `rollout/attempt`."""
        self.given_back: list[str] = []
        """Attempts that nobody played."""

    def answers(self) -> int:
        """Heard so far."""
        return sum(len(story.heard) for story in self.stories.values())

    async def work(self) -> None:
        """Returns when every rollout is played. Raises what a talker cannot stand."""
        playing: set[asyncio.Task[None]] = set()
        renewing = asyncio.create_task(self.renew())
        try:
            async with asyncio.timeout(LIMIT_S):
                while len(self.stories) < ATTEMPTS:
                    claimed = await next(self.admins)(claim(self.run, OWNER, SLOTS - len(playing), TRIES, 1))
                    for number, assignment in enumerate(claimed, len(self.stories)):
                        name = f"{assignment.rollout}/{assignment.attempt}"
                        talker = TALKERS[number % len(TALKERS)]
                        self.stories[name] = Story(talker.__name__)
                        playing.add(asyncio.create_task(self.play(assignment, talker, self.stories[name])))
                    if len(playing) == SLOTS:
                        await asyncio.wait({renewing, *playing}, return_when=asyncio.FIRST_COMPLETED)
                    for task in [task for task in (*playing, renewing) if task.done()]:
                        task.result()
                        playing.discard(task)
                await asyncio.gather(*playing)
        finally:
            for task in (renewing, *playing):
                task.cancel()
            await asyncio.gather(renewing, *playing, return_exceptions=True)

    async def play(self, assignment: Assignment, kind: type, story: Story) -> None:
        random = Random(f"{self.seed} {assignment.rollout}")
        talker = kind(self.connections, assignment.key)
        said = talker.user(f"Begin {assignment.rollout}.")
        for turn in range(CALLS):
            await self.turn()
            streams = random.random() < 0.5
            story.streamed += streams
            heard = await self.ask(talker, said, story, streams=streams)
            story.heard.append(heard)
            story.at.append(time.monotonic())
            said = talker.results(heard.ids) if heard.ids else talker.user(f"Turn {turn}: {random.random()}")
        ending = Ending(outcome=Outcome.OK, reward=random.random())
        await next(self.admins)(end_attempt(assignment.rollout, assignment.attempt, ending, TRIES))

    async def turn(self) -> None:
        """Calls begin at an even pace."""
        at = self.begin_at + self.calls * self.apart_s
        self.calls += 1
        await asyncio.sleep(at - time.monotonic())

    async def ask(self, talker, said, story: Story, *, streams: bool) -> Heard:
        """The same request until its answer is whole."""
        for tries in range(REPEATS + 1):
            try:
                return await talker.ask(next(self.urls), said, streams=streams)
            except BROKEN as error:
                story.repeats.append(repr(error))
                if tries == REPEATS:
                    raise
        raise AssertionError("the last try ends the loop")

    async def renew(self) -> None:
        """Keep what is ours; give back what two renewals in a row say is ours and nobody plays."""
        absent: set[str] = set()
        while True:
            await asyncio.sleep(RENEW_S)
            ours = await next(self.admins)(renew(OWNER))
            unknown = {name for name in ours if name not in self.stories}
            for name in unknown & absent:
                rollout, _, attempt = name.rpartition("/")
                lost = Ending(outcome=Outcome.INFRASTRUCTURE, reason="nobody got this attempt")
                self.given_back.append(name)
                with suppress(ApiError):  # it came through, and the answer was lost
                    await next(self.admins)(end_attempt(rollout, int(attempt), lost, TRIES))
            absent = unknown
