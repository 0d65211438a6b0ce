"""Live RoCEv2 packets: bytes per queue pair, direction and time bin, counted by a BPF program at tc or XDP."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.nic import Source, Tables, Tap
from pulse_bpf.nic.identity import gid_text
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.nic.tc import EGRESS, INGRESS, TcFilters
from pulse_bpf.nic.xdp import XdpLinks, XdpProgram
from pulse_bpf.schema import I64, STR, U8, U32, conform

# Mirrors of probes/bpf/roce.h. An address is 16 bytes in network byte order.
FLOW = np.dtype(
    [
        ("qpn", "<u4"),
        ("ifindex", "<u4"),
        ("egress", "<u4"),
        ("reserved", "<u4"),
        ("source", "<u8", (2,)),
        ("target", "<u8", (2,)),
    ]
)
COUNTS = np.dtype(
    [
        ("bytes", "<u8"),
        ("retx_bytes", "<u8"),
        ("packets", "<u4"),
        ("ctl_packets", "<u4"),
        ("ack_packets", "<u4"),
        ("naks", "<u4"),
        ("rnrs", "<u4"),
        ("cnps", "<u4"),
    ]
)
COUNT_COLUMNS = list(COUNTS.names or ())
BIN = np.dtype([("start_ns", "<u8"), ("flow", FLOW), ("counts", COUNTS)])
SET = np.dtype([("bins", BIN, (4,))])
COUNTED, LOST_PACKETS, LOST_BINS = range(3)
# What is not counted in bins, by kind: the other indexes of `totals`, in order.
KINDS = ["fragment", "merged", "malformed", "uc", "rd", "ud", "xrc", "reserved"]

SOURCE_NAME = "packets"
# Until a sender's queue pair is known its counts wait; a listing of all queue pairs comes about once a second.
HOLD_NS = 10_000_000_000

_PORTS = pl.Schema({"ifindex": U32, "egress": U32, "address": STR, "node": STR, "nic": STR, "port": U8})


class Meter(XdpProgram, Protocol):
    """The loaded probes/bpf/roce.c, compiled with BIN_NS."""

    def load_tc(self, function: str) -> int: ...
    def ring(self, name: str, dtype: np.dtype[np.void]) -> Any: ...
    def percpu_sum(self, name: str, index: int) -> int: ...
    def read_percpu(
        self, name: str, key_dtype: np.dtype[Any], value_dtype: np.dtype[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...


class PacketReader:
    """Counts what each tap's port sends and receives, as the Reader protocol says.

    `bin_ns` must be the BIN_NS that `program` was compiled with; `wall_offset_ns` turns CLOCK_MONOTONIC into
    wall time and is constant, so that all bins have one phase. Packets neither from nor to a GID of the tap,
    as a bridge floods them, are counted apart in `counters`. A bin is read when a later packet of its flow comes on
    the same CPU, when another flow needs its place, or at the end: one bin may come in several rows, in different
    batches, which add up. With `xdp`, what an interface receives is counted at XDP where it takes that, else at
    tc as what it sends. UsageError when two taps show one port.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        program: Meter,
        qps: QpTable,
        bin_ns: int,
        wall_offset_ns: int,
        xdp: bool = False,
    ) -> None:
        ports = [(tap.node, tap.nic, tap.port) for tap in taps]
        for port in ports:
            if ports.count(port) > 1:
                raise UsageError(f"port {port[2]} of {port[1]} on {port[0]} is watched in two places")
        self._taps = taps
        self._program = program
        self._qps = qps
        self._bin_ns = bin_ns
        self._wall_offset_ns = wall_offset_ns
        self._filters = TcFilters()
        self._xdp = XdpLinks(program, "roce_xdp") if xdp else None
        self._xdp_modes: dict[str, str] = {}
        self._ring: Any = None
        self._drained: list[NDArray[np.void]] = []
        self._held: pl.DataFrame | None = None
        self._foreign_packets = 0
        self.notes: list[str] = []
        self._netdevs: dict[str, int] = {}
        self._vanished_ns: dict[str, int] = {}
        self._first_ns = self._last_ns = 0
        self._running = False

    @property
    def source(self) -> Source:
        sides = " and ".join(sorted({tap.side for tap in self._taps}))
        xdp = "".join(f"{mode} XDP at {netdev}, " for netdev, mode in sorted(self._xdp_modes.items()))
        return Source(
            SOURCE_NAME, f"{xdp}tc clsact, {sides} side", True, ("rx", "tx"), self._bin_ns, "payload"
        )

    def start(self) -> None:
        """Begins to count; HostError, with nothing left attached, when an interface is missing or refuses."""
        netdevs = self._netdevs = _indexes(tap.netdev for tap in self._taps)
        ingress, egress = self._program.load_tc("roce_ingress"), self._program.load_tc("roce_egress")
        self._ring = self._program.ring("closed_bins", BIN)
        try:
            self._xdp_modes = self._xdp.attach(netdevs) if self._xdp else {}
            at_tc = {
                netdev: {EGRESS: egress} if netdev in self._xdp_modes else {INGRESS: ingress, EGRESS: egress}
                for netdev in netdevs
            }
            self._filters.attach(netdevs, at_tc)
        except BaseException:
            self._detach()
            raise
        self._map_ports(netdevs)
        self._first_ns = self._last_ns = self._now_ns()
        self._running = True

    def drain(self) -> None:
        """Empties the ring buffer, which `read` then needs no more often than rows are wanted.

        This is cheap, where `read` costs milliseconds however little there is.
        """
        self._drained.append(self._ring.read())

    def read(self) -> Tables:
        """Samples sorted by (flow, direction, t_ns), and events sorted by t_ns, closed since the last call.

        Counts whose sender is unknown for longer than HOLD_NS come out as port_samples. An event belongs to the
        queue pair that its packet is addressed to: the one whose data was refused or that shall slow down.
        """
        now_ns = self._now_ns()
        self.drain()
        tables = self._tables(self._take(), now_ns - HOLD_NS)
        self._note_vanished()
        self._last_ns = now_ns
        return tables

    def stop(self) -> Tables:
        """Detaches, and returns all that is left, bins that were still open and held counts included."""
        if self._running:
            # Before the filters go one by one: until here all of them were there.
            self._note_vanished()
            self._last_ns = self._now_ns()
        self._detach()
        if not self._running:
            return {}
        self._running = False
        self.drain()
        self._drained.append(self._open_bins())
        return self._tables(self._take(), self._last_ns)

    def period_ns(self) -> None:
        """None: a bin is as wide as it says."""

    def coverage(self) -> pl.DataFrame:
        """One row per tap and direction, from start to the last read.

        The kernel side cannot tell which tap a packet lost was from: every row's `lost` is that of the whole reader,
        an upper bound (the packets of bins that a full ring buffer did not take).
        """
        lost = self._program.percpu_sum("totals", LOST_PACKETS)
        rows = [
            (tap.node, SOURCE_NAME, tap.nic, tap.port, direction, self._first_ns, last_ns, lost)
            for tap in self._taps
            for last_ns in [self._vanished_ns.get(tap.netdev, self._last_ns)]
            for direction in ("rx", "tx")
        ]
        columns = ("node", "source", "nic", "port", "direction", "first_ns", "last_ns", "lost")
        return conform(pl.DataFrame(rows, schema=columns, orient="row"), "coverage")

    def counters(self) -> dict[str, int]:
        """Packets by what became of them, and bins lost, since start; those not counted also by kind."""
        total = self._program.percpu_sum
        kinds = {kind: total("totals", index) for index, kind in enumerate(KINDS, LOST_BINS + 1)}
        return {
            "packets": total("totals", COUNTED),
            "foreign_packets": self._foreign_packets,
            "lost_packets": total("totals", LOST_PACKETS),
            "lost_bins": total("totals", LOST_BINS),
            "undecoded_packets": sum(kinds.values()),
            **{f"{kind}_packets": count for kind, count in kinds.items()},
        }

    def _detach(self) -> None:
        if self._xdp:
            self._xdp.detach()
        self._filters.detach()

    def _note_vanished(self) -> None:
        """An interface that is gone, or came back as another, was seen until the read before."""
        for netdev, index in self._netdevs.items():
            if netdev not in self._vanished_ns and _index_of(netdev) != index:
                self._vanished_ns[netdev] = self._last_ns
                self.notes.append(f"{netdev} has gone, and its packets are not seen any more")

    def _now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC) + self._wall_offset_ns

    def _take(self) -> NDArray[np.void]:
        bins, self._drained = np.concatenate(self._drained), []
        return bins

    def _map_ports(self, indexes: dict[str, int]) -> None:
        """Which (interface, hook, own address) shows which port receiving, and which shows it sending."""
        receiving, sending = [], []
        for tap in self._taps:
            # A card lists an address once for each version of RoCE.
            for address in sorted(set(tap.gids)):
                port = (address, tap.node, tap.nic, tap.port)
                faces_device = tap.side == "device"
                receiving.append((indexes[tap.netdev], 0 if faces_device else 1, *port))
                sending.append((indexes[tap.netdev], 1 if faces_device else 0, *port))
        self._receiving = pl.DataFrame(receiving, schema=_PORTS, orient="row")
        self._sending = pl.DataFrame(sending, schema=_PORTS, orient="row")

    def _open_bins(self) -> NDArray[np.void]:
        _, sets = self._program.read_percpu("open_bins", np.dtype("<u4"), SET)
        bins: NDArray[np.void] = sets["bins"].reshape(-1)
        return bins[bins["counts"]["packets"] > 0]

    def _tables(self, raw: NDArray[np.void], give_up_ns: int) -> Tables:
        """The tables of bins as the kernel hands them out; counts older than `give_up_ns` wait no longer for
        their queue pair."""
        start_ns = pl.col("start_ns").cast(I64) + self._wall_offset_ns
        bins = _frame(raw).with_columns(
            start_ns.alias("t_ns"), (start_ns + self._bin_ns - 1).alias("last_ns")
        )
        rx = _at_ports(bins, self._receiving, "target", "inner")
        tx = _at_ports(bins, self._sending, "source", "inner")
        foreign = _at_ports(bins, self._receiving, "target", "anti")
        foreign = _at_ports(foreign, self._sending, "source", "anti")
        self._foreign_packets += int(foreign["packets"].sum())

        rx = rx.rename({"source": "peer_gid", "target": "local_gid"})
        port = ["node", "nic", "port"]
        self._qps.observe_capture(
            rx.group_by(*port, "qpn", "local_gid", "peer_gid").agg(pl.col("packets").sum())
        )
        rx = self._qps.flows(rx)

        tx = tx.rename({"qpn": "peer_qpn", "target": "peer_gid"})
        tx = tx.select(*port, "peer_gid", "peer_qpn", "t_ns", "last_ns", *COUNT_COLUMNS)
        tx = self._qps.resolve_tx(tx if self._held is None else pl.concat([self._held, tx]))
        resolved = pl.col("qpn").is_not_null()
        waits = ~resolved & (pl.col("t_ns") > give_up_ns)
        self._held = tx.filter(waits).drop("qpn", "flow")
        return {
            "samples": self._samples(rx, tx.filter(resolved)),
            "events": _events(rx),
            "port_samples": self._port_samples(tx.filter(~resolved & ~waits)),
        }

    def _samples(self, rx: pl.DataFrame, tx: pl.DataFrame) -> pl.DataFrame:
        key = ["node", "nic", "port", "qpn", "flow", "direction", "t_ns"]
        rows = [
            frame.with_columns(direction=pl.lit(name)).select(*key, *COUNT_COLUMNS)
            for name, frame in (("rx", rx), ("tx", tx))
        ]
        summed = pl.concat(rows).group_by(key).agg(pl.col(*COUNT_COLUMNS).sum())
        summed = summed.with_columns(source=pl.lit(SOURCE_NAME), bin_ns=pl.lit(self._bin_ns))
        return conform(summed, "samples").sort("flow", "direction", "t_ns")

    def _port_samples(self, tx: pl.DataFrame) -> pl.DataFrame:
        summed = tx.group_by("node", "nic", "port", "t_ns").agg(pl.col("bytes", "packets").sum())
        summed = summed.with_columns(
            source=pl.lit(SOURCE_NAME), direction=pl.lit("tx"), bin_ns=pl.lit(self._bin_ns)
        )
        return conform(summed, "port_samples").sort("node", "nic", "port", "t_ns")


def _frame(bins: NDArray[np.void]) -> pl.DataFrame:
    """The bins as flat columns of their own, the addresses as GIDs."""
    columns = {"start_ns": bins["start_ns"]}
    columns.update({name: bins["flow"][name] for name in ("qpn", "ifindex", "egress")})
    columns.update({name: bins["counts"][name] for name in COUNT_COLUMNS})
    frame = pl.DataFrame({name: np.ascontiguousarray(values) for name, values in columns.items()})
    return frame.with_columns(_gids(bins["flow"][name]).alias(name) for name in ("source", "target"))


def _gids(addresses: NDArray[np.uint64]) -> pl.Series:
    """Addresses [n, 2] in network byte order as text; of the few there are each is written once."""
    halves = pl.DataFrame(
        {"first": np.ascontiguousarray(addresses[:, 0]), "second": np.ascontiguousarray(addresses[:, 1])}
    )
    distinct = halves.unique()
    texts = [
        gid_text(ipaddress.IPv6Address(bytes(address)))
        for address in distinct.to_numpy(order="c").view("V16").ravel()
    ]
    written = distinct.with_columns(pl.Series("gid", texts, STR))
    return halves.join(written, on=["first", "second"], how="left", maintain_order="left")["gid"]


def _at_ports(
    bins: pl.DataFrame, ports: pl.DataFrame, own_address: str, how: Literal["inner", "anti"]
) -> pl.DataFrame:
    """The bins at an interface and hook where `own_address` is that of a port, or those at none."""
    where = ["ifindex", "egress"]
    return bins.join(ports, left_on=[*where, own_address], right_on=[*where, "address"], how=how)


def _events(rx: pl.DataFrame) -> pl.DataFrame:
    counts = rx.rename({"naks": "nak", "rnrs": "rnr", "cnps": "cnp"}).unpivot(
        ["nak", "rnr", "cnp"],
        index=["node", "nic", "port", "qpn", "t_ns"],
        variable_name="kind",
        value_name="value",
    )
    summed = counts.group_by(pl.exclude("value")).agg(pl.col("value").sum()).filter(pl.col("value") > 0)
    return conform(summed, "events").sort("t_ns", "nic", "qpn", "kind")


def _indexes(netdevs: Iterable[str]) -> dict[str, int]:
    """The index of each interface, sorted by name; HostError when one is missing."""
    found = {}
    for netdev in sorted(set(netdevs)):
        try:
            found[netdev] = socket.if_nametoindex(netdev)
        except OSError as error:
            raise HostError(
                f"there is no network interface {netdev}", next_step="List them: ip -br link"
            ) from error
    return found


def _index_of(netdev: str) -> int | None:
    try:
        return socket.if_nametoindex(netdev)
    except OSError:
        return None
