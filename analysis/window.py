"""One part of a recording: the operators that were under way in it, each whole, and what else was noted meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import polars as pl

from pulse_bpf.errors import UsageError

# Moments below this are counted from the recording's start, from this on since the Unix epoch (it is in 2001).
EPOCH_NS = 1_000_000_000_000_000_000


class Window(NamedTuple):
    """From when to when, in ns from the recording's start or since the Unix epoch; None: as long as it goes."""

    since_ns: int | None
    until_ns: int | None


def resolved(window: Window, whole: tuple[int, int]) -> tuple[int, int]:
    """The first and last moment of `window`, in ns since the epoch, of a recording that lasts as `whole` says.

    UsageError where nothing of the recording is in it.
    """
    first_ns, last_ns = whole
    since_ns, until_ns = (
        usual if moment is None else moment if moment >= EPOCH_NS else first_ns + moment
        for moment, usual in zip(window, whole, strict=True)
    )
    if None not in window and since_ns >= until_ns:
        raise UsageError("--window ends before it begins", "", "Give it as A..B, for example 2s..5s")
    if since_ns >= last_ns or until_ns <= first_ns:
        raise UsageError(
            "nothing was recorded in that --window",
            f"the recording lasts {(last_ns - first_ns) / 1e9:.3f} s, from {first_ns} to {last_ns} ns",
            "Give times in it, for example 0s..1s",
        )
    return max(since_ns, first_ns), min(until_ns, last_ns)


def operators_in(aligned: pl.DataFrame, first_ns: int, last_ns: int) -> pl.DataFrame:
    """The operators in `aligned` (align.align) that any rank was busy with between these moments.

    Each is kept whole, on all its ranks: what it moved before or afterwards too, so that none looks cut short. An
    operator without traffic is at its call. Bytes outside calls are taken to be spread evenly over their time.
    """
    aligned = aligned.with_row_index("row")
    called = pl.col("program_pos").is_not_null()
    begin, end = pl.coalesce("start_ns", "call_ns"), pl.coalesce("last_byte_ns", "call_ns")
    one = ["comm_id", "step"]
    # Where ranks could not be matched each has operators of its own.
    own = ["node", "pid", "program_pos"]
    busy = aligned.filter(called).with_columns(
        begin=pl.when(pl.col("step").is_null()).then(begin.min().over(own)).otherwise(begin.min().over(one)),
        end=pl.when(pl.col("step").is_null()).then(end.max().over(own)).otherwise(end.max().over(one)),
    )
    busy = busy.filter(pl.col("begin") < last_ns, pl.col("end") >= first_ns).drop("begin", "end")
    length = (pl.col("last_byte_ns") - pl.col("start_ns")).clip(1)
    inside = (pl.col("last_byte_ns").clip(upper_bound=last_ns) - pl.col("start_ns").clip(first_ns)).clip(0)
    share = (inside / length).clip(0, 1)
    other = aligned.filter(~called).with_columns(
        ((pl.col(name) * share).round().cast(aligned.schema[name]) for name in ("bytes", "retx_bytes")),
        start_ns=pl.col("start_ns").clip(first_ns),
        last_byte_ns=pl.col("last_byte_ns").clip(upper_bound=last_ns),
    )
    return pl.concat([busy, other.filter(share > 0)]).sort("row").drop("row")


def tables_in(tables: Mapping[str, pl.DataFrame], first_ns: int, last_ns: int) -> dict[str, pl.DataFrame]:
    """`tables` with only the events and readings between these moments, and coverage that ends there.

    Which events were lost when is not recorded: all of them count.
    """
    now = pl.col("t_ns").is_between(first_ns, last_ns)
    coverage = tables["coverage"].with_columns(
        first_ns=pl.col("first_ns").clip(first_ns), last_ns=pl.col("last_ns").clip(upper_bound=last_ns)
    )
    cut = {name: tables[name].filter(now) for name in ("events", "port_counters") if name in tables}
    return {**tables, **cut, "coverage": coverage.filter(pl.col("first_ns") <= pl.col("last_ns"))}
