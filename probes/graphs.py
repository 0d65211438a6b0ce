"""CUDA graphs: which operators a graph holds, learned when they are captured, and what each of its replays repeats.

A captured call moves nothing; a replay makes no call. NCCL frees the plan of a captured launch with its graph, and so
hands the plan to CUDA during the capture; a replayed plan that has network traffic calls NCCL back with the plan.
Source: NCCL's public source, 2.18 to 2.30 (ncclLaunchPrepare, hostStreamPlanCallback).
"""

from __future__ import annotations

from collections import Counter

import polars as pl

_THREAD = ("pid", "tid")
_PLAN = ("pid", "plan")
# What a replay repeats of the captured call.
_REPEATED = pl.Schema(
    {
        "node": pl.String,
        "comm_ptr": pl.UInt64,
        "comm_hash": pl.UInt64,
        "rank": pl.Int32,
        "nranks": pl.Int32,
        "gpu": pl.Int32,
        "kind": pl.UInt16,
        "count": pl.UInt64,
        "dtype": pl.UInt32,
        "peer": pl.Int32,
        "stream": pl.UInt64,
        "file": pl.UInt32,
    }
)
_HELD = pl.Schema(
    [
        ("pid", pl.Int64),
        ("plan", pl.UInt64),
        ("captured_ns", pl.Int64),
        ("order", pl.UInt32),
        *_REPEATED.items(),
    ]
)
# The highest bit sets the groups of replays apart from those of threads.
_REPLAY_GROUP = 1 << 63


class Graphs:
    """The captured launches of all processes, by the plan that replays them.

    Assumes that a launch's operators are those that its thread last called before the capture was noted: the last call,
    with the rest of its group. Where the plan's own communicator is not among them, the launch is not bound, and its
    replays are counted in `unknown_replays`, by process.
    """

    def __init__(self) -> None:
        self._held = pl.DataFrame(schema=_HELD)
        self._replays = 0
        self.unknown_replays: Counter[int] = Counter()

    def capture(self, calls: pl.DataFrame, notes: pl.DataFrame) -> pl.DataFrame:
        """`calls` with `captured` bool; what the notes say of them is kept for their replays.

        `calls`: operators in order of time, with pid, tid, group (0: none), comm_ptr, call_ns. `notes`: pid, tid,
        comm_ptr, plan, call_ns of captures, of this batch and whatever is known of the next.
        """
        if notes.is_empty() or calls.is_empty():
            return calls.with_columns(pl.lit(False).alias("captured"))
        rows = calls.with_row_index("row")
        last = rows.select(*_THREAD, "row", "group", "call_ns").sort("call_ns")
        noted = (
            notes.select(*_THREAD, "comm_ptr", "plan", "call_ns")
            .sort("call_ns")
            .join_asof(last, on="call_ns", by=_THREAD, strategy="backward", check_sortedness=False)
            .drop_nulls("row")
            .rename({"call_ns": "captured_ns"})
        )
        keys = (*_THREAD, "group", "comm_ptr")
        in_group = rows.filter(pl.col("group") != 0).join(
            noted.filter(pl.col("group") != 0).select(*keys, "plan", "captured_ns"), on=keys
        )
        alone = rows.join(
            noted.filter(pl.col("group") == 0).select("row", "comm_ptr", "plan", "captured_ns"),
            on=("row", "comm_ptr"),
        )
        held = pl.concat([in_group, alone]).sort("row")
        order = pl.int_range(pl.len(), dtype=pl.UInt32).over(*_PLAN, "captured_ns").alias("order")
        self._held = pl.concat([self._held, held.with_columns(order).select(_HELD.names())])
        return rows.with_columns(pl.col("row").is_in(held["row"].implode()).alias("captured")).drop("row")

    def replays(self, events: pl.DataFrame) -> pl.DataFrame:
        """The operators that replays repeat, in order of time; columns of a call, with `group` where there are several.

        `events`: pid, tid, comm_ptr, plan, call_ns of replays.
        """
        if events.is_empty():
            return events
        captures = self._held.select(*_PLAN, "captured_ns").unique().sort("captured_ns")
        numbered = events.sort("call_ns").with_columns(
            (pl.int_range(pl.len(), dtype=pl.UInt64) + self._replays + _REPLAY_GROUP).alias("group")
        )
        self._replays += events.height
        found = numbered.join_asof(
            captures.with_columns(pl.col("captured_ns").alias("call_ns")),
            on="call_ns",
            by=_PLAN,
            strategy="backward",
            check_sortedness=False,
        )
        self.unknown_replays.update(found.filter(pl.col("captured_ns").is_null())["pid"])
        rows = (
            found.select(*_PLAN, "tid", "call_ns", "captured_ns", "group")
            .join(self._held, on=(*_PLAN, "captured_ns"), how="inner")
            .sort("call_ns", "group", "order")
        )
        self._forget_replaced()
        size = pl.len().over("group")
        return rows.with_columns(pl.when(size > 1).then("group").otherwise(0).alias("group")).drop(
            "plan", "captured_ns", "order"
        )

    def end_process(self, pid: int) -> None:
        """Forgets the launches of process `pid`."""
        self._held = self._held.filter(pl.col("pid") != pid)

    def _forget_replaced(self) -> None:
        """A plan's memory may be used again: only its latest capture can still be replayed."""
        latest = pl.col("captured_ns") == pl.col("captured_ns").max().over(_PLAN)
        self._held = self._held.filter(latest)
