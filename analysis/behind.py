"""Ranks that are behind all with whom they exchange in pairs, time after time: late by their own doing."""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.callers import PROCESS
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.lags import IN_PAIRS
from pulse_bpf.analysis.late import OVER_NEXT_RANK, window_of
from pulse_bpf.schema import I64

# What is compared: one operator of a communicator.
OPERATOR = ["comm_id", "step"]
# An operator tells where the middle half of its ranks send as much as each other, and of those that do: who has more to
# send may have had more to compute before, or what it sends was cut into operators wrongly.
EQUAL = 1.05
# Nobody ends an exchange before its last partner has come, but for so many bins.
EARLY_BINS = 2
# All that one machine is behind must cost this share of the time seen, be so many times what the next machine costs,
# and be seen at least so often, in at least this share of the operators in which it was ahead or behind.
LEAST, OVER, TIMES, MOSTLY = 0.03, 3.0, 10, 0.8


def find_behind(ranks: pl.DataFrame, comms: pl.DataFrame, clock_error_ns: int | None) -> list[Finding]:
    """The machine that comes last to exchanges in pairs, after all its partners in each, by `ranks` (lags.lags).

    An exchange ends at both its ends at about the same time. A rank that comes to the next one after all with whom it
    exchanged has spent the time between by itself. Who waits for it, directly or by way of others, comes after one of
    its own partners: a wave runs out from the one that is late, and all but this one are behind somebody. So nobody
    else's sum of how much it is behind its last partner is above zero, and the sum says, over many operators, what
    bins too wide for each of them do not. Takes ranks to have equal work, as find_late does, and on average counts only
    what any two nodes' clocks, each wrong by `clock_error_ns` (None: unknown), cannot be apart. Where what a rank gets
    arrives late at it alone, as from a slow port while the sender's buffers empty, it ends later than its partners too:
    only what it takes from its own end to its next exchange is its own doing.
    """
    window_ns = window_of(ranks)
    if clock_error_ns is None or not window_ns:
        return []
    apart_ns = 2 * clock_error_ns
    processes = _costs(_behind(ranks, apart_ns))
    machines = processes.unique("node", keep="first", maintain_order=True)
    if machines.is_empty():
        return []
    worst = machines.row(0, named=True)
    second_ns = max(0, int(machines["cost_ns"][1])) if machines.height > 1 else 0
    if (
        not LEAST * window_ns <= worst["cost_ns"] <= window_ns
        or worst["cost_ns"] < OVER * second_ns
        or worst["behind_ns"] <= apart_ns
        or worst["times"] < max(TIMES, MOSTLY * (worst["times"] + worst["ahead"]))
    ):
        return []
    return [_finding(worst, processes, comms, window_ns)]


def _behind(ranks: pl.DataFrame, apart_ns: int) -> pl.DataFrame:
    """Of each rank and exchange by how much it came after the last of its partners (behind_ns), and its lag before
    exceeds the longest of theirs (own_ns)."""
    sent = pl.col("sent_bytes")
    even = sent.quantile(0.75).over(OPERATOR) <= EQUAL * sent.quantile(0.25).over(OPERATOR)
    here = ranks.filter(
        pl.col("kind").is_in(IN_PAIRS),
        ~pl.col("pipeline"),
        *(pl.col(name).is_not_null() for name in OPERATOR),
    ).filter(even)
    middle = sent.median().over(OPERATOR)
    here = here.with_columns(
        since_ns=pl.col("entry_ns") - pl.col("entry_ns").shift().over(*PROCESS, "comm_id"),
        like_others=sent.is_between(middle / EQUAL, EQUAL * middle),
    )
    named = here.filter(pl.col("kind") == "Group").explode("partners").drop_nulls("partners")
    pairs = named.select(*OPERATOR, "rank", other="partners")
    pairs = pl.concat([pairs, pairs.select(*OPERATOR, rank="other", other="rank")]).unique()
    times = here.select(
        *OPERATOR, other="rank", other_ns="entry_ns", other_lag_ns="lag_ns", other_end_ns="own_end_ns"
    )
    of_others = (
        pairs.join(times, on=[*OPERATOR, "other"], how="left")
        .group_by(*OPERATOR, "rank")
        .agg(
            partners=pl.len().cast(I64),
            # Of one that was not seen it is not known when it came.
            known=pl.col("other_ns").is_not_null().all(),
            last_ns=pl.col("other_ns").max(),
            longest_ns=pl.col("other_lag_ns").max(),
            soonest_ns=pl.col("other_end_ns").min(),
        )
    )
    groups = here.drop("partners").join(of_others, on=[*OPERATOR, "rank"])
    every = here.filter(pl.col("kind") == "AlltoAll").drop("partners")
    every = every.with_columns(
        partners=(pl.col("nranks") - 1).cast(I64),
        known=(pl.len() == pl.col("nranks")).over(OPERATOR)
        & pl.col("entry_ns").is_not_null().all().over(OPERATOR),
        last_ns=_of_others("entry_ns"),
        longest_ns=_of_others("lag_ns"),
        soonest_ns=pl.col("own_end_ns").min().over(OPERATOR),
    )
    both = pl.concat([groups, every.select(groups.columns)])
    both = both.filter(pl.col("partners") > 1, "known", "like_others", pl.col("lag_ns").is_not_null())
    founded = pl.col("entry_ns") <= pl.col("soonest_ns") + EARLY_BINS * pl.col("bin_ns") + apart_ns
    return both.with_columns(
        # A rank that comes when others have ended was taken for another operator's: that it is late is not so.
        behind_ns=pl.when(founded.fill_null(True))
        .then(pl.min_horizontal(pl.col("entry_ns") - pl.col("last_ns"), "since_ns"))
        .otherwise(-pl.col("bin_ns")),
        own_ns=pl.col("lag_ns") - pl.col("longest_ns"),
    )


def _of_others(name: str) -> pl.Expr:
    """The greatest value in the other rows of the operator."""
    value = pl.col(name)
    greatest, next_one = (
        value.top_k(2).sort(descending=True).get(place, null_on_oob=True) for place in (0, 1)
    )
    return (
        pl.when(value == value.max().over(OPERATOR))
        .then(next_one.over(OPERATOR))
        .otherwise(greatest.over(OPERATOR))
    )


def _costs(behind: pl.DataFrame) -> pl.DataFrame:
    """Per process what its being behind costs (cost_ns), how many `times` it was and was `ahead`; most costly first."""
    late = pl.col("behind_ns") > 0
    return (
        behind.sort(*PROCESS, "program_pos")
        .group_by(PROCESS, maintain_order=True)
        .agg(
            pl.min_horizontal(pl.col("behind_ns").sum(), pl.col("own_ns").sum()).alias("cost_ns"),
            late.sum().alias("times"),
            (pl.col("behind_ns") < 0).sum().alias("ahead"),
            pl.len().alias("of"),
            pl.col("behind_ns").mean(),
            pl.col("rank", "comm_id").first(),
            pl.col("call_ns").filter(late).min().alias("first_ns"),
            pl.col("end_ns").filter(late).max().alias("last_ns"),
        )
        .sort("cost_ns", *PROCESS, descending=[True, False, False])
    )


def _finding(worst: dict[str, Any], processes: pl.DataFrame, comms: pl.DataFrame, window_ns: int) -> Finding:
    here = processes.filter(pl.col("node") == worst["node"], pl.col("pid") != worst["pid"])
    one = worst["cost_ns"] >= OVER_NEXT_RANK * int(here["cost_ns"].max() or 0)  # type: ignore[arg-type]
    members = comms.filter(pl.col("comm_id") == worst["comm_id"], pl.col("node") == worst["node"])
    gpu = (
        members.filter(pl.col("rank") == worst["rank"])["gpu"].drop_nulls() if one else members["gpu"].clear()
    )
    who = f"Rank {worst['rank']}" if one else f"{worst['node']}"
    text = (
        f"{who} comes {worst['behind_ns'] / 1e6:.2f} ms after the last of its partners to what they exchange in pairs, "
        f"on average over {worst['of']} exchanges ({worst['times']} times behind all of them, {worst['ahead']} times "
        "before one); everyone else is behind somebody."
    )
    return Finding(
        kind="gpu-slow",
        cause="compute",
        scope="gpu" if len(gpu) else "node",
        confidence=round(min(0.95, 0.75 + 0.005 * worst["times"]), 3),
        slowdown=round(window_ns / max(1, window_ns - worst["cost_ns"]), 3),
        first_ns=int(worst["first_ns"]),
        last_ns=int(worst["last_ns"]),
        lost_ns=int(worst["cost_ns"]),
        evidence=[Evidence("start_lag_ns", float(worst["behind_ns"]), 0.0, int(worst["times"]), text)],
        node=worst["node"],
        gpu=gpu[0] if len(gpu) else None,
        rank=worst["rank"] if one else None,
        pid=worst["pid"] if one else None,
        comm_id=worst["comm_id"],
        victims=[node for node in processes["node"].unique().sort() if node != worst["node"]],
        next_check=f"on {worst['node']}: nvidia-smi -q -d PERFORMANCE,CLOCK,PIDS; py-spy dump --pid {worst['pid']}",
    )
