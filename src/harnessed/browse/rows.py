"""One rollout's rows as text, with what is trained marked: the loss mask for the eye. `harnessed train --dry-run`."""

import itertools

import numpy as np
from rich.console import Console
from rich.text import Text

from harnessed.gateway.template import ChatTemplate
from harnessed.logs import visible
from harnessed.records import Transcript
from harnessed.training.samples import Bound, Row, build


def print_rows(console: Console, transcript: Transcript, template: ChatTemplate, bound: Bound) -> None:
    rollout = transcript.rollout
    sample = build(transcript, bound)
    reason = f" ({visible(rollout.reason)})" if rollout.reason else ""
    console.print(f"{rollout.id}: {rollout.outcome or rollout.state}{reason}, reward {rollout.reward}", markup=False)
    console.print(f"fates: {', '.join(f'{fate} {n}' for fate, n in sample.fates.items()) or 'no token'}", markup=False)
    for number, row in enumerate(sample.rows, 1):
        trained = int(row.trained.sum())
        console.print(
            f"\nrow {number} of {len(sample.rows)}: {len(row.tokens)} tokens, {trained} trained", markup=False
        )
        console.print(marked(row, template, colour=console.is_terminal))


def marked(row: Row, template: ChatTemplate, *, colour: bool) -> Text:
    """What is trained is green; into a pipe it stands in [[ ]]."""
    text = Text()
    for trained, positions in itertools.groupby(range(len(row.tokens)), key=lambda at: bool(row.trained[at])):
        piece = visible(template.written(row.tokens[np.fromiter(positions, int)].tolist()), kept="\t\n")
        if colour:
            text.append(piece, "green" if trained else "")
        else:
            text.append(f"[[{piece}]]" if trained else piece)
    return text
