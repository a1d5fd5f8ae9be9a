"""`harnessed status`: who waits for whom at a gateway, and since when.

The command line calls `add_status_arguments`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from harnessed.client import ApiError, Client, Unreachable, check_ready, get_status
from harnessed.config import ConfigError
from harnessed.loading import load
from harnessed.records import Status
from harnessed.run import ADMIN_KEY_FILE, URL_FILE, admin_key
from harnessed.waiting import goes_on, who_waits

MOST_CALLS = 10
"""Waiting calls that are shown: those that wait longest."""
MOST_PERIOD_S = 24 * 3600.0


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", type=Path, nargs="?", help="the gateway's configuration, or the folder of a run")
    parser.add_argument("--url", help="of a gateway, in place of that")
    parser.add_argument("--watch", type=_period, nargs="?", const=2.0, metavar="S", help="again every S seconds (2)")
    parser.set_defaults(run=status)


def status(arguments: argparse.Namespace) -> int:
    """Exit status 0: the gateway is ready; 1: it is not, or does not answer."""
    url, key = _gateway(arguments)
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is no address: {error}; the gateway's is http://HOST:PORT") from None
    with Client(url, key) as gateway:
        if arguments.watch is None:
            page, ready = _look(gateway)
            _console().print(page)
            return 0 if ready else 1
        with Live(console=_console(), auto_refresh=False) as live:
            while True:
                try:
                    page, _ = _look(gateway)
                except Unreachable as error:  # it may come back
                    page = escape(str(error))
                live.update(page, refresh=True)
                time.sleep(arguments.watch)


def _period(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MOST_PERIOD_S:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {MOST_PERIOD_S:.0f}")
    return seconds


def _gateway(arguments: argparse.Namespace) -> tuple[str, str]:
    """Its URL and admin key. Raises ConfigError."""
    if arguments.url:
        return arguments.url, admin_key()
    if arguments.where is None:
        raise ConfigError("name the gateway's configuration, the folder of a run, or --url URL")
    folder, url = arguments.where, None
    if not folder.is_dir():
        config = load(arguments.where)
        folder, url = config.run.folder or Path.cwd() / "runs" / config.run.name, config.gateway.url
    if url is None:
        if not (folder / URL_FILE).is_file():
            raise ConfigError(f"no gateway has left its address in {folder}: name another folder, or --url URL")
        url = (folder / URL_FILE).read_text(encoding="utf-8")
    key_file = folder / ADMIN_KEY_FILE
    return url, key_file.read_text(encoding="utf-8") if key_file.is_file() else admin_key()


def _look(gateway: Client) -> tuple[RenderableType, bool]:
    try:
        gateway(check_ready())
        trouble = ""
    except ApiError as error:
        if error.status != 503:
            raise
        trouble = error.message
    try:
        said = gateway(get_status())
    except ValidationError:
        raise Unreachable(f"what answers at {gateway.url} is no gateway, or one of another version") from None
    return page(said, trouble, time.time()), not trouble


def page(status: Status, trouble: str, now: float) -> RenderableType:
    """What is shown; `trouble`: why the gateway is not ready."""
    parts: list[RenderableType] = [f"not ready: {escape(trouble)}" if trouble else "ready"]
    parts += [escape(f"{run.run}: {who_waits(status, run.run, now)}") for run in status.runs if goes_on(status, run)]
    for title, columns, rows in (
        ("gateways", ("id", "for"), [(each.id, _ago(each.since, now)) for each in status.gateways]),
        (
            "turnstiles",
            ("run", "state", "closed by", "for", "lease", "still running"),
            [
                (t.run, t.state, t.owner, _ago(t.since or now, now), _lease(t.lease_until or now, now), t.in_flight)
                for t in status.turnstiles
            ],
        ),
        (
            "runs",
            ("run", "queued", "running", "finished", "calls in flight", "held"),
            [(r.run, r.queued, r.running, r.finished, r.in_flight, r.held) for r in status.runs],
        ),
        (
            "engines",
            ("engine", "run", "health", "in flight", "waiting there", "sampled tokens"),
            [
                (e.id, e.run, "ok" if e.healthy else e.reason or "bad", e.in_flight, e.waiting, e.sampled_tokens)
                for e in status.engines
            ],
        ),
        (
            "controllers",
            ("owner", "attempts", "lease", "slots", "in the evaluator"),
            [
                (
                    each.owner,
                    each.attempts,
                    _lease(each.lease_until, now),
                    each.presence and each.presence.slots,
                    each.presence and each.presence.judging,
                )
                for each in status.controllers
            ],
        ),
        (
            f"calls that wait longest, of {len(status.waiting)}",
            ("run", "rollout", "call", "waits for", "for"),
            [
                (each.run, f"{each.rollout}/{each.attempt}", each.call, each.what, _ago(each.since, now))
                for each in status.waiting[:MOST_CALLS]
            ],
        ),
    ):
        if rows:
            parts.append(_table(title, columns, rows))
    return Group(*parts)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=None)
    for row in rows:
        table.add_row(*("-" if cell is None else escape(str(cell)) for cell in row))
    return table


def _ago(since: float, now: float) -> str:
    seconds = max(0, round(now - since))
    minutes, hours = seconds // 60, seconds // 3600
    return f"{seconds} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h"


def _lease(until: float, now: float) -> str:
    return f"{until - now:.0f} s left" if until > now else f"over for {_ago(until, now)}"


def _console() -> Console:
    # Into a pipe nothing is cut to fit.
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 300)
