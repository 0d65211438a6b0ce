"""Cutting the rate curve of each flow group into operators, by the volumes and times of the process's calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.schema import F64, I32, I64, U32, U64

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]

PROCESS = ["node", "pid"]
PORT = ["node", "nic", "port", "direction"]
# An operator is complete when all but this share of its bytes were seen: more would hide its last message.
VOLUME_TOLERANCE = 0.004
# A process that waits for each operator moves between two calls what the first needs, to this accuracy.
PACED_TOLERANCE = 0.02

PIECES = pl.Schema(
    {"group": U32, "op": U32, "t_ns": I64, "net": I64, "retx_bytes": I64, "ctl_packets": I64, "bytes": I64}
)
CUTS = pl.Schema({"group": U32, "op": U32, "expected_bytes": F64, "paced": pl.Boolean})


@dataclass(frozen=True)
class Segments:
    """`groups`: flow groups, one per (process, communicator, NIC, peer, direction), numbered by `group`.

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
    key = [*PROCESS, "nic", "port", "comm_id", "rank", "peer_rank", "peer_node", "peer_nic", "direction"]
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
    kinds = operators["kind"].unique().sort().to_list()
    expected = expected.with_columns(
        kind_index=pl.col("kind").replace_strict(kinds, range(len(kinds)), return_dtype=I32)
    )
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
    pairs = pairs.with_columns(direct=direct, ring=ring)
    # Who the ring's neighbours are shows in which peers carry more than the direct transfers explain. The
    # shares of a group in the ring's traffic are taken to be the same for all its operators.
    rest = pairs.group_by("group", *PROCESS, "comm_id", "direction").agg(
        (pl.col("total").first() - pl.col("direct").sum()).clip(0).alias("rest")
    )
    where = [*PROCESS, "comm_id", "direction"]
    rest = rest.filter(pl.col("rest") >= 0.25 * pl.col("rest").max().over(where))
    share = rest.select("group", share=pl.col("rest") / pl.col("rest").sum().over(where))
    # Several NICs to one peer share its direct transfers the same way.
    lane = pl.col("total") / pl.col("total").sum().over("op", "direction", "peer_rank", "peer_node")
    return (
        pairs.with_columns(lane=lane)
        .join(share, on="group", how="left")
        .with_columns(
            volume=pl.col("direct") * pl.col("lane")
            + pl.col("ring") * pl.col("share").fill_nan(0).fill_null(0)
        )
        .filter(pl.col("volume") > 0)
        .sort("group", "program_pos")
        .select("group", "op", "kind", "call_ns", "volume")
    )


def _cut(curve: pl.DataFrame, calls: pl.DataFrame, bin_ns: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The cuts and pieces of one group: its samples in time order, and the calls that should use it."""
    t_ns = curve["t_ns"].to_numpy()
    net = (curve["bytes"] - curve["retx_bytes"]).to_numpy()
    total = np.cumsum(net)
    op = calls["op"].to_numpy()
    starts, ends, expected, paced = _boundaries(
        t_ns,
        total,
        bin_ns,
        calls["call_ns"].to_numpy(),
        calls["volume"].to_numpy(),
        calls["kind_index"].to_numpy(),
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


def _boundaries(
    t_ns: Longs, total: Longs, bin_ns: int, call_ns: Longs, volume: Floats, kind: NDArray[Any]
) -> tuple[Longs, Longs, Floats, bool]:
    """Start and end of each operator in cumulated bytes, the bytes it should have, and whether calls pace it.

    Bytes in bins that ended before an operator's call are not its own: this is what brings the cut back in step
    after a partial operator or lost samples. `paced`: the process waits for each operator before the next call, so
    the bytes between two calls are the first one's. Otherwise calls run ahead, and operators follow each other
    by volume; where the first begins is then found by matching boundaries with silences.
    """
    if len(call_ns) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), False
    before = np.r_[0, total]
    low = before[np.searchsorted(t_ns + bin_ns, call_ns, "right")]
    high = before[np.searchsorted(t_ns, call_ns + bin_ns, "right")]
    sizes = np.sort(np.diff(before))
    # Half of all bytes are in bins of at least this size.
    bin_bytes = float(sizes[np.searchsorted(np.cumsum(sizes), total[-1] / 2)])
    factor, paced = _learn(low, volume, kind, bin_bytes)
    if paced:
        expected = volume * factor
        starts = np.empty(len(low))
        at = low[0]
        for index in range(len(low)):
            # Where the volume so far ends away from the call, bytes are missing or unknown: the call settles it.
            starts[index] = at = at if low[index] <= at <= high[index] else low[index]
            at += expected[index]
    else:
        # All traffic against all volumes is the factor if the recording ends with the last operator.
        factors = {1.0, float(np.clip((total[-1] - low[0]) / volume.sum(), 1.0, 2.2))}
        fits = [
            (*_first_offset(t_ns, total, bin_ns, low, volume * value), value) for value in sorted(factors)
        ]
        _, offset, chosen = max(fits, key=lambda fit: fit[0])
        expected = volume * chosen
        position = offset + np.r_[0, np.cumsum(expected)[:-1]]
        starts = position + np.maximum.accumulate(np.maximum(low - position, 0))
    starts = np.minimum(np.round(starts), total[-1]).astype(np.int64)
    following = np.r_[starts[1:], total[-1]]
    ends = np.minimum(np.round(starts + expected).astype(np.int64), following)
    # What exceeds the volume only slightly is still the operator's, a repeat that was not seen as one.
    ends = np.where(following - ends <= PACED_TOLERANCE * expected, following, ends) if paced else ends
    return starts, ends, expected, paced


def _learn(low: Longs, volume: Floats, kind: NDArray[Any], bin_bytes: float) -> tuple[Floats, bool]:
    """The bytes on the wire per expected byte of each operator, by kind, and whether the process is paced."""
    ratio = np.diff(low) / volume[:-1]
    usable = volume[:-1] >= 8 * bin_bytes
    factor = np.ones(len(volume))
    agreeing = 0
    for number in np.unique(kind[:-1][usable]):
        chosen = usable & (kind[:-1] == number)
        middle = float(np.median(ratio[chosen]))
        if not 0.9 <= middle <= 2.2:
            continue
        near = np.abs(ratio - middle) <= PACED_TOLERANCE * middle + 2 * bin_bytes / volume[:-1]
        agreeing += int((near & chosen).sum())
        spread = float(np.median(np.abs(ratio[chosen] - middle)))
        if abs(middle - 1) > max(VOLUME_TOLERANCE, 3 * spread):
            factor[kind == number] = middle
    paced = int(usable.sum()) >= 3 and agreeing >= 0.6 * int(usable.sum())
    return (factor if paced else np.ones(len(volume))), paced


def _first_offset(
    t_ns: Longs, total: Longs, bin_ns: int, low: Longs, expected: Floats
) -> tuple[float, float]:
    """Where in the cumulated bytes the first operator begins, and how well that fits, from 0 to 1.

    Bytes of earlier, unseen calls may precede it. The place where most operators then end in a silence is taken,
    if it is clearly better than the earliest that the calls allow.
    """
    position = np.r_[0, np.cumsum(expected)[:-1]]
    earliest = float(np.max(low - position))
    ends = earliest + position + expected
    silences = total[:-1][np.diff(t_ns) > bin_ns]
    if len(silences) < 2:
        return 0.0, earliest
    later = silences[np.searchsorted(silences, earliest) :][:256]
    offsets = np.unique(np.r_[0.0, (later[:, None] - ends[None, :4]).ravel()])
    offsets = offsets[offsets >= 0]
    moved = ends[None, :] + offsets[:, None]
    after = np.clip(np.searchsorted(silences, moved), 1, len(silences) - 1)
    distance = np.minimum(np.abs(silences[after] - moved), np.abs(silences[after - 1] - moved))
    inside = moved < total[-1]
    hits = ((distance <= VOLUME_TOLERANCE * expected) & inside).sum(1) / np.maximum(inside.sum(1), 4)
    best = int(np.argmax(hits))
    if hits[best] >= 0.8 and hits[best] > hits[0] + 0.2:
        return float(hits[best]), earliest + float(offsets[best])
    return float(hits[0]), earliest
