"""Training rows as files: JSON lines or Parquet, by the file's ending. `harnessed rollouts export` calls `export`."""

import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from harnessed.config import ConfigError
from harnessed.records import Rollout
from harnessed.training.samples import Row

Rows = Iterator[tuple[Rollout, Row]]
ROWS_AT_ONCE = 256
"""In memory, and in one row group of a Parquet file."""


def export(out: Path, rows: Rows) -> int:
    """Write the rows and count them. Raises ConfigError."""
    writers = {".jsonl": _as_json_lines, ".parquet": _as_parquet}
    if out.suffix not in writers:
        raise ConfigError(f"{out} must end in .jsonl or .parquet")
    return writers[out.suffix](out, rows)


def _as_json_lines(out: Path, rows: Rows) -> int:
    count = 0
    with out.open("w", encoding="utf-8") as file:
        for rollout, row in rows:
            values = {name: array.tolist() for name, array in _arrays(row).items()}
            values["logprobs"] = [round(value, 6) for value in values["logprobs"]]
            file.write(json.dumps({"rollout": rollout.id, "reward": rollout.reward} | values) + "\n")
            count += 1
    return count


def _as_parquet(out: Path, rows: Rows) -> int:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("Parquet files need pyarrow: pip install 'harnessed[parquet]', or export to a .jsonl file")
    import pyarrow
    from pyarrow import parquet

    lists = {
        "tokens": pyarrow.int32(),
        "trained": pyarrow.bool_(),
        "logprobs": pyarrow.float32(),
        "versions": pyarrow.int32(),
        "temperatures": pyarrow.float32(),
    }
    schema = pyarrow.schema(
        {"rollout": pyarrow.string(), "reward": pyarrow.float64()}
        | {name: pyarrow.list_(kind) for name, kind in lists.items()}
    )
    count = 0
    with parquet.ParquetWriter(out, schema) as writer:
        while part := list(islice(rows, ROWS_AT_ONCE)):
            columns: dict[str, list[Any]] = {name: [_arrays(row)[name] for _, row in part] for name in lists}
            columns |= {"rollout": [each.id for each, _ in part], "reward": [each.reward for each, _ in part]}
            writer.write_table(pyarrow.table(columns, schema))
            count += len(part)
    return count


def _arrays(row: Row) -> dict[str, Any]:
    return {
        "tokens": row.tokens,
        "trained": row.trained,
        "logprobs": row.logprobs,
        "versions": row.versions,
        "temperatures": row.temperatures,
    }
