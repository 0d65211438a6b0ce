"""The training iteration, from the repetition in what each process calls, or else in when traffic flows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from pulse_bpf.analysis.call_numbers import call_numbers
from pulse_bpf.analysis.names import numbered
from pulse_bpf.analysis.repeats import SAME, after, repeats
from pulse_bpf.analysis.traffic_period import traffic_period
from pulse_bpf.schema import F64, I64, STR, U32, U64

# So many processes are looked at first.
SAMPLE = 8
# Less sure than this is nothing found.
LEAST_SURE = 0.25
# Processes begin an iteration closer together than this share of it.
TOGETHER = 0.25

STARTS = pl.Schema(
    {"process": U32, "node": STR, "pid": I64, "iteration": I64, "program_pos": I64, "call_ns": I64}
)
CALLS = pl.Schema(
    {
        "process": U32,
        "program_pos": I64,
        "symbol": U64,
        "unsized": U64,
        "op_bytes": U64,
        "call_ns": I64,
        "row": U32,
    }
)


@dataclass(frozen=True)
class Iteration:
    """The step that a job repeats.

    `period_ns` is the median. `boundaries_ns`: when iterations began, by calls: the median over processes of the
    first call; empty where only traffic tells. `starts` (STARTS): that call of each process, numbered as in calls_of;
    `iteration` counts as boundaries_ns do, null where its clock is too far off, or too few processes were seen.
    `slowed_ns`: how much longer it takes by what was found, None where nothing was or that is not known.
    """

    period_ns: int
    boundaries_ns: list[int]
    confidence: float
    starts: pl.DataFrame
    slowed_ns: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the findings have it."""
        return {
            "period_ns": self.period_ns,
            "slowed_ns": self.slowed_ns,
            "boundaries_ns": self.boundaries_ns,
            "confidence": self.confidence,
        }


def calls_of(operators: pl.DataFrame) -> pl.DataFrame:
    """One row per call of `operators` (metrics.OPERATORS), in program order of each process (CALLS).

    `row` is one of its rows in `operators`; `symbol` stands for communicator, kind and size, `unsized` for the first
    two of them; `process` numbers (node, pid).
    """
    row = np.flatnonzero(operators["program_pos"].is_not_null().to_numpy())
    named = operators.select(
        numbered(operators["node"])(pl.col("node")),
        pl.col("pid").fill_null(-1),
        pl.col("program_pos").cast(I64),
    )[row]
    process, call = call_numbers(*(named[name].to_numpy() for name in ("node", "pid", "program_pos")))
    one = np.zeros(int(call.max(initial=-1)) + 1, np.int64)
    one[call] = np.arange(len(row))
    code = (numbered(operators[name])(pl.col(name)).fill_null(0).cast(U64) for name in ("comm_id", "kind"))
    unsized = (pl.col("comm_id") * 2**32 + pl.col("kind")).hash()
    return (
        operators.select("comm_id", "kind", "op_bytes", "call_ns")[row[one]]
        .with_columns(code)
        .select(
            "op_bytes",
            "call_ns",
            process=pl.Series(process[one]),
            program_pos=named["program_pos"][one],
            row=pl.Series(row[one]),
            symbol=unsized ^ pl.col("op_bytes").fill_null(1).hash(),
            unsized=unsized,
        )
        .select(CALLS.names())
        .cast(CALLS)
    )


def find_iteration(calls: pl.DataFrame, operators: pl.DataFrame) -> Iteration | None:
    """The iteration of the job that most processes belong to; None where nothing repeats or too little was seen.

    `calls` as calls_of has them of `operators`. Assumes that an iteration has a call, or three in a row, that are not
    made elsewhere in it (the average of the loss, the last bucket of gradients). Where there are no calls, or those of
    a process are all alike, assumes that the rhythm of the traffic is the iteration.
    """
    for symbol in ("symbol", "unsized"):
        named = calls.select("process", "program_pos", "call_ns", "op_bytes", "row", symbol=symbol)
        found = _from_calls(named, operators)
        if found is not None and found.confidence >= LEAST_SURE:
            return found
    different = calls.group_by("process").agg(pl.col("symbol").n_unique())["symbol"]
    period = traffic_period(operators) if (different.max() or 0) < 2 else None  # type: ignore[operator]
    return None if period is None else Iteration(period[0], [], period[1], pl.DataFrame(schema=STARTS))


def _from_calls(calls: pl.DataFrame, operators: pl.DataFrame) -> Iteration | None:
    processes = calls["process"].n_unique()
    some = np.unique(np.linspace(0, processes - 1, SAMPLE).astype(np.uint32))
    # What a job repeats shows in a few of its processes, if they have a call in common that begins it.
    found = repeats(calls.filter(pl.col("process").is_in(some.tolist()))) if processes > 2 * SAMPLE else None
    if found is not None and found.shared is not None:
        starts = after(calls, pl.col("symbol") == found.shared)
    else:
        found = repeats(calls)
        starts = found.starts
    if found.period_ns is None:
        return None
    period_ns = found.period_ns
    counts = starts.group_by("process").len("starts").with_columns(pl.col("starts").cast(F64))
    usual = counts.select(pl.col("starts").median()).item()
    near = counts.filter((pl.col("starts") - usual).abs() <= max(1.0, 2 * SAME * usual))
    clustered = (
        starts.join(near, on="process", how="semi")
        .sort("call_ns")
        .with_columns(
            iteration=(pl.col("call_ns").diff().fill_null(0) > TOGETHER * period_ns).cum_sum().cast(I64)
        )
    )
    together = clustered.group_by("iteration").agg(
        pl.col("call_ns").median().cast(I64).alias("at_ns"),
        pl.len().alias("count"),
        pl.col("process").n_unique().alias("processes"),
    )
    # The first and last iteration may be cut, the others have each process once.
    full = together.filter(2 * pl.col("processes") > near.height).sort("iteration")
    if full.is_empty():
        return None
    pure = full.select(pl.col("processes").sum() / pl.col("count").sum()).item()
    numbers = full.select("iteration").with_row_index("number")
    numbered = clustered.join(numbers, on="iteration", how="left").sort("process", "program_pos")
    where = operators.select("node", "pid")[numbered["row"]]
    return Iteration(
        period_ns,
        full["at_ns"].to_list(),
        round(found.confidence * pure * near.height / processes, 3),
        numbered.with_columns(where, iteration=pl.col("number")).select(STARTS.names()).cast(STARTS),
    )
