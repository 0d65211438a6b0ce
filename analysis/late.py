"""Late entrants: a process that takes longer than its peers from the end of one operator to its next call."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding

# A lag counts when it exceeds the peers' by this share of the time between operators and so many deviations.
LATE_SHARE, DEVIATIONS = 0.1, 6.0
# All lags together must cost this share of the time seen, and so many times what the next process costs.
COST_SHARE, OVER_NEXT = 0.1, 3.0
MIN_PERSISTENT, MIN_SPORADIC = 8, 3
# Late in this share of comparable operators is persistent.
PERSISTENT = 0.5


def find_late(aligned: pl.DataFrame) -> list[Finding]:
    """The process whose own time between operators delays the others.

    A lag runs from the end of the process's previous operator to its call, on its own clock, and is compared
    with the other ranks' at the same operator: waiting for somebody else is no part of it. Only operators before
    which the process waited (call after that end) say anything; calls made ahead do not.
    """
    key = ["comm_id", "step"]
    calls = (
        aligned.filter(
            pl.col("level").is_in(["flow", "call"]),
            pl.col("step").is_not_null(),
            pl.col("prev_end_ns").is_not_null(),
        )
        .group_by(*key, "node", "pid", "rank")
        .agg(pl.col("call_ns", "prev_end_ns", "kind", "program_pos", "bin_ns").first())
        .with_columns(lag_ns=pl.col("call_ns") - pl.col("prev_end_ns"))
        .filter(pl.col("lag_ns") >= -pl.col("bin_ns").fill_null(0))
    )
    others = (pl.col("lag_ns").sum().over(key) - pl.col("lag_ns")) / (pl.len().over(key) - 1)
    usual = pl.when(pl.len().over(key) > 2).then(pl.col("lag_ns").median().over(key)).otherwise(others)
    calls = calls.filter(pl.len().over(key) > 1).with_columns(usual_ns=usual).sort(*key, "rank")
    if calls.is_empty():
        return []
    calls = calls.with_columns(excess_ns=pl.col("lag_ns") - pl.col("usual_ns"))
    window_ns = int(calls.select(pl.col("call_ns").max() - pl.col("call_ns").min()).item())
    period_ns = window_ns / max(1, calls.select(key).unique().height)
    deviation = 1.4826 * float(calls.select(pl.col("excess_ns").abs().median()).item())
    bin_ns = int(calls.select(pl.col("bin_ns").max()).item() or 0)
    limit = max(LATE_SHARE * period_ns, DEVIATIONS * deviation, 3 * bin_ns)
    late = pl.col("excess_ns") > limit
    costs = (
        calls.group_by("node", "pid")
        .agg(
            pl.col("rank").first(),
            pl.col("excess_ns").filter(late).sum().alias("cost_ns"),
            late.sum().alias("times"),
            pl.col("lag_ns").filter(late).median().alias("lag_ns"),
            pl.col("usual_ns").filter(late).median().alias("usual_ns"),
            pl.col("call_ns").filter(late).min().alias("first_ns"),
            pl.col("call_ns").filter(late).max().alias("last_ns"),
            pl.col("comm_id").filter(late).first().alias("comm_id"),
            pl.col("kind").filter(late).first().alias("kind"),
        )
        .sort("cost_ns", "node", "pid", descending=[True, False, False])
    )
    worst = costs.row(0, named=True)
    next_cost = costs["cost_ns"][1] if costs.height > 1 else 0
    if (
        not worst["times"]
        or worst["cost_ns"] < COST_SHARE * window_ns
        or worst["cost_ns"] < OVER_NEXT * next_cost
    ):
        return []
    mine = calls.filter(
        pl.col("node") == worst["node"],
        pl.col("pid") == worst["pid"],
        pl.col("call_ns").is_between(worst["first_ns"], worst["last_ns"]),
    )
    # A job computes only before some of its operators: those at which lateness recurs are comparable.
    share = worst["times"] / max(1, mine.filter(pl.col("usual_ns") >= 0.5 * worst["usual_ns"]).height)
    persistent = share >= PERSISTENT and worst["times"] >= MIN_PERSISTENT
    if not persistent and worst["times"] < MIN_SPORADIC:
        return []
    lag_ms, usual_ms = worst["lag_ns"] / 1e6, worst["usual_ns"] / 1e6
    how = "at nearly every step" if persistent else "now and then"
    evidence = Evidence(
        "start_lag_ns",
        float(worst["lag_ns"]),
        float(worst["usual_ns"]),
        int(worst["times"]),
        f"Rank {worst['rank']} calls its next operator {lag_ms:.1f} ms after the previous one ended, its peers "
        f"after {usual_ms:.1f} ms, {how} ({worst['times']} times); all others wait for it.",
    )
    return [
        Finding(
            kind="unknown" if persistent else "host-pause",
            cause="compute" if persistent else "host",
            scope="node",
            confidence=round(min(0.9, 0.5 + 0.4 * worst["cost_ns"] / (0.3 * window_ns)), 3),
            slowdown=round(window_ns / (window_ns - worst["cost_ns"]), 3),
            first_ns=int(worst["first_ns"]),
            last_ns=int(worst["last_ns"]),
            lost_ns=int(worst["cost_ns"]),
            evidence=[evidence],
            node=worst["node"],
            rank=worst["rank"],
            pid=worst["pid"],
            comm_id=worst["comm_id"],
            next_check=f"on {worst['node']}: py-spy dump --pid {worst['pid']}; nvidia-smi -q -d PERFORMANCE,CLOCK; top",
        )
    ]
