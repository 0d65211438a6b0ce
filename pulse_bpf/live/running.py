"""An agent and a collector as processes: which work is done by which thread, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from rich.console import Console

from pulse_bpf import privileges
from pulse_bpf.errors import PulseError
from pulse_bpf.hosts import Host
from pulse_bpf.live.agent import Agent
from pulse_bpf.live.collector import Collector
from pulse_bpf.live.findings_log import Event
from pulse_bpf.live.server import Server
from pulse_bpf.session import Recording, stop_on_signals
from pulse_bpf.sources import Wanted

# How often an agent looks whether there is a step to cut or to send.
LOOK_S = 0.05
# How long a batch waits at most until it is on the collector's disk, and how often jobs are looked at.
COMMIT_S, JUDGE_S = 0.25, 0.1
# How often what is too old is deleted.
RETAIN_S = 60.0


class Worker:
    """Does `work` every `period_s` in a thread until it is stopped; what goes wrong is told and tried again."""

    def __init__(self, work: Callable[[], object], period_s: float, tell: Callable[[str], None]) -> None:
        self._work, self._period_s, self._tell = work, period_s, tell
        self._stop = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends after what is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._work()
                self._said = ""
            except Exception as error:
                # A fault of one verdict must not end all others; a full disk may have room again.
                text = str(error) if isinstance(error, PulseError) else f"{type(error).__name__}: {error}"
                if text != self._said:
                    self._said = text
                    self._tell(text)


def run_agent(hosts: Sequence[Host], wanted: Wanted, agent: Agent, console: Console) -> int:
    """Attaches to what runs on `hosts`, and to what starts later, until SIGINT or SIGTERM; the exit status.

    What needs root is opened first; the threads that cut and send begin after the capabilities were given up. HostError
    and UsageError when this host cannot record.
    """

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with stop_on_signals() as stop, ExitStack() as cleanup:
        recording = Recording(hosts, wanted, True, False, agent, cleanup)
        privileges.drop()
        for work in (agent.measure, agent.send):
            cleanup.callback(Worker(work, LOOK_S, tell).stop)
        recording.run(None, stop, console)
    return recording.outcome.exit_status


def run_collector(
    collector: Collector,
    server: Server,
    keep_hours: int,
    evidence_bytes: int,
    on_events: Sequence[Callable[[Iterable[Event]], object]],
    tell: Callable[[str], None],
) -> None:
    """Serves until SIGINT or SIGTERM; what was taken by then is on disk afterwards."""

    def judge() -> None:
        events = collector.judge()
        for on_event in on_events if events else ():
            on_event(events)

    def retain() -> None:
        collector.metrics.store_bytes.set(
            collector.store.retain(keep_hours, evidence_bytes, collector.now_ns())
        )

    workers = [
        Worker(work, period_s, tell)
        for work, period_s in ((collector.commit, COMMIT_S), (judge, JUDGE_S), (retain, RETAIN_S))
    ]
    try:
        # The server answers from its own threads.
        with stop_on_signals() as stop:
            while not stop:
                time.sleep(LOOK_S)
    finally:
        server.shutdown()
        for worker in workers:
            worker.stop()
        collector.commit()
