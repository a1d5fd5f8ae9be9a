"""What has to hold when all is over, whatever was killed: `check` is given everything that anybody knows."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from crew import ATTEMPTS, CALLS, Story
from logging_engine import Sampled
from supervisor import Kill
from talkers import stored
from test_random_harness import check_contexts

from harnessed.records import Fate, Outcome, Totals, Transcript
from harnessed.training.samples import build

FATES = {Fate.TRAINED, Fate.UNDELIVERED, Fate.SUPERSEDED_ATTEMPT}
COMMIT_S = 2.0
"""Longest that a record waits for its commit here, on two cores that everybody wants."""
LONGEST_S = 30.0
"""Longest generation."""
ON_THE_WAY_S = 0.5
"""Longest that a request is on its way to its engine."""


@dataclass
class Books:
    stories: dict[str, Story]
    """By attempt."""
    given_back: list[str]
    """Attempts that nobody played."""
    transcripts: list[Transcript]
    totals: Totals
    sampled: list[Sampled]
    """By the engine."""
    kills: list[Kill]

    def check(self) -> str:
        """All of it; what to tell a person."""
        samples = [build(transcript) for transcript in self.transcripts]
        assert len(samples) == len(self.stories) == ATTEMPTS
        fates: Counter[Fate] = Counter()
        for transcript, sample in zip(self.transcripts, samples, strict=True):
            assert (transcript.rollout.outcome, transcript.rollout.reason) == (Outcome.OK, "")
            self.check_story(transcript)
            assert len(sample.rows) == 1, transcript.rollout.id
            check_contexts(sample, self.sampled)
            fates += sample.fates
        assert fates.total() == self.totals.sampled_tokens
        assert set(fates) <= FATES
        self.check_once()
        self.check_calls()
        lost = self.check_lost()
        stories = self.stories.values()
        counts = Counter(kill.name for kill in self.kills)
        return (
            f"{len(self.kills)} kills {dict(counts)}; {sum(len(story.heard) for story in stories)} answers, "
            f"{sum(story.streamed for story in stories)} streamed, {sum(len(story.repeats) for story in stories)} "
            f"asked for again by callers; {len(self.given_back)} attempts given back; "
            f"{ {str(fate): count for fate, count in fates.items()} }, lost {lost}; {self.totals}"
        )

    def check_story(self, transcript: Transcript) -> None:
        """What its client heard is what is stored, one after the other, and nothing else was delivered."""
        attempt = transcript.attempts[-1]
        name = f"{transcript.rollout.id}/{attempt.number}"
        story, by_call = self.stories[name], {node.call: node for node in attempt.nodes}
        assert len(story.heard) == CALLS
        followed = 0
        for heard in story.heard:
            assert heard.call in by_call, (name, story)
            node = by_call[heard.call]
            assert stored(node) == heard, (name, story.protocol)
            assert node.parent == followed, (name, story.protocol)
            followed = node.number
            if not node.delivered:  # nothing came after it that could prove it
                assert heard is story.heard[-1], (name, story.protocol)
                assert self.killed_around(story.at[-1], story.at[-1], "gateway"), (name, story.protocol)
        known = {heard.call for heard in story.heard}
        assert not [node for node in attempt.nodes if node.delivered and node.call not in known], (name, story)

    def check_once(self) -> None:
        """No token that the engine gave stands in the records twice."""
        stored_tokens = [place for node in self.nodes() for place in places(node)]
        assert len(stored_tokens) == len(set(stored_tokens)) == self.totals.sampled_tokens

    def check_lost(self) -> int:
        """Tokens that were sampled and are not in the records: of generations that were open when the engine or their
        gateway was killed; those of a gateway are calls that the totals call lost."""
        kept = Counter(number for node in self.nodes() for number, _ in places(node))
        lost, calls = 0, set()
        for number, sampled in enumerate(self.sampled, 1):
            if kept[number]:
                assert kept[number] == sampled.given, (number, sampled)
                continue
            lost += sampled.given
            ended = sampled.ended or sampled.began + LONGEST_S
            if not sampled.given or self.killed_around(sampled.began, ended, "engine"):
                continue
            assert self.killed_around(sampled.began, ended, "gateway"), (number, sampled)
            if not self.killed_around(sampled.began, sampled.began, "gateway"):  # its row was committed
                calls.add(sampled.id.partition(".")[0])
        assert len(calls) <= self.totals.lost
        return lost

    def check_calls(self) -> None:
        """Every call that was admitted is answered, interrupted or lost."""
        answered = {node.call for node in self.nodes() if node.finish != "interrupted"}
        assert self.totals.calls == len(answered) + self.totals.interrupted + self.totals.lost

    def nodes(self):
        return [node for each in self.transcripts for attempt in each.attempts for node in attempt.nodes]

    def killed_around(self, begin: float, end: float, name: str) -> bool:
        """Whether a service of that name was killed between two moments, or soon after."""
        moments = (kill.at for kill in self.kills if kill.name.startswith(name))
        return any(begin - ON_THE_WAY_S <= at <= end + COMMIT_S for at in moments)


def places(node) -> list[tuple[int, int]]:
    """(call of the engine, offset) of each token."""
    marks = np.rint(-np.frombuffer(node.logprobs, np.float32).astype(np.float64) * 2**20).astype(int) - 1
    return [divmod(int(mark), 1024) for mark in marks]
