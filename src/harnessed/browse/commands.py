"""`harnessed rollouts`: what a run recorded, for people and scripts. Reads the run's folder; no gateway has to run.

`arguments.py` calls COMMANDS. Everything comes from the gateway's database and from the final fates that the trainer
wrote to transcripts.jsonl.
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from sqlalchemy import Connection

from harnessed.browse.export import export
from harnessed.browse.opening import opened, settings_of
from harnessed.browse.prune import prune
from harnessed.config import ConfigError
from harnessed.gateway.lifecycle import list_rollouts
from harnessed.gateway.recording import load_transcript
from harnessed.gateway.template import ChatTemplate
from harnessed.logs import visible
from harnessed.records import Attempt, Fate, Node, Overlong, Rollout, RunSpec
from harnessed.training.samples import Bound, account, build

COLOURS = {Fate.TRAINED: "green", Fate.EVALUATION: "cyan", Fate.GROUP_SKIPPED: "yellow"}
"""Of tokens by fate; other fates are red, prompt tokens are dim."""


def _list(arguments: argparse.Namespace) -> int:
    table = Table("rollout", "purpose", "state", "reward", "attempts", "reason", box=None)
    with opened(arguments.folder) as (connection, run):
        for rollout in list_rollouts(connection, run.id):
            reward = "-" if rollout.reward is None else f"{rollout.reward:g}"
            state = str(rollout.outcome or rollout.state)
            table.add_row(
                rollout.id, rollout.purpose, state, reward, str(rollout.attempt), escape(visible(rollout.reason[:80]))
            )
    _console().print(table)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    console = _console()
    with opened(arguments.folder) as (connection, run):
        rollout = _find(connection, run, arguments.rollout)
        transcript = load_transcript(connection, rollout.id)
        template = ChatTemplate(Path(run.policy)) if arguments.tokens else None
    fates = _final_fates(arguments.folder, rollout.id)
    console.print(f"{rollout.id}: {rollout.outcome or rollout.state}, reward {rollout.reward}", markup=False)
    console.print(f"fates: {', '.join(f'{fate} {n}' for fate, n in fates.items()) or 'not decided'}", markup=False)
    for attempt in transcript.attempts:
        console.print(
            f"\nattempt {attempt.number}{'' if attempt.nodes else ': nothing recorded, or pruned'}", markup=False
        )
        _, ledger = account(transcript, attempt, _bound(arguments.folder))
        indents = _indents(attempt)
        for node in attempt.nodes:
            indent = "  " * indents[node.number]
            console.print(indent + _title(node), markup=False)
            if template:
                console.print(Text(indent) + _coloured(template, node, _decided(ledger[node.number], fates)))
            else:
                for message in (*node.messages, node.message):
                    console.print(visible(f"{indent}  {message['role']}: {_text(message)}", kept="\t\n"), markup=False)
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    with opened(arguments.folder) as (connection, run):
        rollout = _find(connection, run, arguments.rollout)
    found = sorted((arguments.folder / "attempts").glob(f"{rollout.id}.*/log.txt"))
    if not found:
        raise ConfigError(f"no log of {rollout.id} was kept: set controller.keep_folders to `all`")
    for log in found:
        print(f"== {log}", flush=True)
        with log.open("rb") as file:
            if sys.stdout.isatty():
                sys.stdout.writelines(visible(line.decode(errors="replace"), kept="\t\n") for line in file)
            else:
                shutil.copyfileobj(file, sys.stdout.buffer)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    bound = _bound(arguments.folder)
    with opened(arguments.folder) as (connection, run):
        rollouts = list_rollouts(connection, run.id)
        rows = ((each, row) for each in rollouts for row in build(load_transcript(connection, each.id), bound).rows)
        count = export(arguments.out, rows)
    print(f"{count} rows in {arguments.out}")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    with opened(arguments.folder) as (_, run):
        pruned = prune(arguments.folder, run.id, days=arguments.older_than)
    print(f"pruned {pruned.rollouts} rollouts with {pruned.answers} answers; {pruned.megabytes:.1f} MB are free again")
    return 0


def _find(connection: Connection, run: RunSpec, name: str) -> Rollout:
    same = [rollout for rollout in list_rollouts(connection, run.id) if rollout.id.endswith(name)]
    if len(same) != 1:
        raise ConfigError(f"{len(same)} rollouts of {run.id} end in {name!r}; `harnessed rollouts list` shows them")
    return same[0]


def _final_fates(folder: Path, rollout: str) -> dict[str, int]:
    path = folder / "transcripts.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        record = json.loads(line)
        if record["rollout"] == rollout:
            return dict(record["fates"])
    return {}


def _bound(folder: Path) -> Bound:
    """The longest row, as the run's configuration had it."""
    settings = settings_of(folder).get("trainer", {})
    overlong = Overlong(settings.get("overlong", Overlong.TRUNCATE))
    return Bound(settings.get("row_tokens"), Overlong.TRUNCATE if overlong == Overlong.FAIL else overlong)


def _decided(portions: list[tuple[Fate, int]], final: dict[str, int]) -> list[tuple[Fate, int]]:
    """The fates of an answer's tokens: what its transcript says, then what became of the group."""
    instead = (Fate.GROUP_SKIPPED, Fate.GROUP_INCOMPLETE, Fate.UPDATE_SKIPPED)
    decided = next((fate for fate in instead if fate in final), Fate.TRAINED)
    return [(decided if fate == Fate.TRAINED else fate, tokens) for fate, tokens in portions if tokens]


def _title(node: Node) -> str:
    mark = "" if node.delivered else ", not delivered"
    if node.split:
        mark += f", split off #{node.follows}: {node.split}"
    return f"#{node.number} (after #{node.parent}, {node.finish}{mark})"


def _coloured(template: ChatTemplate, node: Node, fates: list[tuple[Fate, int]]) -> Text:
    text = Text()
    segment = "".join(template.written([id]) for id in np.frombuffer(node.segment, np.int32).tolist())
    text.append(visible(segment, kept="\t\n"), "dim")
    ids = np.frombuffer(node.answer, np.int32).tolist()
    for fate, tokens in fates:
        written = "|".join(template.written([id]) for id in ids[:tokens])
        text.append(visible(written, kept="\t\n"), COLOURS.get(fate, "red"))
        text.append(f" ({fate})")
        ids = ids[tokens:]
    return text


def _indents(attempt: Attempt) -> dict[int, int]:
    """Node -> the branches above it: a conversation that goes on stays in its column."""
    children = Counter(node.parent for node in attempt.nodes)
    indents = {0: 0}
    for node in attempt.nodes:
        indents[node.number] = indents[node.parent] + (children[node.parent] > 1)
    return indents


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _console() -> Console:
    # Into a pipe nothing is cut to fit.
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 300)


COMMANDS = {"list": _list, "show": _show, "logs": _logs, "export": _export, "prune": _prune}
