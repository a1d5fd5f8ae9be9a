"""`GET /metrics`: what the gateway does, as numbers for Prometheus.

Calls are counted when they end (`progress.py`), commits by the store's writer; all else is read when somebody scrapes.
Labels are protocols, outcomes, engines, and runs with unfinished rollouts, never rollouts, so that a page stays small.
`probes.py` serves it.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from harnessed.gateway.attempts import Attempts
from harnessed.gateway.engines import Engines
from harnessed.gateway.progress import ENCODER, Calls, Outcome, Progress
from harnessed.gateway.store import Store
from harnessed.gateway.surroundings import Surroundings
from harnessed.gateway.turnstile import Turnstiles
from harnessed.records import State

PROTOCOLS = ("chat", "completions", "messages", "responses", "gemini", "count_tokens")
FIRST_TEXT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
COMMIT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
COMMIT_WRITES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


class Instruments:
    """What is counted while it happens. Labels are resolved here, once, so that a call costs a few microseconds."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        calls = prometheus.Counter(
            "harnessed_calls", "Model calls that ended", ("protocol", "streamed", "outcome"), registry=self.registry
        )
        seconds = prometheus.Histogram(
            "harnessed_call_seconds",
            "From the arrival of a call to the last byte of its whole answer, held time included",
            ("protocol", "streamed"),
            registry=self.registry,
            buckets=CALL_S,
        )
        first = prometheus.Histogram(
            "harnessed_first_text_seconds",
            "From the arrival of a streamed call to the first text of its answer",
            ("protocol",),
            registry=self.registry,
            buckets=FIRST_TEXT_S,
        )
        kinds = list(itertools.product(PROTOCOLS, (False, True)))
        self._calls = {
            (protocol, streamed, outcome): calls.labels(protocol, _said(streamed), outcome)
            for protocol, streamed in kinds
            for outcome in Outcome
        }
        self._seconds = {
            (protocol, streamed): seconds.labels(protocol, _said(streamed)) for protocol, streamed in kinds
        }
        self._first = {protocol: first.labels(protocol) for protocol in PROTOCOLS}
        self._commit_seconds = prometheus.Histogram(
            "harnessed_commit_seconds", "Of one group commit", registry=self.registry, buckets=COMMIT_S
        )
        self._commit_writes = prometheus.Histogram(
            "harnessed_commit_writes", "Writes in one group commit", registry=self.registry, buckets=COMMIT_WRITES
        )

    def ended(self, progress: Progress, seconds: float) -> None:
        """A call has ended."""
        outcome = progress.outcome
        self._calls[progress.protocol, progress.streamed, outcome].inc()
        if outcome == Outcome.OK:
            self._seconds[progress.protocol, progress.streamed].observe(seconds)
        if progress.first_s is not None:
            self._first[progress.protocol].observe(progress.first_s)

    def committed(self, writes: int, seconds: float) -> None:
        """Called by the store's writer thread after each group commit."""
        self._commit_seconds.observe(seconds)
        self._commit_writes.observe(writes)


class Readings(Collector):
    """What is read when somebody scrapes; `look` comes first."""

    def __init__(
        self,
        calls: Calls,
        attempts: Attempts,
        store: Store,
        engines: Engines,
        turnstiles: Turnstiles,
        surroundings: Surroundings,
    ) -> None:
        self._calls = calls
        self._attempts = attempts
        self._store = store
        self._engines = engines
        self._turnstiles = turnstiles
        self._surroundings = surroundings
        self._unfinished: dict[str, Counter[str]] | None = None
        """None: the store is out of reach."""

    async def look(self) -> None:
        """Ask the store; that it is out of reach is a number, no failure."""
        try:
            self._unfinished = await self._surroundings.unfinished()
        except (SQLAlchemyError, TimeoutError):
            self._unfinished = None

    def collect(self) -> Iterator[Metric]:
        yield from self._of_calls()
        yield from self._of_engines()
        up = self._unfinished is not None and not self._store.trouble
        yield GaugeMetricFamily("harnessed_store_up", "1: the store answers", up)
        yield GaugeMetricFamily("harnessed_writes_waiting", "Writes before the store's writer", self._store.waiting)
        rollouts = GaugeMetricFamily(
            "harnessed_rollouts", "Unfinished rollouts of runs that have any", labels=["run", "state"]
        )
        for run, states in (self._unfinished or {}).items():
            for state in (State.QUEUED, State.RUNNING):
                rollouts.add_metric([run, state], states[state])
        yield rollouts

    def _of_calls(self) -> Iterator[Metric]:
        waits = Counter(progress.waits[0] for progress in self._calls)
        held = sum(progress.held for progress in self._calls)
        yield GaugeMetricFamily("harnessed_calls_in_progress", "Calls that have arrived and not ended", waits.total())
        yield GaugeMetricFamily("harnessed_calls_held", "Calls that wait at a closed turnstile", held)
        yield CounterMetricFamily(
            "harnessed_held_seconds",
            "That answers have waited at turnstiles which have opened since",
            self._turnstiles.held_s,
        )
        yield GaugeMetricFamily(
            "harnessed_encoding", "Large requests that are read and encoded, or wait for it", waits[ENCODER]
        )
        yield GaugeMetricFamily("harnessed_sessions", "Attempts in memory", len(self._attempts))

    def _of_engines(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "harnessed_generations", "Answers that this gateway has asked an engine for", labels=["engine"]
        )
        up = GaugeMetricFamily("harnessed_engine_up", "1: the engine is healthy", labels=["engine"])
        queue = GaugeMetricFamily("harnessed_engine_queue", "Answers that wait in the engine", labels=["engine"])
        sampled = CounterMetricFamily(
            "harnessed_sampled_tokens", "Tokens that the engine gave this gateway", labels=["engine"]
        )
        for engine in self._engines.known:
            in_flight.add_metric([engine.id], engine.in_flight)
            up.add_metric([engine.id], engine.healthy)
            sampled.add_metric([engine.id], self._engines.sampled[engine.id])
            if engine.waiting is not None:
                queue.add_metric([engine.id], engine.waiting)
        yield from (in_flight, up, queue, sampled)


def _said(streamed: bool) -> str:
    return "yes" if streamed else "no"
