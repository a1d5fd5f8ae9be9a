"""Files of JSON lines whose writer may have died: read line by line, and rewritten in one step. For `report.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson


def keep_lines(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """Ask for each line, in order, whether it stays; the file is replaced only if one does not.

    A line that is not whole, as its writer's death leaves one at the end, does not stay, and is not asked for.
    The file may be larger than the memory. One that does not exist has no lines. Raises OSError.
    """
    if not path.exists():
        return
    unfinished = path.with_name(f".{path.name}.unfinished")
    dropped = False
    with path.open("rb") as old, unfinished.open("wb") as new:
        for line in old:
            if (found := _read(line)) is not None and stays(found):
                new.write(line)
            else:
                dropped = True
    if dropped:
        unfinished.replace(path)
    else:
        unfinished.unlink()


def _read(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
