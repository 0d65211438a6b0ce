"""What ports sent and received in one go, by their own narrow bins: rates without knowing whose bytes they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.ports import CONTROL_BYTES, NARROWER
from pulse_bpf.analysis.shape import Longs, weighted

# Wider bins hold several operators and the silences between them.
WIDEST_NS = 1_000_000
# Bins after which what never pauses is taken for another piece: rates change while a port goes on sending.
LONGEST = 16
WHERE = ["node", "nic", "port", "direction"]


def narrowest_bins(operators: pl.DataFrame) -> pl.DataFrame:
    """node, nic, port, direction, seen_ns: the narrowest bins of the `operators` (metrics.OPERATORS) of a port."""
    of_flows = operators.filter(pl.col("level") == "flow")
    return of_flows.group_by(WHERE).agg(pl.col("bin_ns").min().alias("seen_ns"))


def least_of(narrowest: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """What `narrowest_bins` would say of all, where it says `narrowest` of some."""
    return pl.concat(narrowest).group_by(WHERE).agg(pl.col("seen_ns").min())


def port_bursts(samples: pl.DataFrame, narrowest: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Rows of level "port" (metrics.OPERATORS): the pieces, between silent bins, of what ports moved.

    `samples` are port_samples, of which the narrowest bins of each port count, and none where operators on it have bins
    nearly as narrow (`narrowest_bins` of all). A piece has bytes, start_ns, last_byte_ns, active_ns, max_gbps,
    wmed_gbps (the byte-weighted median bin) and bin_ns; it may belong to several operators at once. Bins in which only
    control packets moved are silent.
    """
    seen = least_of(narrowest)
    size = pl.col("bytes") / pl.col("packets")
    rows = (
        samples.drop_nulls(["node", "nic", "direction", "t_ns", "bin_ns", "bytes"])
        .filter(pl.col("bin_ns") > 0, pl.col("bin_ns") <= WIDEST_NS)
        .filter(pl.col("bytes") > 0, (size >= CONTROL_BYTES).fill_null(True))
    )
    ports = (
        rows.group_by(WHERE)
        .agg(pl.col("bin_ns").min())
        .join(seen, on=WHERE, how="left", nulls_equal=True)
        .filter((pl.col("seen_ns") >= NARROWER * pl.col("bin_ns")).fill_null(True))
        .sort(WHERE)
        .drop("seen_ns")
        .with_row_index("where")
    )
    rows = (
        rows.join(ports, on=[*WHERE, "bin_ns"], nulls_equal=True)
        .select("where", "t_ns", pl.col("bin_ns", "bytes").cast(pl.Int64))
        .sort("where", "t_ns")
    )
    follows = (pl.col("t_ns").diff() == pl.col("bin_ns")) & (pl.col("where").diff() == 0)
    begin = np.flatnonzero(~rows.select(follows.fill_null(False)).to_series().to_numpy())
    length = np.diff(begin, append=rows.height)
    # Where each piece of each run begins.
    count = -(-length // LONGEST)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    begin = np.repeat(begin, count) + LONGEST * number
    end = np.append(begin, rows.height)[1:]
    total, most, middle = _rates(rows["bytes"].to_numpy(), begin, end)
    first, last = (rows.select(pl.all().gather(place)) for place in (begin, end - 1))
    pieces = first.select(
        "where",
        bytes=pl.Series(total),
        start_ns="t_ns",
        last_byte_ns=last["t_ns"] + last["bin_ns"],
        active_ns=last["t_ns"] + last["bin_ns"] - first["t_ns"],
        max_gbps=pl.Series(most) * 8 / pl.col("bin_ns"),
        wmed_gbps=pl.Series(middle) * 8 / pl.col("bin_ns"),
        level=pl.lit("port"),
        origin=pl.lit("traffic"),
    ).join(ports, on="where")
    return pieces.select(
        (pl.col(name) if name in pieces.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPERATORS.items()
    )


@compiled
def _rates(size: Longs, begin: Longs, end: Longs) -> tuple[Longs, Longs, Longs]:
    """The sum, the largest and the byte-weighted median of the values from each `begin` to its `end`."""
    total, most, middle = np.zeros_like(begin), np.zeros_like(begin), np.zeros_like(begin)
    scratch = np.empty(LONGEST, np.int64)
    for piece in range(len(begin)):
        count = end[piece] - begin[piece]
        for row in range(count):
            value = size[begin[piece] + row]
            scratch[row] = value
            total[piece] += value
            most[piece] = max(most[piece], value)
        middle[piece] = weighted(scratch, count, 0.5 * total[piece])
    return total, most, middle
