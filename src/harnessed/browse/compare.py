"""`harnessed timeline`: engine, trainer and rollouts of runs over time, as a picture, and as a table of shares.

`arguments.py` calls `timeline`.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harnessed.browse.picture import draw
from harnessed.browse.timeline import Shares, read, shares
from harnessed.config import ConfigError

PICTURE = "timeline.png"
ENDINGS = (".png", ".svg")
QUANTITIES: dict[str, Callable[[Shares], str]] = {
    "wall time": lambda of: f"{of.wall_s:,.1f} s",
    "updates": lambda of: str(of.updates),
    "generating": lambda of: _percent(of.generating),
    "updating": lambda of: _percent(of.updating),
    "idle: neither": lambda of: _percent(of.idle),
    "waiting for groups": lambda of: _percent(of.waiting),
    "mean batch while generating": lambda of: f"{of.mean_batch:.1f}",
    "usual batch": lambda of: str(of.usual_batch),
    "busy after warm-up": lambda of: _percent(of.busy),
}


def timeline(arguments: argparse.Namespace) -> int:
    """Raises ConfigError."""
    out: Path = arguments.out or (arguments.folders[0] if len(arguments.folders) == 1 else Path.cwd()) / PICTURE
    if out.suffix not in ENDINGS:
        raise ConfigError(f"{out} must end in {' or '.join(ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install matplotlib")
    found = [read(folder) for folder in arguments.folders]
    for folder, each in zip(arguments.folders, found, strict=True):
        if each.ended <= each.began:
            raise ConfigError(f"{folder} holds a run in which nothing has begun yet")
    measured = [(each, shares(each)) for each in found]
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 300)
    table = Table("", box=None)
    for each in found:
        table.add_column(each.run, justify="right")
    for name, shown in QUANTITIES.items():
        table.add_row(name, *(shown(of) for _, of in measured))
    console.print(table)
    try:
        draw(measured, out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}; name another place with --out") from error
    print(f"picture: {out}")
    return 0


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
