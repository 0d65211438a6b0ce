"""One recording: attach to running processes, drain what they and their queue pairs do, store it, let go."""

from __future__ import annotations

import math
import platform
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import polars as pl
from rich.console import Console

from pulse_bpf import check_policy, clock, privileges
from pulse_bpf.errors import OK, PARTIAL, AttachError, EndedError, HostError, NoNcclError, UsageError
from pulse_bpf.hosts import Device, Host
from pulse_bpf.nic import Tables, Tap, qpc
from pulse_bpf.nic.identity import read_nics
from pulse_bpf.nic.nldev import Nldev
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.pace import Pace
from pulse_bpf.probe_set import ProbeSet
from pulse_bpf.schema import NICS, NODES, STR, U32, conform
from pulse_bpf.sources import Sources, Wanted
from pulse_bpf.start import READY, Start
from pulse_bpf.store import RecordingWriter, Writer
from pulse_bpf.watch import Selection, Watch

POLL_S = 0.1
# With SETTLE_S below, what happened a second ago is on the disk.
ROTATE_S = 0.65
# How long an operator waits for what becomes of it, its launch or its capture into a CUDA graph.
SETTLE_S = 0.1
# How often processes are looked for, and libraries that were opened since.
WATCH_S = 2.0

# A moment that has not come: while nobody has said when to begin.
_NEVER_NS = 2**62

# When the rows of growing tables were, but the anchors of clocks, which hold at any time.
_MOMENTS = {
    "ops": "call_ns",
    "samples": "t_ns",
    "port_samples": "t_ns",
    "events": "t_ns",
    "port_counters": "t_ns",
}


@dataclass
class Outcome:
    """What came of a recording, for the summary and the exit status."""

    seconds: float = 0.0
    rows: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        return PARTIAL if self.warnings else OK


def record(
    hosts: Sequence[Host],
    seconds: float | None,
    output: Path,
    wanted: Wanted,
    wait: bool,
    detail: bool,
    console: Console,
    start_at: Start | None = None,
) -> Outcome:
    """Records `hosts` into `output` for `seconds`, or until SIGINT, SIGTERM or the end of every process named.

    What happens before the moment that `start_at` gives, on this host's wall clock, is not recorded: by then all is
    attached, so that hosts that are given one moment begin together. Where that takes longer, the recording begins late
    and is shorter; when it is never given, nothing is recorded.
    `wait` records also when there is no process with an NCCL yet, `detail` also how NCCL carries out each operator.
    The processes are only read from, and everything attached is detached before this returns or raises.
    HostError, AttachError and UsageError when nothing can be recorded; what fails for a part is a warning.
    """
    pids = check_policy.pid_namespace(Path("/"))
    if pids.state == "fail":
        raise HostError(
            f"the pid namespace is {pids.found}", "no process could be told from another", pids.advice
        )
    writer = RecordingWriter(output)
    with stop_on_signals() as stop, ExitStack() as cleanup:
        recording = Recording(hosts, wanted, wait, detail, writer, cleanup, start_at)
        privileges.drop()
        recording.run(seconds, stop, console)
        return recording.outcome


class Recording:
    """The parts of a running recording; `cleanup` takes every one of them off again."""

    def __init__(
        self,
        hosts: Sequence[Host],
        wanted: Wanted,
        wait: bool,
        detail: bool,
        writer: Writer,
        cleanup: ExitStack,
        start_at: Start | None = None,
    ) -> None:
        self.outcome = Outcome()
        self._writer = writer
        self._nodes = [host.node for host in hosts]
        # One offset for the whole recording keeps every bin on one phase; `clocks` lets a reader redo it.
        self._offset_ns = clock.anchor().offset_ns
        self._probes = ProbeSet(self._offset_ns, detail)
        cleanup.callback(self._probes.close)
        self._watches = [(host, Watch(host.selection)) for host in hosts]
        self._wait = wait
        self._notices: list[str] = []
        self._attach_first()
        self._attached_ns = self._read_ns = self._now_ns()
        # What was seen before is dropped, and is not said to be covered.
        self._start_at = start_at
        self._start_ns = None if start_at is None else _NEVER_NS
        self._nics, taps = self._find_nics(hosts)
        self._qps = QpTable(self._nics)
        self._rdma = self._open_netlink()
        self._queue_pair_pids: frozenset[int] | None = None
        self._asked = pl.DataFrame(schema={"nic": STR, "qpn": U32, "peer_qpn": U32})
        self._tells_contexts = True
        self._sources = Sources(taps, self._nics, self._qps, wanted, self._offset_ns, cleanup)
        self._warn(self._sources.missing)
        self._observe_queue_pairs()

    def run(self, seconds: float | None, stop: list[int], console: Console) -> None:
        """Drains every POLL_S and stores every ROTATE_S until time is over, a signal came or all named are gone."""
        started = rotated = watched = time.monotonic()
        if self._start_at is not None:
            started = math.inf
        self._store([])
        console.print(
            f"processes attached: {self._probes.running}; Ctrl-C ends the recording", highlight=False
        )
        self._tell(console)
        shown = self._warn_since(0, console)
        pace = Pace(seconds)
        if self._start_at is not None:
            console.print(READY, highlight=False)
        with console.status("recording") as status:
            while not stop and (seconds is None or time.monotonic() - started < seconds):
                time.sleep(POLL_S)
                self._probes.drain()
                self._sources.drain()
                if self._start_ns == _NEVER_NS and self._begins(stop):
                    started = (self._start_ns - self._offset_ns) / 1e9
                if time.monotonic() - watched >= WATCH_S:
                    watched = time.monotonic()
                    self._attach_new()
                    self._probes.look_closer(self._queue_pair_pids)
                if time.monotonic() - rotated < ROTATE_S:
                    continue
                rotated = time.monotonic()
                self._observe_queue_pairs()
                settled_ns = time.monotonic_ns() - int(SETTLE_S * 1e9)
                self._store([self._read_calls(settled_ns), *self._sources.read()])
                status.update(pace.line(max(0.0, rotated - started), self.outcome.rows, self.outcome.lost))
                if self._is_over():
                    self._warn(["every recorded process ended, and the recording with them"])
                self._tell(console)
                shown = self._warn_since(shown, console)
                if self._is_over():
                    break
        self.outcome.seconds = max(0.0, time.monotonic() - started)
        self._observe_queue_pairs()
        self._probes.look_closer(self._queue_pair_pids)
        self._store([self._read_calls(None), *self._sources.stop()])
        self._writer.close()
        self._warn_since(shown, console)

    def _begins(self, stop: list[int]) -> bool:
        """Whether it is known by now when to begin; `stop` is filled when that will never be."""
        assert self._start_at is not None
        try:
            start_ns = self._start_at()
        except EOFError:
            self._warn(["it was never said when to begin"])
            stop.append(0)
            return False
        if start_ns is None:
            return False
        self._start_ns = start_ns
        late_s = (self._now_ns() - start_ns) / 1e9
        if late_s > POLL_S:
            self._warn([f"the recording begins {late_s:.1f} s late: it was not ready by --start-at"])
        return True

    def _attach_first(self) -> None:
        """Attaches to what is there; raises what is wrong when that is nothing, unless it may come later."""
        failures = self._attach()
        if not self._probes.running and not self._wait:
            raise failures[0] if failures else _nothing(self._watches[0][0].selection)
        self._warn(str(error) for error in failures if not isinstance(error, NoNcclError))
        self._notices += [
            f"{error.what}, and is watched" for error in failures if isinstance(error, NoNcclError)
        ]

    def _attach_new(self) -> None:
        try:
            self._warn(str(error) for error in self._attach())
        except HostError as error:
            self._warn([str(error)])

    def _attach(self) -> list[AttachError]:
        """Adds what is new, and says what of it cannot be recorded: processes that were named, or that use NCCL."""
        failures: list[AttachError] = []
        for host, watch in self._watches:
            for pid in watch.changed():
                try:
                    self._warn(self._probes.add(pid, host.node))
                except (NoNcclError, EndedError) as error:
                    if pid in host.selection.pids:
                        failures.append(error)
                except AttachError as error:
                    failures.append(error)
        return failures

    def _warn(self, texts: Iterable[str]) -> None:
        self.outcome.warnings += [text for text in texts if text not in self.outcome.warnings]

    def _is_over(self) -> bool:
        by_name = all(host.selection.pids for host, _ in self._watches)
        return by_name and not self._wait and not self._probes.running

    def _tell(self, console: Console) -> None:
        """Prints what is worth knowing and no fault."""
        for notice in [*self._notices, *self._sources.take_notices()]:
            console.print(notice, markup=False, highlight=False, soft_wrap=True)
        self._notices.clear()

    def _warn_since(self, shown: int, console: Console) -> int:
        """Prints the warnings behind the first `shown`; how many there are."""
        for warning in self.outcome.warnings[shown:]:
            console.print(
                f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True
            )
        return len(self.outcome.warnings)

    def _find_nics(self, hosts: Sequence[Host]) -> tuple[pl.DataFrame, list[Tap]]:
        """The nics rows of all hosts, and a tap for each of their ports that has a netdev."""
        frames: list[pl.DataFrame] = [pl.DataFrame(schema=NICS)]
        taps: list[Tap] = []
        for host in hosts:
            wanted = None if host.devices is None else {device.nic: device for device in host.devices}
            rows = read_nics(host.node, devices=None if wanted is None else list(wanted))
            absent = sorted(set(wanted or ()) - set(rows["nic"]))
            if absent:
                raise UsageError(
                    f"{host.node} has no RDMA device {absent[0]}", "", "See with: rdma link show"
                )
            frames.append(rows)
            for row in rows.iter_rows(named=True):
                device = wanted[row["nic"]] if wanted else Device(row["nic"])
                netdev = device.netdev or row["netdev"]
                if netdev:
                    taps.append(
                        Tap(host.node, row["nic"], row["port"], netdev, device.side, tuple(row["gids"]))
                    )
        if not taps:
            self._warn(["no RDMA port with a network interface was found, so there are no byte counts"])
        return pl.concat(frames), taps

    def _open_netlink(self) -> Nldev | None:
        try:
            return Nldev()
        except HostError as error:
            self._warn([str(error)])
            return None

    def _observe_queue_pairs(self) -> None:
        self._qps.observe_uprobe(self._probes.qp_events())
        if self._rdma:
            listed = self._rdma.queue_pairs()
            now_ns = self._now_ns()
            self._qps.observe_netlink(self._with_contexts(self._rdma, listed), now_ns)
            self._sources.follow(listed)
            self._queue_pair_pids = frozenset(listed["pid"].drop_nulls())

    def _with_contexts(self, rdma: Nldev, listed: pl.DataFrame) -> pl.DataFrame:
        """`listed` with what the device itself knows of each queue pair: asked once, as it costs a firmware command."""
        key = ("nic", "qpn", "peer_qpn")
        new = listed.drop_nulls("peer_qpn").join(self._asked, on=key, how="anti")
        if self._tells_contexts and new.height:
            try:
                contexts = qpc.decode(rdma.raw_contexts(new), listed)
                listed = qpc.with_contexts(listed, contexts)
            except HostError as error:
                self._tells_contexts = False
                self._notices.append(str(error))
            self._asked = pl.concat([self._asked, new.select(key)])
        return listed

    def _read_calls(self, until_ns: int | None) -> Tables:
        now_ns = self._now_ns()
        self._read_ns = now_ns if until_ns is None else now_ns - int(SETTLE_S * 1e9)
        return self._probes.read(until_ns)

    def _store(self, batches: Sequence[Tables]) -> None:
        for table in sorted({name for batch in batches for name in batch}):
            frame = pl.concat([batch[table] for batch in batches if table in batch])
            if self._start_ns is not None and table in _MOMENTS:
                frame = frame.filter(pl.col(_MOMENTS[table]) >= self._start_ns)
            self._writer.append(table, frame)
            self.outcome.rows[table] = self.outcome.rows.get(table, 0) + frame.height
        now = clock.anchor()
        self._writer.append("clocks", pl.concat([now.row(node) for node in self._nodes]))
        for table, frame in self._probes.state().items():
            self._writer.replace(table, frame)
        self._writer.replace("nodes", _node_rows(self._nodes))
        self._writer.replace("nics", self._nics)
        self._writer.replace("qps", self._qps.frame())
        self._writer.replace("coverage", self._coverage())
        self._writer.manifest(
            self._sources.manifest(),
            {
                "probes": self._probes.summary(),
                "packets": self._sources.packet_counters(),
                "lost": self.outcome.lost,
                "warnings": self.outcome.warnings,
            },
        )

    def _coverage(self) -> pl.DataFrame:
        """What the readers covered, and the calls: source "uprobe", without a NIC, a row per node and per process."""
        lost = self._probes.lost
        nodes = pl.DataFrame({"node": self._nodes}).with_columns(
            source=pl.lit("uprobe"),
            first_ns=pl.lit(self._attached_ns),
            last_ns=pl.lit(self._read_ns),
            lost=pl.lit(lost),
        )
        calls = pl.concat([conform(nodes, "coverage"), self._probes.coverage(self._read_ns)])
        self.outcome.lost = lost
        cards = self._sources.coverage()
        # Every row may carry the loss of the whole reader.
        self.outcome.lost += int(cards.group_by("source").agg(pl.col("lost").max())["lost"].sum())
        covered = pl.concat([calls, cards])
        if self._start_ns == _NEVER_NS:
            return covered.clear()
        if self._start_ns is not None:
            covered = covered.with_columns(pl.col("first_ns", "last_ns").clip(self._start_ns))
        return covered

    def _now_ns(self) -> int:
        """Wall clock as the recording has it: a step of this host's clock under way changes nothing."""
        return time.monotonic_ns() + self._offset_ns


def _nothing(selection: Selection) -> AttachError:
    """Why a recording cannot begin: nothing that was asked for uses NCCL."""
    whose = ""
    if selection.job:
        whose = f" of job {selection.job}"
    elif selection.container:
        whose = f" of container {selection.container}"
    what = f"no process{whose} that can be read maps an NCCL"
    return AttachError(what, "", "Run as root, with the job running, or with --wait; --all records every one")


def _node_rows(nodes: Sequence[str]) -> pl.DataFrame:
    clock_source, clock_error_ns = clock.discipline()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    rows = [(node, clock_source, clock_error_ns, boot_id, platform.release()) for node in nodes]
    return pl.DataFrame(rows, schema=NODES, orient="row")


@contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM append to, so that a recording ends between two drains, cleanly."""
    caught: list[int] = []

    def catch(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
