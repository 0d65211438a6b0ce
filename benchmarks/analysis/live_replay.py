"""Agents that are fed from a simulated recording, in its own time, and a collector that judges what they send."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
from prometheus_client import CollectorRegistry

from pulse_bpf.analysis.clock_offsets import TIMES
from pulse_bpf.analysis.load import load
from pulse_bpf.errors import HostError
from pulse_bpf.live import wire
from pulse_bpf.live.agent import Agent, Budget
from pulse_bpf.live.collector import Collector
from pulse_bpf.live.findings_log import Event
from pulse_bpf.live.recorder import FlightRecorder
from pulse_bpf.live.spool import Spool
from pulse_bpf.live.status import Json
from pulse_bpf.schema import STREAMED, TABLES
from pulse_bpf.session import ROTATE_S, SETTLE_S
from pulse_bpf.store import write_file

# The columns that hold moments.
MOMENTS = {
    "t_ns",
    "wall_ns",
    *(name for names in TIMES.values() for name in names),
    "return_ns",
    "launch_ns",
    "created_ns",
}
TIME = {"ops": "call_ns", "clocks": "wall_ns"}
# Time passes in steps as long as the session waits between two drains.
TICK_NS = 100_000_000
AMPLE = Budget(cores=1e6, memory_bytes=2**50, sent_bytes_per_s=2**40)


class Direct:
    """A link to a collector in this process; `cut` makes it fail as a network does."""

    def __init__(self, collector: Callable[[], Collector], agent: str) -> None:
        self._collector, self._agent = collector, agent
        self.cut: Exception | None = None

    def send(self, content: bytes, oldest: int, sent_ns: int) -> Json:
        self._check()
        step = wire.decode(wire.unpacked(content))
        return self._collector().accept(self._agent, {self._agent}, step, oldest, sent_ns)

    def peers(self) -> dict[str, pl.DataFrame]:
        self._check()
        return self._collector().peers(self._agent)

    def raw(self, finding: str, node: str, name: str, content: bytes) -> None:
        self._check()
        self._collector().keep_raw(self._agent, {self._agent}, finding, node, name, content)

    def raw_done(self, finding: str, found: bool) -> None:
        self._check()
        self._collector().raw_done(self._agent, finding, found)

    def _check(self) -> None:
        if self.cut is not None:
            raise self.cut


@dataclass
class Player:
    """Gives the tables of one node to its agent as a recording session would: what is settled, every ROTATE_S."""

    node: str
    tables: Mapping[str, pl.DataFrame]
    agent: Agent
    next_ns: int
    told_ns: int
    ahead_ns: int
    cpu_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began_ns = self.told_ns + self.ahead_ns

    def play(self, now_ns: int) -> None:
        """What happens up to `now_ns`; the node's clock is ahead of that."""
        if now_ns < self.next_ns:
            return
        self.next_ns += int(ROTATE_S * 1e9)
        until_ns = now_ns - int(SETTLE_S * 1e9) + self.ahead_ns
        for table, frame in self.tables.items():
            if table in STREAMED:
                told_ns = self.told_ns + self.ahead_ns
                new = pl.col(TIME.get(table, "t_ns")).is_between(told_ns, until_ns, closed="left")
                self.agent.append(table, frame.filter(new))
            elif table == "coverage":
                seen = frame.with_columns(
                    pl.col("first_ns").clip(lower_bound=self.began_ns),
                    pl.col("last_ns").clip(upper_bound=until_ns),
                )
                self.agent.replace(table, seen)
            elif table == "processes":
                gone = pl.when(pl.col("gone_ns") < until_ns).then("gone_ns")
                self.agent.replace(table, frame.with_columns(gone_ns=gone))
            else:
                self.agent.replace(table, frame)
        self.agent.manifest([], {})
        self.told_ns = until_ns - self.ahead_ns
        began = time.process_time()
        self.agent.measure()
        self.cpu_s.append(time.process_time() - began)


class Replay:
    """A simulated recording in `directory`, its agents and their collector with all they keep under `scratch`."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        recording = load([directory])
        self.tables = {
            table: recording[table] for table in TABLES if table not in ("op_details", "operators")
        }
        coverage = self.tables["coverage"]
        self.first_ns, self.last_ns = int(coverage["first_ns"].min()), int(coverage["last_ns"].max())  # type: ignore[arg-type]
        self.now_ns = self.first_ns
        self.scratch, self.full = scratch, False
        self.collector = self.new_collector()
        self.events: list[Event] = []
        self.judging_s: list[float] = []
        nodes = self.tables["nodes"]["node"].to_list()
        self.links = {node: Direct(lambda: self.collector, node) for node in nodes}
        self.players = {node: self.new_player(node, number / len(nodes)) for number, node in enumerate(nodes)}

    def new_collector(self) -> Collector:
        """One that finds what an earlier one left."""
        return Collector(self.scratch / "collector", lambda: self.now_ns, CollectorRegistry(), self.write)

    def write(self, path: Path, content: Callable[[Path], object]) -> None:
        """How the collector writes files; refuses while its disk is `full`."""
        if self.full:
            raise HostError(f"cannot write to {path}", "No space left on device")
        write_file(path, content)

    def new_player(self, node: str, phase: float, ahead_ns: int = 0) -> Player:
        """An agent that begins now, whose clock is `ahead_ns`; sessions rotate at a `phase` of their own."""
        own = {
            table: (frame.filter(pl.col("node") == node) if "node" in frame.columns else frame).with_columns(
                pl.col(name) + ahead_ns for name in frame.columns if name.endswith("_ns") and name in MOMENTS
            )
            for table, frame in self.tables.items()
        }
        root = self.scratch / node
        agent = Agent(
            self.links[node],
            Spool(root / "spool", 2**30, 2**26),
            FlightRecorder(root / "ring", 60.0, 2**30),
            AMPLE,
            lambda: self.now_ns + ahead_ns,
            CollectorRegistry(),
            lambda text: None,
        )
        return Player(node, own, agent, self.now_ns + int(phase * ROTATE_S * 1e9), self.now_ns, ahead_ns)

    def tick(self) -> list[Event]:
        """The next TICK_NS of all; what opened, changed or closed in them."""
        self.now_ns += TICK_NS
        for player in self.players.values():
            player.play(self.now_ns)
            player.agent.send()
        with suppress(HostError):
            self.collector.commit()
        began = time.process_time()
        new = self.collector.judge()
        self.judging_s.append(time.process_time() - began)
        self.events += new
        return new

    def run(self, until_ns: int | None = None) -> list[Event]:
        """Lets time pass, up to the end of the recording if nothing else is said; what happened."""
        before = len(self.events)
        while self.now_ns < (self.last_ns if until_ns is None else until_ns):
            self.tick()
        return self.events[before:]
