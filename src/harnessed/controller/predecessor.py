"""The name of the controller that lives in a folder, and who lived there before. Used by reconciler.py.

Local attempts die with their controller, so the next one in its folder can give back at once what it held. Without a
name its leases end by themselves, half a minute later.
"""

import fcntl
from pathlib import Path
from typing import IO


class Predecessor:
    def __init__(self, folder: Path, owner: str) -> None:
        """Put our name into the folder, where it stays as long as this object lives."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = ""
        """Of a controller that has ended; empty if there was none, or if it lives."""
        self._file: IO[str] = (folder / "controller").open("a+", encoding="utf-8")
        try:
            # The lock ends with the process that has it, whatever ends the process.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        self._file.seek(0)
        self.name = self._file.read()
        self._file.truncate(0)
        self._file.write(owner)
        self._file.flush()
