"""What has to hold in the folder of a training that is over, whatever was killed, by its database and its files alone.

`test_training.py` calls `check`. The trainer's own sums are compared with the records, never taken for granted.
"""

import json
import runpy
import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from lives import DEMO, Lives, whole_lines
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from harnessed.browse.opening import opened
from harnessed.gateway.lifecycle import list_groups
from harnessed.gateway.recording import load_transcript
from harnessed.records import UNKNOWN_VERSION, Version
from harnessed.training.lineages import Lineage, updates_between
from harnessed.training.samples import Row, build

logging.disable_progress_bar()
STALENESS = 2
ROWS = 6
"""That are computed again for each version of which the weights are there."""
SAME = 2e-3
"""Nats by which a token's log-probability may differ from that of the engine."""


@dataclass
class Aftermath:
    lives: Lives
    steps: int
    seed: int
    policy: Path
    checkpoint_every: int

    def check(self) -> str:
        """All of it; what to tell a person."""
        self.check_database()
        self.check_fates()
        self.check_groups()
        self.check_tasks()
        self.check_history()
        self.check_metrics()
        self.check_versions()
        oldest = self.check_staleness()
        self.check_optimiser()
        compared, difference = self.check_weights()
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(oldest.items()))
        return (
            f"{len(self.booked)} rollouts, {self.summary['sampled_tokens']} tokens: {self.summary['fates']}; "
            f"rollouts trained by age: {ages}; {compared} versions computed again, off by {difference:.1e} nats at "
            f"most; held-out {self.summary['held_out_before']} -> {self.summary['held_out_after']}"
        )

    def ask(self, query: str) -> list[tuple]:
        with closing(sqlite3.connect(f"file:{self.run / 'gateway.db'}?mode=ro", uri=True)) as database:
            return database.execute(query).fetchall()

    @property
    def run(self) -> Path:
        return self.lives.run

    @cached_property
    def summary(self) -> dict:
        return json.loads((self.run / "summary.json").read_text())

    @cached_property
    def booked(self) -> dict[str, dict]:
        """Lines of transcripts.jsonl by rollout."""
        lines = whole_lines(self.run / "transcripts.jsonl")
        found = {line["rollout"]: line for line in lines}
        assert len(found) == len(lines), "a rollout is booked twice"
        return found

    @cached_property
    def metrics(self) -> dict[int, dict]:
        """Of each step, its update's line."""
        lines = [line for line in whole_lines(self.run / "metrics.jsonl") if "reward_mean" in line]
        assert [line["step"] for line in lines] == list(range(1, self.steps + 1))
        return {line["step"]: line for line in lines}

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """Of every rollout, by the database."""
        with opened(self.run) as (connection, _):
            return {id: build(load_transcript(connection, id)).rows for id in self.booked}

    @cached_property
    def lineages(self) -> list[Lineage]:
        return [Lineage(*each) for each in json.loads((self.run / "run.json").read_text())["lineages"]]

    def notes(self, step: int) -> dict:
        return json.loads((self.checkpoint(step) / "harnessed.json").read_text())

    def checkpoint(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step:05d}"

    def check_database(self) -> None:
        assert self.ask("pragma integrity_check") == [("ok",)]
        assert self.ask("select state, count(*) from rollouts where state != 'finished' group by state") == []
        assert self.ask("select owner from closings") == []

    def check_fates(self) -> None:
        """Every token in the store has one fate: in the folder, in the dashboard, and in the summary."""
        stored = self.ask(
            "select r.id, r.purpose, coalesce(sum(n.sampled), 0), "
            "coalesce(sum(case when n.attempt < r.attempt then n.sampled end), 0), "
            "coalesce(sum(case when n.attempt = r.attempt and n.delivered then n.sampled end), 0) "
            "from rollouts r left join nodes n on n.rollout = r.id group by r.id"
        )
        assert {id for id, *_ in stored} == set(self.booked)
        total: Counter[str] = Counter()
        for id, purpose, sampled, superseded, delivered in stored:
            fates = Counter(self.booked[id]["fates"])
            assert fates.total() == sampled, id
            assert fates["superseded_attempt"] == superseded, id
            assert fates["trained"] <= delivered, id
            assert purpose == "train" or set(fates) <= {"evaluation", "superseded_attempt"}, id
            total += fates
        assert total == Counter(self.summary["fates"])
        assert total.total() == self.summary["sampled_tokens"]
        assert len(stored) == self.summary["rollouts"]
        dashboard = {id: json.loads(tokens) for id, tokens in self.ask("select rollout, tokens from fates")}
        assert dashboard == {id: line["fates"] for id, line in self.booked.items()}

    def check_groups(self) -> None:
        """Each is consumed once, whole, by one step, as the checkpoints say; and so is its task."""
        steps: defaultdict[str, set[int]] = defaultdict(set)
        members: Counter[str] = Counter()
        trained: defaultdict[str, set[str]] = defaultdict(set)
        for id, line in self.booked.items():
            if line["purpose"] == "train":
                group = id.rpartition(".")[0]
                steps[group].add(line["step"])
                members[group] += 1
                if line["fates"].get("trained"):
                    trained[group.rpartition(".")[2].partition("-")[0]].add(group)
        assert all(len(found) == 1 for found in steps.values())
        assert dict(members) == dict(self.ask("select id, n from groups where purpose = 'train'"))
        assert all(len(groups) == 1 for groups in trained.values())
        for step in range(self.checkpoint_every, self.steps + 1, self.checkpoint_every):
            consumed = self.notes(step)["groups"]
            assert len(set(consumed)) == len(consumed), step
            assert set(consumed) == {group for group, (of,) in steps.items() if of <= step}, step

    def check_tasks(self) -> None:
        """The stream of tasks goes on where it was: none is left out, and each is that of its number."""
        with opened(self.run) as (connection, run):
            groups = [group for group in list_groups(connection, run.id) if group.purpose == "train"]
        by_number = {int(group.id.rpartition(".")[2].partition("-")[0]): group.task for group in groups}
        stream = runpy.run_path(str(DEMO / "tasks.py"))["train"](self.seed)
        assert [by_number[number] for number in sorted(by_number)] == list(islice(stream, len(by_number)))

    def check_history(self) -> None:
        """A life that goes on from a checkpoint keeps the books up to it, and what was measured."""
        deaths = self.lives.deaths
        resumed = self.lives.resumed_from()
        after = [death.resumed for death in deaths[1:]] + [len(resumed)]
        assert resumed == [each.checkpoint for each, later in zip(deaths, after, strict=True) if later > each.resumed]
        assert self.summary["resumed"] == len(resumed)
        for death in deaths:
            for line in death.transcripts:
                if line["step"] is None or line["step"] <= death.checkpoint:
                    assert self.booked[line["rollout"]] == line
            kept = [line for line in death.metrics if line["step"] <= death.checkpoint]
            assert whole_lines(self.run / "metrics.jsonl")[: len(kept)] == kept
        posted = [json.loads(values) for (values,) in self.ask('select "values" from metrics order by number')]
        assert posted == whole_lines(self.run / "metrics.jsonl")

    def check_metrics(self) -> None:
        """What a step says of itself is what its rollouts say."""
        for step, line in self.metrics.items():
            of_step = [each for each in self.booked.values() if each["step"] == step and each["purpose"] == "train"]
            assert sum(each["fates"].get("trained", 0) for each in of_step) == line["trained_tokens"], step
            assert line["staleness_max"] is None or line["staleness_max"] <= STALENESS, step

    def check_versions(self) -> None:
        """No version was served in two lives, or made by two updates."""
        assert len({each.lineage for each in self.lineages}) == len(self.lineages)
        numbers = [each.number for each in self.lineages]
        assert numbers == sorted(set(numbers))
        first = {each.lineage: each.number for each in self.lineages}
        for version in self.served():
            later = [each.number for each in self.lineages if each.lineage > version.lineage]
            assert first[version.lineage] <= version.number < min(later, default=2**31), version
        made: dict[tuple, dict] = {}
        last = whole_lines(self.run / "metrics.jsonl")
        for line in [line for death in [*(each.metrics for each in self.lives.deaths), last] for line in death]:
            if line.get("update_applied"):
                assert made.setdefault(tuple(line["version"]), line) == line
        state = json.loads((self.run / "policy" / "state.json").read_text())
        assert state["version"] == self.metrics[self.steps]["version"]

    def served(self) -> set[Version]:
        blobs = self.ask("select versions from nodes")
        packed = set().union(*(np.frombuffer(blob, np.int32).tolist() for (blob,) in blobs))
        assert UNKNOWN_VERSION not in packed
        return {Version.unpack(each) for each in packed}

    def check_staleness(self) -> Counter[int]:
        """By the stored versions of the tokens; the ages of the rollouts that were trained."""
        found: Counter[int] = Counter()
        for id, line in self.booked.items():
            if not line["fates"].get("trained"):
                continue
            update = self.metrics[line["step"]]
            lineage, number = update["version"]
            current = Version(lineage, number - update["update_applied"])
            packed = {int(each) for row in self.rows[id] for each in np.unique(row.versions[row.trained])}
            age = max(updates_between(Version.unpack(each), current, self.lineages) for each in packed)
            assert 0 <= age <= STALENESS, (id, line["step"], age)
            found[age] += 1
        return found

    def check_optimiser(self) -> None:
        """Moments and counters were carried over: as many updates as the books know."""
        for step in range(self.checkpoint_every, self.steps + 1, self.checkpoint_every):
            training = torch.load(self.checkpoint(step) / "training.pt", weights_only=True)
            applied = sum(line["update_applied"] for number, line in self.metrics.items() if number <= step)
            assert training["updates"] == applied, step
            assert {int(state["step"]) for state in training["optimiser"]["state"].values()} == {applied}, step

    def check_weights(self) -> tuple[int, float]:
        """Tokens were sampled from the weights whose version they have: those of checkpoints, and those from which each
        life went on. Returns how many versions were compared, and the largest difference."""
        weights: dict[Version, Path] = {}
        for step in range(self.checkpoint_every, self.steps + 1, self.checkpoint_every):
            weights[Version(*self.notes(step)["version"])] = self.checkpoint(step)
        begun = [death.lineages for death in self.lives.deaths] + [[list(each) for each in self.lineages]]
        origins = [0, *(death.checkpoint for death in self.lives.deaths)]
        for before, after, step in zip([[], *begun[:-1]], begun, origins, strict=True):
            for lineage, number, _ in after[len(before) :]:
                weights[Version(lineage, number)] = self.checkpoint(step) if step else self.policy
        by_version: defaultdict[int, list[Row]] = defaultdict(list)
        for row in (row for rows in self.rows.values() for row in rows):
            for packed in {int(each) for each in np.unique(row.versions)} - {UNKNOWN_VERSION}:
                by_version[packed].append(row)
        compared, most = 0, 0.0
        for version, folder in weights.items():
            rows = by_version[version.pack()][:ROWS]
            if rows:
                difference = self.difference(folder, rows, version)
                assert difference < SAME, (version, folder, difference)
                compared, most = compared + 1, max(most, difference)
        return compared, most

    def difference(self, folder: Path, rows: list[Row], version: Version) -> float:
        """Between the log-probabilities that the engine gave and those by the weights of this folder."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        most = 0.0
        for row in rows:
            with torch.no_grad():
                logits = model(torch.from_numpy(row.tokens).long()[None]).logits[0, :-1]
            logits = logits / torch.from_numpy(row.temperatures)[1:, None]
            ours = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(row.tokens).long()[1:, None])[:, 0]
            mine = torch.from_numpy(row.versions == version.pack())[1:]
            most = max(most, float((ours - torch.from_numpy(row.logprobs)[1:])[mine].abs().max()))
        return most
