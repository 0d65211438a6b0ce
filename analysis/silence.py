"""Whether a job stands still: since when nothing of it moves, beside the longest pause it made before."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

# Of the longest pause before, and of the time in which anything moved: a longer silence at the end is a stop.
LONGER, OF_ACTIVE = 1.5, 0.1
# Columns of the operators that are looked at.
NEEDED = ("node", "level", "call_ns", "start_ns", "last_byte_ns", "first_stall_ns", "first_stall_len_ns")


@dataclass(frozen=True)
class Silence:
    """From `since_ns` (by the node that was active last, on its clock) to `end_ns`; `longest_ns` is what came before.

    `until` has node, until_ns: to when each node was watched, on its own clock.
    """

    since_ns: int
    end_ns: int
    longest_ns: int
    until: pl.DataFrame

    @property
    def text(self) -> str:
        length, before = (self.end_ns - self.since_ns) / 1e9, max(0, self.longest_ns) / 1e9
        return f"The job is silent for {length:.2f} s; no pause before was longer than {before:.3f} s."


def watched_until(coverage: pl.DataFrame, end_ns: int, nodes: pl.Series) -> pl.DataFrame:
    """node, until_ns: when the first watch of its ports ended, else `end_ns`; later silence says nothing."""
    ends = (
        coverage.filter(pl.col("nic").is_not_null())
        .group_by("node")
        .agg(pl.col("last_ns").min().alias("until_ns"))
    )
    return (
        pl.DataFrame({"node": nodes.unique()})
        .join(ends, on="node", how="left")
        .with_columns(pl.col("until_ns").fill_null(end_ns))
        .sort("node")
    )


def silence(rows: pl.DataFrame, until: pl.DataFrame) -> Silence | None:
    """The silence at the end of `rows` (operators of one job with a call), if it is longer than the job's pauses.

    The job is silent when all its nodes are; its pauses before are those of the node that paused longest.
    """
    nodes = _reach(rows, until, ["node"])
    if nodes.is_empty():
        return None
    last = nodes.sort("quiet_ns", "node").row(0, named=True)
    active = int(nodes.select((pl.col("end") - pl.col("begin")).max()).item())
    # First what is told without putting anything in order.
    if last["quiet_ns"] <= OF_ACTIVE * active:
        return None
    longest = int(activity(rows, until, ["node"]).select(pl.col("pause_ns").max()).item())
    if last["quiet_ns"] <= LONGER * longest:
        return None
    return Silence(int(last["end"]), int(last["until_ns"]), longest, until)


def _reach(rows: pl.DataFrame, until: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """As `activity`, without the pauses."""
    flow = (pl.col("level") == "flow") & pl.col("start_ns").is_not_null()
    return (
        rows.select(
            *key,
            begin=pl.min_horizontal("call_ns", pl.when(flow).then("start_ns")),
            end=pl.max_horizontal(
                "call_ns", pl.when(flow).then(pl.max_horizontal("first_stall_ns", "last_byte_ns"))
            ),
        )
        .group_by(key)
        .agg(pl.col("begin").min(), pl.col("end").max())
        .join(until, on="node")
        .with_columns(quiet_ns=pl.col("until_ns") - pl.col("end"))
    )


def activity(rows: pl.DataFrame, until: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """Per `key` (node, or node and pid): begin, end and the longest pause of its activity, and how long it is quiet.

    Active is who calls and whose flows move bytes, on the clock of its node: clocks need not agree.
    """
    stall_end = pl.col("first_stall_ns") + pl.col("first_stall_len_ns")
    flows = rows.filter(pl.col("level") == "flow", pl.col("start_ns").is_not_null())
    spans = pl.concat(
        [
            rows.select(*key, begin="call_ns", end="call_ns"),
            flows.select(*key, begin="start_ns", end=pl.coalesce("first_stall_ns", "last_byte_ns")),
            flows.filter(stall_end.is_not_null()).select(*key, begin=stall_end, end="last_byte_ns"),
        ]
    ).sort(*key, "begin")
    reached = pl.col("end").cum_max().shift().over(key)
    return (
        spans.with_columns(pause_ns=pl.col("begin") - reached)
        .group_by(key)
        .agg(pl.col("end").max(), pl.col("pause_ns").max().fill_null(0), pl.col("begin").min())
        .join(until, on="node")
        .with_columns(quiet_ns=pl.col("until_ns") - pl.col("end"))
        .sort(key)
    )
