"""An attempt's folder: made with the task's files, copied for the evaluator, removed. Called by local.py and
evaluation.py, in threads.

The agent writes in here what it likes: links to everywhere, fifos, folders a thousand deep. Nothing here follows a
link or trusts a name.
"""

import asyncio
import errno
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

_MOST_ENTRIES = 100_000
_MOST_DEPTH = 100
"""Folders in folders; the time to reach an entry grows with it."""
_LEFT_OUT = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP, errno.EINVAL}
"""Errors of copying that are the agent's doing; a full disk is not."""


class BadTask(Exception):
    """No attempt at this task can work; the text says why."""


@dataclass(frozen=True)
class AttemptFolder:
    path: Path

    @property
    def workspace(self) -> Path:
        """Where the agent works; holds the task's files at first."""
        return self.path / "workspace"

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def temporary(self) -> Path:
        return self.path / "tmp"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def result(self) -> Path:
        """What a Python harness returned, as JSON."""
        return self.path / "result.json"

    @property
    def task(self) -> Path:
        """What the agent may know of its task, as JSON."""
        return self.path / "task.json"

    def make(self, task: Mapping[str, Any], files: Any) -> None:
        """Make the folder anew. Raises BadTask where `files` is not a mapping of paths inside to texts."""
        remove(self.path)
        self.path.mkdir(mode=0o700, parents=True)
        for folder in (self.workspace, self.home, self.temporary):
            folder.mkdir()
        self.task.write_text(json.dumps(task), encoding="utf-8")
        if not isinstance(files, dict):
            raise BadTask("the task's `files` is not a mapping of paths to contents")
        for name, content in files.items():
            _write(self.workspace, name, content)

    def add_to_home(self, files: Mapping[str, str]) -> None:
        """Path in HOME -> content."""
        for name, content in files.items():
            _write(self.home, name, content)


def _write(folder: Path, name: str, content: Any) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise BadTask(f"the task's file {name!r} is not a path inside the workspace")
    if not isinstance(content, str):
        raise BadTask(f"the content of the task's file {name!r} is not text")
    try:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8", newline="")
    except (FileExistsError, IsADirectoryError, NotADirectoryError, UnicodeEncodeError) as error:
        raise BadTask(f"the task's file {name!r} cannot be written: {error}") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise BadTask(f"the task's file {name!r} has too long a name") from None


def copy(source: Path, target: Path, most_bytes: int) -> None:
    """Copy a dead attempt's folder, up to so many bytes: plain files, folders, and links whose end lies in the copy."""
    links: list[Path] = []
    entries = 0
    folders = [(source, target, 0)]
    target.mkdir(mode=0o700)
    while folders:
        folder, twin, depth = folders.pop()
        for entry in _entries(folder):
            entries += 1
            if entries > _MOST_ENTRIES:
                break
            there = twin / entry.name
            try:
                if entry.is_symlink():
                    there.symlink_to(os.readlink(entry.path))  # noqa: PTH115 - a Path would normalise the target
                    links.append(there)
                elif entry.is_dir(follow_symlinks=False):
                    there.mkdir(mode=0o700)
                    if depth < _MOST_DEPTH:
                        folders.append((folder / entry.name, there, depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    most_bytes -= _copy_file(entry, there, most_bytes)
            except OSError as error:
                if error.errno not in _LEFT_OUT:
                    raise
    top = os.path.realpath(target)
    for link in links:
        # Judged when all links are in place, by where the system would really go.
        if not Path(os.path.realpath(link)).is_relative_to(top):
            link.unlink()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        folder.chmod(0o700)
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno not in _LEFT_OUT:
            raise
        return []


def _copy_file(entry: os.DirEntry[str], there: Path, most_bytes: int) -> int:
    """Copy one file unless it is too big; returns its size, 0 if it was left out."""
    status = entry.stat(follow_symlinks=False)
    if status.st_size > most_bytes:
        return 0
    if not status.st_mode & 0o400:
        Path(entry.path).chmod(0o600)
    shutil.copyfile(entry.path, there, follow_symlinks=False)
    there.chmod(status.st_mode & 0o777 | 0o600)
    return status.st_size


def remove(path: Path) -> None:
    """Remove a folder with whatever is in it."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError):  # closed folders, or deeper than Python can go
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--", path], check=False, capture_output=True)
        if path.exists():
            raise


async def in_thread(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of this module in a thread. A cancellation waits for it: nobody else is at the folder then."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


def last_line(path: Path, most: int = 300) -> str:
    """The last line of a text file that is not empty, at most so much of it; nothing if there is no such file."""
    try:
        # The agent may have put a link or a fifo here.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            file.seek(max(0, os.fstat(file.fileno()).st_size - most - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:most]
