"""Linux: how a process becomes responsible for all that its descendants leave, and how these are found and killed.

Used by warm.py and child.py. A *subreaper* becomes the parent of every orphan below it, so that neither setsid nor
a double fork nor nohup takes a process out of its tree. Some kernels have no /proc/<pid>/children, so parents are
read from /proc/<pid>/stat.
"""

# ruff: noqa: PTH116, PTH208
# All of /proc is read at the end of every attempt: by plain strings in a third of the time.
import ctypes
import os
import signal
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Get the signal when `parent` dies; if it died before this call, go too."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def descendants(known: set[int] | frozenset[int] = frozenset()) -> set[int]:
    """This process's children except the `known` ones, and everything below them; zombies too."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it is gone
                children.setdefault(_parent(name), []).append(int(name))
    found: set[int] = set()
    unseen = [pid for pid in children.get(os.getpid(), []) if pid not in known]
    while unseen:
        pid = unseen.pop()
        found.add(pid)
        unseen += children.get(pid, [])
    return found


def kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_all_children(limit_s: float) -> None:
    """Kill and reap until there is no child, or the time is over."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        kill(descendants())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def count_of_user() -> int:
    """Threads of this user's processes, which is what RLIMIT_NPROC counts."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _parent(pid: str) -> int:
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        # "pid (name) state parent ...", where the name may hold anything.
        return int(os.read(descriptor, 512).rpartition(b")")[2].split()[1])
    finally:
        os.close(descriptor)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
