"""An agent and a collector as processes: which work is done by which thread, and how it ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from pulse_bpf import check_policy, privileges
from pulse_bpf.errors import HostError, PulseError
from pulse_bpf.hosts import Host
from pulse_bpf.live.agent import Agent
from pulse_bpf.live.collector import Collector
from pulse_bpf.live.findings_log import Event
from pulse_bpf.live.judges import Judge
from pulse_bpf.live.memory import Spare
from pulse_bpf.live.server import Server
from pulse_bpf.live.status import LATE_NS
from pulse_bpf.session import Recording, stop_on_signals
from pulse_bpf.sources import Wanted

# How often an agent looks whether there is a step to cut or to send.
LOOK_S = 0.05
# How often it gives back what compiling needed: each new kind of library is compiled for.
GIVE_BACK_S = 10.0
# How long a batch waits at most until it is on the collector's disk, and how often jobs are looked at.
COMMIT_S, JUDGE_S = 0.25, 0.1
# How often it is looked at who is missing, which jobs are over, and how late verdicts are.
LOOK_AFTER_S = 0.5
# How often what is too old is deleted.
RETAIN_S = 60.0
# How long calls that are under way may take when a collector ends.
CLOSE_S = 1.0


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

    # Without this one it would wait for ever for processes that it cannot see; what else is missing, attaching tells.
    seen = check_policy.capabilities(Path("/"), True)
    if seen.state == "fail":
        raise HostError("this agent cannot see other users' processes", seen.found, seen.advice)
    with stop_on_signals() as stop, ExitStack() as cleanup:
        recording = Recording(hosts, wanted, True, False, agent, cleanup)
        privileges.drop()
        for work, period_s in (
            (agent.measure, LOOK_S),
            (agent.send, LOOK_S),
            (Spare().give_back, GIVE_BACK_S),
        ):
            cleanup.callback(Worker(work, period_s, tell).stop)
        recording.run(None, stop, console)
    return recording.outcome.exit_status


def run_collector(
    collector: Collector,
    server: Server,
    keep_hours: int,
    evidence_bytes: int,
    judge_cores: float,
    on_events: Sequence[Callable[[Iterable[Event]], object]],
    tell: Callable[[str], None],
) -> bool:
    """Serves until SIGINT or SIGTERM; what was taken by then is on disk afterwards. Whether no call is left waiting."""

    def tell_of(events: Sequence[Event]) -> None:
        for on_event in on_events if events else ():
            on_event(events)

    def judging(judge: Judge) -> Callable[[], None]:
        def work() -> None:
            while not stop and (events := collector.judge_next(judge)) is not None:
                tell_of(events)
                judge.rest(lambda: stop)

        return work

    def look_after() -> None:
        tell_of(collector.look_after())
        if collector.lag_ns > LATE_NS:
            raise HostError(
                "verdicts come late",
                "judging needs more than --judge-cores",
                "Raise it, or give some jobs a collector of their own",
            )

    def retain() -> None:
        collector.metrics.store_bytes.set(
            collector.store.retain(keep_hours, evidence_bytes, collector.now_ns())
        )

    count = math.ceil(judge_cores)
    judges = [Judge(judge_cores / count) for _ in range(count)]
    works: list[tuple[Callable[[], object], float]] = [
        (collector.commit, COMMIT_S),
        (look_after, LOOK_AFTER_S),
        (retain, RETAIN_S),
        *((judging(judge), JUDGE_S) for judge in judges),
    ]
    # The server answers from its own threads.
    with stop_on_signals() as stop:
        workers = [Worker(work, period_s, tell) for work, period_s in works]
        while not stop:
            time.sleep(LOOK_S)
        # It waits for calls that are under way, and clients may stand still in the middle of one.
        closing = threading.Thread(target=server.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        for judge in judges:
            judge.close()
        for worker in workers:
            worker.stop()
        collector.commit()
    return not closing.is_alive()
