"""Samples and events as each source counts them, a second at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.lab.sim.clocks import bin_start_ns, wall_ns
from pulse_bpf.lab.sim.identity import PORT, Identity, Longs, nic_name
from pulse_bpf.lab.sim.loss import Windows
from pulse_bpf.lab.sim.model import NONE, Array, Cluster, Result, Seen, Settings
from pulse_bpf.lab.sim.options import Options
from pulse_bpf.schema import I64

# What rotates a recorder's parts.
PART_NS = 1_000_000_000
# RoCEv2 around the payload of a packet: Ethernet 14 + 4, IPv4 20, UDP 8, BTH 12, ICRC 4 (InfiniBand specification,
# annex A17). A clear-to-send is a write of 64 bytes with RETH 16, an acknowledgement has AETH 4.
HEADER_BYTES = 62
CTL_BYTES = 64 + 16 + HEADER_BYTES
ACK_BYTES = 4 + HEADER_BYTES
# The observer on a card counts in these (sent_32bytes of DOCA PCC), and dumps events per 128 bins.
UNIT_BYTES, EPOCH_BINS = 32, 128
# How often queue pairs' counters are read on the card.
QP_PERIOD_NS = 10_000_000

# With headers, of all but acknowledgements, which a card makes without its queue pair.
_WIRE_BYTES = (
    pl.col("bytes").cast(I64)
    + HEADER_BYTES * (pl.col("packets").cast(I64) - pl.col("ctl_packets") - pl.col("ack_packets"))
    + CTL_BYTES * pl.col("ctl_packets").cast(I64)
)


@dataclass
class Counted:
    """What a recording holds of the traffic: rows per second and node by table, and rows lost on each node."""

    parts: Iterator[dict[str, pl.DataFrame]]
    lost: Longs = field(default_factory=lambda: np.zeros(0, np.int64))


def count(result: Result, identity: Identity, settings: Settings, options: Options, lost: Windows) -> Counted:
    """The tables samples and port_samples in parts of a node's second; `lost` is complete when the parts were taken."""
    counted = Counted(iter(()), np.zeros(len(identity.nodes), np.int64))
    counted.parts = _parts(result.samples, identity, settings, options, lost, counted.lost)
    return counted


def _parts(
    samples: Array, identity: Identity, settings: Settings, options: Options, lost: Windows, missed: Longs
) -> Iterator[dict[str, pl.DataFrame]]:
    at_node, at_nic = (identity.ends[name].to_numpy() for name in ("at_node", "at_nic"))
    end = 2 * samples["flow"].astype(np.int64) + samples["rx"]
    node = at_node[end]
    seen = node < len(identity.nodes)
    seen[seen] = identity.recorded[node[seen]]
    t_ns = np.zeros(len(samples), np.int64)
    t_ns[seen] = bin_start_ns(settings, node[seen], samples["bin"][seen])
    gone = np.zeros(len(samples), bool)
    gone[seen] = lost.hit(node[seen], t_ns[seen])
    np.add.at(missed, node[gone], 1)
    second = t_ns // PART_NS
    second[~seen | gone] = -1
    for number in np.unique(second[second >= 0]):
        rows = np.flatnonzero(second == number)
        rows = rows[np.argsort(node[rows].astype(np.int16), kind="stable")]
        for mine in np.split(rows, np.flatnonzero(np.diff(node[rows])) + 1):
            both = _both_ways(samples[mine], end[mine], t_ns[mine])
            yield _SOURCES[options.source](both, identity, settings.bin_ns, at_nic)


def _both_ways(samples: Array, end: Longs, t_ns: Longs) -> pl.DataFrame:
    """Rows end, tx, t_ns and counts, sorted so: a sample's data, and the control packets that go the other way.

    The meters close the bins of one end in order of time, so that only ends are out of order.
    """
    data = np.flatnonzero((samples["bytes"] > 0) | (samples["packets"] > 0))
    control = np.flatnonzero((samples["reverse_ctl"] > 0) | (samples["reverse_acks"] > 0))
    row = np.concatenate([data, control])
    is_control = np.arange(len(row)) >= len(data)
    order = np.argsort((2 * end[row] + is_control).astype(np.int32), kind="stable")
    row, is_control = row[order], is_control[order]

    def counted(name: str, of_control: bool) -> NDArray[np.uint32]:
        return np.where(is_control == of_control, samples[name][row], 0).astype(np.uint32)

    ctl, acks = counted("reverse_ctl", True), counted("reverse_acks", True)
    return pl.DataFrame(
        {
            "end": end[row],
            "tx": (samples["rx"][row] == 0) != is_control,
            "t_ns": t_ns[row],
            "bytes": counted("bytes", False),
            "retx_bytes": counted("retx_bytes", False),
            "packets": counted("packets", False) + ctl + acks,
            "ctl_packets": ctl,
            "ack_packets": acks,
        }
    )


def _packets(both: pl.DataFrame, identity: Identity, bin_ns: int, _nics: Longs) -> dict[str, pl.DataFrame]:
    return {"samples": _named(both, identity, "packets", bin_ns)}


def _pcc(both: pl.DataFrame, identity: Identity, bin_ns: int, _nics: Longs) -> dict[str, pl.DataFrame]:
    counted = both.filter("tx").select(
        "end", "tx", "t_ns", bytes=(_WIRE_BYTES + UNIT_BYTES - 1) // UNIT_BYTES
    )
    sent = counted.filter(pl.col("bytes") > 0).with_columns(pl.col("bytes") * UNIT_BYTES)
    return {"samples": _named(sent, identity, "pcc", bin_ns)}


def _diag(both: pl.DataFrame, identity: Identity, bin_ns: int, nics: Longs) -> dict[str, pl.DataFrame]:
    period_ns = max(QP_PERIOD_NS, bin_ns)
    counted = both.select(
        "end",
        "tx",
        "t_ns",
        bytes=_WIRE_BYTES,
        packets=pl.col("packets") - pl.col("ack_packets"),
        all_bytes=_WIRE_BYTES + ACK_BYTES * pl.col("ack_packets"),
        all_packets="packets",
        nic_number=pl.Series(nics[both["end"].to_numpy()]),
    )
    by_qp = (
        counted.group_by("end", "tx", pl.col("t_ns") // period_ns * period_ns)
        .agg(pl.col("bytes", "packets").sum())
        .filter(pl.col("bytes") > 0)
        .sort("end", "tx", "t_ns")
    )
    by_port = (
        counted.group_by("nic_number", "tx", "t_ns")
        .agg(pl.col("end").min(), bytes=pl.col("all_bytes").sum(), packets=pl.col("all_packets").sum())
        .sort("nic_number", "tx", "t_ns")
    )
    return {
        "samples": _named(by_qp, identity, "qp-counters", period_ns),
        "port_samples": _named(by_port, identity, "doca-diag", bin_ns),
    }


_SOURCES = {"packets": _packets, "pcc": _pcc, "diag+netlink": _diag}


def _named(rows: pl.DataFrame, identity: Identity, source: str, bin_ns: int) -> pl.DataFrame:
    """`rows` with the names of their ends in place of numbers."""
    names = identity.ends.select("node", "nic", "port", "qpn", "flow")
    return rows.with_columns(
        *(names[name].gather(rows["end"]) for name in names.columns),
        source=pl.lit(source),
        direction=pl.when("tx").then(pl.lit("tx")).otherwise(pl.lit("rx")),
        bin_ns=pl.lit(bin_ns),
    )


def events(
    result: Result, identity: Identity, cluster: Cluster, settings: Settings, options: Options
) -> pl.DataFrame:
    """Rows of `events` but those that a counter's reading shows: CNP and NAK packets, with the queue pair they met.

    They have the time of their bin, from a card that of its group of bins. A source of port counters has none.
    """
    kinds = {int(Seen.CNP): "cnp", int(Seen.NAK): "nak"}
    if options.source == "diag+netlink":
        kinds = {}
    chosen = result.events[np.isin(result.events["kind"], list(kinds))]
    chosen = chosen[(chosen["t_ns"] >= settings.record_ns) & (chosen["flow"] != NONE)]
    chosen = chosen[chosen["nic"] < len(identity.pids)]
    node = chosen["nic"] // cluster.gpus
    chosen, node = chosen[identity.recorded[node]], node[identity.recorded[node]]
    grid_ns = settings.bin_ns * (EPOCH_BINS if options.source == "pcc" else 1)
    phase_ns = bin_start_ns(settings, node, np.zeros(len(node), np.int64))
    shown_ns = wall_ns(settings, node, chosen["t_ns"])
    end = 2 * chosen["flow"].astype(np.int64)
    end += identity.ends["at_nic"].to_numpy()[end] != chosen["nic"]
    return (
        pl.DataFrame(
            {
                "end": end,
                "t_ns": phase_ns + (shown_ns - phase_ns) // grid_ns * grid_ns,
                "kind": pl.Series(chosen["kind"]).replace_strict(kinds, return_dtype=pl.String),
                "value": chosen["value"],
            }
        )
        .group_by("end", "t_ns", "kind")
        .agg(pl.col("value").sum())
        .join(identity.ends.select("end", "node", "nic", "port", "qpn"), on="end")
        .sort("t_ns", "node", "nic", "qpn", "kind")
    )


def manifest(settings: Settings, options: Options) -> list[dict[str, Any]]:
    """The `sources` of the manifest, as the readers of a real recording describe themselves."""
    both, period_ns = ("rx", "tx"), int(settings.counter_interval_ns)
    qp_ns = max(QP_PERIOD_NS, settings.bin_ns)
    narrow: dict[str, list[tuple[Any, ...]]] = {
        "packets": [("packets", "tc clsact, switch side", True, both, settings.bin_ns, "payload", None)],
        "pcc": [("pcc", "BlueField-3 PCC, dump", True, ("tx",), settings.bin_ns, "wire", None)],
        "diag+netlink": [
            ("doca-diag", "the card's own samples", False, both, settings.bin_ns, "wire", settings.bin_ns),
            ("qp-counters", "the card's counters of each queue pair", True, both, qp_ns, "wire", qp_ns),
        ],
    }
    rows = [
        *narrow[options.source],
        ("sysfs", "the port's own counters", False, both, None, "wire", period_ns),
        ("ethtool", "the interface's own counters", False, (), None, "wire", period_ns),
    ]
    names = ("name", "vantage", "per_qp", "directions", "bin_ns", "bytes_are")
    return [
        {**dict(zip(names, row, strict=False)), "period_ns": None if row[6] is None else [row[6], row[6]]}
        for row in rows
    ]


def coverage(
    identity: Identity, cluster: Cluster, settings: Settings, options: Options, lost: Longs
) -> pl.DataFrame:
    """Rows of `coverage` of all sources that tell of NICs."""
    nics = np.arange(len(identity.pids))
    nics = nics[identity.recorded[nics // cluster.gpus]]
    node = nics // cluster.gpus
    ports = pl.DataFrame(
        {
            "node": [identity.nodes[number] for number in node],
            "nic": [nic_name(cluster, int(number)) for number in nics],
            "port": np.full(len(nics), PORT),
            "first_ns": wall_ns(settings, node, settings.record_ns),
            "last_ns": wall_ns(settings, node, settings.end_ns),
            "lost": lost[node],
        }
    )
    frames = []
    for source in manifest(settings, options):
        for direction in source["directions"] or (None,):
            rows = ports.with_columns(source=pl.lit(source["name"]), direction=pl.lit(direction, pl.String))
            if source["name"] in ("sysfs", "ethtool"):
                rows = rows.with_columns(lost=pl.lit(0, I64))
            frames.append(rows)
    return pl.concat(frames)
