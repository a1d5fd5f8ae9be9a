"""What a process of an attempt does between the fork and its end. Called by warm.py in the child, never returns.

The child was the template a moment ago, so it first lets go of everything of it: session, signals, environment,
descriptors, random state. It must not write into the template's buffers nor run its exit handlers: it ends by
`os._exit`, or becomes the command.
"""

import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from harnessed.controller import processes
from harnessed.controller.orders import Bounds, Order

_REPORT = 3
"""Descriptor that tells the template why the order could not be started; closed once it has started."""


def run(order: Order, report: int, template: int, users_processes: int) -> NoReturn:
    status = 1
    try:
        try:
            os.dup2(report, _REPORT, inheritable=False)
            _leave_the_template(order, template)
            _limit(order.bounds, users_processes)
            if order.command:
                os.execvpe(order.command[0], order.command, order.environment)
        except (OSError, ValueError) as error:
            os.write(_REPORT, f"{type(error).__name__}: {error}".encode(errors="replace")[:4000])
        else:
            os.close(_REPORT)
            status = _call(order)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # the log is full, or the function closed it
                    stream.flush()
    finally:
        os._exit(status)


def resolve(name: str) -> Any:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _leave_the_template(order: Order, template: int) -> None:
    os.setsid()
    processes.die_with_parent(template, signal.SIGKILL)
    processes.become_subreaper()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.command:  # Python ignores these two; a program expects them
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order.environment)
    tempfile.tempdir = None  # found again from TMPDIR
    os.chdir(order.cwd)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    log = os.open(order.log, append, 0o600)
    output = os.open(order.output, append, 0o600) if order.output else log
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(log, 2)
    for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if descriptor > _REPORT:
            with suppress(OSError):  # the listing's own
                os.close(descriptor)
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()


def _limit(bounds: Bounds, users_processes: int) -> None:
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: bounds.file_bytes,
        resource.RLIMIT_NPROC: users_processes + bounds.processes,
        resource.RLIMIT_CPU: bounds.cpu_s,
    }
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def _call(order: Order) -> int:
    """Call the order's function as Python would run a program: the exit status of what it did."""
    try:
        result = resolve(order.function)(*order.arguments)
        text = json.dumps(result)
        unfinished = Path(f"{order.result}.new")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(order.result)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - the end of this process: whatever it was belongs in its log
        with suppress(OSError):  # the log is full
            traceback.print_exc()
        return 1
    return 0
