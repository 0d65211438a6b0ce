"""Which operators of different ranks are one and the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

# Recorders attach to the ranks of a job one after the other; more operators than this do not pass meanwhile.
MAX_SHIFT = 16
# Two-sided calls, of which both ends move the same, to this accuracy.
TWO_SIDED, SAME_BYTES = ("Send", "Recv", "Group"), 0.01
# How much a constant distance in time counts, which may be that of two clocks, beside one that varies.
CLOCKS = 0.1


def align(operators: pl.DataFrame) -> pl.DataFrame:
    """`operators` with `step` (i64): equal for rows of one operator of a communicator on all its ranks.

    NCCL's own number is taken where every rank has it. Otherwise each rank's observed sequence is shifted against
    that of another, so that kinds and sizes agree, what one sends is what the other gets, and calls are at most evenly
    apart in time: this assumes that volumes or the times between calls are uneven, or that the clocks of the nodes
    differ by less than half the time between equal operators, and fails for point-to-point calls that only some ranks
    make. `step` is null where no shift fits, and in rows without a call.
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
    moved = _moved(operators)
    for (comm,), frame in calls.filter(~pl.col("comm_id").is_in(numbered)).group_by("comm_id"):
        ranks = {
            int(rank): _Sequence(
                part["what"].to_numpy(),
                part["call_ns"].to_numpy(),
                {
                    key: part.join(bytes_of, on="op_seq", how="left", maintain_order="left")[
                        "bytes"
                    ].to_numpy()
                    for key, bytes_of in moved.get((comm, rank), {}).items()
                },
            )
            for (rank,), part in frame.partition_by("rank", as_dict=True).items()
        }
        shifts += [(str(comm), rank, shift) for rank, shift in _shifts(ranks).items()]
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


class _Sequence(NamedTuple):
    """The operators of a rank in order: `what` they are, call_ns, and bytes by (peer, direction), NaN where none."""

    what: NDArray[np.uint32]
    call_ns: NDArray[np.int64]
    moved: dict[tuple[int, str], NDArray[np.float64]]


def _moved(operators: pl.DataFrame) -> dict[tuple[str, int], dict[tuple[int, str], pl.DataFrame]]:
    """By (comm_id, rank) and (peer, direction): op_seq and bytes that point-to-point operators should move."""
    rows = (
        operators.filter(pl.col("kind").is_in(TWO_SIDED), pl.col("op_seq").is_not_null())
        .drop_nulls(["rank", "peer_rank", "expected_bytes"])
        .group_by("comm_id", "rank", "peer_rank", "direction", "op_seq")
        .agg(bytes=pl.col("expected_bytes").sum().cast(pl.Float64))
    )
    found: dict[tuple[str, int], dict[tuple[int, str], pl.DataFrame]] = {}
    for (comm, rank, peer, way), part in rows.partition_by(
        "comm_id", "rank", "peer_rank", "direction", as_dict=True
    ).items():
        found.setdefault((comm, rank), {})[peer, way] = part.select("op_seq", "bytes")
    return found


def _shifts(ranks: dict[int, _Sequence]) -> dict[int, int]:
    """By how much the numbers of each rank must grow to match those of the rank with most; none where none fits.

    Each is matched with a rank that is matched already, if there is one with one it exchanges data with.
    """
    reference = max(ranks, key=lambda rank: (len(ranks[rank].what), -rank))
    found, failed = {reference: 0}, set[int]()
    while left := sorted(set(ranks) - set(found) - failed):
        rank, other = next(
            (
                (rank, peer)
                for rank in left
                for peer in sorted({peer for peer, _ in ranks[rank].moved})
                if peer in found
            ),
            (left[0], reference),
        )
        shift = _shift(rank, ranks[rank], other, ranks[other])
        if shift is None:
            failed.add(rank)
        else:
            found[rank] = shift + found[other]
    return found


def _shift(rank: int, part: _Sequence, peer: int, other: _Sequence) -> int | None:
    """By how much the first sequence's numbers must grow to match the second's; None when no shift fits."""
    best: tuple[float, float, int] | None = None
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        begin, end = max(0, shift), min(len(other.what), len(part.what) + shift)
        if end <= begin:
            continue
        mine, theirs = slice(begin - shift, end - shift), slice(begin, end)
        if not np.array_equal(part.what[mine], other.what[theirs]):
            continue
        # The mean, since calls come in volleys: next to it, only those at the edge of a volley are far apart.
        later = part.call_ns[mine] - other.call_ns[theirs]
        usual = float(np.median(later))
        apart = float(np.mean(np.abs(later - usual))) + CLOCKS * abs(usual)
        unequal = _unequal(rank, part, mine, peer, other, theirs)
        if best is None or (unequal, apart) < best[:2]:
            best = (unequal, apart, shift)
    return best[2] if best else None


def _unequal(rank: int, part: _Sequence, mine: slice, peer: int, other: _Sequence, theirs: slice) -> float:
    """Of what two ranks exchange, the share of operators in which one sent what the other did not get, in tenths."""
    unequal, seen = 0, 0
    for way, back in (("tx", "rx"), ("rx", "tx")):
        one, two = part.moved.get((peer, way)), other.moved.get((rank, back))
        if one is None or two is None:
            continue
        one, two = one[mine], two[theirs]
        either = ~(np.isnan(one) & np.isnan(two))
        seen += int(either.sum())
        unequal += int((~np.isclose(one, two, rtol=SAME_BYTES) & either).sum())
    return round(unequal / seen, 1) if seen else 1.0
