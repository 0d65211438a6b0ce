"""What ports sent and received in one go, by their own narrow bins: rates without knowing whose bytes they are."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.ports import CONTROL_BYTES, NARROWER

# Wider bins hold several operators and the silences between them.
WIDEST_NS = 1_000_000
# Bins after which what never pauses is taken for another piece: rates change while a port goes on sending.
LONGEST = 16
WHERE = ["node", "nic", "port", "direction"]


def port_bursts(samples: pl.DataFrame, operators: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Rows of level "port" (metrics.OPERATORS): the pieces, between silent bins, of what ports moved.

    `samples` are port_samples, of which the narrowest bins of each port count, and none where the rows of `operators`
    on it have bins nearly as narrow. A piece has bytes, start_ns, last_byte_ns, active_ns, max_gbps, wmed_gbps (the
    byte-weighted median bin) and bin_ns; it may belong to several operators at once. Bins in which only control
    packets moved are silent.
    """
    seen = pl.concat(
        [
            table.filter(pl.col("level") == "flow")
            .group_by(WHERE)
            .agg(pl.col("bin_ns").min().alias("seen_ns"))
            for table in (pl.DataFrame(schema=OPERATORS), *operators)
        ]
    )
    size = pl.col("bytes") / pl.col("packets")
    rows = (
        samples.drop_nulls(["node", "nic", "direction", "t_ns", "bin_ns", "bytes"])
        .filter(pl.col("bin_ns") > 0, pl.col("bin_ns") <= WIDEST_NS)
        .filter(pl.col("bin_ns") == pl.col("bin_ns").min().over(WHERE))
        .join(seen, on=WHERE, how="left")
        .filter((pl.col("seen_ns") >= NARROWER * pl.col("bin_ns")).fill_null(True))
        .filter(pl.col("bytes") > 0, (size >= CONTROL_BYTES).fill_null(True))
        .sort(*WHERE, "t_ns")
    )
    follows = pl.col("t_ns").diff().over(WHERE) == pl.col("bin_ns")
    rows = rows.with_columns(run=(~follows.fill_null(False)).cum_sum())
    rows = rows.with_columns(piece=pl.int_range(pl.len()).over("run") // LONGEST)
    piece = [*WHERE, "run", "piece"]
    gbps = pl.col("bytes") * 8 / pl.col("bin_ns")
    ordered = pl.col("bytes").sort(descending=True)
    middle = ordered.filter(ordered.cum_sum() >= 0.5 * pl.col("bytes").sum()).first()
    pieces = (
        rows.group_by(piece, maintain_order=True)
        .agg(
            pl.col("bytes").sum(),
            pl.col("t_ns").min().alias("start_ns"),
            (pl.col("t_ns") + pl.col("bin_ns")).max().alias("last_byte_ns"),
            pl.col("bin_ns").first(),
            gbps.max().alias("max_gbps"),
            (middle * 8 / pl.col("bin_ns").first()).alias("wmed_gbps"),
        )
        .with_columns(
            active_ns=pl.col("last_byte_ns") - pl.col("start_ns"),
            level=pl.lit("port"),
            origin=pl.lit("traffic"),
        )
    )
    return pieces.select(
        (pl.col(name) if name in pieces.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPERATORS.items()
    )
