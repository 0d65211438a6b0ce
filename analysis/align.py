"""Which operators of different ranks are one and the same."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

# Recorders attach to the ranks of a job one after the other; more operators than this do not pass meanwhile.
MAX_SHIFT = 16
# How much a constant distance in time counts, which may be that of two clocks, beside one that varies.
CLOCKS = 0.1


def align(operators: pl.DataFrame) -> pl.DataFrame:
    """`operators` with `step` (i64): equal for rows of one operator of a communicator on all its ranks.

    NCCL's own number is taken where every rank has it. Otherwise each rank's observed sequence is shifted against
    that of the rank with most, so that kinds and sizes agree and calls are at most evenly apart in time: this
    assumes that calls are uneven in time, or that the clocks of the nodes differ by less than half the time between
    equal operators, and fails for point-to-point calls that only some ranks make. `step` is null where no shift
    fits, and in rows without a call.
    """
    calls = (
        operators.filter(pl.col("op_seq").is_not_null(), pl.col("rank").is_not_null())
        .select("comm_id", "rank", "op_seq", "kind", "op_bytes", "call_ns", "nccl_seq")
        .unique(["comm_id", "rank", "op_seq"])
        .sort("comm_id", "rank", "op_seq")
        .with_columns(what=pl.struct("kind", "op_bytes").rank("dense"))
    )
    shifts: list[tuple[str, int, int]] = []
    numbered = [comm for (comm,), frame in calls.group_by("comm_id") if not frame["nccl_seq"].null_count()]
    for (comm,), frame in calls.filter(~pl.col("comm_id").is_in(numbered)).group_by("comm_id"):
        ranks = {rank: part for (rank,), part in frame.partition_by("rank", as_dict=True).items()}
        reference = max(ranks, key=lambda rank: (ranks[rank].height, -rank))
        for rank, part in ranks.items():
            shift = _shift(_arrays(part), _arrays(ranks[reference]))
            if shift is not None:
                shifts.append((str(comm), int(rank), shift))
    table = pl.DataFrame(
        shifts, schema={"comm_id": pl.String, "rank": pl.Int32, "shift": pl.Int64}, orient="row"
    )
    own = pl.col("op_seq").cast(pl.Int64) + pl.col("shift")
    theirs = pl.when(pl.col("comm_id").is_in(numbered)).then(pl.col("nccl_seq").cast(pl.Int64))
    return (
        operators.join(table, on=["comm_id", "rank"], how="left")
        .with_columns(step=pl.coalesce(theirs, own))
        .drop("shift")
    )


def _arrays(part: pl.DataFrame) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    return part["what"].to_numpy(), part["call_ns"].to_numpy()


def _shift(
    part: tuple[NDArray[np.uint32], NDArray[np.int64]], other: tuple[NDArray[np.uint32], NDArray[np.int64]]
) -> int | None:
    """By how much the first sequence's numbers must grow to match the second's; None when no shift fits."""
    what, call_ns = part
    other_what, other_call_ns = other
    best: tuple[float, int] | None = None
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        begin, end = max(0, shift), min(len(other_what), len(what) + shift)
        if end <= begin:
            continue
        mine, theirs = slice(begin - shift, end - shift), slice(begin, end)
        if not np.array_equal(what[mine], other_what[theirs]):
            continue
        # The mean, since calls come in volleys: next to it, only those at the edge of a volley are far apart.
        later = call_ns[mine] - other_call_ns[theirs]
        usual = float(np.median(later))
        apart = float(np.mean(np.abs(later - usual))) + CLOCKS * abs(usual)
        if best is None or apart < best[0]:
            best = (apart, shift)
    return best[1] if best else None
