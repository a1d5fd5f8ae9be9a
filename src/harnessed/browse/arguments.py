"""The arguments of `harnessed rollouts` and `harnessed timeline`; the command line calls `add_commands` and
`add_timeline_arguments`.

What the commands do is in `commands.py` and `compare.py`, which need the database: services and other commands need not
wait until that is imported.
"""

import argparse
from functools import partial
from pathlib import Path


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Arguments of `harnessed rollouts`."""
    commands = parser.add_subparsers(required=True, metavar="list|show|logs|export|prune")
    for name, description in (
        ("list", "one line for each rollout"),
        ("show", "the transcript of one rollout as a tree"),
        ("logs", "what the agent's processes printed, if the attempt's folder was kept"),
        ("export", "rows as training sees them: token ids, loss mask, log-probabilities, versions"),
        ("prune", "delete what an ended run said, and keep how it ended"),
    ):
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
        command.set_defaults(run=partial(_run, name))
        if name in ("show", "logs"):
            command.add_argument("rollout", metavar="ROLLOUT", help="its id, or an end of it that is unique")
        if name == "show":
            command.add_argument("--tokens", action="store_true", help="every token, coloured by its fate")
        if name == "export":
            command.add_argument("out", type=Path, metavar="OUT.jsonl|OUT.parquet")
        if name == "prune":
            command.add_argument("--older-than", type=float, default=7, metavar="DAYS", help="days since it ended; 7")


def add_timeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `harnessed timeline`."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="folders of runs, drawn side by side")
    where = "by default timeline.png in the run's folder; of several runs, in the current one"
    parser.add_argument("--out", type=Path, metavar="FILE.png|FILE.svg", help=where)
    parser.set_defaults(run=_timeline)


def _timeline(arguments: argparse.Namespace) -> int:
    from harnessed.browse.compare import timeline

    return timeline(arguments)


def _run(name: str, arguments: argparse.Namespace) -> int:
    from harnessed.browse.commands import COMMANDS

    return COMMANDS[name](arguments)
