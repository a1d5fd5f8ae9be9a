"""The runner of this machine: one folder and one fenced tree of processes per attempt, forked from warm templates.

Made by reconciler.py. An attempt goes: folder and files, the harness under its time limit, the death of all that it
started, the evaluator on a copy, the folder kept or removed.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import Signals

from harnessed.config import Config
from harnessed.controller import fence, folders
from harnessed.controller.evaluation import Evaluation, EvaluatorBroken
from harnessed.controller.folders import AttemptFolder, BadTask, in_thread
from harnessed.controller.launch import launch, preparation, template_environment
from harnessed.controller.orders import Bounds, Exit, Order, Preparation
from harnessed.controller.runner import Ended
from harnessed.controller.spawner import Spawner, TemplateError
from harnessed.records import TRAINED_OUTCOMES, Assignment, Ending, Outcome

log = logging.getLogger(__name__)

_MEGABYTE = 1 << 20


class LocalRunner:
    def __init__(
        self,
        config: Config,
        gateway: str,
        root: Path,
        wake: asyncio.Event,
        held: Callable[[Assignment], Awaitable[float]],
    ) -> None:
        """`root` holds the attempts' folders; `gateway` is the URL that agents call; `held` says for how many seconds
        an attempt's calls were held, which do not count to its time limit."""
        self._config = config
        self._held = held
        self._gateway = gateway.rstrip("/")
        self._root = root
        self._wake = wake
        self._fence: fence.Fence | None = None
        self._tasks: dict[str, asyncio.Task[Ended]] = {}
        self._stopping: set[str] = set()
        self._judging = 0
        settings = config.controller
        self._bounds = Bounds(
            file_bytes=settings.file_size_mb * _MEGABYTE,
            processes=settings.processes * settings.slots,
            cpu_s=int(settings.time_limit_s) * (os.cpu_count() or 1) + 1,
        )
        evaluator = preparation(config.harness).path, config.evaluator.function
        modules = ["harnessed.controller.verdict", *([evaluator[1].partition(":")[0]] if evaluator[1] else [])]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
        self._harness = Spawner(root / "harness", preparation(config.harness), template_environment(config.harness))
        self._judges = Spawner(root / "evaluator", Preparation(evaluator[0], modules), environment)
        # The evaluator has its own time; the agent's limit is none of its business.
        bounds = replace(self._bounds, cpu_s=int(config.evaluator.time_limit_s) * (os.cpu_count() or 1) + 1)
        self._evaluate = Evaluation(config.evaluator, self._judges, bounds, environment)

    async def open(self) -> None:
        self._fence = None
        if self._config.harness.kind == "mini-swe-agent":
            self._fence = fence.find(self._config.harness.shell, self._bounds.file_bytes)
        self._root.mkdir(parents=True, exist_ok=True)
        await asyncio.gather(self._harness.open(), self._judges.open())

    def start(self, assignment: Assignment) -> None:
        name = f"{assignment.rollout}/{assignment.attempt}"
        task = asyncio.create_task(self._run(assignment), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._wake.set())

    def attempts(self) -> Mapping[str, Ended | None]:
        return {name: _end_of(task) for name, task in self._tasks.items()}

    def judging(self) -> int:
        return self._judging

    def stop(self, attempt: str) -> None:
        if attempt not in self._stopping:
            self._stopping.add(attempt)
            self._tasks[attempt].cancel()

    def forget(self, attempt: str) -> None:
        del self._tasks[attempt]
        self._stopping.discard(attempt)

    async def close(self) -> None:
        for attempt in self._tasks:
            self.stop(attempt)
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        await asyncio.gather(self._harness.close(), self._judges.close())

    async def _run(self, assignment: Assignment) -> Ended:
        folder = AttemptFolder(self._root / f"{assignment.rollout}.{assignment.attempt}")
        ended = Ended(Ending(outcome=Outcome.CANCELLED))
        try:
            ended = await self._attempt(assignment, folder)
        except BadTask as error:
            ended = Ended(Ending(outcome=Outcome.INFRASTRUCTURE, reason=str(error)), final=True)
        except (TemplateError, OSError) as error:
            ended = Ended(Ending(outcome=Outcome.INFRASTRUCTURE, reason=str(error)))
        except Exception as error:  # one attempt, whatever is odd about it, must not end the controller of all
            about = {"run": assignment.run, "rollout": assignment.rollout, "attempt": assignment.attempt}
            log.exception("the attempt broke", extra=about)
            reason = f"the controller failed: {type(error).__name__}: {error}"
            ended = Ended(Ending(outcome=Outcome.INFRASTRUCTURE, reason=reason), final=True)
        finally:
            with suppress(OSError):  # it stays then, which changes nothing of the attempt's end
                await self._tidy(folder, ended.ending.outcome)
        return ended

    async def _attempt(self, assignment: Assignment, folder: AttemptFolder) -> Ended:
        task = assignment.task
        visible = {name: value for name, value in task.items() if name not in self._config.tasks.hidden}
        await in_thread(folder.make, visible, task.get("files", {}))
        what = launch(self._config, self._fence, self._gateway, assignment, visible, folder)
        await in_thread(folder.add_to_home, what.files)
        order = Order(
            id=f"{assignment.rollout}/{assignment.attempt}",
            cwd=str(folder.workspace),
            environment=what.environment,
            log=str(folder.log),
            bounds=self._bounds,
            function=what.function,
            arguments=what.arguments,
            result=str(folder.result),
            command=what.command,
        )
        limit_s = self._config.controller.time_limit_s
        exit_ = await self._harness.run(order, limit_s, lambda: self._held(assignment))
        ending = describe(exit_, limit_s, folders.last_line(folder.log))
        # The agent may have written its key into the log.
        ending.reason = ending.reason.replace(assignment.key, "***")
        if ending.outcome not in TRAINED_OUTCOMES:
            return Ended(ending)
        self._judging += 1
        try:
            verdict = await self._evaluate(task, folder)
        except EvaluatorBroken as error:
            return Ended(Ending(outcome=Outcome.INFRASTRUCTURE, reason=str(error)), final=True)
        finally:
            self._judging -= 1
        return Ended(ending.model_copy(update=dict(verdict)))

    async def _tidy(self, folder: AttemptFolder, outcome: Outcome) -> None:
        keep = self._config.controller.keep_folders
        failed = outcome not in (Outcome.OK, Outcome.CANCELLED)
        if keep == "none" or (keep == "failed" and not failed):
            await in_thread(folders.remove, folder.path)


def describe(exit_: Exit, limit_s: float, last_line: str) -> Ending:
    """The outcome of a harness that ended in this way, with a reason for a person."""
    said = f": {last_line}" if last_line else ""
    if exit_.failure:
        return Ending(outcome=Outcome.INFRASTRUCTURE, reason=f"the harness could not be started: {exit_.failure}")
    if exit_.stuck:
        return Ending(outcome=Outcome.INFRASTRUCTURE, reason=f"{exit_.stuck} of its processes could not be killed")
    left = f"{exit_.strays} processes that it had left were killed" if exit_.strays else ""
    if exit_.timed_out:
        return Ending(outcome=Outcome.AGENT_TIMEOUT, reason=f"ran longer than {limit_s:g} s{said}")
    if exit_.signal:
        return Ending(outcome=Outcome.AGENT_EXIT, reason=f"ended by {_signal_name(exit_.signal)}{said}")
    if exit_.status:
        return Ending(outcome=Outcome.AGENT_EXIT, reason=f"exit status {exit_.status}{said}")
    return Ending(outcome=Outcome.OK, reason=left)


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:  # the real-time signals between the first and the last have no name
        return f"signal {number}"


def _end_of(task: asyncio.Task[Ended]) -> Ended | None:
    if not task.done():
        return None
    if task.cancelled():
        return Ended(Ending(outcome=Outcome.CANCELLED))
    return task.result()
