"""The reconciling loop: observe what the gateway says is ours and what the runner has, compare, act.

`run_controller` is called by the command line, in the main thread (it handles SIGTERM and SIGINT).
The loop is level-based: it never relies on having seen a change, only on the last answers, so that a lost answer, a
gateway that was away and an attempt that was superseded are all the same case. Claiming is one long-poll, so a queued
rollout starts when a slot is free, not when a timer fires.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harnessed.client import ApiError, AsyncClient, Unreachable, claim, end_attempt, get_held_seconds, renew
from harnessed.config import Config
from harnessed.controller.local import LocalRunner
from harnessed.controller.predecessor import Predecessor
from harnessed.controller.runner import Ended, Runner
from harnessed.records import Assignment, Ending, Outcome, Presence

log = logging.getLogger(__name__)
T = TypeVar("T")

RENEW_S = 5.0
"""The gateway's lease is 30 s."""
CLAIM_WAIT_S = 20.0
_HELD_LIMIT_S = 60.0
"""How long the gateway is asked whether an attempt that has reached its time limit was held."""
_FAREWELL_S = 3.0
"""How long a controller that was told to end tries to report what it stopped."""


@dataclass(frozen=True)
class Observation:
    leased: frozenset[str]
    """Attempts that are ours, by the gateway's last answers."""
    unknown: frozenset[str]
    """Leased to us by two renewals in a row, though we never got them: the answer to a claim was lost."""
    attempts: Mapping[str, Ended | None]
    """What the runner has."""
    reporting: frozenset[str]
    """Ends on their way to the gateway."""
    slots: int


@dataclass(frozen=True)
class Plan:
    stop: frozenset[str]
    report: Mapping[str, Ended]
    forget: frozenset[str]
    claim: int


def compare(seen: Observation) -> Plan:
    """What to do now."""
    running = {name for name, ended in seen.attempts.items() if ended is None}
    cancelled = {name for name, ended in seen.attempts.items() if ended and ended.ending.outcome is Outcome.CANCELLED}
    # The end of an attempt that is no longer ours is reported too: the gateway decides, and refuses it.
    report = {
        name: ended
        for name, ended in seen.attempts.items()
        if ended and name not in cancelled and name not in seen.reporting
    }
    lost = Ended(Ending(outcome=Outcome.INFRASTRUCTURE, reason="the controller never got this attempt"))
    report |= dict.fromkeys(seen.unknown - seen.attempts.keys() - seen.reporting, lost)
    return Plan(
        stop=frozenset(running - seen.leased),
        report=report,
        forget=frozenset(cancelled),
        claim=max(0, seen.slots - len(running)),
    )


async def run_controller(config: Config, client: AsyncClient, folder: Path, run: str) -> None:
    """Run rollouts of `run` (an id, or the name that ids begin with) until SIGTERM or SIGINT.

    `client` has patience: a gateway that is away is asked again as long as the controller lives. Attempts live in
    `folder`. Returns when no process of them is left.
    Raises ConfigError if another controller has the folder, ConfigError or TemplateError if the harness or the
    evaluator does not start, ApiError if the gateway refuses the controller as such.
    """
    # A name of this process alone: what an earlier controller held is not adopted.
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    predecessor = Predecessor(folder, owner)
    wake, stopping = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        stopping.set()
        wake.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    runner = LocalRunner(config, client.url, folder, wake, lambda assignment: _held_seconds(client, assignment))
    opening = asyncio.create_task(runner.open())
    ending = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([opening, ending], return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            await opening
            await Reconciler(config, client, runner, wake, run, owner).run(stopping, predecessor.name)
    finally:
        opening.cancel()
        ending.cancel()
        await asyncio.wait([opening, ending])
        await runner.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _held_seconds(client: AsyncClient, assignment: Assignment) -> float:
    """A gateway that does not answer for so long does not prolong an attempt."""
    try:
        async with asyncio.timeout(_HELD_LIMIT_S):
            return await client(get_held_seconds(assignment.rollout, assignment.attempt))
    except (TimeoutError, ApiError) as error:
        log.warning("attempt %d of rollout %s is not prolonged: %s", assignment.attempt, assignment.rollout, error)
        return 0.0


class Reconciler:
    def __init__(
        self, config: Config, client: AsyncClient, runner: Runner, wake: asyncio.Event, run: str, owner: str
    ) -> None:
        self._run = run
        self._config = config.controller
        self._client = client
        self._runner = runner
        self._wake = wake
        self._owner = owner
        self._burying: asyncio.Task[None] | None = None
        self._leased: set[str] = set()
        self._claimed_since_renewal: set[str] = set()
        self._absent: set[str] = set()
        """Leased by the last renewal, and not with the runner then."""
        self._unknown: set[str] = set()
        self._claiming: asyncio.Task[list[Assignment]] | None = None
        self._renewing: asyncio.Task[list[str]] | None = None
        self._renew_at = 0.0
        self._reports: dict[str, asyncio.Task[None]] = {}

    async def run(self, stopping: asyncio.Event, predecessor: str) -> None:
        """Reconcile until told to stop; then stop the runner and report. `predecessor`: who died here, if anybody."""
        if predecessor:
            self._burying = self._begin(self._bury(predecessor))
        try:
            while not stopping.is_set():
                self._wake.clear()
                self._take_answers()
                self._act(compare(self._observe()))
                until_renewal = max(0.0, self._renew_at - time.monotonic())
                with suppress(TimeoutError):
                    async with asyncio.timeout(RENEW_S if self._renewing else until_renewal):
                        await self._wake.wait()
        finally:
            await self._part()

    def _observe(self) -> Observation:
        return Observation(
            leased=frozenset(self._leased),
            unknown=frozenset(self._unknown),
            attempts=self._runner.attempts(),
            reporting=frozenset(self._reports),
            slots=self._config.slots,
        )

    def _act(self, plan: Plan) -> None:
        for name in plan.stop:
            self._runner.stop(name)
        for name in plan.forget:
            self._runner.forget(name)
        self._report_all(plan.report)
        if plan.claim and self._claiming is None:
            request = claim(self._run, self._owner, plan.claim, self._config.attempts, CLAIM_WAIT_S)
            self._claiming = self._begin(self._client(request))
        if self._renewing is None and time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + RENEW_S
            self._claimed_since_renewal.clear()
            presence = Presence(run=self._run, slots=self._config.slots, judging=self._runner.judging())
            self._renewing = self._begin(self._client(renew(self._owner, presence)))

    def _take_answers(self) -> None:
        if self._claiming and self._claiming.done():
            for assignment in self._claiming.result():
                name = f"{assignment.rollout}/{assignment.attempt}"
                self._leased.add(name)
                self._claimed_since_renewal.add(name)
                self._runner.start(assignment)
            self._claiming = None
        if self._renewing and self._renewing.done():
            answer = set(self._renewing.result())
            absent = answer - self._runner.attempts().keys() - self._reports.keys()
            self._unknown, self._absent = absent & self._absent, absent
            self._leased = answer | self._claimed_since_renewal
            self._renewing = None
        for name in [name for name, report in self._reports.items() if report.done()]:
            self._reports.pop(name).result()
            self._unknown.discard(name)
            if name in self._runner.attempts():
                self._runner.forget(name)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._wake.set())
        return task

    def _report_all(self, ends: Mapping[str, Ended]) -> None:
        for name, ended in ends.items():
            self._reports[name] = self._begin(self._report(name, ended))

    async def _report(self, name: str, ended: Ended) -> None:
        rollout, _, number = name.rpartition("/")
        attempts = int(number) if ended.final else self._config.attempts
        try:
            await self._client(end_attempt(rollout, int(number), ended.ending, attempts))
        except ApiError as error:
            # 409: cancelled, superseded, or ended by an earlier report whose answer was lost.
            if error.status != 409:
                log.warning("the end of %s was refused: %s", name, error)

    async def _bury(self, owner: str) -> None:
        """End the attempts of a controller that died in this folder."""
        died = Ended(Ending(outcome=Outcome.INFRASTRUCTURE, reason="its controller died"))
        try:
            held = await self._client(renew(owner))
            self._report_all(dict.fromkeys(held, died))
        except ApiError as error:
            log.warning("the leases of %s end by themselves: %s", owner, error)

    async def _part(self) -> None:
        """Stop everything and give back what is leased, so that another controller gets it at once."""
        for call in (self._claiming, self._renewing, self._burying):
            if call:
                call.cancel()
        await self._runner.close()
        stopped = Ended(Ending(outcome=Outcome.INFRASTRUCTURE, reason="the controller was stopped"))
        try:
            async with asyncio.timeout(_FAREWELL_S):
                self._report_all(compare(self._observe()).report)
                await asyncio.gather(*self._reports.values())
                left = await self._client(renew(self._owner))
                await asyncio.gather(*(self._report(name, stopped) for name in left))
        except (TimeoutError, ApiError, Unreachable) as error:
            log.warning("not everything could be given back; the leases end by themselves (%s)", error or "no answer")
        finally:
            for report in self._reports.values():
                report.cancel()
