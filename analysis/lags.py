"""How long each process takes from the end of one operator to its part in the next, on its own clock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from pulse_bpf.analysis.call_numbers import call_numbers
from pulse_bpf.analysis.callers import PROCESS
from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Flags, Longs
from pulse_bpf.analysis.ends import VOLUME_TOLERANCE
from pulse_bpf.analysis.gradient import MAIN
from pulse_bpf.analysis.names import numbered
from pulse_bpf.analysis.readiness import end_together, ended_before, in_stages, ready
from pulse_bpf.analysis.shape import NOTHING
from pulse_bpf.analysis.twins import (
    ALL_TO_ALL,
    COLLECTIVE,
    GROUP,
    LEAST_BYTES,
    STAGE,
    TWO_SIDED,
    Calls,
    twins,
)
from pulse_bpf.schema import I64

# Operators in which each pair of ranks exchanges on its own, and a rank is done when its own pairs are.
IN_PAIRS = ("Group", "AlltoAll")
# What is the same for all rows of a call, and further columns of the operators that are looked at.
OF_CALL = (
    *(*PROCESS, "program_pos", "comm_id", "rank", "nranks", "gpu", "kind", "op_bytes", "op_seq", "step"),
    *("call_ns", "covered"),
)
NEEDED = (
    *(*OF_CALL, "level", "nic", "direction", "peer_node", "peer_rank", "bytes", "expected_bytes", "bin_ns"),
    *("start_ns", "last_byte_ns", "first_stall_ns", "first_stall_len_ns", "first_stall_bytes"),
)


def lags(aligned: pl.DataFrame, one_clock: bool) -> pl.DataFrame:
    """One row per process and operator: when it was ready (ready_ns), came (entry_ns), called and ended, and its lag.

    entry_ns is the first byte it sent, null where it sent none. ready_ns is the end of all that the process did
    before, or of its last operator on the communicator where other operators overlap with this one. `team` and `place`
    are with whom it is compared in what, `same` numbers both (twins.twins).
    """
    own = (
        aligned.select(NEEDED)
        .filter(
            pl.col("level").is_in(["flow", "call"]),
            pl.col("program_pos").is_not_null(),
            pl.col("pid").is_not_null(),
        )
        .with_columns(**_trimmed())
    )
    sends = (own["direction"] == "tx").to_numpy()
    nodes = own.select(numbered(own["node"])(pl.col("node")))["node"]
    process_of, call_of = call_numbers(_longs(nodes), _longs(own["pid"]), _longs(own["program_pos"]))
    summed = _summed(
        call_of,
        int(call_of.max(initial=-1)) + 1,
        sends,
        (own["level"] == "flow").to_numpy(),
        _longs(own["bytes"]),
        _longs(own["start_ns"]),
        _longs(own["last_byte_ns"]),
        _longs(own["bin_ns"]),
        _longs(own["expected_bytes"]),
        VOLUME_TOLERANCE,
    )
    own = own.with_columns(kept=pl.Series(summed.kept), call=pl.Series(call_of))
    sent = own.filter("kept", pl.col("direction") == "tx")
    # Whom it sends most, and by which NIC.
    sender = pl.Series(sends)[summed.first]
    ranks = (
        own.select(*OF_CALL, "peer_rank", "nic")[summed.first]
        .with_columns(
            pl.when(sender).then("peer_rank").alias("peer_rank"),
            pl.when(sender).then("nic").alias("nic"),
            *(_times(name, getattr(summed, name)) for name in ("entry_ns", "end_ns")),
            *(
                pl.Series(name, getattr(summed, name))
                for name in ("receives", "sent_bytes", "expected_bytes")
            ),
            pl.Series("bin_ns", summed.bin_ns),
            call=pl.int_range(pl.len()),
        )
        .join(_partners(sent), on="call", how="left", maintain_order="left")
        .drop("call")
    )
    if one_clock:
        ranks = (
            ranks.join(_heard(sent), on=["comm_id", "rank", "step"], how="left", maintain_order="left")
            .with_columns(
                end_ns=pl.when(~pl.col("receives"))
                .then(pl.max_horizontal("end_ns", "heard_ns"))
                .otherwise("end_ns"),
                receives=pl.col("receives") | pl.col("heard_ns").is_not_null(),
            )
            .drop("heard_ns")
        )
    calls = _calls(ranks, process_of[summed.first])
    large = _longs(ranks["op_bytes"].fill_null(LEAST_BYTES)) >= LEAST_BYTES
    team, place, same = twins(calls)
    # What a stage does is its own doing; a kernel takes part in all channels of its communicator, also in those that
    # leave over a neighbour's NIC, and in a ring what others still have to send is still to come for all.
    end_ns = _longs(ranks["end_ns"])
    end_together(calls, end_ns, one_clock)
    stage = in_stages(calls)
    before_ns, same_ns = ended_before(calls, large, stage, end_ns)
    entry_ns, bin_ns = _longs(ranks["entry_ns"]), _longs(ranks["bin_ns"])
    receives = ranks["receives"].to_numpy()
    came, since = _arrivals(sent, ranks, calls, stage)
    ready_ns = ready(
        calls,
        stage,
        team,
        same,
        receives,
        entry_ns,
        bin_ns,
        before_ns,
        same_ns,
        end_ns,
        came,
        since,
        one_clock,
    )
    since_ns = pl.when(pl.col("kind").is_in(IN_PAIRS) | (not one_clock)).then("ready_ns").otherwise(0)
    return ranks.with_columns(
        _times("team", team),
        _times("place", place),
        _times("before_ns", before_ns),
        _times("ready_ns", ready_ns),
        _times("end_ns", end_ns),
        pl.Series("same", same),
        own_end_ns="end_ns",
        pipeline=pl.Series(stage),
        tree=pl.col("comm_id").is_in(_trees(sent).implode()) & ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
    ).with_columns(
        lag_ns=pl.col("entry_ns") - pl.col("ready_ns"),
        # On one clock whoever ended before another came did not wait for it; else, or where a rank is done when its own
        # pairs are, the times are from when each was ready.
        came_ns=pl.col("entry_ns") - since_ns,
        done_ns=pl.col("own_end_ns") - since_ns,
        call_lag_ns=pl.col("call_ns") - pl.col("before_ns"),
    )


def _longs(values: pl.Series) -> Longs:
    """As numbers that may be written, NOTHING for null."""
    return np.array(values.cast(I64).fill_null(NOTHING).to_numpy())


def _times(name: str, values: Longs) -> pl.Series:
    return pl.Series(name, values).to_frame().select(pl.when(pl.col(name) != NOTHING).then(name))[name]


def _trimmed() -> dict[str, pl.Expr]:
    """When a flow begins and ends, without what is before its first long silence, or after it, if that is hardly
    anything: some sources take control data for payload, and cuts between operators are not exact to the byte."""
    before, some = pl.col("first_stall_bytes"), VOLUME_TOLERANCE * pl.col("bytes")
    return {
        "start_ns": pl.when(before <= some)
        .then(pl.col("first_stall_ns") + pl.col("first_stall_len_ns"))
        .otherwise("start_ns"),
        "last_byte_ns": pl.when(before >= pl.col("bytes") - some)
        .then("first_stall_ns")
        .otherwise("last_byte_ns"),
    }


class _Sums(NamedTuple):
    """Of each call: its `first` row, which sends the most, and what all of its rows that are `kept` come to."""

    first: Longs
    entry_ns: Longs
    end_ns: Longs
    bin_ns: Longs
    receives: Flags
    sent_bytes: Longs
    expected_bytes: Longs
    kept: Flags


@compiled
def _summed(
    call_of: Longs,
    calls: int,
    sends: Flags,
    flow: Flags,
    moved: Longs,
    start_ns: Longs,
    last_ns: Longs,
    bin_ns: Longs,
    expected: Longs,
    tolerance: float,
) -> _Sums:
    """What sends hardly anything while other flows of the same operator do sends control data, and is not kept."""
    most = np.zeros(calls, np.int64)
    for row in range(len(call_of)):
        most[call_of[row]] = max(most[call_of[row]], moved[row])
    first = np.full(calls, -1)
    entry, end = np.full(calls, NOTHING), np.full(calls, NOTHING)
    widest, sent, wanted = np.zeros(calls, np.int64), np.zeros(calls, np.int64), np.zeros(calls, np.int64)
    receives, kept = np.zeros(calls, np.bool_), np.zeros(len(call_of), np.bool_)
    for row in range(len(call_of)):
        call = call_of[row]
        if moved[row] != 0 and moved[row] < tolerance * most[call]:
            continue
        kept[row] = True
        known = first[call]
        if known < 0:
            first[call] = row
        elif sends[row] != sends[known]:
            first[call] = row if sends[row] else known
        elif moved[row] != moved[known]:
            first[call] = row if moved[row] > moved[known] else known
        elif start_ns[row] < start_ns[known]:
            first[call] = row
        if sends[row]:
            if start_ns[row] != NOTHING and (entry[call] == NOTHING or start_ns[row] < entry[call]):
                entry[call] = start_ns[row]
            if flow[row]:
                sent[call] += moved[row]
        else:
            receives[call] = True
        end[call] = max(end[call], last_ns[row])
        widest[call] = max(widest[call], bin_ns[row])
        if expected[row] != NOTHING:
            wanted[call] += expected[row]
    return _Sums(first, entry, end, widest, receives, sent, wanted, kept)


def _partners(sent: pl.DataFrame) -> pl.DataFrame:
    """Of each call that exchanges with several at once, whom it sends to (partners)."""
    return sent.filter(pl.col("kind") == "Group").group_by("call").agg(partners=pl.col("peer_rank").unique())


def _heard(sent: pl.DataFrame) -> pl.DataFrame:
    """When the last byte for each rank of an operator was sent: where only what is sent is seen, about when it came."""
    return (
        sent.filter(pl.col("step").is_not_null(), pl.col("bytes") > 0)
        .group_by("comm_id", pl.col("peer_rank").alias("rank"), "step")
        .agg(pl.col("last_byte_ns").max().alias("heard_ns"))
        .drop_nulls()
    )


def _calls(ranks: pl.DataFrame, process: Longs) -> Calls:
    code = {
        name: numbered(ranks[name])(pl.col(name)).fill_null(-1) + 1 for name in ("node", "comm_id", "kind")
    }
    numbers = ranks.select(**code)
    kinds = {"Send": STAGE, "Recv": STAGE, "Group": GROUP, "AlltoAll": ALL_TO_ALL}
    what = ranks.select(
        pl.col("kind").replace_strict(kinds, default=COLLECTIVE, return_dtype=I64).fill_null(COLLECTIVE)
    )["kind"]
    comm, step = _longs(numbers["comm_id"]), _longs(ranks["step"])
    order = np.lexsort((step, comm))
    change = (comm[order][1:] != comm[order][:-1]) | (step[order][1:] != step[order][:-1])
    operator = np.empty(len(order), np.int64)
    operator[order] = np.cumsum(np.r_[np.zeros(min(1, len(order)), np.int64), change])
    return Calls(
        process,
        _longs(numbers["node"]),
        comm,
        _longs(numbers["kind"]),
        _longs(what),
        _longs(ranks["rank"]),
        _longs(ranks["nranks"]),
        _longs(ranks["op_bytes"]),
        step,
        operator,
        int(operator.max(initial=-1)) + 1,
        int(comm.max(initial=0)) + 1,
    )


def _arrivals(sent: pl.DataFrame, ranks: pl.DataFrame, calls: Calls, stage: Flags) -> tuple[Longs, Longs]:
    """When what was sent to a stage of a pipeline had come, in order, of each process from `since` to the next's."""
    places = (
        ranks.select("comm_id", pl.col("rank").alias("peer_rank"), process=pl.Series(calls.process))
        .filter(pl.Series(stage))
        .unique()
    )
    came = (
        sent.filter(pl.col("bytes") > 0, pl.col("last_byte_ns").is_not_null())
        .select("comm_id", "peer_rank", "last_byte_ns")
        .join(places, on=["comm_id", "peer_rank"])
        .sort("process", "last_byte_ns")
    )
    processes = int(calls.process[-1]) + 1 if len(calls.process) else 0
    return _longs(came["last_byte_ns"]), np.searchsorted(_longs(came["process"]), np.arange(processes + 1))


def _trees(sent: pl.DataFrame) -> pl.Series:
    """The communicators whose collectives run over trees: in a ring each NIC sends to one other node only."""
    edges = (
        sent.filter(
            pl.col("level") == "flow",
            pl.col("peer_node").is_not_null(),
            ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
        )
        .group_by("comm_id", "node", "nic", "peer_node")
        .agg(pl.col("bytes").sum())
    )
    main = edges.filter(pl.col("bytes") >= MAIN * pl.col("bytes").max().over("comm_id"))
    return main.filter(pl.len().over("comm_id", "node", "nic") > 1)["comm_id"].unique()
