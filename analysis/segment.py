"""Cutting the rate curve of each flow group into operators, by the volumes and times of the process's calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from pulse_bpf.analysis import boundaries
from pulse_bpf.schema import F64, I32, I64, U32, U64

PROCESS = ["node", "pid"]
PORT = ["node", "nic", "port", "direction"]

# A kind of operator that would carry more than so many times all bytes of a flow group does not use it.
MOST = 20.0

PIECES = pl.Schema(
    {"group": U32, "op": U32, "t_ns": I64, "net": I64, "retx_bytes": I64, "ctl_packets": I64, "bytes": I64}
)
CUTS = pl.Schema({"group": U32, "op": U32, "expected_bytes": F64, "paced": pl.Boolean})


@dataclass(frozen=True)
class Segments:
    """`groups`: flow groups, one per (process, communicator, use, NIC, peer, direction), numbered by `group`.

    `cuts`: one row per (group, operator that should use it), with the bytes it should carry. `pieces`: every
    sample of the groups, cut where an operator ends inside it, sorted by (group, t_ns); `op` is null for bytes
    that belong to no call seen; `net` is `bytes` without repeats.
    """

    groups: pl.DataFrame
    cuts: pl.DataFrame
    pieces: pl.DataFrame


def program(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The operators of each process in program order, and what their point-to-point calls carry.

    All Send and Recv calls of one ncclGroup on one communicator are one operator of kind "Group". Calls that
    were captured into a graph move nothing and are left out. The operators have: op (a number for the row),
    node, pid, comm_id, rank, nranks, gpu, kind, op_bytes (null for Group), root, call_ns (of the first call),
    op_seq and program_pos (from 0, within the communicator and the process), nccl_seq, origin. The second
    frame has op, direction, peer_rank, bytes.
    """
    calls = (
        ops.filter(pl.col("comm_id").is_not_null(), pl.col("origin").fill_null("call") != "capture")
        .sort("node", "pid", "call_ns", "comm_id", "seq")
        .with_row_index("call")
        .with_columns(two_sided=pl.col("kind").is_in(["Send", "Recv"]))
    )
    grouped = pl.col("two_sided") & pl.col("group").is_not_null()
    calls = calls.with_columns(
        first_call=pl.when(grouped)
        .then(pl.col("call").min().over("node", "pid", "tid", "comm_id", "two_sided", "group"))
        .otherwise("call")
    )
    operators = (
        calls.group_by("first_call", maintain_order=True)
        .agg(
            pl.col("node", "pid", "comm_id", "rank", "nranks", "gpu", "nccl_seq", "origin").first(),
            pl.when(grouped.first()).then(pl.lit("Group")).otherwise(pl.col("kind").first()).alias("kind"),
            pl.when(~grouped.first()).then(pl.col("bytes").first()).alias("op_bytes"),
            pl.when(~grouped.first()).then(pl.col("peer").first()).alias("root"),
            pl.col("call_ns").min(),
        )
        .sort("first_call")
        .with_columns(
            op=pl.col("first_call").cast(U32),
            op_seq=pl.int_range(pl.len(), dtype=U64).over("node", "pid", "comm_id"),
            program_pos=pl.int_range(pl.len(), dtype=U64).over("node", "pid"),
        )
        .drop("first_call")
    )
    sent = (
        calls.filter("two_sided", pl.col("peer") != pl.col("rank"))
        .with_columns(direction=pl.when(pl.col("kind") == "Send").then(pl.lit("tx")).otherwise(pl.lit("rx")))
        .group_by(pl.col("first_call").cast(U32).alias("op"), "direction", pl.col("peer").alias("peer_rank"))
        .agg(pl.col("bytes").sum())
    )
    return operators, sent


def segment(
    operators: pl.DataFrame,
    sent: pl.DataFrame,
    flows: pl.DataFrame,
    rows: pl.DataFrame,
    covered: pl.DataFrame,
) -> Segments:
    """Cuts the samples `rows` of the attributed `flows` into the `operators`, which `sent` as `program` says.

    Calls outside the time in which their port was `covered` take no bytes.
    """
    key = [
        *PROCESS,
        "nic",
        "port",
        "comm_id",
        "use",
        "rank",
        "peer_rank",
        "peer_node",
        "peer_nic",
        "direction",
    ]
    mine = flows.filter(pl.col("comm_id").is_not_null()).select(*key[:-1], "gpu", "peer_pid", "flow")
    traffic = rows.drop("node", "nic", "port", "qpn").join(mine, on="flow")
    groups = (
        traffic.filter(pl.col("bytes") > 0)
        .group_by(key)
        .agg(
            pl.col("gpu", "peer_pid").first(),
            pl.col("flow").unique().sort().alias("flows"),
            (pl.col("bytes") - pl.col("retx_bytes").fill_null(0)).sum().cast(I64).alias("total"),
            pl.col("bin_ns").max(),
        )
        .sort(key)
        .with_row_index("group")
    )
    groups = groups.with_columns(pl.col("group").cast(U32))
    during = groups.select("group", *PORT).join(covered, on=PORT)
    expected = (
        _expected(groups, operators, sent)
        .join(during, on="group")
        .filter(pl.col("call_ns").is_between("from_ns", "to_ns"))
    )
    curve = (
        traffic.join(groups.select("group", *key), on=key, nulls_equal=True)
        .group_by("group", "t_ns")
        .agg(pl.col("bytes", "retx_bytes", "ctl_packets").fill_null(0).sum().cast(I64))
        .sort("group", "t_ns")
    )
    # What of its volume an operator of the ring moves depends on its size, too.
    size = pl.when("by_ring").then("op_bytes")
    expected = expected.with_columns(kind_index=pl.struct("kind", size).rank("dense").cast(I32))
    calls_of = {group: frame for (group,), frame in expected.partition_by("group", as_dict=True).items()}
    bin_of = dict(groups.select("group", "bin_ns").iter_rows())
    cuts, pieces = [pl.DataFrame(schema=CUTS)], [pl.DataFrame(schema=PIECES)]
    for (group,), frame in curve.partition_by("group", as_dict=True, maintain_order=True).items():
        calls = calls_of.get(group, expected.clear())
        cut, piece = _cut(frame, calls, int(bin_of[group]))
        cuts.append(cut.with_columns(group=pl.lit(group, U32)).select(CUTS.names()))
        pieces.append(piece.with_columns(group=pl.lit(group, U32)).select(PIECES.names()))
    return Segments(groups, pl.concat(cuts), pl.concat(pieces))


def _expected(groups: pl.DataFrame, operators: pl.DataFrame, sent: pl.DataFrame) -> pl.DataFrame:
    """(group, op, kind, call_ns, volume > 0) in program order: the payload an operator should put on a group.

    Volumes are those of NCCL's ring algorithm (chains for Broadcast and Reduce) and of direct transfers, from
    its published design; other algorithms show as a factor, which is learned later.
    """
    operators = operators.join(_first_calls(operators), on="op")
    pairs = groups.join(operators.drop("rank", "gpu"), on=[*PROCESS, "comm_id"]).join(
        sent, on=["op", "direction", "peer_rank"], how="left"
    )
    size, nranks = pl.col("op_bytes").cast(F64), pl.col("nranks").cast(F64)
    sends = pl.col("direction") == "tx"
    from_rank = pl.when(sends).then("rank").otherwise("peer_rank")
    to_rank = pl.when(sends).then("peer_rank").otherwise("rank")
    kind = pl.col("kind")
    direct = (
        pl.when(kind.is_in(["Group", "Send", "Recv"]))
        .then(pl.col("bytes").cast(F64))
        .when(
            (kind == "AlltoAll")
            | ((kind == "Gather") & (to_rank == pl.col("root")))
            | ((kind == "Scatter") & (from_rank == pl.col("root")))
        )
        .then(size / nranks)
        .otherwise(0.0)
        .fill_null(0.0)
    )
    ring = (
        pl.when(kind == "AllReduce")
        .then(2 * (nranks - 1) / nranks * size)
        .when(kind.is_in(["AllGather", "ReduceScatter"]))
        .then((nranks - 1) / nranks * size)
        .when((kind == "Broadcast") & (to_rank != pl.col("root")).fill_null(True))
        .then(size)
        .when((kind == "Reduce") & (from_rank != pl.col("root")).fill_null(True))
        .then(size)
        .otherwise(0.0)
        .fill_null(0.0)
    )
    # Point-to-point calls have queue pairs of their own, unless a transport has one for all that two processes say.
    own = pl.col("use").is_in(["pairs", "alltoall"]).fill_null(False)
    collective = (pl.col("use") == "collective").fill_null(False)
    pairs = pairs.with_columns(
        direct=pl.when(collective & own.any().over("node", "comm_id", "direction"))
        .then(0.0)
        .otherwise(direct),
        # More than the group carries in all is no part of it.
        ring=pl.when(
            (own & collective.any().over("node", "comm_id", "direction"))
            | (ring.sum().over("group", "kind", "op_bytes") > MOST * pl.col("total"))
        )
        .then(0.0)
        .otherwise(ring),
    )
    # Who the ring's neighbours are shows in which peers carry more than the direct transfers explain. Its channels
    # are spread over the node's NICs, whichever process posts; each carries the same.
    rest = pairs.group_by("group", "node", "comm_id", "direction").agg(
        pl.col("direct").sum(),
        (pl.col("total").first() - pl.col("direct").sum()).clip(0).alias("rest"),
        pl.col("flows").first().list.len().alias("channels"),
    )
    where = ["node", "comm_id", "direction"]
    rest = rest.with_columns(main=pl.col("rest") >= 0.25 * pl.col("rest").max().over(where))
    channels = pl.col("channels") / pl.col("channels").sum().over(*where, "main")
    measured = pl.col("rest") / pl.col("rest").sum().over(*where, "main")
    share = rest.select(
        "group",
        share=pl.when(~pl.col("main"))
        .then(pl.when(pl.col("direct") > 0).then(0.0).otherwise(1.0))
        .when((measured / channels - 1).abs() < 0.02)
        .then(channels)
        .otherwise(measured),
    )
    # Several NICs to one peer share its direct transfers the same way.
    lane = pl.col("total") / pl.col("total").sum().over("op", "direction", "peer_rank", "peer_node")
    return (
        pairs.with_columns(lane=lane)
        .join(share, on="group", how="left")
        .with_columns(
            volume=pl.col("direct") * pl.col("lane")
            + pl.col("ring") * pl.col("share").fill_nan(0).fill_null(0),
            by_ring=pl.col("ring") > 0,
        )
        .filter(pl.col("volume") > 0)
        .sort("group", "program_pos")
        .select(
            "group", "op", "kind", "op_bytes", "by_ring", "call_ns", "first_call_ns", "last_call_ns", "volume"
        )
    )


def _first_calls(operators: pl.DataFrame) -> pl.DataFrame:
    """op, first_call_ns, last_call_ns: when the first and the last process of the node made that call.

    With PXN a queue pair carries what another GPU of the node sends, so bytes may flow from then on. Observed
    sequences of two processes may begin one call apart; they are matched by kind, size and time. Point-to-point
    calls are the caller's own.
    """
    same = ["node", "comm_id", "kind", "op_bytes", "step"]
    calls = operators.filter(~pl.col("kind").is_in(["Group", "Send", "Recv"])).select(
        "op", *PROCESS, "comm_id", "kind", "op_bytes", "call_ns", step=pl.col("op_seq").cast(I64)
    )
    pair = ["node", "comm_id", "pid", "other"]
    apart = pl.col("other_ns") - pl.col("call_ns")
    matched = pl.concat(
        [
            calls.join(
                calls.select(
                    *same[:-1], pl.col("step") + shift, pl.col("pid").alias("other"), other_ns="call_ns"
                ),
                on=same,
                nulls_equal=True,
            )
            .filter(pl.col("pid") != pl.col("other"))
            .with_columns(shift=pl.lit(shift))
            for shift in (0, -1, 1)
        ]
    )
    fits = (
        matched.group_by(*pair, "shift", maintain_order=True)
        .agg(pl.len(), apart.abs().median().alias("apart_ns"))
        .filter(pl.col("len") >= 0.8 * pl.col("len").max().over(pair))
        .sort("apart_ns", maintain_order=True)
        .unique(pair, keep="first", maintain_order=True)
    )
    others = (
        matched.join(fits.select(*pair, "shift"), on=[*pair, "shift"], how="semi")
        .group_by("op")
        .agg(pl.col("other_ns").min(), pl.col("other_ns").max().alias("last_ns"))
    )
    return (
        operators.select("op", "call_ns")
        .join(others, on="op", how="left")
        .select(
            "op",
            first_call_ns=pl.min_horizontal("call_ns", "other_ns"),
            last_call_ns=pl.max_horizontal("call_ns", "last_ns"),
        )
    )


def _cut(curve: pl.DataFrame, calls: pl.DataFrame, bin_ns: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The cuts and pieces of one group: its samples in time order, and the calls that should use it."""
    t_ns = curve["t_ns"].to_numpy()
    net = (curve["bytes"] - curve["retx_bytes"]).to_numpy()
    total = np.cumsum(net)
    op = calls["op"].to_numpy()
    starts, ends, expected, paced = boundaries.cut(
        t_ns,
        total,
        bin_ns,
        calls["first_call_ns"].to_numpy(),
        calls["last_call_ns"].to_numpy(),
        calls["volume"].to_numpy(),
        calls["kind_index"].to_numpy(),
        calls["kind"].is_in(["Group", "Send", "Recv"]).to_numpy(),
    )
    cuts = pl.DataFrame({"op": op, "expected_bytes": expected, "paced": np.full(len(op), paced)})

    # Every edge of a bin or an operator in the cumulated bytes ends a piece.
    edges = np.unique(np.concatenate([total, starts, ends]))
    edges = edges[edges > 0]
    bin_of = np.searchsorted(total, edges, "left")
    # A bin without new bytes (repeats and control only) is a piece of its own.
    silent = np.flatnonzero(net == 0)
    order = np.lexsort((np.r_[np.zeros(len(edges)), np.ones(len(silent))], np.r_[bin_of, silent]))
    bins = np.r_[bin_of, silent][order]
    ended = np.r_[edges, total[silent]][order]
    size = np.r_[np.diff(edges, prepend=0), np.zeros(len(silent), np.int64)][order]
    inside = np.searchsorted(starts, ended, "left") - 1
    belongs = (inside >= 0) & (ended <= ends[np.maximum(inside, 0)]) if len(op) else np.zeros(len(bins), bool)
    # Repeats and control of a bin go with its last piece.
    last = np.r_[bins[1:] != bins[:-1], True] if len(bins) else np.zeros(0, bool)
    retx = np.where(last, curve["retx_bytes"].to_numpy()[bins], 0)
    pieces = pl.DataFrame(
        {
            "op": pl.Series(op[np.maximum(inside, 0)] if len(op) else np.zeros(len(bins)), dtype=U32),
            "t_ns": t_ns[bins],
            "net": size,
            "retx_bytes": retx,
            "ctl_packets": np.where(last, curve["ctl_packets"].to_numpy()[bins], 0),
            "bytes": size + retx,
        }
    ).with_columns(op=pl.when(pl.Series(belongs)).then("op"))
    return cuts.cast({"op": U32}), pieces
