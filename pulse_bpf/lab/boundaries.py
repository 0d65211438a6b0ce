"""How far the starts and ends of operators that an analysis derives are from the true ones."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

# One operator in one direction between two ranks; its channels count as one.
KEY = ["node", "nic", "direction", "pid", "comm_id", "op_seq", "peer_rank"]


@dataclass(frozen=True)
class Boundaries:
    """Counts of operators: `true` ones, those of them `found` with start and end, and how far off these are.

    An operator of a communicator counts once per direction and peer. Distances are in bins of the recording.
    """

    true: int
    found: int
    starts_within_1: int
    starts_within_3: int
    ends_within_1: int
    ends_within_3: int


def compare(operators: pl.DataFrame, truth: pl.DataFrame) -> Boundaries:
    """The derived `operators` (schema.OPERATORS) beside `truth` (truth_operators.parquet).

    Only operators that ended and whose call was recorded are true ones. Both number the calls seen of each process
    on a communicator (op_seq) alike, with all point-to-point calls of a group as one.
    """
    real = (
        truth.filter(pl.col("bytes") > 0)
        .group_by(KEY)
        .agg(
            pl.col("start_ns").min().alias("true_start_ns"),
            pl.when(pl.col("end_ns").null_count() == 0).then(pl.col("end_ns").max()).alias("true_end_ns"),
        )
        .drop_nulls(["op_seq", "true_start_ns", "true_end_ns"])
    )
    derived = (
        operators.drop_nulls(["start_ns", "end_ns"])
        .group_by(KEY)
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max(), pl.col("bin_ns").max())
    )
    both = real.join(derived, on=KEY).select(
        start=(pl.col("start_ns") - pl.col("true_start_ns")).abs() / pl.col("bin_ns"),
        end=(pl.col("end_ns") - pl.col("true_end_ns")).abs() / pl.col("bin_ns"),
    )
    within = both.select(
        *((pl.col(side) <= bins).sum().alias(f"{side}{bins}") for side in ("start", "end") for bins in (1, 3))
    ).row(0)
    return Boundaries(real.height, both.height, *within)
