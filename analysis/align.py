"""Which operators of different ranks are one and the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.call_numbers import call_numbers
from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.names import numbered

# Recorders attach to the ranks of a job one after the other; more operators than this do not pass meanwhile.
MAX_SHIFT = 16
# Clocks that are wrong by no more than this, and bins that are narrower, tell which calls are of one iteration.
ITERATIONS_NS = 1_000_000
# Two-sided calls, of which both ends move the same, to this accuracy.
TWO_SIDED, SAME_BYTES = ("Send", "Recv", "Group"), 0.01
# How much a constant distance in time counts, which may be that of two clocks, beside one that varies.
CLOCKS = 0.1
# Whether a rank's shift is still to be found, was found, or does not exist.
LEFT, FOUND, FAILED = 0, 1, 2
UNKNOWN_NS = np.iinfo(np.int64).max
RANK = ["comm_id", "rank"]
# Columns of the operators that are looked at.
NEEDED = (
    *(*RANK, "node", "pid", "program_pos", "op_seq", "kind", "op_bytes", "call_ns", "nccl_seq"),
    *("peer_rank", "direction", "expected_bytes", "last_byte_ns", "bin_ns"),
)

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


def align(operators: pl.DataFrame, error_ns: int | None = None) -> pl.DataFrame:
    """`operators` with `step` (i64): equal for rows of one operator of a communicator on all its ranks.

    NCCL's own number is taken where every rank has it. Otherwise each rank's observed sequence is shifted against
    that of another, so that kinds and sizes agree, what one sends is what the other gets, and calls are at most evenly
    apart in time: this assumes that volumes or the times between calls are uneven, or that the clocks of the nodes
    differ by less than half the time between equal operators, and fails for point-to-point calls that only some ranks
    make. `step` is null where no shift fits, and in rows without a call. A process that stood still as recording began
    makes the calls of a whole iteration after that, which others had made before: where times are wrong by at most
    `error_ns` (None: unknown), these are told by that nobody ends an operator before whom it exchanges with has called.
    """
    rows = operators.select(NEEDED).filter(pl.col("op_seq").is_not_null(), pl.col("rank").is_not_null())
    call_of, calls = _calls(rows, error_ns)
    known = calls.group_by("comm_id").agg(pl.col("nccl_seq").null_count() == 0)
    by_nccl = known.filter("nccl_seq").select("comm_id")
    counted = (
        calls.join(by_nccl, on="comm_id", how="anti")
        .unique([*RANK, "op_seq"], keep="first", maintain_order=True)
        .sort(*RANK, "op_seq")
        .with_columns(what=pl.struct("kind", "op_bytes").rank("dense").cast(pl.Int64))
    )
    ranks = counted.group_by(RANK, maintain_order=True).agg(calls=pl.len().cast(pl.Int64))
    sequences = _sequences(counted, ranks, _items(rows, call_of, calls.height, counted, ranks))
    shift, state = _shifts(sequences, MAX_SHIFT, SAME_BYTES, CLOCKS, ITERATIONS_NS)
    found = ranks.select(RANK).with_columns(shift=pl.Series(shift)).filter(pl.Series(state == FOUND))
    own = operators.select(RANK).join(found, on=RANK, how="left", maintain_order="left")["shift"]
    theirs = pl.when(pl.col("comm_id").is_in(by_nccl["comm_id"].implode())).then(
        pl.col("nccl_seq").cast(pl.Int64)
    )
    return operators.with_columns(step=pl.coalesce(theirs, pl.col("op_seq").cast(pl.Int64) + own))


def _calls(rows: pl.DataFrame, error_ns: int | None) -> tuple[Longs, pl.DataFrame]:
    """The number of the call of each row; and a row of each call, numbered, with `ended_ns` (i64), UNKNOWN_NS where it
    is not known: what moved before a call was none of its."""
    name = numbered(rows["node"])(pl.col("node"))
    # A row of which nobody knows where in a program it is stands for itself.
    position = pl.coalesce("program_pos", pl.int_range(pl.len()))
    key = rows.select(name.fill_null(-1), pl.col("pid").fill_null(-1), position.cast(pl.Int64))
    _, call_of = call_numbers(*(_longs(column) for column in key))
    first = np.zeros(int(call_of.max(initial=-1)) + 1, np.int64)
    first[call_of[::-1]] = np.arange(len(call_of))[::-1]
    ended_ns = np.full(len(first), UNKNOWN_NS)
    if error_ns is not None and error_ns <= ITERATIONS_NS:
        after = (pl.col("last_byte_ns") > pl.col("call_ns")) & (pl.col("bin_ns") < ITERATIONS_NS)
        timed = rows.select(after.fill_null(False)).to_series().to_numpy()
        _latest(ended_ns, call_of, timed, _longs(rows["last_byte_ns"].fill_null(0)))
    calls = rows.select(*RANK, "op_seq", "kind", "op_bytes", "call_ns", "nccl_seq")[first]
    return call_of, calls.with_columns(ended_ns=pl.Series(ended_ns), call=pl.int_range(pl.len()))


@compiled
def _latest(ended_ns: Longs, call_of: Longs, timed: NDArray[np.bool_], last_ns: Longs) -> None:
    for row in range(len(call_of)):
        if timed[row]:
            known = ended_ns[call_of[row]]
            ended_ns[call_of[row]] = max(last_ns[row], known) if known != UNKNOWN_NS else last_ns[row]


def _items(
    rows: pl.DataFrame, call_of: Longs, calls: int, counted: pl.DataFrame, ranks: pl.DataFrame
) -> pl.DataFrame:
    """What each rank, by its `place` in `ranks`, exchanged with a peer_rank in its `at`-th operator: `sends`, `moved`
    (bytes), in order of all these."""
    count = _longs(ranks["calls"])
    place, at = np.full(calls, -1), np.zeros(calls, np.int64)
    place[_longs(counted["call"])] = np.repeat(np.arange(len(count)), count)
    at[_longs(counted["call"])] = np.arange(len(counted)) - np.repeat(np.cumsum(count) - count, count)
    two_sided = rows.select(
        pl.col("kind").is_in(TWO_SIDED)
        & pl.col("peer_rank").is_not_null()
        & pl.col("expected_bytes").is_not_null()
    )
    row = np.flatnonzero(two_sided.to_series().fill_null(False).to_numpy() & (place[call_of] >= 0))
    own, own_at = place[call_of[row]], at[call_of[row]]
    picked = rows.select("peer_rank", "expected_bytes", sends=pl.col("direction") == "tx")[row]
    peer, sends = _longs(picked["peer_rank"]), _longs(picked["sends"])
    order = np.lexsort((own_at, sends, peer, own))
    frame = pl.DataFrame({"place": own, "peer_rank": peer, "sends": sends == 1, "at": own_at})
    moved = picked["expected_bytes"].cast(pl.Float64)
    frame = frame.with_columns(moved=moved)[order]
    # Several flow groups of one operator to a peer count as one.
    same = ["place", "peer_rank", "sends", "at"]
    begin = np.flatnonzero(
        frame.select(pl.any_horizontal(pl.col(same) != pl.col(same).shift()).fill_null(True))
    )
    sums = np.add.reduceat(frame["moved"].to_numpy(), begin) if len(begin) else np.zeros(0)
    return frame[begin].with_columns(moved=pl.Series(sums))


class _Sequences(NamedTuple):
    """The operators of each rank in order, and what it exchanges with which other; each `begin` has one more entry.

    `begin`: of each rank in `what` (equal for equal calls), `call_ns` and `ended_ns`; `comm_begin`: of each
    communicator in the ranks; `edge_begin`: of each rank in the edges, one for each peer (place among the ranks, -1:
    none) and direction, with the same as the peer has it (`back`, -1: none); `item_begin`: of each edge in `at` (which
    of the rank's operators) and `moved` (bytes).
    """

    what: Longs
    call_ns: Longs
    ended_ns: Longs
    begin: Longs
    comm_begin: Longs
    edge_begin: Longs
    peer: Longs
    back: Longs
    item_begin: Longs
    at: Longs
    moved: Floats


def _sequences(counted: pl.DataFrame, ranks: pl.DataFrame, items: pl.DataFrame) -> _Sequences:
    """Of `counted` calls, in order of communicator, rank and op_seq, with those `ranks`, and their `_items`."""
    place = ranks.select(RANK).with_columns(place=pl.int_range(pl.len()))
    edges = (
        items.group_by("place", "peer_rank", "sends", maintain_order=True)
        .agg(items=pl.len().cast(pl.Int64))
        .with_columns(pl.col("peer_rank").cast(ranks.schema["rank"]), edge=pl.int_range(pl.len()))
        .join(place, on="place", how="left", maintain_order="left")
    )
    theirs = edges.select("comm_id", rank="peer_rank", peer_rank="rank", sends=~pl.col("sends"), back="edge")
    peers = place.select("comm_id", peer_rank="rank", peer="place")
    edges = edges.join(
        theirs, on=["comm_id", "rank", "peer_rank", "sends"], how="left", maintain_order="left"
    ).join(peers, on=["comm_id", "peer_rank"], how="left", maintain_order="left")
    of_comms = ranks.group_by("comm_id", maintain_order=True).len()["len"]
    return _Sequences(
        _longs(counted["what"]),
        _longs(counted["call_ns"]),
        _longs(counted["ended_ns"]),
        _begins(ranks["calls"]),
        _begins(of_comms),
        np.searchsorted(_longs(edges["place"]), np.arange(ranks.height + 1)),
        _longs(edges["peer"].fill_null(-1)),
        _longs(edges["back"].fill_null(-1)),
        _begins(edges["items"]),
        _longs(items["at"]),
        np.array(items["moved"].to_numpy()),
    )


def _longs(numbers: pl.Series) -> Longs:
    return np.array(numbers.to_numpy(), np.int64)


def _begins(lengths: pl.Series) -> Longs:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(_longs(lengths))])


@compiled
def _shifts(
    seen: _Sequences, most: int, same_bytes: float, clocks: float, iterations_ns: int
) -> tuple[Longs, Longs]:
    """By how much the numbers of each rank must grow to match those of the rank of its communicator with most; and
    whether that was FOUND.

    Each is matched with a rank that is matched already, if there is one with one it exchanges data with.
    """
    count = len(seen.begin) - 1
    shift, state = np.zeros(count, np.int64), np.full(count, LEFT)
    for comm in range(len(seen.comm_begin) - 1):
        first, last = seen.comm_begin[comm], seen.comm_begin[comm + 1]
        reference = first
        for rank in range(first, last):
            if seen.begin[rank + 1] - seen.begin[rank] > seen.begin[reference + 1] - seen.begin[reference]:
                reference = rank
        state[reference] = FOUND
        for _ in range(first + 1, last):
            chosen, other = -1, reference
            for rank in range(first, last):
                if state[rank] != LEFT:
                    continue
                if chosen < 0:
                    chosen = rank
                known = -1
                for edge in range(seen.edge_begin[rank], seen.edge_begin[rank + 1]):
                    if seen.peer[edge] >= 0 and state[seen.peer[edge]] == FOUND:
                        known = seen.peer[edge]
                        break
                if known >= 0:
                    chosen, other = rank, known
                    break
            fits, by = _shift(seen, chosen, other, most, same_bytes, clocks, iterations_ns)
            state[chosen] = FOUND if fits else FAILED
            shift[chosen] = by + shift[other]
    return shift, state


@compiled
def _shift(
    seen: _Sequences, rank: int, other: int, most: int, same_bytes: float, clocks: float, iterations_ns: int
) -> tuple[bool, int]:
    """Whether some shift makes the numbers of `rank` match those of `other`, and the best."""
    what = seen.what[seen.begin[rank] : seen.begin[rank + 1]]
    call_ns = seen.call_ns[seen.begin[rank] : seen.begin[rank + 1]]
    ended_ns = seen.ended_ns[seen.begin[rank] : seen.begin[rank + 1]]
    other_what = seen.what[seen.begin[other] : seen.begin[other + 1]]
    other_ns = seen.call_ns[seen.begin[other] : seen.begin[other + 1]]
    other_ended_ns = seen.ended_ns[seen.begin[other] : seen.begin[other + 1]]
    # By how much the numbers differ if the first calls of the two were made at one time.
    by_time = 0
    if np.any(ended_ns != UNKNOWN_NS) and np.any(other_ended_ns != UNKNOWN_NS):
        by_time = np.searchsorted(other_ns, call_ns[0]) - np.searchsorted(call_ns, other_ns[0])
    fits, best, least = False, 0, (0.0, 0.0, 0.0)
    for shift in range(min(0, by_time) - most, max(0, by_time) + most + 1):
        begin, end = max(0, shift), min(len(other_what), len(what) + shift)
        if end <= begin or (abs(shift) > most and abs(shift - by_time) > most):
            continue
        # A few calls of two long sequences are as near in time whatever they are.
        if abs(shift) > most and 2 * (end - begin) < len(what):
            continue
        if not np.array_equal(what[begin - shift : end - shift], other_what[begin:end]):
            continue
        # The mean, since calls come in volleys: next to it, only those at the edge of a volley are far apart.
        later_ns = call_ns[begin - shift : end - shift] - other_ns[begin:end]
        usual_ns = float(np.median(later_ns))
        apart = float(np.mean(np.abs(later_ns - usual_ns))) + clocks * abs(usual_ns)
        early = (ended_ns[begin - shift : end - shift] < other_ns[begin:end] - iterations_ns) | (
            other_ended_ns[begin:end] < call_ns[begin - shift : end - shift] - iterations_ns
        )
        unequal = _unequal(seen, rank, other, begin, end, shift, same_bytes)
        fit = float(np.rint(10 * early.mean()) / 10), unequal, apart
        if not fits or fit < least:
            fits, best, least = True, shift, fit
    return fits, best


@compiled
def _unequal(
    seen: _Sequences, rank: int, other: int, begin: int, end: int, shift: int, same_bytes: float
) -> float:
    """Of what two ranks exchange, the share of operators in which one sent what the other did not get, in tenths.

    Looks at those of `other` from `begin` to `end`, and those of `rank` that lie `shift` before.
    """
    unequal, either = 0, 0
    for edge in range(seen.edge_begin[rank], seen.edge_begin[rank + 1]):
        back = seen.back[edge]
        if seen.peer[edge] != other or back < 0:
            continue
        mine, last_mine = seen.item_begin[edge], seen.item_begin[edge + 1]
        theirs, last_theirs = seen.item_begin[back], seen.item_begin[back + 1]
        while mine < last_mine or theirs < last_theirs:
            at = seen.at[mine] + shift if mine < last_mine else end
            other_at = seen.at[theirs] if theirs < last_theirs else end
            here = min(at, other_at)
            if here >= end:
                break
            if here >= begin:
                either += 1
                alike = at == other_at and (
                    abs(seen.moved[mine] - seen.moved[theirs]) <= same_bytes * abs(seen.moved[theirs])
                )
                unequal += 0 if alike else 1
            if at == here:
                mine += 1
            if other_at == here:
                theirs += 1
    return float(np.rint(10 * unequal / either) / 10) if either else 1.0
