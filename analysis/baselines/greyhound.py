"""The group medians of Greyhound (ATC'25, also known as Falcon): which groups are slower than others of their kind.

Published: once iterations have become more than a tenth slower, every group's communication is timed by CUDA events
for a while; a group is suspect when its slowest rank's mean exceeds the median of the groups in the same position by a
tenth (the public code: a fifth). Then the job is paused, and benchmarks of matrix products and of the links of the
suspect groups find the slow GPU or link.
Our reading: the alarm is given for free, and the second half of the recording is what is timed after it. Groups are in
the same position when they have as many ranks and nodes and call the same operators; one that is alone in it goes to
the benchmarks, as in the code. That of the GPUs is stood for by their true time outside of calls, a tenth above the
median of their role, which unequal work lengthens too. That of the links cannot be run on a recording, so what would
be benchmarked is the answer: the machines that all slower groups share, else those of any, and nothing where that is
every machine.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.baselines.calls import PROCESS, accuse, accuse_group, timed, verdict, window
from pulse_bpf.analysis.findings import Evidence
from pulse_bpf.analysis.load import Recording

SLOWER = 1.1


def locate(calls: pl.LazyFrame | None, recording: Recording) -> dict[str, Any]:
    rows = timed(calls)
    window_ns = window(rows)
    middle = (pl.col("call_ns").min() + pl.col("call_ns").max()).over("node") / 2
    rows = rows.filter(pl.col("call_ns") >= middle)
    suspects = suspect_groups(rows).collect()
    if suspects.is_empty():
        return verdict([], window_ns)
    slowdown = float(suspects["slowdown"].max())  # type: ignore[arg-type]
    members = rows.join(suspects.lazy(), on="comm_id", how="semi")
    slow = slow_gpus(rows).join(members, on=PROCESS, how="semi", maintain_order="left").collect()
    slower = suspects.filter(pl.col("slowdown") > SLOWER)
    text = f"{slower['comm_id'].n_unique()} groups are slower than others in their position."
    evidence = Evidence("duration_ratio", slowdown, SLOWER, int(suspects["operators"].sum()), text)
    if not slow.is_empty():
        alone = slow["node"].n_unique() == 1 < slow.height
        who = {"node": slow["node"][0]} if alone else slow.row(0, named=True)
        return verdict([accuse(who, window_ns, evidence, slowdown=slowdown)], window_ns)
    if slower.is_empty():
        return verdict([], window_ns)
    groups = (
        rows.join(slower.lazy(), on="comm_id", how="semi").group_by("comm_id").agg(pl.col("node").unique())
    )
    nodes_of = [set(nodes) for nodes in groups.collect()["node"]]
    nodes = list(set.intersection(*nodes_of) or set.union(*nodes_of))
    further: dict[str, Any] = {"kind": "unknown", "cause": "network", "slowdown": slowdown}
    if len(nodes) == 1:
        return verdict([accuse({"node": nodes[0]}, window_ns, evidence, **further)], window_ns)
    return verdict(accuse_group(nodes, rows, window_ns, evidence, **further), window_ns)


def suspect_groups(rows: pl.LazyFrame) -> pl.LazyFrame:
    """comm_id, kind, size, operators and slowdown of the groups that are slower than others in their position,
    and of those that are alone in it, whose slowdown is 1."""
    position = ["ranks", "nodes", "kind", "size"]
    return (
        rows.drop_nulls(["duration_ns", "comm_id"])
        .group_by(*PROCESS, "comm_id", "kind", "size")
        .agg(pl.col("duration_ns").mean(), pl.len().alias("operators"))
        .group_by("comm_id", "kind", "size")
        .agg(
            pl.len().alias("ranks"),
            pl.col("node").n_unique().alias("nodes"),
            pl.col("duration_ns").max(),
            pl.col("operators").sum(),
        )
        .with_columns(slowdown=pl.col("duration_ns") / pl.col("duration_ns").median().over(position))
        .filter((pl.col("slowdown") > SLOWER) | (pl.len().over(position) == 1))
        .select("comm_id", "kind", "size", "operators", "slowdown")
    )


def slow_gpus(rows: pl.LazyFrame) -> pl.LazyFrame:
    """node, pid and gpu of those that compute longer than their role's median, the slowest first."""
    return (
        rows.group_by(*PROCESS, "gpu", "role")
        .agg(pl.col("compute_ns").sum())
        .with_columns(ratio=pl.col("compute_ns") / pl.col("compute_ns").median().over("role"))
        .filter(pl.col("ratio") > SLOWER)
        .sort("ratio", *PROCESS, descending=[True, False, False])
        .select(*PROCESS, "gpu")
    )
