"""The operators that a process's calls make, chunk of calls after chunk of calls."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from pulse_bpf.analysis.callers import LATEST_NS, PROCESS
from pulse_bpf.analysis.calls import CAPTURED
from pulse_bpf.analysis.pairing import FOREVER
from pulse_bpf.schema import I64, STR, U32, U64

# What makes calls a program.
CALLED = (
    *("node", "pid", "tid", "comm_id", "rank", "nranks", "gpu", "seq", "kind", "bytes", "peer", "group"),
    *("call_ns", "nccl_seq", "origin"),
)


def program(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The operators of each process in program order, and what their point-to-point calls carry, of calls (CALLED).

    All Send and Recv calls of one ncclGroup on one communicator are one operator of kind "Group". Calls that
    were captured into a graph move nothing and are left out. The operators have: op (a number for the row),
    node, pid, comm_id, rank, nranks, gpu, kind, op_bytes (null for Group), root, call_ns (of the first call),
    op_seq and program_pos (from 0, within the communicator and the process), nccl_seq, origin. The second
    frame has op, direction, peer_rank, bytes.
    """
    calls = (
        ops.filter(pl.col("comm_id").is_not_null(), ~CAPTURED)
        .sort("node", "pid", "call_ns", "comm_id", "seq")
        .with_row_index("call")
        .with_columns(two_sided=pl.col("kind").is_in(["Send", "Recv"]))
    )
    grouped = pl.col("two_sided") & pl.col("group").is_not_null()
    calls = calls.with_columns(
        first_call=pl.when(grouped)
        .then(pl.col("call").min().over("node", "pid", "tid", "comm_id", "two_sided", "group"))
        .otherwise("call")
    )
    operators = (
        calls.group_by("first_call", maintain_order=True)
        .agg(
            pl.col("node", "pid", "comm_id", "rank", "nranks", "gpu", "nccl_seq", "origin").first(),
            pl.when(grouped.first()).then(pl.lit("Group")).otherwise(pl.col("kind").first()).alias("kind"),
            pl.when(~grouped.first()).then(pl.col("bytes").first()).alias("op_bytes"),
            pl.when(~grouped.first()).then(pl.col("peer").first()).alias("root"),
            pl.col("call_ns").min(),
        )
        .sort("first_call")
        .with_columns(
            op=pl.col("first_call").cast(U32),
            op_seq=pl.int_range(pl.len(), dtype=U64).over("node", "pid", "comm_id"),
            program_pos=pl.int_range(pl.len(), dtype=U64).over("node", "pid"),
        )
        .drop("first_call")
    )
    sent = (
        calls.filter("two_sided", pl.col("peer") != pl.col("rank"))
        .with_columns(direction=pl.when(pl.col("kind") == "Send").then(pl.lit("tx")).otherwise(pl.lit("rx")))
        .group_by(pl.col("first_call").cast(U32).alias("op"), "direction", pl.col("peer").alias("peer_rank"))
        .agg(pl.col("bytes").sum())
    )
    return operators, sent


class Program:
    """The operators of calls (CALLED) that come in `chunks`, as Calls.in_time gives them, numbered throughout.

    All calls before `until_ns` are there, but of processes in `held` (node, pid, held_ns) only those before held_ns:
    more calls of an ncclGroup may follow.
    """

    def __init__(self, chunks: Iterator[tuple[int, pl.DataFrame]]) -> None:
        self._chunks = chunks
        self.until_ns = -FOREVER
        self.held = pl.DataFrame(schema={"node": STR, "pid": I64, "held_ns": I64})
        self._rest: list[pl.DataFrame] = []
        self._count = 0
        # How many operators each process made, the last of them, and how many on each communicator.
        self._made = pl.DataFrame(schema={"node": STR, "pid": I64, "made": U64, "last": U32})
        self._steps = pl.DataFrame(schema={"node": STR, "pid": I64, "comm_id": STR, "steps": U64})

    def more(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """What `program` makes of the next chunk, and `before` (the operator before of the same process, or null)."""
        self.until_ns, calls = next(self._chunks)
        calls = pl.concat([*self._rest, calls])
        self.held = self.held.clear()
        self._rest = []
        if self.until_ns < FOREVER:
            self.held = _unfinished(calls, self.until_ns)
            if self.held.height:
                calls = calls.join(self.held, on=PROCESS, how="left", maintain_order="left")
                later = (pl.col("call_ns") >= pl.col("held_ns")).fill_null(False)
                self._rest = [calls.filter(later).drop("held_ns")]
                calls = calls.filter(~later).drop("held_ns")
        operators, sent = program(calls)
        own = [*PROCESS, "comm_id"]
        operators = (
            operators.with_columns(pl.col("op") + self._count)
            .join(self._made, on=PROCESS, how="left", maintain_order="left")
            .join(self._steps, on=own, how="left", maintain_order="left")
            .with_columns(
                pl.col("program_pos") + pl.col("made").fill_null(0),
                pl.col("op_seq") + pl.col("steps").fill_null(0),
                before=pl.coalesce(pl.col("op").shift().over(PROCESS), "last"),
            )
            .drop("made", "steps", "last")
        )
        made = operators.select(*PROCESS, made=pl.col("program_pos") + 1, last="op")
        self._made = pl.concat([self._made, made]).unique(PROCESS, keep="last")
        steps = operators.select(*own, steps=pl.col("op_seq") + 1)
        self._steps = pl.concat([self._steps, steps]).unique(own, keep="last", maintain_order=True)
        sent = sent.with_columns(pl.col("op") + self._count)
        self._count += calls.height
        return operators, sent


def _unfinished(calls: pl.DataFrame, until_ns: int) -> pl.DataFrame:
    """node, pid, held_ns: the first call of groups to which more `calls` may come after `until_ns`."""
    of_thread = [*PROCESS, "tid"]
    last = calls.sort("call_ns", maintain_order=True).unique(of_thread, keep="last", maintain_order=True)
    groups = last.select(*of_thread, "group").drop_nulls("group")
    return (
        calls.join(groups, on=[*of_thread, "group"], how="semi", nulls_equal=True)
        .group_by(of_thread)
        .agg(pl.col("call_ns").min().alias("held_ns"))
        .filter(pl.col("held_ns") >= until_ns - LATEST_NS)
        .group_by(PROCESS)
        .agg(pl.col("held_ns").min())
    )
