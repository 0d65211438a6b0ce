"""Hosts that come late with their calls: a process that stops now and then, or waits for its CPUs or for memory."""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.callers import PROCESS
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.in_order import in_order
from pulse_bpf.analysis.lags import IN_PAIRS
from pulse_bpf.analysis.twins import KEY, TWO_SIDED

# A call is late when it comes so much longer after the one before than on other ranks, and by this share longer.
LATE_NS, LATE_SHARE = 1_000_000, 0.5
# So many times a machine calls late say something, or one so long and so many times what is usual there; all of them
# together are at least and at most these shares of the time, a single one at least that of ONCE.
MIN_TIMES, PAUSE_NS, LEAST_OF_TIME, ONCE, MOST_OF_TIME = 2, 8_000_000, 0.005, 0.02, 0.7
# How many times what is usual there a single late call must be: where clocks tell that it was on time before, and else.
SINGLE, SINGLE_BLIND = 0.7, 3.0
# What another machine's late calls may cost at most, beside those of the one that is named.
OTHERS = 0.2
# Late in more of its calls than this, and than so many, it may as well wait for its GPU: then all of them together are
# at least this share of the time seen, and what is said of the host is no surer than this.
SPORADIC, FEW, LEAST_OFTEN, UNSURE = 0.3, 3, 0.03, 0.75
# By what part of that a late call must come after the first of the other ranks', where clocks tell.
BEHIND = 0.5
# Where so many ranks call on one clock, a call is also late by so many times what three quarters of them are within of
# their median: what varies from rank to rank by the job's own doing, as computing does, does not reach that.
MANY_RANKS, SPREADS = 16, 10.0
# Of its calls after as long a wait, in what share a process is late so: what is late each time may wait for its GPU.
OFTEN = 0.5
# From this length on a late call is a pause and no wait for a CPU, whose slices are shorter.
LONG_NS = 12_000_000
# So far a host falls behind the others, and no further, as long as they do not all wait for it.
IN_STEP_NS = 30_000_000


def find_hosts(ranks: pl.DataFrame, one_clock: bool, lost: int, often: bool = False) -> list[Finding]:
    """The machine whose processes call late, by `ranks` (late.lags), now and then, or only those that do so `often`.

    The time from one call of a process to its next is compared with that of the other ranks at the same operator, each
    on its own clock. All ranks wait for a late one sooner or later, but at another call. A process may wait in its call
    for the operator to end: so long it is not late, and where nobody watched the traffic nothing is said; neither
    where calls were `lost`, which look like waits. What calls late often has a host or a GPU that is slow: which of
    them is not known, but the machine is.
    """
    if lost:
        return []
    calls = _gaps(ranks, one_clock)
    late = calls.filter(
        pl.col("excess_ns") > LATE_NS,
        (pl.col("excess_ns") > LATE_SHARE * pl.col("usual_ns")) | pl.col("outlying"),
        pl.col("in_step"),
        # Where the call before came early, the time between them is longer, and nobody late.
        (pl.col("behind_ns") > BEHIND * pl.col("excess_ns")) | (not one_clock),
    ).sort(*PROCESS, "program_pos")
    single = SINGLE if one_clock else SINGLE_BLIND
    costs = (
        late.group_by(PROCESS)
        .agg(
            pl.col("excess_ns").sum().alias("cost_ns"),
            pl.len().alias("times"),
            pl.col("excess_ns").max().alias("longest_ns"),
            pl.col("excess_ns")
            .filter(pl.col("excess_ns") > single * pl.col("usual_ns"))
            .max()
            .alias("pause_ns"),
            pl.col("excess_ns").median().alias("median_ns"),
            pl.col("call_ns").min().alias("first_ns"),
            pl.col("call_ns").max().alias("last_ns"),
            pl.col("rank", "comm_id").first(),
        )
        .join(calls.group_by(PROCESS).agg(pl.len().alias("calls")), on=PROCESS)
        .sort("cost_ns", *PROCESS, descending=[True, False, False])
    )
    if costs.is_empty():
        return []
    worst = costs.row(0, named=True)
    window_ns = int(calls.select(pl.col("call_ns").max() - pl.col("call_ns").min()).item())
    here = costs.filter(pl.col("node") == worst["node"])
    cost_ns = int(here["cost_ns"].sum())
    # What all processes of a machine come late from is one occasion, like the end of a checkpoint.
    moments_ns = late.filter(pl.col("node") == worst["node"])["call_ns"].sort()
    times = 1 + int((moments_ns.diff() > IN_STEP_NS).sum())
    elsewhere = float(costs.filter(pl.col("node") != worst["node"])["cost_ns"].max() or 0)  # type: ignore[arg-type]
    if (
        (times < MIN_TIMES and (worst["pause_ns"] or 0) < PAUSE_NS)
        or cost_ns < LEAST_OF_TIME * window_ns
        or (times < MIN_TIMES and worst["cost_ns"] < ONCE * window_ns)
        or worst["cost_ns"] > MOST_OF_TIME * window_ns
        or elsewhere > OTHERS * worst["cost_ns"]
        or (worst["times"] > max(FEW, SPORADIC * worst["calls"])) != often
        or (often and cost_ns < LEAST_OFTEN * window_ns)
    ):
        return []
    return [_finding(worst, costs, calls, window_ns, UNSURE if often else 0.95)]


def _gaps(ranks: pl.DataFrame, one_clock: bool) -> pl.DataFrame:
    """Per call of an operator of several ranks: the time since the process's call before, and by how much it exceeds.

    `in_step`: the call before came at about the same time on all ranks, as far as clocks tell; a rank whose calls
    were matched with the wrong ones of the others is never in step. `behind_ns`: how much later than
    the first of theirs it is. `outlying`: by itself too late to be of what varies from rank to rank.
    """
    same_process = pl.all_horizontal(pl.col(name) == pl.col(name).shift() for name in PROCESS)

    def before(name: str) -> pl.Expr:
        return pl.when(same_process).then(pl.col(name).shift())

    calls = (
        ranks.sort(*PROCESS, "program_pos")
        .with_columns(
            before_call_ns=before("call_ns"),
            after_end_ns=pl.col("call_ns") - before("own_end_ns"),
            watched=before("covered"),
            follows=pl.col("program_pos") == before("program_pos") + 1,
            after_ring=~before("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
            after_stage=pl.col("pipeline") & before("pipeline"),
        )
        .filter(
            "follows",
            "watched",
            pl.col("place").is_not_null(),
            # Who may have waited in its call for another stage is late only after that operator ended.
            ~pl.col("after_stage") | pl.col("after_end_ns").is_not_null(),
        )
        .with_columns(gap_ns=pl.col("call_ns") - pl.col("before_call_ns"))
    )
    calls = in_order(calls, KEY).filter(pl.len().over("same") > 1)
    several = pl.len().over("same") > 2

    def usual(name: str) -> pl.Expr:
        value = pl.col(name)
        return pl.when(several).then(value.median().over("same")).otherwise(value.min().over("same"))

    apart = (pl.col("before_call_ns") - pl.col("before_call_ns").median().over("same")).abs()
    apart = apart * pl.when(several).then(1).otherwise(2)
    calls = calls.with_columns(usual_gap_ns=usual("gap_ns"), usual_after_ns=usual("after_end_ns"))
    longer_ns = pl.col("gap_ns") - pl.col("usual_gap_ns")
    after_end_ns = pl.col("after_end_ns") - pl.col("usual_after_ns")
    if one_clock:
        # What has ended everywhere before the others called has ended here before a call that is later: its bytes were
        # taken for those of the next.
        cut_late = pl.col("after_ring") & (pl.col("after_end_ns") < 0) & (pl.col("usual_after_ns") > 0)
        after_end_ns = pl.when(~cut_late).then(after_end_ns)
    calls = calls.with_columns(
        # Of the time between two calls, what a process waits for the first one's operator is none of its own, where it
        # is known or clocks tell as well. Who exchanges in pairs may also wait for what others still exchange.
        usual_ns=pl.when(
            pl.col("usual_after_ns") > 0,
            pl.col("after_ring"),
            pl.col("after_end_ns").is_not_null() | one_clock,
        )
        .then(pl.min_horizontal("usual_gap_ns", "usual_after_ns"))
        .otherwise("usual_gap_ns"),
        excess_ns=pl.min_horizontal(longer_ns, after_end_ns),
        in_step=(apart < pl.max_horizontal(0.5 * longer_ns, pl.lit(IN_STEP_NS)))
        if one_clock
        else pl.lit(True),
        behind_ns=pl.col("call_ns") - pl.col("call_ns").min().over("same"),
        outlying=_outlying() if one_clock else pl.lit(False),
    )
    # What a process is late each time that it waited for so long it may wait for.
    long = pl.col("usual_gap_ns") > 0.5 * pl.col("usual_gap_ns").filter("outlying").median().over(PROCESS)
    return calls.with_columns(
        outlying=pl.col("outlying") & (pl.col("outlying").filter(long).mean().over(PROCESS) <= OFTEN)
    )


def _outlying() -> pl.Expr:
    """Whether the time since the call before is longer than that of the other ranks by many times what these differ."""
    spread_ns = pl.col("gap_ns").quantile(0.75).over("same") - pl.col("usual_gap_ns")
    return (pl.len().over("same") >= MANY_RANKS) & (
        pl.col("gap_ns") - pl.col("usual_gap_ns") > SPREADS * spread_ns
    )


def _finding(
    worst: dict[str, Any], costs: pl.DataFrame, calls: pl.DataFrame, window_ns: int, most: float
) -> Finding:
    """`most`: how sure of it one may be."""
    here = costs.filter(pl.col("node") == worst["node"])
    one = here.height == 1 or worst["cost_ns"] >= 2 * float(here["cost_ns"][1])
    pause = worst["median_ns"] >= LONG_NS
    who = (
        f"Rank {worst['rank']} of {worst['node']}" if one else f"{worst['node']} with {here.height} processes"
    )
    text = (
        f"{who} calls {worst['times']} of {worst['calls']} operators late, by {worst['median_ns'] / 1e6:.1f} ms and "
        f"up to {worst['longest_ns'] / 1e6:.1f} ms; other machines' hosts call on time."
    )
    pid = worst["pid"]
    return Finding(
        kind="host-pause" if pause else "host-cpu",
        cause="host",
        scope="node",
        confidence=round(min(most, 0.7 + 0.05 * worst["times"]), 3),
        slowdown=round(window_ns / max(1.0, window_ns - worst["cost_ns"]), 3),
        first_ns=int(worst["first_ns"]),
        last_ns=int(worst["last_ns"]),
        lost_ns=int(worst["cost_ns"]),
        evidence=[Evidence("call_gap_ns", float(worst["median_ns"]), 0.0, int(worst["times"]), text)],
        node=worst["node"],
        rank=worst["rank"] if one else None,
        pid=pid if one else None,
        comm_id=worst["comm_id"],
        victims=[node for node in calls["node"].unique().sort() if node != worst["node"]],
        next_check=f"on {worst['node']}: py-spy dump --pid {pid}; top -H -p {pid}; vmstat 1 5; cat /proc/pressure/*",
    )
