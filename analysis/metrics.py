"""What each operator did on each flow group: times, rates while sending, and silences."""

from __future__ import annotations

import numpy as np
import polars as pl

from pulse_bpf import schema
from pulse_bpf.analysis.boundaries import VOLUME_TOLERANCE, Floats, Longs
from pulse_bpf.analysis.segment import PROCESS, Segments
from pulse_bpf.schema import BOOL, F64, I32, I64, STR, U64

# What localization needs beyond the recording format; see `measure`.
_FURTHER: dict[str, pl.DataType | type[pl.DataType]] = {
    "level": STR,
    "nranks": I32,
    "op_bytes": U64,
    "nccl_seq": U64,
    "burst_gbps": F64,
    "last_byte_ns": I64,
    "covered": BOOL,
    "paced": BOOL,
    "reason": STR,
}
OPERATORS = pl.Schema({**schema.OPERATORS, **_FURTHER})
# A bin counts as active above this share of the flow's 95th percentile: less is a trickle of control data.
ACTIVE_SHARE = 0.2
# A silence is a stall when it is this much of the operator, and long enough in bins not to be one packet's.
STALL_SHARE, STALL_BINS = 0.1, 8
# Bins at full speed that a window for the bursting rate spans: fewer count packets, more hide short bursts.
WINDOW_BINS = 2.0
# Windows of an operator, end to end, below which there is no bursting rate; and in how many windows each byte is.
MIN_WINDOWS, OVERLAP = 3, 4


def measure(
    segments: Segments,
    operators: pl.DataFrame,
    flows: pl.DataFrame,
    rows: pl.DataFrame,
    covered: pl.DataFrame,
) -> pl.DataFrame:
    """The operators table: the columns of the recording format, and these of its own.

    `level`: "flow" for one operator on one flow group; "nic" for one operator and direction of a NIC, summed
    over its peers, where there are several; "call" for an operator that moved no bytes here; "traffic" for bytes
    of a flow group outside every call seen; "unattributed" for bytes of a NIC that belong to no communicator
    (`reason`). All bytes of the samples are in exactly one row of level flow, traffic or unattributed.
    `burst_gbps` is the upper quartile of the rates over windows of equal volume; `last_byte_ns` is known also
    where end_ns is null; `covered`: whether the node's traffic was being watched at the call; `op_bytes`,
    `nccl_seq`, `nranks` are those of the call; `paced` as segment says. Sorted by node, nic, direction, pid,
    program_pos, level, peer_rank.
    """
    groups, pieces = segments.groups, segments.pieces
    operators = _with_coverage(operators, covered)
    window = _window_bytes(groups, pieces)
    pieces = pieces.join(groups.select("group", *PROCESS, "nic", "port", "direction", "bin_ns"), on="group")
    pieces = pieces.join(window, on=PROCESS)
    used = pieces.filter(pl.col("op").is_not_null())
    of_flow = (
        _shape(used, ["group", "op"])
        .join(segments.cuts, on=["group", "op"], how="full", coalesce=True)
        .join(groups.drop("total", "bin_ns", "use"), on="group")
        .drop(*PROCESS, "comm_id", "rank", "gpu")
        .join(operators.drop("root"), on="op")
        .with_columns(level=pl.lit("flow"))
    )
    of_nic = _of_nics(used, of_flow)
    own = pl.concat([of_flow, of_nic], how="diagonal").with_columns(
        pl.col("bytes", "retx_bytes").fill_null(0)
    )
    silent = operators.join(of_flow.filter(pl.col("bytes") > 0), on="op", how="anti").with_columns(
        level=pl.lit("call"), direction=pl.lit("tx"), bytes=pl.lit(0, I64)
    )
    # Where nothing was seen of an operator on any flow, the groups it should use are named by its call's row.
    own = own.filter((pl.col("bytes") > 0) | ~pl.col("op").is_in(silent["op"].implode()))
    own = pl.concat([own, silent.drop("root")], how="diagonal").with_columns(
        origin=pl.coalesce("origin", pl.lit("call"))
    )
    traffic = (
        pieces.filter(pl.col("op").is_null())
        .group_by("group")
        .agg(_totals())
        .join(groups.drop("total", "use"), on="group")
        .with_columns(level=pl.lit("traffic"), origin=pl.lit("traffic"))
    )
    unattributed = (
        rows.join(flows.select("flow", "comm_id", "reason"), on="flow", how="left")
        .filter(pl.col("comm_id").is_null())
        .with_columns(pl.col("reason").fill_null("its queue pair is not listed"))
        .with_columns(pl.col("bytes", "retx_bytes", "ctl_packets").cast(I64).fill_null(0))
        .group_by("node", "nic", "port", "direction", "reason")
        .agg(
            *_totals(),
            pl.col("flow").drop_nulls().unique().sort().alias("flows"),
            pl.col("bin_ns").max(),
        )
        .with_columns(level=pl.lit("unattributed"), origin=pl.lit("traffic"))
    )
    table = pl.concat([_timed(own), traffic, unattributed], how="diagonal_relaxed")
    columns = [
        (pl.col(name) if name in table.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPERATORS.items()
    ]
    return table.select(columns).sort(
        "node", "nic", "direction", "pid", "program_pos", "level", "peer_rank", "peer_node", "reason"
    )


def _with_coverage(operators: pl.DataFrame, covered: pl.DataFrame) -> pl.DataFrame:
    times = covered.group_by("node").agg(pl.col("from_ns").max(), pl.col("to_ns").min())
    inside = pl.col("call_ns").is_between("from_ns", "to_ns").fill_null(False)
    return operators.join(times, on="node", how="left").with_columns(covered=inside).drop("from_ns", "to_ns")


def _totals() -> list[pl.Expr]:
    return [
        pl.col("bytes", "retx_bytes", "ctl_packets").sum(),
        pl.col("t_ns").min().alias("start_ns"),
        (pl.col("t_ns").max() + pl.col("bin_ns").max()).alias("last_byte_ns"),
    ]


def _window_bytes(groups: pl.DataFrame, pieces: pl.DataFrame) -> pl.DataFrame:
    """Per process, the volume of a window for the bursting rate: WINDOW_BINS bins of its fastest flow group.

    The fastest group's is used for all, so that a slow flow is measured over the same volume as a fast one.
    """
    fast = (
        pieces.filter(pl.col("net") > 0)
        .join(groups.select("group", *PROCESS), on="group")
        .group_by(*PROCESS, "group", "t_ns")
        .agg(pl.col("net").sum())
        .group_by(*PROCESS, "group")
        .agg(_weighted(pl.col("net"), 0.25).alias("bin_bytes"))
    )
    return fast.group_by(PROCESS).agg((WINDOW_BINS * pl.col("bin_bytes").max()).alias("window_bytes"))


def _weighted(value: pl.Expr, share: float) -> pl.Expr:
    """The largest value such that bins of at least it hold `share` of all bytes."""
    falling = value.sort(descending=True)
    return falling.filter(falling.cum_sum() >= share * value.sum()).first()


def _shape(pieces: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """Rates, silences and times of each `key`; `pieces` in time order within it."""
    bins = (
        pieces.group_by(*key, "t_ns", maintain_order=True)
        .agg(
            pl.col("net", "retx_bytes", "ctl_packets", "bytes").sum(), pl.col("bin_ns", "window_bytes").max()
        )
        .sort(*key, "t_ns")
    )
    rates = bins.filter(pl.col("net") > 0)
    net, bin_ns, t_ns = pl.col("net"), pl.col("bin_ns").first(), pl.col("t_ns")
    gap = (t_ns - t_ns.shift(1) - bin_ns).clip(0)
    span = t_ns.last() + bin_ns - t_ns.first()
    stall = (gap >= STALL_SHARE * span) & (gap >= STALL_BINS * bin_ns)
    # Only the interior: the first and last bin are cut by when the operator happened to begin and end.
    inner = net.slice(1, pl.len().cast(I64) - 2)
    inner_bins = span / bin_ns - 2
    mean = inner.sum() / inner_bins
    p95 = net.quantile(0.95, "nearest")
    active = net >= ACTIVE_SHARE * p95
    gbps = 8.0 / bin_ns
    shape = rates.group_by(key, maintain_order=True).agg(
        t_ns.first().alias("start_ns"),
        (t_ns.last() + bin_ns).alias("last_byte_ns"),
        bin_ns.alias("bin_ns"),
        (active.sum() * bin_ns).alias("active_ns"),
        (net.filter(active).sum() * gbps / active.sum()).alias("active_gbps"),
        (pl.coalesce(net.sort(descending=True).get(1, null_on_oob=True), net.max()) * gbps).alias(
            "peak_gbps"
        ),
        (net.max() * gbps).alias("max_gbps"),
        (p95 * gbps).alias("p95_gbps"),
        (_weighted(net, 0.5) * gbps).alias("wmed_gbps"),
        pl.when(inner_bins >= 2)
        .then(((inner.cast(F64).pow(2).sum() / inner_bins - mean.pow(2)).clip(0)).sqrt() / mean)
        .alias("bin_cv"),
        gap.sum().alias("gap_unknown_ns"),
        (t_ns - gap).filter(gap > 0).first().alias("first_gap_ns"),
        stall.sum().alias("stalls"),
        gap.filter(stall).sum().alias("stall_ns"),
        (t_ns - gap).filter(stall).first().alias("first_stall_ns"),
        gap.filter(stall).first().alias("first_stall_len_ns"),
        net.cum_sum().shift(1).filter(stall).first().alias("first_stall_bytes"),
    )
    totals = bins.group_by(key).agg(pl.col("bytes", "retx_bytes", "ctl_packets").sum())
    return totals.join(shape, on=key, how="left").join(_burst(rates, key), on=key, how="left")


def _burst(rates: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """`burst_gbps` per key: the upper quartile of the rates over windows of equal volume, each OVERLAP times covered.

    A window is timed from its first byte to its last, bytes spread evenly in a bin. Unlike the rate in a fixed
    bin it does not jump with single packets when a bin holds few. Windows overlap so that how they fall on the
    slices of a collective does not matter: a quarter of them lie inside slices of 4/3 their size. Null below
    MIN_WINDOWS: such an operator is too small for these bins.
    """
    extent = rates.group_by(key, maintain_order=True).agg(
        pl.col("net").sum().alias("volume"), pl.col("window_bytes").first()
    )
    volume = extent["volume"].to_numpy()
    fitting = np.floor(volume / extent["window_bytes"].to_numpy()).astype(np.int64)
    count = np.where(fitting >= MIN_WINDOWS, OVERLAP * (fitting - 1) + 1, 0)
    ends = np.cumsum(rates["net"].to_numpy())
    net, t_ns = rates["net"].to_numpy(), rates["t_ns"].to_numpy()
    width = rates["bin_ns"].cast(I64).to_numpy()
    origin = t_ns[0] if len(t_ns) else 0  # floats are exact near it, not near the epoch
    begin = np.cumsum(volume) - volume
    owner = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    size = (volume / np.maximum(fitting, 1))[owner]
    low = begin[owner] + number * size / OVERLAP
    high = low + size
    first = np.minimum(np.searchsorted(ends, low + 1e-6, "right"), len(ends) - 1)
    last = np.minimum(np.searchsorted(ends, high - 1e-6, "left"), len(ends) - 1)

    def moment(index: Longs, position: Floats) -> Floats:
        share = (position - (ends[index] - net[index])) / net[index]
        return np.asarray((t_ns[index] - origin) + np.clip(share, 0, 1) * width[index])

    duration = moment(last, high) - moment(first, low)
    windows = extent.select(key)[owner].with_columns(gbps=pl.Series(size * 8 / np.maximum(duration, 1)))
    return windows.group_by(key).agg(pl.col("gbps").quantile(0.75, "linear").alias("burst_gbps"))


def _of_nics(used: pl.DataFrame, of_flow: pl.DataFrame) -> pl.DataFrame:
    """One row per operator and direction of a NIC where it talks to several peers."""
    key = ["op", "nic", "port", "direction"]
    several = (
        of_flow.filter(pl.col("bytes") > 0)
        .group_by(key)
        .agg(
            pl.len().alias("peers"),
            pl.col("flows").explode().unique().sort(),
            pl.col("expected_bytes").sum(),
            pl.col("node", "pid", "comm_id", "rank", "nranks", "gpu", "kind", "op_bytes", "nccl_seq").first(),
            pl.col("call_ns", "op_seq", "program_pos", "origin", "paced").first(),
        )
        .filter(pl.col("peers") > 1)
        .drop("peers")
    )
    return _shape(used, key).join(several, on=key).with_columns(level=pl.lit("nic"))


def _timed(own: pl.DataFrame) -> pl.DataFrame:
    """Adds completion, end and what depends on the process's other operators."""
    complete = pl.col("completion") >= 1 - VOLUME_TOLERANCE
    own = own.with_columns(
        # What should have moved may be nothing, and then nothing is known of how much of it has.
        completion=pl.when(pl.col("expected_bytes").is_finite(), pl.col("expected_bytes") > 0).then(
            (pl.col("bytes") - pl.col("retx_bytes").fill_null(0)) / pl.col("expected_bytes")
        ),
        expected_bytes=pl.col("expected_bytes").round().cast(I64),
    )
    own = own.with_columns(
        end_ns=pl.when(complete).then("last_byte_ns"), start_err_ns="bin_ns", end_err_ns="bin_ns"
    )
    process_end = own.group_by(*PROCESS, "program_pos").agg(
        pl.when(pl.col("end_ns").count() > 0).then(pl.col("end_ns").max()).alias("op_end_ns")
    )
    previous = process_end.select(
        *PROCESS, (pl.col("program_pos") + 1).alias("program_pos"), pl.col("op_end_ns").alias("prev_end_ns")
    )
    where = [*PROCESS, "program_pos"]
    return (
        own.join(process_end, on=where, how="left")
        .join(previous, on=where, how="left")
        .with_columns(
            start_lag_ns=pl.col("start_ns") - pl.col("prev_end_ns"),
            tail_ns=pl.col("op_end_ns") - pl.col("end_ns"),
            gap_sender_ns=pl.lit(0, I64),
            gap_receiver_ns=pl.lit(0, I64),
            gap_network_ns=pl.lit(0, I64),
            confidence=pl.when(pl.col("paced").fill_null(False)).then(1.0).otherwise(0.7),
        )
    )
