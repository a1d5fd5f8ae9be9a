"""The evaluator: judges what an attempt left, in a process of its own, on a copy of the attempt's folder.

Called by local.py when no process of the agent lives any more. The evaluator's module is imported once, by a warm
template. The copy is made anew for every try, for an evaluator may change it, and is removed afterwards; what a
broken evaluator printed last stays in the attempt's folder as evaluation.txt.
"""

import json
from contextlib import suppress
from pathlib import Path

from harnessed.config import Evaluator
from harnessed.controller import folders
from harnessed.controller.folders import AttemptFolder, in_thread
from harnessed.controller.orders import Bounds, Exit, Order
from harnessed.controller.spawner import Spawner, TemplateError
from harnessed.controller.verdict import judge, read_verdict
from harnessed.records import Reward, Task

_COPY_BYTES = 1 << 30
_VERDICT_BYTES = 1 << 16


class EvaluatorBroken(Exception):
    """The evaluator gave no reward however often it was tried; the text says why. It says nothing of the attempt."""


class _NoVerdict(Exception):
    """One try failed."""


class Evaluation:
    def __init__(self, settings: Evaluator, spawner: Spawner, bounds: Bounds, environment: dict[str, str]) -> None:
        self._settings = settings
        self._spawner = spawner
        self._bounds = bounds
        self._environment = environment

    async def __call__(self, task: Task, folder: AttemptFolder) -> Reward:
        """The evaluator's verdict. Raises EvaluatorBroken."""
        reason = ""
        place = folder.path.with_name(folder.path.name + ".evaluation")
        try:
            for number in range(self._settings.tries):
                try:
                    return await self._try(task, folder, place, number)
                except (_NoVerdict, TemplateError) as error:
                    reason = str(error)
                except OSError as error:
                    reason = f"the attempt's folder could not be copied: {error}"
            with suppress(OSError):  # there is none
                (place / "log.txt").replace(folder.path / "evaluation.txt")
            raise EvaluatorBroken(f"evaluator: {reason}")
        finally:
            await in_thread(folders.remove, place)

    async def _try(self, task: Task, folder: AttemptFolder, place: Path, number: int) -> Reward:
        copy = place / "copy"
        await in_thread(_lay_out, task, folder, place)
        order = Order(
            id=f"{place.name}.{number}",
            cwd=str(copy),
            environment=self._environment | {"HOME": str(place), "TMPDIR": str(place / "tmp")},
            log=str(place / "log.txt"),
            bounds=self._bounds,
            result=str(place / "verdict.json"),
            output=str(place / "output.txt"),
            function=f"{judge.__module__}:{judge.__name__}" if self._settings.function else "",
            arguments=[self._settings.function, task, str(copy)],
            command=[word.replace("{task}", str(place / "task.json")) for word in self._settings.command or []],
        )
        exit_ = await self._spawner.run(order, self._settings.time_limit_s)
        return self._verdict(exit_, place)

    def _verdict(self, exit_: Exit, place: Path) -> Reward:
        if exit_.failure:
            raise _NoVerdict(f"could not be started: {exit_.failure}")
        if exit_.timed_out:
            raise _NoVerdict(f"ran longer than {self._settings.time_limit_s:g} s")
        if exit_.status != 0:
            ending = f"exit status {exit_.status}" if exit_.signal == 0 else f"ended by signal {exit_.signal}"
            raise _NoVerdict(f"{ending}: {folders.last_line(place / 'log.txt')}")
        file = place / ("verdict.json" if self._settings.function else "output.txt")
        text = folders.last_line(file, most=_VERDICT_BYTES)
        try:
            return read_verdict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise _NoVerdict(f"{error}" if text else "printed nothing") from None


def _lay_out(task: Task, folder: AttemptFolder, place: Path) -> None:
    folders.remove(place)
    (place / "tmp").mkdir(parents=True)
    (place / "task.json").write_text(json.dumps(task), encoding="utf-8")
    folders.copy(folder.path, place / "copy", _COPY_BYTES)
