"""Creates groups of rollouts at the gateway and reads back what was recorded. Used by `flights.py`, evaluation and the
command line."""

import hashlib
from collections.abc import Callable

from harnessed.client import Client, cancel_group, cancel_run, create_groups, get_transcripts, list_groups
from harnessed.records import GroupSpec, Purpose, Sampling, Task, Transcript
from harnessed.training.watch import Watch

GROUPS_PER_REQUEST = 256


class Rollouts:
    """The rollouts of one run."""

    def __init__(self, gateway: Client, run: str, seed: int, watch: Watch, tick: Callable[[], None]) -> None:
        self._gateway = gateway
        self._seed = seed
        self._tick = tick
        self.run = run
        self.watch = watch
        self.open: dict[str, GroupSpec] = {}
        """Groups that were created and whose rollouts are not in the books yet."""

    def specs(
        self, label: str, tasks: list[Task], n: int, purpose: Purpose, sampling: Sampling, draws: str
    ) -> list[GroupSpec]:
        """One group for each task. The same `draws` on the same tasks sample with the same random numbers."""
        return [
            GroupSpec(
                id=f"{self.run}.{label}.{index:04d}",
                run=self.run,
                task=task,
                n=n,
                purpose=purpose,
                sampling=sampling,
                seed=self.seed_of(draws, index),
            )
            for index, task in enumerate(tasks)
        ]

    def seed_of(self, draws: str, index: int) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self._seed}/{draws}/{index}".encode(), digest_size=6).digest())

    def create(self, specs: list[GroupSpec]) -> None:
        """Queue the groups. They are open until `close`, so that an interruption finds them."""
        self.open |= {spec.id: spec for spec in specs}
        for start in range(0, len(specs), GROUPS_PER_REQUEST):
            self._gateway(create_groups(specs[start : start + GROUPS_PER_REQUEST]))

    def collect(self, specs: list[GroupSpec]) -> list[list[Transcript]]:
        """Create the groups, wait until all are complete, and read them. Raises failures.Stalled."""
        self.create(specs)
        self.watch.until_complete([spec.id for spec in specs], self._tick)
        return [self.read(spec.id) for spec in specs]

    def known(self) -> list[GroupSpec]:
        """All groups of the run that the gateway knows, in the order of their creation."""
        known = self._gateway(list_groups(self.run))
        return [GroupSpec.model_validate(group.model_dump(include=set(GroupSpec.model_fields))) for group in known]

    def read(self, group: str) -> list[Transcript]:
        return self._gateway(get_transcripts(group))

    def wait(self, what: str) -> None:
        """Until something changes, for about a second at most. Raises failures.Stalled."""
        self._tick()
        self.watch.wait(what)

    def cancel(self, group: str) -> None:
        self._gateway(cancel_group(group))

    def close(self, groups: list[str]) -> None:
        """They are in the books."""
        for group in groups:
            self.open.pop(group, None)

    def give_up(self) -> list[tuple[Transcript, Task]]:
        """Cancel what is open; the transcripts of its rollouts, with their tasks."""
        self._gateway(cancel_run(self.run))
        return [(each, spec.task) for spec in self.open.values() for each in self.read(spec.id)]
