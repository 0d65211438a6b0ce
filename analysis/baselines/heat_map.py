"""The heat map of MegaScale (NSDI'24): each rank's time in each part of the step, and who stands out.

Published: CUDA-event timers around the critical code of each rank, averages over steps, shown as a heat map of
machines, in which people see the outliers; the machines found so took about a tenth longer for the same computing.
Our reading: the parts are the time outside of calls and the time in each kind of call over so many ranks. Ranks that
make the same calls are compared; a person sees what exceeds the median by a tenth, three robust deviations and a
hundredth of the rank's time. Hot computing is looked at first, since calls of others then wait for it, else the part
that costs most. The GPU, machine or machines that are hot there are the answer.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.baselines.calls import PROCESS, accuse, accuse_group, timed, verdict, window
from pulse_bpf.analysis.findings import Evidence
from pulse_bpf.analysis.load import Recording

SLOWER, DEVIATIONS, VISIBLE = 1.1, 3.0, 0.01
RANK = ["node", "pid", "gpu", "role"]
COMPUTE = "computing"


def locate(calls: pl.LazyFrame | None, recording: Recording) -> dict[str, Any]:
    rows = timed(calls)
    window_ns = window(rows)
    hot = outliers(heat(rows)).collect()
    if hot.is_empty():
        return verdict([], window_ns)
    by_part = hot.group_by("part").agg(pl.col("excess_ns").sum())
    worst = by_part.sort(pl.col("part") == COMPUTE, "excess_ns", "part")["part"][-1]
    hot = hot.filter(pl.col("part") == worst).sort(
        "excess_ns", "node", "pid", descending=[True, False, False]
    )
    top, nodes = hot.row(0, named=True), hot["node"].unique().to_list()
    evidence = Evidence(
        "time_ns",
        top["time_ns"],
        top["median_ns"],
        top["operators"],
        f"{hot.height} ranks stand out by their time in {worst}.",
    )
    computing = worst == COMPUTE
    further: dict[str, Any] = {
        "kind": "gpu-slow" if computing else "unknown",
        "cause": "compute" if computing else "network",
        "slowdown": top["ratio"],
    }
    if len(nodes) > 1:
        return verdict(accuse_group(nodes, rows, window_ns, evidence, **further), window_ns)
    who = {name: top[name] for name in (("node",) if hot.height > 1 else ("node", "pid", "gpu"))}
    return verdict([accuse(who, window_ns, evidence, **further)], window_ns)


def heat(rows: pl.LazyFrame) -> pl.LazyFrame:
    """The map: RANK, part (COMPUTE, or calls of a kind over so many ranks), time_ns in all, operators."""
    ranks = pl.struct(PROCESS).n_unique().over("comm_id")
    parts = [
        rows.group_by(RANK).agg(
            pl.lit(COMPUTE).alias("part"),
            pl.col("compute_ns").sum().alias("time_ns"),
            pl.len().alias("operators"),
        ),
        rows.group_by(*RANK, pl.format("{} over {} ranks", "kind", ranks).alias("part")).agg(
            pl.col("duration_ns").sum().alias("time_ns"), pl.len().alias("operators")
        ),
    ]
    return pl.concat(parts, how="diagonal_relaxed")


def outliers(heat: pl.LazyFrame) -> pl.LazyFrame:
    """The cells that stand out among ranks of equal role, with median_ns, ratio and excess_ns."""
    peers = ["role", "part"]
    deviation = 1.4826 * (pl.col("time_ns") - pl.col("median_ns")).abs().median().over(peers)
    return (
        heat.with_columns(median_ns=pl.col("time_ns").median().over(peers))
        .with_columns(
            excess_ns=pl.col("time_ns") - pl.col("median_ns"),
            ratio=pl.col("time_ns") / pl.max_horizontal("median_ns", pl.lit(1.0)),
            deviation_ns=deviation,
        )
        .filter(
            pl.len().over(peers) > 2,
            pl.col("ratio") > SLOWER,
            pl.col("excess_ns") > DEVIATIONS * pl.col("deviation_ns"),
            pl.col("excess_ns") > VISIBLE * pl.col("time_ns").sum().over(RANK),
        )
    )
