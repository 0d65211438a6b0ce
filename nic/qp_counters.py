"""Bytes per queue pair as the device counts them: counters that are bound to queue pairs through RDMA netlink.

Opt-in, as it changes a queue pair a little: the kernel makes the device count it in a set of its own. What is switched
on and bound here is taken back at the end, after a crash by a guard process. Run as a script, this file is the guard.
Sources: stat_* functions of the kernel's nldev.c and counters.c. Not run on a card.
"""

from __future__ import annotations

import errno
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import polars as pl
from pyroute2.netlink.exceptions import NetlinkError

from pulse_bpf.errors import HostError
from pulse_bpf.nic import Source, Tables
from pulse_bpf.nic.guard import Guard, wait_for_owner
from pulse_bpf.nic.nldev import Nldev, number, text
from pulse_bpf.nic.periods import Periods
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.nic.rdma_netlink import RES_QP, STAT_DEL, STAT_GET, STAT_GET_STATUS, STAT_SET, attribute
from pulse_bpf.schema import I64, STR, U8, U32, U64, conform

SOURCE_NAME = "qp-counters"
_AUTO, _MANUAL = 1, 2  # enum rdma_nl_counter_mode
# mlx5, from kernel 6.15: steering rules with a flow counter each, so they count whole packets.
BYTE_COUNTERS = {
    "tx": ("rdma_tx_bytes", "rdma_tx_packets"),
    "rx": ("rdma_rx_bytes", "rdma_rx_packets"),
}
_NAMES = [name for names in BYTE_COUNTERS.values() for name in names]

_KEY = ["nic", "port", "qpn", "set", "counter"]
_READINGS = pl.Schema(
    {"t_ns": I64, "nic": STR, "port": U8, "qpn": U32, "set": U32, "counter": STR, "value": U64}
)


def check(nldev: Nldev, nic: str, port: int) -> None:
    """HostError with the reason when no bytes can be counted per queue pair of this port."""
    names = _optional(nldev, nic, port)
    if not any(names.keys() >= set(pair) for pair in BYTE_COUNTERS.values()):
        raise HostError(
            f"{nic} counts no bytes per queue pair",
            f"its driver or this kernel has no counter {BYTE_COUNTERS['tx'][0]}; mlx5 has it from kernel 6.15",
        )
    answer = nldev.ask(
        STAT_GET, DEV_INDEX=nldev.index_of(nic), PORT_INDEX=port, STAT_RES=RES_QP, STAT_MODE=_MANUAL
    )
    if number(answer, "STAT_MODE") == _AUTO:
        # Its "off" ends the counting of whoever switched it on.
        raise HostError(
            f"another tool lets {nic} count queue pairs by its own rule",
            "counters cannot be bound beside that, and Pulse does not switch it off",
            f"If nobody needs it: rdma statistic qp set link {nic}/{port} auto off",
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
        guard_script: str = __file__,
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
                check(self._nldev, nic, port)
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
            others = {qpn for _, _, qpn, _, _ in _bound_sets(self._nldev, nic)}
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
                undo(self._nldev, self._told)
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
        known = _optional(self._nldev, nic, port)
        new = [name for name in _NAMES if name in known and not known[name][1]]
        for name in new:
            self._tell(f"enabled {nic} {port} {name}")
        if new:
            _switch(self._nldev, nic, port, new, [])

    def _bind(self, nic: str, port: int, qpn: int) -> None:
        assert self._nldev is not None
        self._tell(f"binding {nic} {port} {qpn}")
        try:
            answer = self._nldev.ask(
                STAT_SET,
                DEV_INDEX=self._nldev.index_of(nic),
                PORT_INDEX=port,
                STAT_MODE=_MANUAL,
                STAT_RES=RES_QP,
                RES_LQPN=qpn,
            )
        except NetlinkError as error:
            self._tell(f"refused {nic} {port} {qpn}")
            if error.code == errno.ENOENT:
                return
            # A device has 255 sets of counters at most.
            self._full.add(nic)
            have = sum(key[0] == nic for key in self._bound)
            self.notes.append(f"only {have} queue pairs of {nic} are counted: {_why(nic, error)}")
            return
        counter = number(answer, "STAT_COUNTER_ID")
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
                        values = _values(nldev, nic)
                    except (HostError, NetlinkError):
                        self._failed += 1
                        continue
                    t_ns = (asked_ns + time.monotonic_ns()) // 2
                    self._readings.put([(t_ns, *row) for row in values])
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


def undo(nldev: Nldev, lines: Iterable[str]) -> None:
    """Takes back what `lines` say was bound and enabled; what is gone or in another's hands is left."""
    bound: dict[tuple[str, int, int], int | None] = {}
    enabled: dict[tuple[str, int], list[str]] = {}
    for line in lines:
        verb, nic, port, rest = line.split(" ", 3)
        if verb == "enabled":
            enabled.setdefault((nic, int(port)), []).append(rest)
        elif verb == "refused":
            bound.pop((nic, int(port), int(rest)), None)
        else:
            qpn, _, counter = rest.partition(" ")
            bound[nic, int(port), int(qpn)] = int(counter) if counter else None
    steps = [partial(_unbind, nldev, *key, counter) for key, counter in bound.items()]
    steps += [partial(_switch, nldev, *key, [], names) for key, names in enabled.items()]
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except (HostError, NetlinkError) as error:
            gone = isinstance(error, HostError) or error.code in (errno.ENOENT, errno.ENODEV, errno.EINVAL)
            failures += [] if gone else [error]
    if failures:
        raise failures[0]


def _unbind(nldev: Nldev, nic: str, port: int, qpn: int, counter: int | None) -> None:
    """`counter` None: its number was not told before the end, so it is the one that counts `qpn` alone."""
    if counter is None:
        counter = next((found for _, _, of, found, _ in _bound_sets(nldev, nic) if of == qpn), None)
    if counter is None:
        return
    nldev.ask(
        STAT_DEL,
        DEV_INDEX=nldev.index_of(nic),
        PORT_INDEX=port,
        STAT_MODE=_MANUAL,
        STAT_RES=RES_QP,
        STAT_COUNTER_ID=counter,
        RES_LQPN=qpn,
    )


def _optional(nldev: Nldev, nic: str, port: int) -> dict[str, tuple[int, bool]]:
    """Index and state of each counter of a port that can be switched on and off."""
    try:
        answer = nldev.ask(STAT_GET_STATUS, DEV_INDEX=nldev.index_of(nic), PORT_INDEX=port)
    except NetlinkError as error:
        raise HostError(f"{nic} lists no counters", str(error)) from error
    found = {}
    for entry in _nested(answer, "STAT_HWCOUNTERS", "STAT_HWCOUNTER_ENTRY"):
        name, index = text(entry, "STAT_HWCOUNTER_ENTRY_NAME"), number(entry, "STAT_HWCOUNTER_INDEX")
        enabled = number(entry, "STAT_HWCOUNTER_DYNAMIC")
        if name is not None and index is not None and enabled is not None:
            found[name] = index, bool(enabled)
    return found


def _switch(nldev: Nldev, nic: str, port: int, on: list[str], off: list[str]) -> None:
    """The kernel is told the whole set, so what others switched on stays in it."""
    known = _optional(nldev, nic, port)
    before = [index for index, enabled in known.values() if enabled]
    after = [index for name, (index, now) in known.items() if name in on or (now and name not in off)]
    if after != before:
        wanted = {"attrs": [(attribute("STAT_HWCOUNTER_INDEX"), index) for index in after]}
        nldev.ask(STAT_SET, DEV_INDEX=nldev.index_of(nic), PORT_INDEX=port, STAT_HWCOUNTERS=wanted)


def _bound_sets(nldev: Nldev, nic: str) -> list[tuple[str, int, int, int, Any]]:
    """Device, port, queue pair, counter id and entry of each set that is bound to exactly one queue pair."""
    found = []
    for message in nldev.dump(STAT_GET, DEV_INDEX=nldev.index_of(nic), STAT_RES=RES_QP):
        for entry in _nested(message, "STAT_COUNTER", "STAT_COUNTER_ENTRY"):
            port, counter = number(entry, "PORT_INDEX", most=255), number(entry, "STAT_COUNTER_ID")
            qpns = [number(pair, "RES_LQPN") for pair in _nested(entry, "RES_QP", "RES_QP_ENTRY")]
            if port is not None and counter is not None and len(qpns) == 1 and qpns[0] is not None:
                found.append((nic, port, qpns[0], counter, entry))
    return found


def _values(nldev: Nldev, nic: str) -> list[tuple[str, int, int, int, str, int]]:
    """Device, port, queue pair, set, counter and value of all byte and packet counters that are bound."""
    return [
        (nic, port, qpn, number_of_set, name, value)
        for _, port, qpn, number_of_set, entry in _bound_sets(nldev, nic)
        for counter in _nested(entry, "STAT_HWCOUNTERS", "STAT_HWCOUNTER_ENTRY")
        if (name := text(counter, "STAT_HWCOUNTER_ENTRY_NAME")) in _NAMES
        and name is not None
        and (value := number(counter, "STAT_HWCOUNTER_ENTRY_VALUE", most=2**63 - 1)) is not None
    ]


def _nested(message: Any, outer: str, inner: str) -> list[Any]:
    nest = message.get_attr(attribute(outer))
    entries = nest.get_attrs(attribute(inner)) if hasattr(nest, "get_attrs") else []
    return [entry for entry in entries if hasattr(entry, "get_attr")]


def _why(nic: str, error: Exception) -> str:
    if isinstance(error, NetlinkError) and error.code == errno.EPERM:
        return f"{nic}: counters are bound with CAP_NET_ADMIN only"
    return str(error) if isinstance(error, HostError) else f"{nic}: {error}"


if __name__ == "__main__":
    lines = wait_for_owner()
    undo(Nldev(), lines)
    sys.exit(0)
