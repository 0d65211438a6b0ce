"""One node watched without a collector: an agent and what judges it, both in this process; nothing is sent or kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
from prometheus_client import CollectorRegistry
from rich.console import Console

from pulse_bpf import privileges
from pulse_bpf.errors import HostError
from pulse_bpf.hosts import Host
from pulse_bpf.live import wire
from pulse_bpf.live.agent import Agent, Budget
from pulse_bpf.live.collector import Collector, steady_clock
from pulse_bpf.live.recorder import FlightRecorder
from pulse_bpf.live.running import LOOK_S, Worker
from pulse_bpf.live.spool import Spool
from pulse_bpf.live.status import Json
from pulse_bpf.session import Recording
from pulse_bpf.sources import Wanted

_AGENT = "here"
# As `pulse record` reads the cards where nothing else is asked for.
_WANTED = Wanted(1_000_000, False, False, False, None, 100_000, False, {})
# Steps go straight on, and raw samples are not asked for.
_SPOOLED_BYTES, _RAW_S, _RAW_BYTES = 64 * 1024 * 1024, 1.0, 16 * 1024 * 1024
# A person who watches a node waits for the answer: its own budget, beyond which bins get wider.
_BUDGET = Budget(cores=1.0, memory_bytes=4 * 1024**3, sent_bytes_per_s=1024**3)


@contextmanager
def watching(hosts: Sequence[Host], console: Console) -> Iterator[Callable[[], Json]]:
    """Attaches to `hosts` until the context ends; gives what answers with a status document, as a collector would.

    What is amiss with the recording is told at `console`, at the beginning and at the end. Errors as
    session.record has them; those of later moments are raised by what answers.
    """
    with TemporaryDirectory(prefix="pulse-watch-") as directory, ExitStack() as cleanup:
        local = Local(Path(directory), [host.node for host in hosts], steady_clock())
        recording = Recording(hosts, _WANTED, True, False, local.agent, cleanup)
        privileges.drop()
        told = len(recording.outcome.warnings)
        for warning in recording.outcome.warnings:
            console.print(
                f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True
            )
        trouble: list[str] = []
        stop: list[int] = []

        def ask() -> Json:
            if running.done():
                running.result()
            if trouble:
                raise HostError("this node cannot be judged", trouble.pop())
            return local.status()

        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(recording.run, None, stop, Console(quiet=True))
            judging = Worker(local.step, LOOK_S, trouble.append)
            try:
                yield ask
            finally:
                judging.stop()
                stop.append(0)
        for warning in recording.outcome.warnings[told:]:
            console.print(
                f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True
            )


class Local:
    """Judges what `agent` is given, as a recording gives it, with small files below `root` and nothing else."""

    def __init__(self, root: Path, nodes: Collection[str], clock: Callable[[], int]) -> None:
        registry = CollectorRegistry()
        self._collector = Collector(root, clock, registry, write=lambda path, fill: None)
        self.status = self._collector.status
        self.agent = Agent(
            _Here(self._collector, nodes),
            Spool(root / "spool", _SPOOLED_BYTES, _SPOOLED_BYTES),
            FlightRecorder(root / "raw", _RAW_S, _RAW_BYTES),
            _BUDGET,
            clock,
            CollectorRegistry(),
            lambda text: None,
        )

    def step(self) -> None:
        """Takes what came since the last time, and judges it."""
        if self.agent.measure():
            self.agent.send()
            self._collector.commit()
            self._collector.judge()


class _Here:
    """The way to a collector that is in this process: agent.Link."""

    def __init__(self, collector: Collector, nodes: Collection[str]) -> None:
        self._collector = collector
        self._nodes = nodes

    def send(self, content: bytes, oldest: int, sent_ns: int) -> Json:
        step = wire.decode(wire.unpacked(content))
        return self._collector.accept(_AGENT, self._nodes, step, oldest, sent_ns)

    def peers(self) -> dict[str, pl.DataFrame]:
        return self._collector.peers(_AGENT)

    def raw(self, finding: str, node: str, name: str, content: bytes) -> None:
        """Raw samples are where they are of use already."""

    def raw_done(self, finding: str, found: bool) -> None:
        self._collector.raw_done(_AGENT, finding, found)
