"""Opens what a run recorded, for reading. `harnessed rollouts` and `harnessed timeline` call `opened`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import URL, Connection, create_engine

from harnessed.config import ConfigError
from harnessed.gateway.app import DATABASE
from harnessed.gateway.lifecycle import list_runs
from harnessed.records import RunSpec


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Connection, RunSpec]]:
    """The run's database, read only, and its latest run. Raises ConfigError."""
    database = folder / DATABASE
    if not database.is_file():
        raise ConfigError(_why_none(folder))
    url = URL.create("sqlite", database=database.resolve().as_uri(), query={"mode": "ro", "uri": "true"})
    with create_engine(url).connect() as connection:
        runs = list_runs(connection)
        if not runs:
            raise ConfigError(f"{folder} holds no run yet")
        yield connection, runs[-1]


def settings_of(folder: Path) -> dict[str, Any]:
    """The configuration of a run, as it was used; empty if its folder has none."""
    path = folder / "config.yaml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None) or {}


def _why_none(folder: Path) -> str:
    gateway = settings_of(folder).get("gateway", {})
    if gateway.get("url"):
        return (
            f"the records of {folder} are at its gateway {gateway['url']}: "
            f"name that gateway's folder, or look at the run in its dashboard, {gateway['url']}/ui/"
        )
    if gateway.get("database"):
        return (
            f"the records of {folder} are in {gateway['database']}, and only those in a folder are read here: "
            "look at the run in the dashboard of a gateway on that database"
        )
    return f"{folder} is no run's folder: it has no {DATABASE}"
