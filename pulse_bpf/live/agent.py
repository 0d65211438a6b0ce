"""An agent without its probes and network: tables of a recording in, steps for a collector out, within budgets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl
from prometheus_client import CollectorRegistry

from pulse_bpf.errors import PulseError
from pulse_bpf.live import wire
from pulse_bpf.live.cutting import Cutting
from pulse_bpf.live.memory import resident_bytes
from pulse_bpf.live.metrics import AgentMetrics
from pulse_bpf.live.recorder import FlightRecorder
from pulse_bpf.live.spool import Spool
from pulse_bpf.live.status import Json

# How often it is asked for news of other nodes, at most; and how long an agent waits at its start until there are none.
PEERS_EVERY_NS, GREETING_NS = 1_000_000_000, 10_000_000_000
# A collector that is away, or refuses, is tried again after so long.
AGAIN_NS = 1_000_000_000
# Bins are made twice as wide when a budget was exceeded over so many steps in a row, at most so many times.
PATIENCE, WIDEST = 6, 64
# Narrower again when for so many steps no more than this share of the budget was used.
CALM, CALM_STEPS = 0.4, 120
# Of a trouble that lasts, no more reasons than these are told.
MOST_REASONS = 20


class Link(Protocol):
    """The way to a collector; a PulseError where it is not to be reached, or refuses."""

    def send(self, content: bytes, oldest: int, sent_ns: int) -> Json:
        """Sends what the spool holds; the collector's answer, as Collector.accept has it."""

    def peers(self) -> dict[str, pl.DataFrame]:
        """What other nodes have to do with this one."""

    def raw(self, finding: str, node: str, name: str, content: bytes) -> None:
        """Sends a file of the raw samples that were asked for."""

    def raw_done(self, finding: str, found: bool) -> None:
        """Says that all were sent, or that there are none."""


@dataclass(frozen=True)
class Budget:
    """What an agent may use: cores of CPU time, bytes of memory, and bytes a second that it sends."""

    cores: float
    memory_bytes: int
    sent_bytes_per_s: int


@dataclass
class _Use:
    cpu_s: float
    at_s: float
    over: int = 0
    calm: int = 0


class Agent:
    """Takes what a recording writes (append, replace, manifest); `measure` cuts it, `send` delivers it.

    The three may each be called by a thread of its own. `clock`: the time that the tables have, in ns.
    """

    def __init__(
        self,
        link: Link,
        spool: Spool,
        recorder: FlightRecorder,
        budget: Budget,
        clock: Callable[[], int],
        registry: CollectorRegistry,
        tell: Callable[[str], None],
    ) -> None:
        self.metrics = AgentMetrics(registry)
        self.metrics.cpu_budget.set(budget.cores)
        self.metrics.memory_budget.set(budget.memory_bytes)
        self.metrics.bandwidth_budget.set(budget.sent_bytes_per_s)
        self._link, self._spool, self._recorder, self._budget = link, spool, recorder, budget
        self._clock, self._tell = clock, tell
        self._cutting = Cutting()
        self._lock = threading.Lock()
        self._inbox: list[tuple[bool, str, pl.DataFrame]] = []
        self._began_ns, self._greeted = clock(), False
        self._use = _Use(time.process_time(), time.monotonic())
        self._sent, self._again_ns = -1, 0
        self._peers_version, self._peers_ns = -1, 0
        self._peers: dict[str, pl.DataFrame] | None = None
        self._wants_state = False
        self._allowance, self._allowed_s = float(budget.sent_bytes_per_s), time.monotonic()
        self._troubles: dict[str, set[str]] = {}
        self._lost = 0

    def append(self, table: str, frame: pl.DataFrame) -> None:
        """More rows of a table that grows."""
        self._recorder.append(table, frame)
        with self._lock:
            self._inbox.append((True, table, frame))

    def replace(self, table: str, frame: pl.DataFrame) -> None:
        """The whole of a small table."""
        self._recorder.replace(table, frame)
        with self._lock:
            self._inbox.append((False, table, frame))

    def manifest(self, sources: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> None:
        """What is known of the sources by now."""
        self._recorder.manifest(sources, extra)
        self.metrics.sources.set(len(sources))

    def close(self) -> None:
        """Nothing more will come."""

    def measure(self) -> bool:
        """Cuts what came into operators, and spools them; whether there was a step to do."""
        with self._lock:
            inbox, self._inbox = self._inbox, []
            peers, self._peers = self._peers, None
            wants_state, self._wants_state = self._wants_state, False
        for grows, table, frame in inbox:
            if grows:
                self._cutting.append(table, frame)
            else:
                self._cutting.replace(table, frame)
        if peers is not None:
            self._cutting.know(peers)
        if wants_state:
            self._cutting.tell_all()
        until_ns = self._cutting.due()
        if until_ns is None:
            return False
        if self._greeted or self._clock() - self._began_ns > GREETING_NS:
            tables = self._cutting.step(until_ns)
            self.metrics.operators.inc(float(tables["operators"]["final"].sum()))
        else:
            # Where queue pairs lead is known once the collector has told of the others.
            tables = self._cutting.greet(until_ns)
        step = wire.Step(self._spool.name, self._spool.next_sequence, until_ns, tables)
        dropped = self._spool.dropped
        self._spool.put(wire.packed(wire.encode(step)))
        self.metrics.spool_dropped.inc(self._spool.dropped - dropped)
        self._watch_budget()
        self._report(tables)
        return True

    def send(self) -> bool:
        """Delivers what waits, as far as the budget allows; False when the collector cannot be reached."""
        if self._clock() < self._again_ns:
            return False
        try:
            while (entry := self._spool.after(self._sent)) is not None:
                if entry.size > self._refilled():
                    break
                content = self._spool.content(entry)
                if content is None:
                    continue
                self._allowance -= entry.size
                answer = self._link.send(content, self._spool.oldest(entry.spool), self._clock())
                self._sent = -1 if answer["again"] else entry.order
                self._say("the collector", None)
                self._learn(answer)
        except PulseError as error:
            # All that is not known to have arrived is sent again.
            self._sent, self._again_ns = -1, self._clock() + AGAIN_NS
            self.metrics.send_failures.inc()
            self._say("the collector", str(error))
            return False
        return True

    def _learn(self, answer: Json) -> None:
        now_ns = self._clock()
        for spool, sequence in answer["acked"].items():
            count, size = self._spool.delivered(spool, sequence)
            self.metrics.batches_sent.inc(count)
            self.metrics.bytes_sent.inc(size)
            if count:
                self.metrics.last_sent.set(now_ns / 1e9)
        if answer["peers"] == self._peers_version:
            self._greeted = True
        elif now_ns - self._peers_ns >= PEERS_EVERY_NS:
            peers = self._link.peers()
            self._peers_version, self._peers_ns = answer["peers"], now_ns
            with self._lock:
                self._peers = peers
        if answer["state"]:
            with self._lock:
                self._wants_state = True
        for wanted in answer["raw"]:
            found = False
            for name, content in self._recorder.between(wanted["first_ns"], wanted["last_ns"]):
                self._link.raw(wanted["finding"], wanted["nodes"][0], name, content)
                found = True
            self._link.raw_done(wanted["finding"], found)

    def _refilled(self) -> float:
        """How many bytes may be sent now: what a second allows, or ten when nothing was sent for long."""
        now_s, rate = time.monotonic(), self._budget.sent_bytes_per_s
        self._allowance = min(10.0 * rate, self._allowance + rate * (now_s - self._allowed_s))
        self._allowed_s = now_s
        return self._allowance

    def _watch_budget(self) -> None:
        """Makes bins wider when too much CPU time or memory was used for a while, and says so."""
        cpu_s, now_s = time.process_time(), time.monotonic()
        cores = (cpu_s - self._use.cpu_s) / max(1e-9, now_s - self._use.at_s)
        share = max(cores / self._budget.cores, resident_bytes() / self._budget.memory_bytes)
        self._use.cpu_s, self._use.at_s = cpu_s, now_s
        self._use.over = self._use.over + 1 if share > 1 else 0
        self._use.calm = self._use.calm + 1 if share < CALM else 0
        if self._use.over >= PATIENCE and self._cutting.widen < WIDEST:
            self._cutting.widen *= 2
            self._use.over = 0
            self.metrics.over_budget.inc()
            self._tell(
                f"beyond its budget ({share:.1f} times); bins are {self._cutting.widen} times as wide now"
            )
        elif self._use.calm >= CALM_STEPS and self._cutting.widen > 1:
            self._cutting.widen //= 2
            self._use.calm = 0
            self._tell(f"within its budget again; bins are {self._cutting.widen} times as wide as recorded")

    def _report(self, tables: Mapping[str, pl.DataFrame]) -> None:
        self.metrics.spool_bytes.set(self._spool.size_bytes)
        self.metrics.ring_bytes.set(self._recorder.size_bytes)
        self.metrics.ring_seconds.set(self._recorder.span_ns / 1e9)
        if self._cutting.bin_ns:
            self.metrics.bin_seconds.set(self._cutting.bin_ns / 1e9)
        if "coverage" in tables:
            lost = int(tables["coverage"].group_by("source").agg(pl.col("lost").max())["lost"].sum())
            self.metrics.events_lost.inc(max(0, lost - self._lost))
            self._lost = lost
        if "processes" in tables:
            self.metrics.processes.set(tables["processes"]["gone_ns"].null_count())
        self._say("the spool", self._spool.refused)
        self._say("the flight recorder", self._recorder.refused)

    def _say(self, part: str, trouble: str | None) -> None:
        """Tells of a trouble once while it lasts, for each of its reasons, and when it is over (None)."""
        if trouble is None:
            if self._troubles.pop(part, None):
                self._tell(f"{part} works again; batches that wait: {len(self._spool)}")
            return
        told = self._troubles.setdefault(part, set())
        if trouble not in told and len(told) < MOST_REASONS:
            told.add(trouble)
            self._tell(trouble)
