"""Runs groups of rollouts through the gateway and reads back what was recorded. Used by trainer and evaluation."""

import hashlib
from collections.abc import Callable

from harnessed.client import Client, cancel_run, create_groups, get_transcripts
from harnessed.records import GroupSpec, Purpose, Sampling, Task, Transcript
from harnessed.training.watch import Watch

GROUPS_PER_REQUEST = 256


class Rollouts:
    """The rollouts of one run."""

    def __init__(self, gateway: Client, run: str, seed: int, watch: Watch, tick: Callable[[], None]) -> None:
        self._gateway = gateway
        self._run = run
        self._seed = seed
        self._watch = watch
        self._tick = tick
        self.open: list[GroupSpec] = []
        """Groups that were created and whose rollouts are not in the books yet."""

    def specs(
        self, label: str, tasks: list[Task], n: int, purpose: Purpose, sampling: Sampling, draws: str
    ) -> list[GroupSpec]:
        """One group for each task. The same `draws` on the same tasks sample with the same random numbers."""
        return [
            GroupSpec(
                id=f"{self._run}.{label}.{index:04d}",
                run=self._run,
                task=task,
                n=n,
                purpose=purpose,
                sampling=sampling,
                seed=_seed(self._seed, draws, index),
            )
            for index, task in enumerate(tasks)
        ]

    def collect(self, specs: list[GroupSpec]) -> list[list[Transcript]]:
        """Queue the groups, wait until all are complete, and read them. Raises failures.Stalled.

        They are open until `close`, so that an interruption finds them.
        """
        ids = [spec.id for spec in specs]
        self.open = [*self.open, *specs]
        for part in _parts(specs):
            self._gateway(create_groups(part))
        self._watch.until_complete(ids, self._tick)
        return [self._gateway(get_transcripts(id)) for id in ids]

    def close(self) -> None:
        """What was collected is in the books."""
        self.open = []

    def give_up(self) -> list[tuple[Transcript, Task]]:
        """Cancel what is open; the transcripts of its rollouts, with their tasks."""
        self._gateway(cancel_run(self._run))
        return [(each, spec.task) for spec in self.open for each in self._gateway(get_transcripts(spec.id))]


def _parts(specs: list[GroupSpec]) -> list[list[GroupSpec]]:
    return [specs[start : start + GROUPS_PER_REQUEST] for start in range(0, len(specs), GROUPS_PER_REQUEST)]


def _seed(run_seed: int, draws: str, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{draws}/{index}".encode(), digest_size=6).digest())
