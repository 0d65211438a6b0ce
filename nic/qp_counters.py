"""Bytes per queue pair as the device counts them: counters that are bound to queue pairs through RDMA netlink.

Opt-in, as it changes a queue pair a little: the kernel makes the device count it in a set of its own. What is switched
on and bound here is taken back at the end, after a crash by a guard process. Not run on a card.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import polars as pl
from pyroute2.netlink.exceptions import NetlinkError

from pulse_bpf.errors import HostError
from pulse_bpf.nic import Source, Tables, bound_counters
from pulse_bpf.nic.bound_counters import BYTE_COUNTERS, NAMES
from pulse_bpf.nic.guard import Guard
from pulse_bpf.nic.nldev import Nldev
from pulse_bpf.nic.periods import Periods
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.schema import I64, STR, U8, U32, U64, conform

SOURCE_NAME = "qp-counters"
_KEY = ["nic", "port", "qpn", "set", "counter"]
_READINGS = pl.Schema(
    {"t_ns": I64, "nic": STR, "port": U8, "qpn": U32, "set": U32, "counter": STR, "value": U64}
)


class QpCounterReader:
    """Counts the bytes of queue pairs, read by a thread every `period_ns`, as the Reader protocol says.

    `nics` are NICS rows of the ports to count on. Each reading costs a firmware command a queue pair. A bin is
    `period_ns` wide, or several of them where readings came late; its bytes are what went between two readings, the
    moment of which is uncertain by half a period. `notes` tells what is not counted.
    """

    def __init__(
        self,
        nics: pl.DataFrame,
        qps: QpTable,
        wall_offset_ns: int,
        period_ns: int = 100_000_000,
        connect: Callable[[], Nldev] = Nldev,
        guard_script: str = bound_counters.__file__,
    ) -> None:
        self._ports = list(nics.select("nic", "port").iter_rows())
        self._nodes = nics.select("nic", "node").unique("nic")
        self._qps = qps
        self._wall_offset_ns = wall_offset_ns
        self._period_ns = period_ns
        self._connect = connect
        self._guard_script = guard_script
        self._guard: Guard | None = None
        self._told: list[str] = []
        self._nldev: Nldev | None = None
        self._bound: dict[tuple[str, int, int], int] = {}
        self._full: set[str] = set()
        self._readings: queue.SimpleQueue[list[tuple[object, ...]]] = queue.SimpleQueue()
        self._last = pl.DataFrame(schema=_READINGS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._first_ns = self._last_ns = 0
        self._failed = self._resets = 0
        self._periods = Periods()
        self.notes: list[str] = []

    @property
    def source(self) -> Source:
        return Source(
            SOURCE_NAME, "the card's counters of each queue pair", True, ("rx", "tx"), self._period_ns, "wire"
        )

    def start(self) -> None:
        """Switches the byte counters on where they can be, binds what is listed and begins to read.

        HostError with every port's reason when it can be nowhere. CAP_NET_ADMIN is needed.
        """
        self._nldev = self._connect()
        self._guard = Guard(self._guard_script)
        usable, reasons = [], []
        for nic, port in self._ports:
            try:
                bound_counters.check(self._nldev, nic, port)
                self._switch_on(nic, port)
                usable.append((nic, port))
            except (HostError, NetlinkError) as error:
                reasons.append(_why(nic, error))
        self._ports = usable
        if not usable:
            self.stop()
            raise HostError("no bytes can be counted per queue pair", "; ".join(reasons))
        self.notes += reasons
        self.follow(self._nldev.queue_pairs())
        self._thread = threading.Thread(target=self._poll, name="qp-counters", daemon=True)
        self._thread.start()

    def follow(self, listed: pl.DataFrame) -> None:
        """Binds those `listed` (Nldev.queue_pairs) that are connected and not yet counted; forgets those gone."""
        pairs = {
            (nic, port or 1, qpn): peer
            for nic, port, qpn, peer in listed.select("nic", "port", "qpn", "peer_qpn").iter_rows()
        }
        self._bound = {key: counter for key, counter in self._bound.items() if key in pairs}
        assert self._nldev is not None
        for nic, port in self._ports:
            wanted = [
                key
                for key, peer in pairs.items()
                if key[:2] == (nic, port) and peer and key not in self._bound
            ]
            if not wanted or nic in self._full:
                continue
            others = {qpn for _, _, qpn, _, _ in bound_counters.bound_sets(self._nldev, nic)}
            for key in wanted:
                if key[2] not in others and nic not in self._full:
                    self._bind(*key)

    def drain(self) -> None:
        """Nothing to do: the thread reads."""

    def read(self) -> Tables:
        """The `samples` since the last call. The first reading of a queue pair is what later ones are compared with."""
        rows = [row for _ in range(self._readings.qsize()) for row in self._readings.get()]
        frame = pl.concat([self._last, pl.DataFrame(rows, schema=_READINGS, orient="row")])
        self._last = frame.group_by(_KEY, maintain_order=True).last().select(frame.columns)
        value = pl.col("value").cast(I64)
        changes = (
            frame.sort("t_ns", maintain_order=True)
            .with_columns(
                count=(value - value.shift().over(_KEY)),
                start_ns=pl.col("t_ns").shift().over(_KEY),
            )
            .drop_nulls("start_ns")
        )
        self._resets += changes.filter(pl.col("count") < 0).height
        return {"samples": self._samples(changes.filter(pl.col("count") > 0))}

    def stop(self) -> Tables:
        """Ends reading, unbinds and switches off what was bound and switched on, and returns the rest."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._guard is not None:
            guard, self._guard = self._guard, None
            if not guard.close() and self._nldev is not None:
                bound_counters.undo(self._nldev, self._told)
        if self._nldev is not None:
            self._nldev.close()
            self._nldev = None
        return self.read()

    def coverage(self) -> pl.DataFrame:
        """A row per counted port and direction; `lost` are readings that failed, and changes that a reset hid."""
        frame = pl.DataFrame(self._ports, schema={"nic": STR, "port": U8}, orient="row")
        return conform(
            frame.join(self._nodes, on="nic")
            .join(pl.DataFrame({"direction": ["rx", "tx"]}), how="cross")
            .with_columns(
                source=pl.lit(SOURCE_NAME),
                first_ns=self._first_ns,
                last_ns=self._last_ns,
                lost=self._failed + self._resets,
            )
            .filter(pl.col("first_ns") > 0),
            "coverage",
        )

    def period_ns(self) -> tuple[int, int] | None:
        """Median and 99th percentile of the time between two readings."""
        return self._periods.p50_p99_ns()

    def _switch_on(self, nic: str, port: int) -> None:
        assert self._nldev is not None
        known = bound_counters.optional(self._nldev, nic, port)
        new = [name for name in NAMES if name in known and not known[name][1]]
        for name in new:
            self._tell(f"enabled {nic} {port} {name}")
        if new:
            bound_counters.switch(self._nldev, nic, port, new, [])

    def _bind(self, nic: str, port: int, qpn: int) -> None:
        assert self._nldev is not None
        self._tell(f"binding {nic} {port} {qpn}")
        try:
            counter = bound_counters.bind(self._nldev, nic, port, qpn)
        except NetlinkError as error:
            self._tell(f"refused {nic} {port} {qpn}")
            if error.code == errno.ENOENT:
                return
            # A device has 255 sets of counters at most.
            self._full.add(nic)
            have = sum(key[0] == nic for key in self._bound)
            self.notes.append(f"only {have} queue pairs of {nic} are counted: {_why(nic, error)}")
            return
        if counter is not None:
            self._bound[nic, port, qpn] = counter
            self._tell(f"bound {nic} {port} {qpn} {counter}")

    def _tell(self, line: str) -> None:
        assert self._guard is not None
        self._told.append(line)
        self._guard.tell(line)

    def _poll(self) -> None:
        """Reads all counted queue pairs at each multiple of the period, until stopped."""
        nldev = self._connect()
        before_ns = 0
        try:
            while True:
                now_ns = time.monotonic_ns()
                due_ns = (now_ns // self._period_ns + 1) * self._period_ns
                stopping = self._stopping.wait((due_ns - now_ns) / 1e9)
                for nic in dict.fromkeys(nic for nic, _ in self._ports):
                    asked_ns = time.monotonic_ns()
                    try:
                        found = bound_counters.values(nldev, nic)
                    except (HostError, NetlinkError):
                        self._failed += 1
                        continue
                    t_ns = (asked_ns + time.monotonic_ns()) // 2
                    self._readings.put([(t_ns, *row) for row in found])
                read_ns = time.monotonic_ns()
                if before_ns:
                    self._periods.add(np.array([read_ns - before_ns], np.int64))
                before_ns = read_ns
                self._last_ns = read_ns + self._wall_offset_ns
                self._first_ns = self._first_ns or self._last_ns
                if stopping:
                    return
        finally:
            nldev.close()

    def _samples(self, changes: pl.DataFrame) -> pl.DataFrame:
        """SAMPLES rows on the grid of the period: a reading counts as made at the nearest multiple of it."""
        start, end = (
            (pl.col(name) + self._period_ns // 2) // self._period_ns * self._period_ns
            for name in ("start_ns", "t_ns")
        )
        sides = [
            changes.filter(pl.col("counter") == byte_name)
            .join(
                changes.filter(pl.col("counter") == packet_name).select(
                    "t_ns", "nic", "port", "qpn", packets="count"
                ),
                on=["t_ns", "nic", "port", "qpn"],
                how="left",
            )
            .with_columns(direction=pl.lit(direction))
            for direction, (byte_name, packet_name) in BYTE_COUNTERS.items()
        ]
        rows = (
            pl.concat(sides)
            .with_columns(start.alias("start_ns"), end.alias("end_ns"))
            # Two readings that fall on one multiple: the later one's bytes are those of the bin before it.
            .with_columns(start_ns=pl.min_horizontal("start_ns", pl.col("end_ns") - self._period_ns))
            .with_columns(
                t_ns=pl.col("start_ns") + self._wall_offset_ns,
                bin_ns=pl.col("end_ns") - pl.col("start_ns"),
                last_ns=pl.col("end_ns") + self._wall_offset_ns - 1,
                bytes="count",
                source=pl.lit(SOURCE_NAME),
            )
        )
        flows = self._qps.flows(rows.join(self._nodes, on="nic"))
        # A bin in which the number was reused belongs to no life: of two, the later.
        return conform(flows.sort("t_ns", "flow", "direction"), "samples")


def _why(nic: str, error: Exception) -> str:
    if isinstance(error, NetlinkError) and error.code == errno.EPERM:
        return f"{nic}: counters are bound with CAP_NET_ADMIN only"
    return str(error) if isinstance(error, HostError) else f"{nic}: {error}"
