"""What each operator did on each flow group: times, rates while sending, and silences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from pulse_bpf import schema
from pulse_bpf.analysis.curves import Longs
from pulse_bpf.analysis.ends import VOLUME_TOLERANCE
from pulse_bpf.analysis.pairing import QP
from pulse_bpf.analysis.samples import PORT, Samples
from pulse_bpf.analysis.segment import KEY
from pulse_bpf.analysis.unsettled import Segments
from pulse_bpf.schema import BOOL, F64, I32, I64, STR, U32, U64

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

LEVELS = ("call", "flow", "nic", "traffic", "unattributed")
# Rows that are made at a time: enough that what it costs to make some does not show, few beside what Python takes.
BLOCK_ROWS = 16384
# When operators ended.
ENDS = pl.Schema({"op": U32, "op_end_ns": I64})
UNLISTED = "its queue pair is not listed"

# Rows are in the order of these.
ORDER = (
    *("node", "nic", "direction", "pid", "program_pos", "level", "peer_rank", "peer_node", "reason"),
    *("peer_nic", "comm_id", "start_ns", "bytes"),
)

# What rows have of the flows whose totals (Segments.totals) they put together.
_OF_TOTALS = (
    pl.col("bytes", "retx_bytes", "ctl_packets").sum(),
    pl.col("first_ns").min().alias("start_ns"),
    (pl.col("last_ns").max() + pl.col("bin_ns").max()).alias("last_byte_ns"),
    pl.col("flow").unique().sort().alias("flows"),
    pl.col("bin_ns").max(),
)


def measure(
    segments: Iterable[Segments], flows: pl.DataFrame, samples: Samples, covered: pl.DataFrame
) -> Iterator[pl.DataFrame]:
    """The operators table of some nodes, about BLOCK_ROWS rows at a time, of which `table` makes one.

    It has the columns of the recording format, and these of its own; `port_bursts` adds rows.
    `level`: "flow" for one operator on one flow group; "nic" for one operator and direction of a NIC, summed
    over its peers, where there are several; "call" for an operator that moved no bytes here; "traffic" for bytes
    of a flow group outside every call seen, burst by burst where it has none, and for control that its source counts as
    data; "unattributed" for bytes of a NIC that belong to no communicator (`reason`). All bytes of the samples are in
    exactly one row of level flow, traffic or unattributed.
    `burst_gbps` is the upper quartile of the rates over windows of equal volume; `last_byte_ns` is known also
    where end_ns is null; `covered`: whether the node's traffic was being watched at the call; `op_bytes`,
    `nccl_seq`, `nranks` are those of the call; `paced` as boundaries.learn says. `byte_mean_ns` is when its bytes moved
    on average; of what is sent, `credits_before` and `credits_during` it are clear-to-sends that came in since the
    operator before and from its first byte to its last, `credit_mean_ns` when the latter did on average: null
    where none did, as with sources that do not tell.
    """
    ends = pl.DataFrame(schema=ENDS)
    for settled in segments:
        unlisted = samples.unlisted
        texts = _texts(settled.operators, settled.groups, flows, unlisted)
        operators = _cast(_with_coverage(settled.operators, covered).drop("root"), texts)
        groups = _cast(settled.groups, texts)
        cuts, sums = settled.cuts, settled.sums
        # In the order of calls, so that some calls at a time have all their rows.
        of_call, of_sum = (_places(operators["op"], frame["op"]) for frame in (cuts, sums))
        in_order, sums_in_order = (np.argsort(place, kind="stable") for place in (of_call, of_sum))
        of_call, of_sum = of_call[in_order], of_sum[sums_in_order]
        filled = np.maximum(np.bincount(of_call, minlength=operators.height), 1).cumsum()
        edges = np.searchsorted(filled, _even(int(filled[-1]))) if len(filled) else [0]
        for begin, end in pairwise([*np.unique(edges), operators.height]):
            here, there = (np.searchsorted(place, [begin, end]) for place in (of_call, of_sum))
            own, ends = _of_calls(
                cuts[in_order[slice(*here)]],
                sums[sums_in_order[slice(*there)]],
                operators[begin:end],
                groups,
                texts,
                ends,
            )
            yield own
        traffic = settled.outside.join(groups.drop("use"), on="group").with_columns(
            bytes=pl.col("net") + pl.col("retx_bytes"),
            last_byte_ns=pl.col("last_ns") + pl.col("bin_ns"),
            level=pl.lit("traffic", texts["level"]),
            origin=pl.lit("traffic", texts["origin"]),
        )
        rest = [traffic, *(_cast(frame, texts) for frame in _of_flows(settled.totals, flows, unlisted))]
        yield _complete(pl.concat(rest, how="diagonal_relaxed"), texts)


def _even(rows: int) -> Longs:
    """Where blocks of about BLOCK_ROWS of so many `rows` begin, none much smaller than another."""
    return np.linspace(0, rows, max(1, round(rows / BLOCK_ROWS)), endpoint=False).astype(np.int64)


def _of_flows(totals: pl.DataFrame, flows: pl.DataFrame, unlisted: pl.DataFrame) -> tuple[pl.DataFrame, ...]:
    """Rows of what flows carried in all that is of no communicator, or what the source could not tell from data."""
    if totals.is_empty():
        return ()
    control = (
        totals.join(flows.filter(pl.col("comm_id").is_not_null()), on="flow")
        .filter(pl.col("direction") != pl.col("data"))
        .group_by(*KEY, "gpu", "peer_pid")
        .agg(_OF_TOTALS)
        .drop("use")
        .with_columns(level=pl.lit("traffic"), origin=pl.lit("traffic"))
    )
    listed = pl.concat([flows.select("flow", *QP, "comm_id", "reason"), unlisted], how="diagonal")
    unattributed = (
        totals.join(listed, on="flow")
        .filter(pl.col("comm_id").is_null())
        .with_columns(pl.col("reason").fill_null(UNLISTED))
        .group_by(*PORT, "reason")
        .agg(_OF_TOTALS)
        .with_columns(level=pl.lit("unattributed"), origin=pl.lit("traffic"))
    )
    return control, unattributed


def _of_calls(
    cuts: pl.DataFrame,
    sums: pl.DataFrame,
    operators: pl.DataFrame,
    groups: pl.DataFrame,
    texts: dict[str, pl.Enum],
    ends: pl.DataFrame,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of the calls `operators`, and `ends` as `_timed` has them."""
    # Calls that no flow carried a byte of have a row of their own, which stands for the groups they should use.
    of_call = _places(operators["op"], cuts["op"])
    carried = np.zeros(operators.height, np.bool_)
    carried[of_call[(cuts["bytes"] > 0).to_numpy()]] = True
    cuts, of_call = cuts.filter(pl.Series(carried[of_call])), of_call[carried[of_call]]
    of_group = _places(groups["group"], cuts["group"])
    of_flow = pl.concat(
        [
            cuts.drop("op", "group"),
            groups.select(*PORT[1:], "peer_pid", "peer_rank", "peer_node", "peer_nic", "flows")[of_group],
            operators[of_call],
        ],
        how="horizontal",
    ).with_columns(
        level=pl.lit("flow", texts["level"]), bin_ns=pl.when(pl.col("start_ns").is_not_null()).then("bin_ns")
    )
    silent = operators.filter(pl.Series(~carried)).with_columns(
        level=pl.lit("call", texts["level"]),
        direction=pl.lit("tx", texts["direction"]),
        bytes=pl.lit(0, I64),
    )
    of_nics = _of_nics(sums, of_flow, operators, groups).with_columns(level=pl.lit("nic", texts["level"]))
    own = pl.concat([of_flow, of_nics, silent], how="diagonal").with_columns(
        origin=pl.coalesce("origin", pl.lit("call", texts["origin"]))
    )
    own, ends = _timed(own, operators, ends)
    return _complete(own.filter("told"), texts), ends


def table(blocks: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """OPERATORS of the `blocks`, which are of the same nodes, in an order that does not depend on how rows came."""
    text = pl.col(blocks[0].select(pl.col(pl.Enum)).columns).cast(STR)
    if len(blocks) == 1:
        return blocks[0][_order(blocks[0])].with_columns(text)
    whole = pl.concat([block.with_columns(text) for block in blocks])
    return whole[_order(_keys(whole))]


def written(path: Path, columns: Collection[str]) -> pl.DataFrame:
    """Some `columns`, those of ORDER among them, of the operators table whose blocks are the rows of the Parquet file
    `path`, in the order of analysis.measure: node by node, and what ports moved last."""
    whole = pl.scan_parquet(path).select(name for name in OPERATORS if name in columns).collect()
    return whole[_order(_keys(whole), pl.col("level") == "port")]


def _keys(whole: pl.DataFrame) -> pl.DataFrame:
    keys = whole.select("origin", *ORDER)
    return _cast(keys, _texts(keys))


def _order(rows: pl.DataFrame, *first: pl.Expr) -> pl.Series:
    return rows.select(pl.arg_sort_by(*first, *ORDER).alias("order"))["order"]


def together(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The operators tables of nodes, given in the order of their names, as one."""
    return pl.concat([pl.DataFrame(schema=OPERATORS), *tables])


def _texts(*frames: pl.DataFrame) -> dict[str, pl.Enum]:
    """Of each column of text in `frames`, and of those that `measure` adds, the values it may have, in order.

    There are few of them, and numbers of these are gathered, joined and sorted faster than text.
    """
    found: dict[str, set[str]] = {}
    for frame in frames:
        for column in frame.select(pl.col(STR)):
            found.setdefault(column.name, set()).update(column.drop_nulls().unique())
    found["level"], found["direction"] = set(LEVELS), {"rx", "tx"}
    found["origin"] |= {"call", "traffic"}
    found["reason"] |= {UNLISTED}
    return {name: pl.Enum(sorted(values)) for name, values in found.items()}


def _cast(frame: pl.DataFrame, texts: dict[str, pl.Enum]) -> pl.DataFrame:
    return frame.cast({name: texts[name] for name, dtype in frame.schema.items() if dtype == STR})


def _complete(frame: pl.DataFrame, texts: dict[str, pl.Enum]) -> pl.DataFrame:
    """`frame` with exactly the columns OPERATORS, text as `texts` has it."""
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(texts.get(name, dtype)).alias(name)
        for name, dtype in OPERATORS.items()
    )


def _places(of: pl.Series, wanted: pl.Series) -> Longs:
    """Where each of the numbers `wanted` is in `of`, which has them all, in order."""
    return np.asarray(np.searchsorted(of.to_numpy(), wanted.to_numpy()), np.int64)


def _with_coverage(operators: pl.DataFrame, covered: pl.DataFrame) -> pl.DataFrame:
    times = covered.group_by("node").agg(pl.col("from_ns").max(), pl.col("to_ns").min())
    inside = pl.col("call_ns").is_between("from_ns", "to_ns").fill_null(False)
    return operators.join(times, on="node", how="left").with_columns(covered=inside).drop("from_ns", "to_ns")


def _of_nics(
    sums: pl.DataFrame, of_flow: pl.DataFrame, operators: pl.DataFrame, groups: pl.DataFrame
) -> pl.DataFrame:
    """One row per operator and direction of a NIC where it talks to several peers."""
    key = ["op", "nic", "port", "direction"]
    ports = groups.select(key[1:])[_places(groups["group"], sums["group"])]
    sums = pl.concat([sums.drop("group", "cut_short"), ports], how="horizontal")
    several = (
        of_flow.filter(pl.col("bytes") > 0)
        .join(sums.select(key), on=key, how="semi")
        .group_by(key)
        .agg(
            pl.len().alias("peers"),
            pl.col("flows").explode().unique().sort(),
            pl.col("expected_bytes").sum(),
            pl.col("cut_short").max(),
            pl.col("paced").min(),
        )
        .filter(pl.col("peers") > 1)
        .drop("peers")
    )
    rows = sums.join(several, on=key)
    of_call = _places(operators["op"], rows["op"])
    return pl.concat([rows.drop("op"), operators.drop("covered")[of_call]], how="horizontal")


def _timed(
    own: pl.DataFrame, operators: pl.DataFrame, ends: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`own` with completion, end and what depends on the operator before of the same process.

    These are among `operators` or in `ends` (ENDS); returned with the ends of operators that none is known to follow.
    """
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
    own_ends = own.group_by("op").agg(pl.col("end_ns").max().alias("op_end_ns"))
    of_calls = operators.select("op", "before", "told", "followed").join(
        own_ends, on="op", how="left", maintain_order="left"
    )
    ends = pl.concat([ends, of_calls.filter(~pl.col("followed") | ~pl.col("told")).select(ENDS.names())])
    of_calls = of_calls.join(
        ends.rename({"op": "before", "op_end_ns": "prev_end_ns"}),
        on="before",
        how="left",
        maintain_order="left",
    )
    ends = ends.join(of_calls.filter("told"), left_on="op", right_on="before", how="anti")
    of_calls = of_calls.select("op_end_ns", "prev_end_ns")
    timed = pl.concat([own, of_calls[_places(operators["op"], own["op"])]], how="horizontal").with_columns(
        start_lag_ns=pl.col("start_ns") - pl.col("prev_end_ns"),
        tail_ns=pl.col("op_end_ns") - pl.col("end_ns"),
        gap_sender_ns=pl.lit(0, I64),
        gap_receiver_ns=pl.lit(0, I64),
        gap_network_ns=pl.lit(0, I64),
        confidence=pl.when(pl.col("paced").fill_null(False)).then(1.0).otherwise(0.7),
        **{name: pl.when(pl.col("credits_during") > 0).then(name) for name in CREDITS},
    )
    return timed, ends
