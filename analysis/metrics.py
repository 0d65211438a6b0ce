"""What each operator did on each flow group: times, rates while sending, and silences."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from pulse_bpf import schema
from pulse_bpf.analysis.ends import VOLUME_TOLERANCE
from pulse_bpf.analysis.pairing import QP
from pulse_bpf.analysis.samples import PORT
from pulse_bpf.analysis.segment import KEY, PROCESS
from pulse_bpf.analysis.stream import Segments
from pulse_bpf.schema import BOOL, F64, I32, I64, STR, U64

CREDITS = ("credits_before", "credits_during", "credit_mean_ns")
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
    "byte_mean_ns": I64,
    "credits_before": I64,
    "credits_during": I64,
    "credit_mean_ns": I64,
}
OPERATORS = pl.Schema({**schema.OPERATORS, **_FURTHER})


def measure(
    segments: Segments,
    operators: pl.DataFrame,
    flows: pl.DataFrame,
    unlisted: pl.DataFrame,
    covered: pl.DataFrame,
) -> pl.DataFrame:
    """The operators table: the columns of the recording format, and these of its own; `port_bursts` adds rows.

    `level`: "flow" for one operator on one flow group; "nic" for one operator and direction of a NIC, summed
    over its peers, where there are several; "call" for an operator that moved no bytes here; "traffic" for bytes
    of a flow group outside every call seen, and for control that its source counts as data; "unattributed" for bytes of
    a NIC that belong to no communicator (`reason`). All bytes of the samples are in exactly one row of level flow,
    traffic or unattributed.
    `burst_gbps` is the upper quartile of the rates over windows of equal volume; `last_byte_ns` is known also
    where end_ns is null; `covered`: whether the node's traffic was being watched at the call; `op_bytes`,
    `nccl_seq`, `nranks` are those of the call; `paced` as boundaries.learn says. `byte_mean_ns` is when its bytes moved
    on average; of what is sent, `credits_before` and `credits_during` it are clear-to-sends that came in since the
    operator before and from its first byte to its last, `credit_mean_ns` when the latter did on average: null
    where none did, as with sources that do not tell.
    """
    operators = _with_coverage(operators, covered).drop("root")
    of_flow = (
        segments.cuts.join(segments.groups.drop("bin_ns", "use"), on="group")
        .drop(*PROCESS, "comm_id", "rank", "gpu")
        .join(operators, on="op")
        .with_columns(level=pl.lit("flow"), bin_ns=pl.when(pl.col("start_ns").is_not_null()).then("bin_ns"))
    )
    own = pl.concat([of_flow, _of_nics(segments.sums, of_flow)], how="diagonal")
    silent = operators.join(of_flow.filter(pl.col("bytes") > 0), on="op", how="anti").with_columns(
        level=pl.lit("call"), direction=pl.lit("tx"), bytes=pl.lit(0, I64)
    )
    # Where nothing was seen of an operator on any flow, the groups it should use are named by its call's row.
    own = own.filter((pl.col("bytes") > 0) | ~pl.col("op").is_in(silent["op"].implode()))
    own = pl.concat([own, silent], how="diagonal").with_columns(origin=pl.coalesce("origin", pl.lit("call")))
    traffic = segments.outside.join(segments.groups.drop("use"), on="group").with_columns(
        bytes=pl.col("net") + pl.col("retx_bytes"),
        last_byte_ns=pl.col("last_ns") + pl.col("bin_ns"),
        level=pl.lit("traffic"),
        origin=pl.lit("traffic"),
    )
    # What the source could not tell from data.
    control = (
        segments.totals.join(flows.filter(pl.col("comm_id").is_not_null()), on="flow")
        .filter(pl.col("direction") != pl.col("data"))
        .group_by(*KEY, "gpu", "peer_pid")
        .agg(
            pl.col("bytes", "retx_bytes", "ctl_packets").sum(),
            pl.col("first_ns").min().alias("start_ns"),
            (pl.col("last_ns").max() + pl.col("bin_ns").max()).alias("last_byte_ns"),
            pl.col("flow").unique().sort().alias("flows"),
            pl.col("bin_ns").max(),
        )
        .drop("use")
        .with_columns(level=pl.lit("traffic"), origin=pl.lit("traffic"))
    )
    listed = pl.concat([flows.select("flow", *QP, "comm_id", "reason"), unlisted], how="diagonal")
    unattributed = (
        segments.totals.join(listed, on="flow")
        .filter(pl.col("comm_id").is_null())
        .with_columns(pl.col("reason").fill_null("its queue pair is not listed"))
        .group_by(*PORT, "reason")
        .agg(
            pl.col("bytes", "retx_bytes", "ctl_packets").sum(),
            pl.col("first_ns").min().alias("start_ns"),
            (pl.col("last_ns").max() + pl.col("bin_ns").max()).alias("last_byte_ns"),
            pl.col("flow").unique().sort().alias("flows"),
            pl.col("bin_ns").max(),
        )
        .with_columns(level=pl.lit("unattributed"), origin=pl.lit("traffic"))
    )
    table = pl.concat([_timed(own), traffic, control, unattributed], how="diagonal_relaxed")
    return table.select(
        (pl.col(name) if name in table.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPERATORS.items()
    )


def in_order(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The operators tables of some nodes as one, in an order that does not depend on how they came."""
    columns = ["node", "nic", "direction", "pid", "program_pos", "level", "peer_rank", "peer_node", "reason"]
    table = pl.concat([pl.DataFrame(schema=OPERATORS), *tables])
    return table.sort(*columns, "peer_nic", "comm_id", "start_ns")


def _with_coverage(operators: pl.DataFrame, covered: pl.DataFrame) -> pl.DataFrame:
    times = covered.group_by("node").agg(pl.col("from_ns").max(), pl.col("to_ns").min())
    inside = pl.col("call_ns").is_between("from_ns", "to_ns").fill_null(False)
    return operators.join(times, on="node", how="left").with_columns(covered=inside).drop("from_ns", "to_ns")


def _of_nics(sums: pl.DataFrame, of_flow: pl.DataFrame) -> pl.DataFrame:
    """One row per operator and direction of a NIC where it talks to several peers."""
    key = ["op", "nic", "port", "direction"]
    several = (
        of_flow.filter(pl.col("bytes") > 0)
        .group_by(key)
        .agg(
            pl.len().alias("peers"),
            pl.col("flows").explode().unique().sort(),
            pl.col("expected_bytes").sum(),
            pl.col("cut_short").max(),
            pl.col("node", "pid", "comm_id", "rank", "nranks", "gpu", "kind", "op_bytes", "nccl_seq").first(),
            pl.col("call_ns", "op_seq", "program_pos", "origin", "paced").first(),
        )
        .filter(pl.col("peers") > 1)
        .drop("peers")
    )
    return sums.drop("node", "cut_short").join(several, on=key).with_columns(level=pl.lit("nic"))


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
        end_ns=pl.when(complete | (pl.col("cut_short") == 1)).then("last_byte_ns"),
        start_err_ns="bin_ns",
        end_err_ns="bin_ns",
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
            **{name: pl.when(pl.col("credits_during") > 0).then(name) for name in CREDITS},
        )
    )
