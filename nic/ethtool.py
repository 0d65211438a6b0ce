"""Pause, discard and drop counters of a port's network interface, as `ethtool -S` shows them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import re
import socket
import struct
import time
from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.errors import HostError
from pulse_bpf.nic import Source, Tables
from pulse_bpf.nic.counter_log import CounterLog, Port
from pulse_bpf.nic.periods import Periods
from pulse_bpf.schema import EVENTS, conform

SOURCE_NAME = "ethtool"
Ioctl = Callable[[int, int, bytearray], int]

# linux/sockios.h, linux/ethtool.h; struct ifreq of linux/if.h is 40 bytes on 64-bit machines.
_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_SET_OF_STATS = 1
_NAME_BYTES = 32
_MAX_COUNTERS = 65536
# Of a thousand counters: what stops a port or loses its packets, and what RDMA moved through a virtual port.
_KEPT = re.compile(r"pause|pfc|xo(n|ff)|discard|drop|out_of_buffer|vport_rdma|link_down")
# Frames that told this port to be silent, by priority and for all (names of mlx5_core). Those that it sent itself
# silence another port, and are in port_counters only.
_PAUSED = re.compile(r"rx_(prio[0-7]|global)_pause")


class EthtoolReader:
    """Reads the counters of each port's interface once a period, as the Reader protocol says.

    `nics` has the columns node, nic, port and netdev; ports without a netdev are left out. `ioctl` is called as
    fcntl.ioctl is; `wall_offset_ns` turns `monotonic_ns` into wall time. Names are the driver's own.

    pyroute2's get_statistics is not used: it takes the names once and for all, and lets the kernel write as many values
    as the interface has by then into a buffer made for as many as it had.
    """

    def __init__(
        self,
        nics: pl.DataFrame,
        wall_offset_ns: int,
        ioctl: Ioctl = fcntl.ioctl,
        period_ns: int = 1_000_000_000,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        rows = nics.filter(pl.col("netdev").is_not_null()).select("netdev", "node", "nic", "port").iter_rows()
        self._ports: list[tuple[str, Port]] = [
            (netdev, (node, nic, port)) for netdev, node, nic, port in rows
        ]
        self._wall_offset_ns = wall_offset_ns
        self._ioctl = ioctl
        self._period_ns = period_ns
        self._monotonic_ns = monotonic_ns
        self._log = CounterLog(SOURCE_NAME)
        self._periods = Periods()
        self._due_ns = 0
        self._names: dict[str, list[str]] = {}
        self._seen_ns: dict[Port, tuple[int, int]] = {}
        self._lost: dict[Port, int] = {}
        self._events: list[tuple[object, ...]] = []
        self._socket: socket.socket | None = None
        self.notes: list[str] = []
        """What is worth telling the user once."""

    @property
    def source(self) -> Source:
        return Source(SOURCE_NAME, "counters of the port's interface", False, (), None, "wire")

    def start(self) -> None:
        """Takes the first reading; HostError, naming each interface and its reason, when none has counters."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        refusals = self._read_all()
        if not self._seen_ns:
            self._socket.close()
            self._socket = None
            why = "; ".join(refusals) or "no RDMA port has a network interface"
            raise HostError(
                "no interface of an RDMA port shows counters", why, "See with: ethtool -S INTERFACE"
            )
        self.notes.extend(refusals)

    def drain(self) -> None:
        """Takes a reading once a period; cheap in between."""
        if self._monotonic_ns() >= self._due_ns:
            self._read_all()

    def read(self) -> Tables:
        """port_counters, and events of kind "pause", since the last call, sorted by t_ns.

        An event bears the time of the reading that showed it; `value` is how many frames since the reading before
        told this port to be silent.
        """
        self.drain()
        events = pl.DataFrame(self._events, schema=EVENTS, orient="row")
        self._events = []
        return {"port_counters": self._log.take(), "events": events.sort("t_ns", maintain_order=True)}

    def stop(self) -> Tables:
        """Takes a last reading and returns all that is left."""
        if self._socket is None:
            return {}
        self._read_all()
        tables = self.read()
        self._socket.close()
        self._socket = None
        return tables

    def coverage(self) -> pl.DataFrame:
        """A row per port, without direction; `lost` counts changes that a reset made unknowable."""
        rows = [
            (*port[:1], SOURCE_NAME, *port[1:], *seen_ns, self._lost.get(port, 0))
            for port, seen_ns in self._seen_ns.items()
        ]
        columns = ("node", "source", "nic", "port", "first_ns", "last_ns", "lost")
        return conform(pl.DataFrame(rows, schema=columns, orient="row"), "coverage")

    def period_ns(self) -> tuple[int, int] | None:
        """Median and 99th percentile of the time between two readings of an interface."""
        return self._periods.p50_p99_ns()

    def _read_all(self) -> list[str]:
        """Takes a reading of every interface; what refused, and why."""
        if self._socket is None:
            return []
        self._due_ns = self._monotonic_ns() + self._period_ns
        refusals = []
        for netdev, port in self._ports:
            try:
                names, values, t_ns = self._read(netdev)
            except OSError as error:
                refusals.append(f"{netdev} shows no counters: {error.strerror or error}")
                continue
            first_ns, before_ns = self._seen_ns.get(port, (t_ns, t_ns))
            if t_ns > before_ns:
                self._periods.add(np.array([t_ns - before_ns], np.int64))
            self._seen_ns[port] = first_ns, t_ns
            self._add(port, t_ns, dict(zip(names, values.tolist(), strict=True)))
        return refusals

    def _add(self, port: Port, t_ns: int, values: dict[str, int]) -> None:
        paused = 0
        for name, value in values.items():
            if not _KEPT.search(name):
                continue
            change = self._log.add(port, name, t_ns, value)
            if change is None:
                continue
            if change.count is None:
                self._lost[port] = self._lost.get(port, 0) + 1
            elif _PAUSED.fullmatch(name):
                paused += change.count
        if paused:
            self._events.append((*port, None, t_ns, "pause", paused))

    def _read(self, netdev: str) -> tuple[list[str], NDArray[np.uint64], int]:
        """Names, values and wall time of one reading; OSError when the interface has none or keeps changing."""
        for _ in range(3):
            count = self._count(netdev)
            names = self._names.get(netdev, [])
            if len(names) != count:
                names = self._names[netdev] = self._read_names(netdev, count)
            before_ns = self._monotonic_ns()
            values = self._read_values(netdev, count)
            t_ns = (before_ns + self._monotonic_ns()) // 2 + self._wall_offset_ns
            # A driver adds and removes counters with its queues; then names and values don't belong together.
            if len(values) == len(names) == count:
                return names, values, t_ns
            self._names.pop(netdev, None)
        raise OSError(errno.EAGAIN, "its counters keep changing their number")

    def _count(self, netdev: str) -> int:
        reply = self._ask(netdev, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SET_OF_STATS, 0))
        (mask,) = struct.unpack_from("=Q", reply, 8)
        (count,) = struct.unpack_from("=I", reply, 16)
        if not mask >> _SET_OF_STATS & 1 or not 0 < count <= _MAX_COUNTERS:
            raise OSError(errno.EOPNOTSUPP, "it has no counters")
        return int(count)

    def _read_names(self, netdev: str, count: int) -> list[str]:
        request = struct.pack("=III", _GSTRINGS, _SET_OF_STATS, count)
        return decode_names(self._ask(netdev, request, _NAME_BYTES * 2 * count))

    def _read_values(self, netdev: str, count: int) -> NDArray[np.uint64]:
        return decode_values(self._ask(netdev, struct.pack("=II", _GSTATS, count), 8 * 2 * count))

    def _ask(self, netdev: str, request: bytes, room_bytes: int = 0) -> bytes:
        """The kernel's answer in place of `request`, with room behind it.

        Kernels older than 2026 write as much as there is, not as much as was asked for: `room_bytes` is twice what
        is expected, and 1024 names more, for an interface that grows between two calls.
        """
        assert self._socket is not None
        buffer = ctypes.create_string_buffer(request, len(request) + room_bytes + 1024 * _NAME_BYTES)
        name = netdev.encode()[:15]
        interface = bytearray(struct.pack("=16sQ16x", name, ctypes.addressof(buffer)))
        self._ioctl(self._socket.fileno(), _SIOCETHTOOL, interface)
        return buffer.raw


def decode_names(reply: bytes) -> list[str]:
    """The names in an answer to ETHTOOL_GSTRINGS, as many as it states and holds.

    struct ethtool_gstrings of linux/ethtool.h: u32 cmd, string_set, len, then 32 bytes each, padded with zeros.
    """
    if len(reply) < 12:
        return []
    (count,) = struct.unpack_from("=I", reply, 8)
    count = min(count, (len(reply) - 12) // _NAME_BYTES)
    names = np.frombuffer(reply, f"S{_NAME_BYTES}", count, 12)
    return [name.split(b"\0")[0].decode("utf-8", "replace") for name in names.tolist()]


def decode_values(reply: bytes) -> NDArray[np.uint64]:
    """The values in an answer to ETHTOOL_GSTATS, uint64, as many as it states and holds.

    struct ethtool_stats of linux/ethtool.h: u32 cmd, n_stats, then u64 each.
    """
    if len(reply) < 8:
        return np.zeros(0, np.uint64)
    (count,) = struct.unpack_from("=I", reply, 4)
    return np.frombuffer(reply, np.uint64, min(count, (len(reply) - 8) // 8), 8)
