"""Samples and events as each source counts them, a second at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.lab.sim import rows
from pulse_bpf.lab.sim.clocks import bin_start_ns, wall_ns
from pulse_bpf.lab.sim.identity import PORT, Identity, Longs, nic_name
from pulse_bpf.lab.sim.loss import Windows
from pulse_bpf.lab.sim.model import NONE, Cluster, Result, Seen, Settings
from pulse_bpf.lab.sim.options import Options
from pulse_bpf.lab.sim.rows import Rows
from pulse_bpf.schema import I64, U32

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

_DIRECTIONS = pl.Series(["rx", "tx"], dtype=pl.Enum(["rx", "tx"]))


@dataclass
class Counted:
    """What a recording holds of the traffic: rows per second and node by table, and rows lost on each node."""

    parts: Iterator[dict[str, pl.DataFrame]]
    lost: Longs = field(default_factory=lambda: np.zeros(0, np.int64))


def count(result: Result, identity: Identity, settings: Settings, options: Options, lost: Windows) -> Counted:
    """The tables samples and port_samples in parts of a node's second; `lost` is complete when the parts were taken."""
    counted = Counted(iter(()), np.zeros(len(identity.nodes), np.int64))
    taken = rows.parts(result.samples, identity, settings, lost, PART_NS, counted.lost)
    counted.parts = (_SOURCES[options.source](part, identity, settings) for part in taken)
    return counted


def _packets(part: Rows, identity: Identity, settings: Settings) -> dict[str, pl.DataFrame]:
    frame = pl.DataFrame({"end": part.end, "tx": _sent(part), **part.columns})
    return {"samples": _named(frame, identity, "packets", settings.bin_ns)}


def _pcc(part: Rows, identity: Identity, settings: Settings) -> dict[str, pl.DataFrame]:
    units = (_wire_bytes(part) + UNIT_BYTES - 1) // UNIT_BYTES
    shown = np.flatnonzero(_sent(part) & (units > 0))
    columns = {"end": part.end, "t_ns": part.columns["t_ns"], "bytes": units * UNIT_BYTES}
    sent = pl.DataFrame({name: column[shown] for name, column in columns.items()})
    sent = sent.with_columns(tx=pl.lit(True))
    return {"samples": _named(sent, identity, "pcc", settings.bin_ns)}


def _diag(part: Rows, identity: Identity, settings: Settings) -> dict[str, pl.DataFrame]:
    bin_ns, period_ns = settings.bin_ns, max(QP_PERIOD_NS, settings.bin_ns)
    sent, wire_bytes, t_ns = _sent(part), _wire_bytes(part), part.columns["t_ns"]
    packets, acks = (part.columns[name] for name in ("packets", "ack_packets"))
    period = t_ns // period_ns
    begins = np.flatnonzero(
        (np.diff(part.end, prepend=np.uint32(len(identity.ends))) != 0)
        | np.diff(part.is_control, prepend=False)
        | (np.diff(period, prepend=0) != 0)
    )
    by_qp = (
        pl.DataFrame(
            {
                "end": part.end[begins],
                "tx": sent[begins],
                "t_ns": period[begins] * period_ns,
                "bytes": np.add.reduceat(wire_bytes, begins),
                "packets": np.add.reduceat(packets - acks, begins),
            }
        )
        .filter(pl.col("bytes") > 0)
        .sort("end", "tx", "t_ns")
    )
    # By NIC, direction and bin, which have one number together; each node's bins begin at its clock's.
    first_ns = t_ns.min() - t_ns.min() % bin_ns
    bins = (t_ns.max() - first_ns) // bin_ns + 1
    nic = identity.ends["at_nic"].to_numpy()
    place = (2 * nic[part.end] + sent) * bins + (t_ns - first_ns) // bin_ns
    all_bytes = np.bincount(place, wire_bytes + ACK_BYTES * acks.astype(np.int64))
    used = np.flatnonzero(all_bytes)
    an_end = np.zeros(nic.max() + 1, np.uint32)
    an_end[nic] = np.arange(len(nic))
    phase_ns = np.zeros(len(an_end), np.int64)
    phase_ns[nic[part.end]] = (t_ns - first_ns) % bin_ns
    by_port = pl.DataFrame(
        {
            "end": an_end[used // bins // 2],
            "tx": used // bins % 2 > 0,
            "t_ns": first_ns + used % bins * bin_ns + phase_ns[used // bins // 2],
            "bytes": all_bytes[used].astype(np.int64),
            "packets": np.bincount(place, packets)[used].astype(np.uint32),
        }
    )
    return {
        "samples": _named(by_qp, identity, "qp-counters", period_ns),
        "port_samples": _named(by_port, identity, "doca-diag", bin_ns),
    }


def _sent(part: Rows) -> NDArray[np.bool_]:
    """Whether a row is of what its end sends: the first end of a flow its data, the other one control packets."""
    sent: NDArray[np.bool_] = (part.end % 2 == 0) != part.is_control
    return sent


def _wire_bytes(part: Rows) -> Longs:
    """With headers, of all but acknowledgements, which a card makes without its queue pair."""
    data, packets, ctl, acks = (
        part.columns[name].astype(np.int64) for name in ("bytes", "packets", "ctl_packets", "ack_packets")
    )
    return data + HEADER_BYTES * (packets - ctl - acks) + CTL_BYTES * ctl


_SOURCES = {"packets": _packets, "pcc": _pcc, "diag+netlink": _diag}


def _named(frame: pl.DataFrame, identity: Identity, source: str, bin_ns: int) -> pl.DataFrame:
    """`frame` with the names of their ends in place of numbers."""
    ends = identity.ends
    return frame.with_columns(
        *(_text(ends[name]).gather(frame["end"]) for name in ("node", "nic")),
        *(ends[name].gather(frame["end"]) for name in ("port", "qpn", "flow")),
        source=pl.lit(source, pl.Enum([source])),
        direction=_DIRECTIONS.gather(frame["tx"].cast(U32)),
        bin_ns=pl.lit(bin_ns, U32),
    )


def _text(names: pl.Series) -> pl.Series:
    return pl.Series(names, dtype=pl.Enum(names.unique(maintain_order=True)))


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
