"""Ranks whose calls on a communicator are not those of the others: another operator, size, or one skipped."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.align import MAX_SHIFT
from pulse_bpf.analysis.findings import Evidence
from pulse_bpf.analysis.stuck import PROCESS, TWO_SIDED, Root
from pulse_bpf.analysis.waits import Process

# Calls in a row that must agree before a difference means anything, where NCCL's own numbers are unknown.
MIN_AGREED = 4
# Columns of the operators that are looked at.
NEEDED = ("node", "pid", "comm_id", "rank", "op_seq", "kind", "op_bytes", "nccl_seq", "call_ns")

Longs = NDArray[np.int64]


def find_mismatch(job: pl.DataFrame, calls_lost: bool) -> Root | None:
    """The rank, or ranks, whose n-th call on a communicator differs from that of most others; None without any.

    Point-to-point calls differ by nature and are left out, and so are sizes on a communicator where one is unknown.
    Where NCCL's own number of a call is not known, calls are counted, which says nothing when `calls_lost`. Between two
    ranks the one is right whose calls on all its communicators are those of another process; else both are named.
    """
    size = pl.when(pl.col("op_bytes").null_count().over("comm_id") == 0).then("op_bytes")
    calls = (
        job.select(NEEDED)
        .filter(
            pl.col("op_seq").is_not_null(), pl.col("rank").is_not_null(), ~pl.col("kind").is_in(TWO_SIDED)
        )
        .unique(["comm_id", "rank", "op_seq"])
        .sort("comm_id", "rank", "op_seq")
        .with_columns(what=pl.struct("kind", size).rank("dense").cast(pl.Int64))
    )
    numbered = pl.col("nccl_seq").null_count().over("comm_id") == 0
    known = calls.filter(numbered).with_columns(number=pl.col("nccl_seq").cast(pl.Int64))
    counted = (
        [] if calls_lost else [_counted(part) for _, part in calls.filter(~numbered).group_by("comm_id")]
    )
    placed = pl.concat([known, *(part for part in counted if part is not None)], how="diagonal")
    at = ["comm_id", "number"]
    different = placed.filter(pl.col("what").n_unique().over(at) > 1)
    if different.is_empty():
        return None
    first = different.sort("number").group_by("comm_id").first().sort("call_ns")
    comm, number = str(first["comm_id"][0]), int(first["number"][0])
    here = placed.filter(pl.col("comm_id") == comm, pl.col("number") == number)
    votes = here["what"].value_counts().sort("count", "what", descending=[True, False])
    usual = here.filter(pl.col("what") == votes["what"][0])
    odd = here.filter(pl.col("what") != votes["what"][0]).sort("rank")
    others = here
    if 2 * usual.height > here.height:
        others = odd
    elif here.height == 2:
        right = [process for process in _processes(here) if _has_twin(job, process, set(_processes(here)))]
        if len(right) == 1:
            others = here.filter(~((pl.col("node") == right[0][0]) & (pl.col("pid") == right[0][1])))
    suspects = sorted(_processes(others))
    nodes = sorted({node for node, _ in suspects})
    text = f"Call number {number} of communicator {comm}: {_told(odd)}, while {_told(usual)}. Their calls agree before."
    if len(suspects) < here.height:
        text += (
            " The others agree."
            if here.height > 2
            else " The other rank's program is that of a third process."
        )
    confidence = 0.95 if len(nodes) == 1 else 0.6
    evidence = [Evidence("ranks_that_differ", float(odd.height), float(usual.height), 1, text)]
    first_ns = int(here["call_ns"].min())  # type: ignore[arg-type]
    return Root("mismatch", "calls differ", suspects, confidence, evidence, comm_id=comm, first_ns=first_ns)


def _processes(rows: pl.DataFrame) -> list[Process]:
    return [
        (str(node), int(pid)) for node, pid in rows.select(PROCESS).unique(maintain_order=True).iter_rows()
    ]


def _told(rows: pl.DataFrame) -> str:
    """What these ranks call."""
    row = rows.row(0, named=True)
    size = "" if row["op_bytes"] is None else f" of {row['op_bytes']:,} bytes"
    ranks = ", ".join(map(str, rows["rank"].sort().to_list()[:8])) + (", ..." if rows.height > 8 else "")
    return f"rank{'s' if rows.height > 1 else ''} {ranks} call{'' if rows.height > 1 else 's'} {row['kind']}{size}"


def _counted(part: pl.DataFrame) -> pl.DataFrame | None:
    """`part`, calls of one communicator, with `number`, equal on all ranks as long as their calls agree."""
    ranks = {
        int(rank): rows
        for (rank,), rows in part.partition_by("rank", as_dict=True, maintain_order=True).items()
    }
    reference = max(ranks, key=lambda rank: (ranks[rank].height, -rank))
    placed = []
    for rows in ranks.values():
        shift = _shift(rows, ranks[reference])
        if shift is None or not _one_change(rows, ranks[reference], shift):
            return None
        place = pl.int_range(pl.len(), dtype=pl.Int64) + shift
        placed.append(rows.with_columns(number=place))
    return pl.concat(placed)


def _shift(rows: pl.DataFrame, reference: pl.DataFrame) -> int | None:
    """By how much to shift `rows` so that most of them agree with `reference` from the beginning; the nearest in
    time of those that agree as long."""
    what, other = rows["what"].to_numpy(), reference["what"].to_numpy()
    call_ns, other_ns = rows["call_ns"].to_numpy(), reference["call_ns"].to_numpy()
    best: tuple[int, float] | None = None
    chosen = None
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        begin, end = max(0, shift), min(len(other), len(what) + shift)
        if end - begin < MIN_AGREED:
            continue
        same = what[begin - shift : end - shift] == other[begin:end]
        agreed = len(same) if same.all() else int(np.argmin(same))
        apart = float(
            np.median(np.abs(call_ns[begin - shift : end - shift] - other_ns[begin:end])[: max(agreed, 1)])
        )
        if agreed >= MIN_AGREED and (best is None or (agreed, -apart) > best):
            best, chosen = (agreed, -apart), shift
    return chosen


def _one_change(rows: pl.DataFrame, reference: pl.DataFrame, shift: int) -> bool:
    """Whether one call that was left out, added or replaced explains all by which the two differ.

    Otherwise the sequences may only seem to agree, begun at different places.
    """
    what, other = rows["what"].to_numpy(), reference["what"].to_numpy()
    what, other = what[max(0, -shift) :], other[max(0, shift) :]
    length = min(len(what), len(other))
    if np.array_equal(what[:length], other[:length]):
        return True
    at = int(np.argmin(what[:length] == other[:length]))
    for mine, theirs in ((0, 1), (1, 0), (1, 1)):
        one, two = what[at + mine :], other[at + theirs :]
        rest = min(len(one), len(two))
        if np.array_equal(one[:rest], two[:rest]):
            return True
    return False


def _has_twin(job: pl.DataFrame, process: Process, apart: set[Process]) -> bool:
    """Whether a process that is not one of `apart` made the same calls, up to the end, as far as both were recorded."""
    programs = (
        job.filter(pl.col("op_seq").is_not_null())
        .unique([*PROCESS, "program_pos"])
        .sort(*PROCESS, "program_pos")
        .with_columns(what=pl.struct("kind", "op_bytes").rank("dense").cast(pl.Int64))
        .group_by(PROCESS, maintain_order=True)
        .agg("what")
    )
    listed: dict[Process, Longs] = {
        (str(node), int(pid)): np.array(what, np.int64) for node, pid, what in programs.iter_rows()
    }
    mine = listed[process]
    for other, theirs in listed.items():
        length = min(len(mine), len(theirs))
        near = abs(len(mine) - len(theirs)) <= MAX_SHIFT and length >= MIN_AGREED
        if other not in apart and near and np.array_equal(mine[-length:], theirs[-length:]):
            return True
    return False
