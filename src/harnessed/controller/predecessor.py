"""The one controller that lives in a folder, and who lived there before. Used by reconciler.py.

Local attempts die with their controller, so the next one in its folder can give back at once what it held. Without a
name its leases end by themselves, half a minute later.
"""

import fcntl
import time
from pathlib import Path
from typing import IO

from harnessed.config import ConfigError

PATIENCE_S = 5.0
"""One that was told to end, or was killed a moment ago, may still have the folder for so long."""


class Predecessor:
    def __init__(self, folder: Path, owner: str) -> None:
        """Put our name into the folder, which is ours as long as this object lives. Raises ConfigError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = ""
        """Of a controller that has ended; empty if there was none."""
        self._file: IO[str] = (folder / "controller").open("a+", encoding="utf-8")
        deadline = time.monotonic() + PATIENCE_S
        while not self._lock():
            if time.monotonic() > deadline:
                self._file.close()
                raise ConfigError(f"another controller works in {folder} already: end it, or choose another run.folder")
            time.sleep(0.05)
        self._file.seek(0)
        self.name = self._file.read()
        self._file.truncate(0)
        self._file.write(owner)
        self._file.flush()

    def _lock(self) -> bool:
        try:
            # The lock ends with the process that has it, whatever ends the process.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
