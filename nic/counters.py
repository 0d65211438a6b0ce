"""Port counters in sysfs: bytes and packets per port, errors, and the state of the link."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl

from pulse_bpf.errors import HostError
from pulse_bpf.nic import Source, Tables
from pulse_bpf.nic.counter_log import Change, CounterLog, Port
from pulse_bpf.nic.periods import Periods
from pulse_bpf.schema import EVENTS, PORT_SAMPLES, conform

SOURCE_NAME = "sysfs"
# RDMA_HW_STATS_DEFAULT_LIFESPAN in the kernel's include/rdma/ib_verbs.h, for kernels that do not show theirs.
_DEFAULT_LIFESPAN_MS = 10
# Counters of bytes by direction, with the unit of each and the counter of packets beside it; the first that a port has
# is taken. port_*_data are in words of four bytes whatever the width of the link (InfiniBand specification,
# PortCountersExtended), tx_bytes and rx_bytes are those of EFA.
_BYTES = {
    "tx": (("port_xmit_data", 4, "port_xmit_packets"), ("tx_bytes", 1, "tx_pkts")),
    "rx": (("port_rcv_data", 4, "port_rcv_packets"), ("rx_bytes", 1, "rx_pkts")),
}
# The old 32-bit form of these counters stops at its last value instead of wrapping; from there it counts nothing.
_STOPPED = 2**32 - 1
_MAY_STOP = frozenset(name for ways in _BYTES.values() for way in ways for name in (way[0], way[2]))
_ACTIVE = 4
_MAX_BIN_NS = 2**32 - 1


class CounterReader:
    """Reads `counters` and `hw_counters` of each port in `nics` below sysfs `root`, as the Reader protocol says.

    `nics` has the columns node, nic and port; `wall_offset_ns` turns `monotonic_ns` into wall time. Each value has the
    time when its file was read, and bins are as long as the time between two readings really was. The kernel answers
    hw_counters out of a cache that is `lifespan` old at most: they are not read more often than that, and are that
    much out of date. What a driver does not count ("N/A", no such file) is absent, never zero. Names are the driver's
    own. Device-wide counters have port 0.

    Per port, not per queue pair: what a whole second of a port looked like, and whether it had errors.
    """

    def __init__(
        self,
        nics: pl.DataFrame,
        wall_offset_ns: int,
        root: Path = Path("/sys"),
        period_ns: int = 1_000_000_000,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ports: list[Port] = list(nics.select("node", "nic", "port").iter_rows())
        devices = sorted({(node, nic, 0) for node, nic, _ in self._ports})
        base = root / "class/infiniband"
        self._folders = {port: base / port[1] / f"ports/{port[2]}" for port in self._ports}
        self._folders.update({device: base / device[1] for device in devices})
        self._wall_offset_ns = wall_offset_ns
        self._period_ns = period_ns
        self._monotonic_ns = monotonic_ns
        self._log = CounterLog(SOURCE_NAME)
        self._periods = Periods()
        self._due_ns = 0
        self._hardware_read_ns: dict[Port, int] = {}
        self._seen_ns: dict[Port, tuple[int, int]] = {}
        self._lost: dict[Port, int] = {}
        self._directions: dict[Port, set[str]] = {}
        self._states: dict[Port, int] = {}
        self._samples: list[tuple[object, ...]] = []
        self._events: list[tuple[object, ...]] = []
        self._running = False
        self.notes: list[str] = []
        """What is worth telling the user once."""

    @property
    def source(self) -> Source:
        return Source(SOURCE_NAME, "the port's own counters", False, ("rx", "tx"), None, "wire")

    def start(self) -> None:
        """Takes the first reading, which later ones are compared with; HostError when no port shows counters."""
        self._running = True
        self._read_all()
        blind = [f"{nic}/{port}" for node, nic, port in self._ports if (node, nic, port) not in self._seen_ns]
        if len(blind) == len(self._ports):
            self._running = False
            raise HostError(
                "no RDMA port shows counters in sysfs",
                f"nothing can be read below {', '.join(blind) or 'class/infiniband'}",
                "See with: ls /sys/class/infiniband/*/ports/*/counters",
            )
        if blind:
            # A virtual function that was handed to a guest, for one: its silence here is not an idle rail.
            self.notes.append(f"no counters can be read of {', '.join(blind)}")
        seen = [port for port in self._ports if port in self._seen_ns]
        countless = ", ".join(
            f"{nic}/{port}" for node, nic, port in seen if not self._directions.get((node, nic, port))
        )
        if countless:
            self.notes.append(f"{countless} count no bytes in sysfs, so there are no bytes per port of them")

    def drain(self) -> None:
        """Takes a reading once a period; cheap in between."""
        if self._monotonic_ns() >= self._due_ns:
            self._read_all()

    def read(self) -> Tables:
        """port_counters, port_samples and events ("port_down", "port_up") sorted by t_ns since the last call.

        An event bears the time of the reading that showed it.
        """
        self.drain()
        samples = pl.DataFrame(self._samples, schema=PORT_SAMPLES, orient="row")
        events = pl.DataFrame(self._events, schema=EVENTS, orient="row")
        self._samples, self._events = [], []
        return {
            "port_counters": self._log.take(),
            "port_samples": samples.sort("t_ns", maintain_order=True),
            "events": events.sort("t_ns", maintain_order=True),
        }

    def stop(self) -> Tables:
        """Takes a last reading and returns all that is left."""
        if not self._running:
            return {}
        self._read_all()
        self._running = False
        return self.read()

    def coverage(self) -> pl.DataFrame:
        """A row per port and direction whose bytes it counts, without direction where it counts none.

        `lost` counts the readings of that port whose change could not be told, because the counter was reset.
        """
        rows = [
            (*port[:1], SOURCE_NAME, *port[1:], direction, *self._seen_ns[port], self._lost.get(port, 0))
            for port in self._ports
            if port in self._seen_ns
            for direction in sorted(self._directions.get(port, ())) or (None,)
        ]
        columns = ("node", "source", "nic", "port", "direction", "first_ns", "last_ns", "lost")
        return conform(pl.DataFrame(rows, schema=columns, orient="row"), "coverage")

    def period_ns(self) -> tuple[int, int] | None:
        """Median and 99th percentile of the time between two readings of a port."""
        return self._periods.p50_p99_ns()

    def _read_all(self) -> None:
        if not self._running:
            return
        self._due_ns = self._monotonic_ns() + self._period_ns
        for port, folder in self._folders.items():
            values = {} if port[2] == 0 else self._values(folder / "counters")
            values = {**self._hardware_values(port, folder / "hw_counters"), **values}
            values = {
                name: reading
                for name, reading in values.items()
                if not (name in _MAY_STOP and reading[1] == _STOPPED)
            }
            changes = {name: self._log.add(port, name, *reading) for name, reading in values.items()}
            if values:
                last_ns = max(t_ns for t_ns, _ in values.values())
                first_ns, before_ns = self._seen_ns.get(port, (last_ns, last_ns))
                if last_ns > before_ns:
                    self._periods.add(np.array([last_ns - before_ns], np.int64))
                self._seen_ns[port] = first_ns, last_ns
                resets = sum(change is not None and change.count is None for change in changes.values())
                self._lost[port] = self._lost.get(port, 0) + resets
            if port[2]:
                self._count_bytes(port, values, changes)
                self._follow_link(port, folder, changes.get("link_downed"))

    def _hardware_values(self, port: Port, folder: Path) -> dict[str, tuple[int, int]]:
        now_ns = self._monotonic_ns()
        read_ns = self._hardware_read_ns.get(port)
        if read_ns is not None and now_ns - read_ns < _lifespan_ms(folder) * 1_000_000:
            return {}
        values = self._values(folder)
        self._hardware_read_ns[port] = self._monotonic_ns()
        return values

    def _values(self, folder: Path) -> dict[str, tuple[int, int]]:
        """Wall time of the reading and value of each counter in `folder`, by its file's name, whatever that is."""
        return {
            file.name: (self._monotonic_ns() + self._wall_offset_ns, value)
            for file in _files(folder)
            if file.name != "lifespan" and (value := _number(file)) is not None
        }

    def _count_bytes(
        self, port: Port, values: dict[str, tuple[int, int]], changes: dict[str, Change | None]
    ) -> None:
        for direction, ways in _BYTES.items():
            way = next((way for way in ways if way[0] in values), None)
            if way is None:
                continue
            name, unit_bytes, packets_name = way
            self._directions.setdefault(port, set()).add(direction)
            change, packets = changes[name], changes.get(packets_name)
            if change is None or not change.count:
                continue
            bin_ns = values[name][0] - change.since_ns
            if not 0 < bin_ns <= _MAX_BIN_NS:
                continue
            count = packets.count if packets and packets.count is not None and packets.count < 2**32 else None
            self._samples.append(
                (*port, SOURCE_NAME, direction, change.since_ns, bin_ns, change.count * unit_bytes, count)
            )

    def _follow_link(self, port: Port, folder: Path, downed: Change | None) -> None:
        """Events of a link that changed its state, or went down and came back between two readings."""
        state = _number(folder / "state")
        if state is None:
            return
        t_ns = self._monotonic_ns() + self._wall_offset_ns
        before = self._states.get(port, state)
        self._states[port] = state
        self._log.add(port, "state", t_ns, state, cumulative=False)
        downs = max(downed.count or 0 if downed else 0, int(before == _ACTIVE != state))
        ups = int(state == _ACTIVE and (downs > 0 or before != _ACTIVE))
        for kind, count in (("port_down", downs), ("port_up", ups)):
            if count:
                self._events.append((*port, None, t_ns, kind, count))


def _lifespan_ms(folder: Path) -> int:
    lifespan_ms = _number(folder / "lifespan")
    return _DEFAULT_LIFESPAN_MS if lifespan_ms is None else lifespan_ms


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        # No such folder: this driver has no counters of this kind, or the device has gone.
        return


def _number(file: Path) -> int | None:
    """The number that a file begins with ("4: ACTIVE" is 4); None when it is unreadable, not a number as "N/A", or
    none that 64 bits hold."""
    try:
        text = file.read_bytes()[:64].split(b":")[0].strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 2**64 else None
