"""Rate curves as points of counters: where a queue pair's rate changes, in bins as wide as a bounded trace takes."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from pulse_bpf.analysis.samples import Batch
from pulse_bpf.schema import F64, I64, U8, U32, U64

POINTS = pl.Schema({"flow": U64, "tx": U8, "t_ns": I64, "gbps": F64})
_BINS = pl.Schema({"flow": U64, "tx": U8, "bin_ns": U32, "phase_ns": I64, "bin": I64, "bytes": U64})


def points(batches: Iterable[Batch], first_ns: int, last_ns: int, most: int) -> tuple[pl.DataFrame, int]:
    """POINTS between two moments, by flow, direction and time: the rate is `gbps` from `t_ns` to the next point.

    A missing bin is a rate of 0, as the recording format says it is where a source was watching. Where there are more
    than `most` bins, two and two become one until there are fewer: also returns of how many each consists. The bytes
    of each curve stay what they are. Holds no more than twice as many bins, and one batch.
    """
    wide, bins = 1, pl.DataFrame(schema=_BINS)
    waiting, rows = [bins], 0
    for batch in batches:
        inside = batch.rows.filter(pl.col("t_ns").is_between(first_ns, last_ns), pl.col("bytes") > 0)
        waiting.append(_binned(inside, wide))
        rows += waiting[-1].height
        if rows > most:
            bins = _summed(waiting)
            while bins.height > most and bins["bin"].max() != 0:
                wide *= 2
                bins = _summed([bins.with_columns(pl.col("bin") // 2)])
            waiting, rows = [bins], bins.height
    return _changes(_summed(waiting), wide), wide


def _binned(rows: pl.DataFrame, wide: int) -> pl.DataFrame:
    """Rows of samples.BATCH as _BINS; t_ns of a source is its phase and a multiple of bin_ns."""
    width = pl.col("bin_ns").cast(I64)
    return rows.select(
        "flow",
        "tx",
        "bin_ns",
        phase_ns=pl.col("t_ns") % width,
        bin=pl.col("t_ns") // width // wide,
        bytes="bytes",
    )


def _summed(frames: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(frames).group_by("flow", "tx", "bin_ns", "phase_ns", "bin").agg(pl.col("bytes").sum())


def _changes(bins: pl.DataFrame, wide: int) -> pl.DataFrame:
    width = pl.col("bin_ns").cast(I64) * wide
    rates = bins.select(
        "flow",
        "tx",
        t_ns=pl.col("bin") * width + pl.col("phase_ns"),
        end_ns=(pl.col("bin") + 1) * width + pl.col("phase_ns"),
        gbps=8 * pl.col("bytes") / width,
    ).sort("flow", "tx", "t_ns")
    curve = ["flow", "tx"]
    pauses = (
        rates.with_columns(next_ns=pl.col("t_ns").shift(-1).over(curve))
        .filter(pl.col("next_ns").is_null() | (pl.col("next_ns") > pl.col("end_ns")))
        .select(*curve, t_ns="end_ns", gbps=pl.lit(0.0))
    )
    both = pl.concat([rates.drop("end_ns"), pauses]).sort(*curve, "t_ns")
    return both.filter(pl.col("gbps").ne_missing(pl.col("gbps").shift().over(curve))).cast({"gbps": F64})
