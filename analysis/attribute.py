"""Whose traffic a queue pair carries: process, communicator and peer of each flow."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from pulse_bpf.analysis.bursts import Bursts, bursts
from pulse_bpf.analysis.by_volume import HEADER_BYTES, MTUS
from pulse_bpf.analysis.candidates import candidates, data_directions
from pulse_bpf.analysis.channels import with_channels
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.pairing import FOREVER, QP, with_owners, with_peers
from pulse_bpf.analysis.samples import PORT
from pulse_bpf.analysis.settling import on_wire, settle
from pulse_bpf.schema import F64, I32, I64, STR, U8, U32, U64

# One row per life of a queue pair.
#
# `owner_pid` made the queue pair and posts on it. `pid`, `gpu`, `rank` are those of the process whose operators its
# bytes belong to: of a collective the owner, as all its members take part; of point-to-point calls (`use` "pairs") the
# caller, which with PXN is any process of the node, and null where several may be (`ranks`, then of more than one).
# `peer_pid`, `peer_rank`, `peer_ranks` and `peer_owner_pid` are the same of the other end. `channel` is null where
# unknown. `data` is the direction of its data, where the source took what went the other way, control, for data, too;
# its source counts `wire_factor` bytes for each byte of data. `confidence` (0 to 1) and `evidence` tell why it is
# attributed, `reason` why it is not: then comm_id is null.
_FLOWS: dict[str, pl.DataType | type[pl.DataType]] = {
    "flow": U64,
    "node": STR,
    "nic": STR,
    "port": U8,
    "qpn": U32,
    "owner_pid": I64,
    "pid": I64,
    "gpu": I32,
    "comm_id": STR,
    "use": STR,
    "channel": I32,
    "rank": I32,
    "ranks": pl.List(I32),
    "nranks": I32,
    "peer_node": STR,
    "peer_nic": STR,
    "peer_owner_pid": I64,
    "peer_pid": I64,
    "peer_rank": I32,
    "peer_ranks": pl.List(I32),
    "data": STR,
    "wire_factor": F64,
    "created_ns": I64,
    "confidence": F64,
    "evidence": STR,
    "reason": STR,
}
FLOWS = pl.Schema(_FLOWS)


def samples(recording: Recording, lives: pl.DataFrame) -> pl.DataFrame:
    """The samples of one source per (node, nic, port, direction), one row per (flow, direction, bin), sorted so.

    The source with the narrowest bins is taken, by name where equal. Rows without a flow get that of the
    life of their QP that had begun by then. `flow` stays null where the QP is in no qps row.
    """
    rows = recording["samples"]
    port = PORT
    sources = rows.select(*port, "source", "bin_ns").unique()
    best = sources.sort("bin_ns", "source").unique(port, keep="first", maintain_order=True).drop("bin_ns")
    if best.height < sources.height:
        rows = rows.join(best, on=[*port, "source"], how="semi", nulls_equal=True)
    if rows["flow"].null_count():
        begun = lives.select(
            *QP, pl.col("flow").alias("lived"), pl.col("created_ns").fill_null(-FOREVER).alias("t_ns")
        )
        rows = (
            rows.sort("t_ns")
            .join_asof(begun.sort("t_ns"), on="t_ns", by=QP, check_sortedness=False)
            .with_columns(pl.coalesce("flow", "lived").alias("flow"))
        )
    counts = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]
    # Not by the names, which a flow implies: strings are slow to sort.
    order = ["flow", "qpn", "direction", "t_ns"]
    rows = rows.select(*QP, "flow", "direction", "t_ns", "bin_ns", *counts).sort(order, maintain_order=True)
    again = pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift()) for name in order)
    if rows.select(again.any()).item():
        rows = rows.group_by(rows.columns[: -len(counts)], maintain_order=True).agg(
            pl.when(pl.col(counts).count() > 0).then(pl.col(counts).sum())
        )
    return rows


def covered(recording: Recording) -> pl.DataFrame:
    """node, nic, port, direction, from_ns, to_ns: when bytes of a port would have been seen, had there been any.

    From the coverage table; where that says nothing of a port, from the first to the last sample of its node. `lossy`:
    whether it says that samples were lost.
    """
    stated = (
        recording["coverage"]
        .drop_nulls(PORT)
        .group_by(PORT)
        .agg(
            pl.col("first_ns").min().alias("from_ns"),
            pl.col("last_ns").max().alias("to_ns"),
            (pl.col("lost").max() > 0).fill_null(False).alias("lossy"),
        )
    )
    ports = recording.lives.select(PORT[:-1]).unique().join(recording.samples.spans(), on="node")
    both = pl.DataFrame({"direction": ["tx", "rx"], "lossy": False})
    others = ports.join(both, how="cross").join(stated, on=PORT, how="anti", nulls_equal=True)
    return pl.concat([stated, others.select(stated.columns)]).sort(PORT)


class Carried(NamedTuple):
    """What is needed of the samples to attribute flows: their first `bursts`, and whether bytes include headers."""

    bursts: Bursts
    wire: bool


def carried_first(recording: Recording, start_ns: int | None = None) -> Carried:
    """What the flows in `recording` carried first, counted from `start_ns`, or else from its first sample on."""
    return Carried(bursts(recording.samples, recording.lives["flow"], start_ns), on_wire(recording))


def flows(recording: Recording, carried: Carried | None = None) -> pl.DataFrame:
    """Each life of a QP with what it belongs to, in FLOWS columns.

    `carried` is of the same flows, where the samples are elsewhere.

    `channel` as channels.py tells it. Where the two ends of a QP share several communicators, or several processes of
    the node may have called, what it carried first settles which (by_volume). Both ends of a QP count, where both were
    recorded.
    """
    first, wire = carried or carried_first(recording)
    paired, possible = with_peers(recording.lives, recording["nics"], recording["comms"], first.totals())
    known = with_owners(paired, recording["comms"])
    told = data_directions(first, known, possible, wire)
    directions = told.drop("data")
    found = candidates(known, possible, recording, directions)
    settled = settle(found, directions, recording, first, wire)
    there = known.select("nic", peer_flow="flow", end_pid="owner_pid")
    joined = (
        known.drop("comm_id")
        .rename({"peer_node": "only_node", "peer_nic": "only_nic", "peer_owner_pid": "only_pid"})
        .drop("peer_flow")
        .join(settled, on="flow", how="left")
        .join(there.rename({"nic": "end_nic"}), on="peer_flow", how="left")
        .with_columns(
            peer_node=pl.coalesce("only_node", "peer_node"),
            peer_nic=pl.coalesce("only_nic", "end_nic"),
            peer_owner_pid=pl.coalesce("only_pid", "end_pid"),
        )
    )
    reason = (
        pl.when(pl.col("comm_id").is_not_null())
        .then(None)
        .when(pl.col("flow").is_in(found["flow"].unique().implode()))
        .then(pl.lit("several communicators could use it"))
        .when(pl.col("owner_pid").is_null())
        .then(pl.lit("its process is unknown"))
        .when(pl.col("peer_node").is_null())
        .then(pl.lit("its peer is unknown"))
        .otherwise(pl.lit("no communicator seen holds both its ends"))
    )
    mtu_bytes = pl.coalesce("path_mtu", pl.col("path_mtu").mode().first(), pl.lit(MTUS[0]))
    flows = joined.join(told.select("flow", "data"), on="flow", how="left").with_columns(
        reason=reason, wire_factor=1 + HEADER_BYTES / mtu_bytes if wire else pl.lit(1.0)
    )
    flows = flows.select(pl.col(name).cast(dtype) for name, dtype in FLOWS.items())
    return with_channels(flows, directions, recording["channels"])
