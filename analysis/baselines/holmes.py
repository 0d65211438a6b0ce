"""The operator graph of Holmes (NSDI'25): follow abnormal operators to the one that the others waited for.

Published, as noted of the paper: a forest trained on labelled operators marks abnormal ones. In a group whose operators
are abnormal, a member with a normal one is whom the others waited for; from it the search goes on to the groups that it
was in before, through collectives and along the pipeline, until there is no abnormal operator. Evidence from
irregular iterations is put together into a ranking; slow-downs below 1.04 are not found.
Our reading: without labels, an operator is abnormal when it is a tenth and four deviations longer than the lower
quartile of its own history, or than the median of that over the groups in the same position, whichever is shorter, and
at least half as much longer as on the member with most; the deviation is that of the shorter half, which is normal. A
normal member is passed over where it waited half as long itself, in anything since its last operator in the group:
that has votes of its own, but for calls along a pipeline, as whom they waited for takes their place in the schedule to
know. An operator that is abnormal on all members votes for all of them. A vote weighs what was lost. The first of the
ranking is named with most of the votes, when what is voted on is at least 4 % of the time; a group if no member is.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.baselines.calls import (
    MAJORITY,
    OPERATOR,
    PROCESS,
    accuse,
    accuse_group,
    culprit,
    timed,
    verdict,
    window,
)
from pulse_bpf.analysis.findings import Evidence
from pulse_bpf.analysis.load import Recording

SLOWER, DEVIATIONS, FLOOR = 1.1, 4.0, 0.04


def locate(calls: pl.LazyFrame | None, recording: Recording) -> dict[str, Any]:
    rows = marked(timed(calls))
    window_ns = window(rows)
    votes = cast(rows).collect()
    groups = votes.filter("whole").group_by("comm_id").agg(pl.col("weight").sum())
    who = culprit(votes)
    if who is not None:
        behind = votes.filter(pl.col(name) == value for name, value in who.items())
    else:
        top = groups.sort("weight", "comm_id", descending=[True, False]).head(1)
        behind = votes.filter("whole").join(top, on="comm_id", how="semi")
    lost_ns, share = float(behind["weight"].sum()), _share(behind, votes)
    spent = rows.group_by(PROCESS).agg(spent_ns=pl.col("end_ns").max() - pl.col("call_ns").min())
    if share <= MAJORITY or lost_ns < FLOOR * spent.select(pl.col("spent_ns").max()).collect().item():
        return verdict([], window_ns)
    operators = behind.select(OPERATOR).n_unique()
    text = f"{operators} abnormal operators lead there, that is {share:.0%} of what was lost."
    evidence = Evidence("votes", share, MAJORITY, operators, text)
    if who is not None:
        return verdict([accuse(who, window_ns, evidence)], window_ns)
    further: dict[str, Any] = {"kind": "unknown", "cause": "network"}
    nodes = behind["node"].unique().to_list()
    return verdict(accuse_group(nodes, rows, window_ns, evidence, **further), window_ns)


def _share(some: pl.DataFrame, votes: pl.DataFrame) -> float:
    return 0.0 if some.is_empty() else float(some["weight"].sum()) / float(votes["weight"].sum())


def marked(rows: pl.LazyFrame) -> pl.LazyFrame:
    """`rows` with `abnormal`, `excess_ns` over a normal duration, and `waited_ns`, the abnormal excess of all
    operators of the process since its last on the communicator."""
    own = [*PROCESS, "comm_id", "kind", "size"]
    position = ["ranks", "nodes", "kind", "size"]
    return (
        rows.drop_nulls("duration_ns")
        .with_columns(
            ranks=pl.struct(PROCESS).n_unique().over("comm_id"),
            nodes=pl.col("node").n_unique().over("comm_id"),
            history_ns=pl.col("duration_ns").quantile(0.25).over(own),
        )
        .with_columns(
            normal_ns=pl.min_horizontal("history_ns", pl.col("history_ns").median().over(position)),
            # One standard deviation apart where durations are normally distributed.
            deviation_ns=pl.col("history_ns") - pl.col("duration_ns").quantile(0.05).over(own),
        )
        .with_columns(excess_ns=pl.col("duration_ns") - pl.col("normal_ns"))
        .with_columns(
            abnormal=(pl.col("duration_ns") > SLOWER * pl.col("normal_ns"))
            & (pl.col("excess_ns") > DEVIATIONS * pl.col("deviation_ns"))
            & (
                pl.col("size").is_null()
                | (pl.col("excess_ns") > pl.col("excess_ns").max().over(OPERATOR, "size") / 2)
            )
        )
        .with_columns(
            total_ns=pl.when("abnormal").then("excess_ns").otherwise(0.0).cum_sum().over(PROCESS),
        )
        .with_columns(
            waited_ns=pl.col("total_ns").shift(1, fill_value=0.0).over(PROCESS)
            - pl.col("total_ns").shift(1, fill_value=0.0).over(*PROCESS, "comm_id", pl.col("size").is_null())
        )
    )


def cast(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Who is voted for by which collective: the rows of `marked` with `weight`, and whether the `whole` group is."""
    normal = (~pl.col("abnormal")).sum().over(OPERATOR)
    return (
        rows.filter(pl.col("size").is_not_null(), pl.col("comm_id").is_not_null())
        .with_columns(
            normal=normal, members=pl.len().over(OPERATOR), excess_ns=pl.col("excess_ns").max().over(OPERATOR)
        )
        .with_columns(whole=pl.col("normal") == 0)
        .filter(
            (pl.col("normal") <= pl.col("members") / 2)
            & (pl.col("whole") | (~pl.col("abnormal") & (pl.col("waited_ns") < pl.col("excess_ns") / 2)))
        )
        .with_columns(weight=pl.col("excess_ns") / pl.when("whole").then("members").otherwise("normal"))
    )
