"""Late ranks: processes that take longer than their peers from the end of one operator to their part in the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from pulse_bpf.analysis.callers import PROCESS
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.in_order import in_order, numbered
from pulse_bpf.analysis.lags import IN_PAIRS
from pulse_bpf.analysis.twins import KEY, LEAST_BYTES

# A lag counts when it exceeds the peers' by so many bins, by this much, and by this share of theirs. Windows of a live
# recording in wide bins were seen to cut operators four bins too early, step after step.
LATE_BINS, LATE_NS, LATE_SHARE = 5, 50_000, 0.25
# Clocks that are as far apart as this many bins are one.
CLOCK_BINS = 3
# Operators in wider bins are known by their bytes; when they were is not known well enough.
WIDE_BINS_NS = 5_000_000
# All that one machine is late must cost this share of the time seen, be so many times what the next machine costs, be
# seen so often, and be at most so probable by chance: much, often, or less often but clearly. ONCE tells nothing where
# calls were lost, since one that is missing looks like a wait. In healthy jobs, in which after each checkpoint another
# rank was the last, these were ten times in a row on the same of two machines, which cost up to 0.044 of the time.
MOST_CHANCE = 1e-4
ENOUGH = ((0.1, 5.0, 5, 1.0), (0.03, 5.0, 5, MOST_CHANCE), (0.02, 10.0, 3, MOST_CHANCE))
ONCE = (0.05, 20.0, 1, 1.0)
# Operators called further apart are no volley: what comes late to one comes late to all that it called with it.
VOLLEY_NS = 2_000_000
# Of its lateness, what one process must have, against the next of its machine, to be the one.
OVER_NEXT_RANK = 2.0
# Of a stage's operators from its first late one to its last, those that must be late, and how many at least.
STEADY, STEADY_TIMES = 0.4, 5
# Of an operator's ranks, the share that may look as if they had ended before the late one came.
EARLY_ENDS = 0.2
# Of its excess, by how much the late rank may outlast the others: it should not at all.
OUTLASTS = 0.5
# Of the lags of a rank before equal exchanges, up to which quantile they are natural.
NATURAL = 0.75
# Of its excess, what its receiver's call must be late for the rank to have waited for that.
WAITS = 0.5
# Lags that no operator bears out, as a share of all, above which the operators were not told apart well enough.
MAX_UNFOUNDED = 0.5


def find_late(
    ranks: pl.DataFrame,
    comms: pl.DataFrame,
    channels: pl.DataFrame | None,
    one_clock: bool,
    lost: int,
) -> list[Finding]:
    """The machine that comes late to operators by its own doing, which delays all others, by `ranks` (lags).

    A rank's lag runs from the end of what its process did before to its first byte sent, on its own clock, and is
    compared with the other ranks' in the same operator: waiting for somebody else is no part of it. Nobody can
    end an operator before its last rank has come, so lags longer than the others' operator are no lags. Assumes
    that ranks of one communicator have equal work: what is unequal by the job's own doing moves from rank to rank.
    A rank may send by a neighbour's NIC and process, so that its GPU is named where `comms` and `channels` tell it.
    With `one_clock` the times of all nodes are comparable. Where calls were `lost`, once is not enough.
    """
    window_ns = window_of(ranks)
    if not window_ns:
        return []
    compared = excesses(ranks, one_clock)
    costs, machines = _costs(compared)
    suspect = _stands_out(machines, costs, window_ns, ENOUGH if lost else (*ENOUGH, ONCE))
    if suspect is None:
        return []
    worst = costs.filter(pl.col("node") == suspect).row(0, named=True)
    finding = _finding(worst, costs, machines, compared, window_ns)
    return [finding if finding.rank is None else _of_gpu(finding, worst, comms, channels)]


def _of_gpu(
    finding: Finding, worst: dict[str, Any], comms: pl.DataFrame, channels: pl.DataFrame | None
) -> Finding:
    """`finding` with the GPU whose data the late process sends; without rank where that is not known."""
    members = comms.filter(pl.col("comm_id") == worst["comm_id"], pl.col("node") == worst["node"])
    members = members.unique("rank")
    if members.height > 1 and channels is not None and worst["peer_rank"] is not None:
        senders = channels.filter(
            pl.col("comm_id") == worst["comm_id"], pl.col("ring_next") == worst["peer_rank"]
        )
        members = members.join(senders.select("rank").unique(), on="rank", how="semi")
    if members.height != 1:
        return replace(finding, rank=None, pid=None)
    sender = members.row(0, named=True)
    if sender["rank"] != finding.rank:
        seen = finding.evidence[0]
        text = f"Rank {sender['rank']} sends by way of rank {finding.rank}. {seen.text}"
        finding = replace(finding, evidence=[replace(seen, text=text)])
    if sender["gpu"] is None:
        return replace(finding, rank=sender["rank"], pid=sender["pid"])
    return replace(finding, scope="gpu", gpu=sender["gpu"], rank=sender["rank"], pid=sender["pid"])


def same_clock(error_ns: int | None, bin_ns: int) -> bool:
    """Whether clocks that may be wrong by error_ns (None: unknown) are as good as one, beside what counts as late."""
    return error_ns is not None and error_ns <= max(LATE_NS, CLOCK_BINS * bin_ns)


def excesses(ranks: pl.DataFrame, one_clock: bool) -> pl.DataFrame:
    """Adds to operators of several ranks by how much each lag exceeds the usual one of its operator (excess_ns).

    `unfounded` where most others ended before it, which cannot be.
    """
    together = ranks.filter(
        pl.col("place").is_not_null(),
        pl.col("before_ns").is_not_null(),
        pl.col("op_bytes").fill_null(LEAST_BYTES) >= LEAST_BYTES,
        pl.col("bin_ns") < WIDE_BINS_NS,
    )
    together = in_order(together, KEY, "nic").with_columns(rail=numbered([*KEY, "nic"]))
    together = together.filter(pl.len().over("same") > 1)
    # Where only what is sent is seen, the end of an exchange in pairs is not; nor what a rank waits for that passes on
    # to one what it gets from another.
    blind = (pl.col("kind") == "Group") & ~pl.col("pipeline") & ~pl.col("receives").any().over("same")
    together = together.filter(~(blind & (pl.col("partners").list.len() < 2)))
    # The replicas of a stage do not wait for each other.
    seen = ~pl.col("pipeline") & (pl.col("receives").any().over("same") | ~pl.col("kind").is_in(IN_PAIRS))
    last = pl.col("done_ns").sort(descending=True)
    ends = (
        # In a Group only its partners must wait for a rank.
        pl.when(pl.col("kind") == "Group")
        .then(
            pl.when(pl.col("partners").list.len() > 1)
            .then(last.slice(2, 1).first().over("same"))
            .otherwise(last.slice(1, 1).first().over("same"))
        )
        # Ranks that send through NICs of one name have the channels of a ring in common.
        .when(pl.len().over("rail") > 2)
        .then(pl.col("done_ns").quantile(EARLY_ENDS, "lower").over("rail"))
        .otherwise(pl.col("done_ns").quantile(EARLY_ENDS, "lower").over("same"))
    ) + 2 * pl.col("bin_ns")
    # Who comes late to a ring or a tree has less left to do: it ends with the others.
    outlasts = pl.col("done_ns") - pl.when(pl.len().over("rail") > 2).then(
        pl.col("done_ns").median().over("rail")
    ).otherwise(pl.col("done_ns").median().over("same"))
    alone = ~pl.col("kind").is_in(IN_PAIRS) & (outlasts > OUTLASTS * pl.col("excess_ns"))
    # Who has more to send may have had more to compute before, as with experts of unequal load.
    load = pl.col("sent_bytes") / pl.col("sent_bytes").median().over("same")
    together = (
        together.with_columns(relative_ns=pl.col("lag_ns") / load)
        .with_columns(
            usual_ns=pl.when(pl.col("kind") == "Group", load > 0)
            .then(pl.max_horizontal(_usual("lag_ns"), load * _usual("relative_ns"), _natural()))
            .otherwise(_usual("lag_ns"))
            .clip(0),
            late_call_ns=pl.col("call_lag_ns") - _usual("call_lag_ns").clip(0),
        )
        .with_columns(excess_ns=pl.col("lag_ns") - pl.col("usual_ns"))
    )
    # Nobody can send before the receiver has called.
    receivers = together.select(
        "same",
        pl.col("rank").alias("peer_rank"),
        pl.col("late_call_ns").alias("peer_late_ns"),
        pl.col("call_ns").alias("peer_call_ns"),
    )
    together = together.join(
        receivers.unique(["same", "peer_rank"]), on=["same", "peer_rank"], how="left", maintain_order="left"
    )
    waits = (pl.col("peer_late_ns") > WAITS * pl.col("excess_ns")) & (
        pl.col("late_call_ns").fill_null(0) < WAITS * pl.col("excess_ns")
    )
    if one_clock:
        # The latest moment of a call at which it has no part in the rank's being late.
        before_ns = pl.col("entry_ns") - (1 - WAITS) * pl.col("excess_ns")
        waits |= (pl.col("peer_call_ns") > before_ns) & (pl.col("call_ns") < before_ns)
    together = together.join(_held(together), on=[*KEY, "rank"], how="left", maintain_order="left")
    waits = waits.fill_null(False) | pl.col("held").fill_null(False)
    return together.with_columns(
        waits=waits,
        unfounded=seen & ((pl.col("came_ns") > ends) | alone).fill_null(True) | waits,
    ).drop("same", "rail", "held")


def _held(together: pl.DataFrame) -> pl.DataFrame:
    """The KEY and rank that come late to exchanges with several others because of one of these (held).

    Who does not take what is sent to it holds up all its partners, and these begin to send to others as late as to it:
    all partners of the cause are as late as it is, of who waits for it only some are. Where all partners of a late
    rank are as late, as between three machines, nothing tells them apart.
    """
    late = together.filter(
        pl.col("kind") == "Group",
        ~pl.col("pipeline"),
        pl.col("partners").list.len() > 1,
        pl.col("excess_ns") > 0,
    )
    peers = together.select(
        *KEY, pl.col("rank").alias("partners"), pl.col("excess_ns").alias("peer_excess_ns")
    )
    pairs = (
        late.select(*KEY, "rank", "excess_ns", "partners")
        .explode("partners")
        .join(peers, on=[*KEY, "partners"])
        .with_columns(together=pl.col("peer_excess_ns") > WAITS * pl.col("excess_ns"))
        .with_columns(all=pl.col("together").all().over(*KEY, "rank"))
    )
    causes = pairs.filter("all").select(*KEY, pl.col("rank").alias("partners")).unique()
    of_causes = pairs.filter("together", ~pl.col("all")).join(causes, on=[*KEY, "partners"], how="semi")
    return of_causes.select(*KEY, "rank").unique().with_columns(held=True)


def _usual(lag: str) -> pl.Expr:
    """The median over an operator's ranks; of two, the smaller."""
    return (
        pl.when(pl.len().over("same") > 2)
        .then(pl.col(lag).median().over("same"))
        .otherwise(pl.col(lag).min().over("same"))
    )


def _natural() -> pl.Expr:
    """What ranks take for what they do before such an exchange where nobody holds them up: half of them at least.

    In an exchange between neighbours only these wait for a late rank, and the others for these, one after the other:
    who waits has done meanwhile what it had to do, and comes at once when it need not wait any more.
    """
    alike = ["team", "kind", "expected_bytes"]
    own = pl.col("lag_ns").quantile(NATURAL).over(*alike, "rank")
    return pl.when("pipeline").then(0).otherwise(own.median().over(alike))


def window_of(ranks: pl.DataFrame) -> int:
    first, last = ranks["call_ns"].min(), ranks["end_ns"].max()
    return int(last) - int(first) if isinstance(first, int) and isinstance(last, int) else 0


def _costs(compared: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Per process: `cost_ns` of all its lateness, how many `times`, when and where, most costly first; and the same per
    machine, whose cost in an operator is that of its latest process."""
    least = pl.max_horizontal(LATE_BINS * pl.col("bin_ns"), pl.lit(LATE_NS), LATE_SHARE * pl.col("usual_ns"))
    late = compared.filter(pl.col("excess_ns") > least, ~pl.col("waits")).sort(*PROCESS, "program_pos")
    # In a tree a rank waits for those below it, each machine in one tree of two: who is late by itself is in both.
    members = compared.group_by("node", *KEY).agg(pl.len().alias("members"))
    late = late.join(members, on=["node", *KEY], maintain_order="left")
    late = late.filter(~pl.col("tree") | (pl.len().over("node", *KEY) == pl.col("members")))
    founded = late.filter(~pl.col("unfounded"))
    if float(founded["excess_ns"].sum()) < (1 - MAX_UNFOUNDED) * float(late["excess_ns"].sum()):
        founded = founded.clear()
    # Of operators that overlap the same time may be counted for each.
    since_ns = pl.col("entry_ns") - pl.col("entry_ns").shift().over(PROCESS)
    founded = (
        founded.sort(*PROCESS, "entry_ns", maintain_order=True)
        .with_columns(excess_ns=pl.min_horizontal("excess_ns", since_ns))
        .filter(pl.col("excess_ns") > least)
        .sort(*PROCESS, "program_pos")
    )
    costs = (
        founded.group_by(PROCESS)
        .agg(
            pl.col("excess_ns").sum().alias("cost_ns"),
            pl.len().alias("times"),
            pl.col("excess_ns").median(),
            pl.col("rank", "comm_id", "peer_rank").first(),
            pl.col("call_ns").min().alias("first_ns"),
            pl.col("end_ns").max().alias("last_ns"),
        )
        .sort("cost_ns", *PROCESS, descending=[True, False, False])
    )
    sums = pl.col("excess_ns").sum().alias("cost_ns"), pl.len().alias("times")
    # What a process does on one communicator after another it does itself, each time.
    processes = founded.filter(~pl.col("pipeline")).group_by(PROCESS).agg(*sums)
    machines = (
        pl.concat(
            [
                founded.group_by("node", *KEY)
                .agg(pl.col("excess_ns").max())
                .group_by("node", "team")
                .agg(*sums),
                processes.select(
                    "node", pl.lit(None, compared.schema["team"]).alias("team"), "cost_ns", "times"
                ),
            ]
        )
        .sort("cost_ns", "node", "team", descending=[True, False, False])
        .unique("node", keep="first", maintain_order=True)
        .join(_chances(founded, compared), on="node", how="left")
        .with_columns(pl.col("chance").fill_null(1.0))
        .join(_seldom(founded, compared).with_columns(seldom=True), on=["node", "team"], how="left")
        .sort("cost_ns", "node", descending=[True, False])
    )
    return costs, machines


def _chances(late: pl.DataFrame, compared: pl.DataFrame) -> pl.DataFrame:
    """How probably (`chance`) some node is the latest by chance as often as each is, or some process as one of its own.

    Somebody is always the last, be all alike: of each volley of operators any node, and any process, as likely as the
    others. Chernoff's bound of the binomial distribution, times how many there are. Assumes that volleys do not depend
    on each other: where one cause lasts for several, its chance is taken for too small.
    """
    called = compared.group_by(KEY).agg(pl.col("call_ns").min().alias("volley_ns"))
    volleys = (
        called.join(late.select(KEY).unique(), on=KEY, how="semi")
        .sort("volley_ns", *KEY)
        .with_columns(volley=(pl.col("volley_ns").diff() > VOLLEY_NS).fill_null(False).cum_sum())
    )
    latest = (
        late.join(volleys, on=KEY)
        .sort("excess_ns", *PROCESS, descending=[True, False, False])
        .unique("volley", keep="first", maintain_order=True)
    )

    def chances(of: list[str]) -> pl.DataFrame:
        among = pl.lit(compared.select(of).n_unique(), pl.Float64)
        share = pl.len() / latest.height
        # How much more often than its turn, as a divergence (Kullback and Leibler).
        more = share * (share * among).log() + pl.when(share < 1).then(
            (1 - share) * ((1 - share) / (1 - 1 / among)).log()
        ).otherwise(0.0)
        often = share > 1 / among
        return latest.group_by(of).agg(
            pl.when(often)
            .then((among * (-latest.height * more).exp()).clip(upper_bound=1.0))
            .otherwise(1.0)
            .alias("chance")
        )

    return (
        pl.concat([chances(["node"]), chances(PROCESS).select("node", "chance")])
        .group_by("node")
        .agg(pl.col("chance").min())
    )


def _seldom(late: pl.DataFrame, compared: pl.DataFrame) -> pl.DataFrame:
    """The node and team of stages that are `late` now and then only, of the operators in which they are `compared`.

    A stage may have waited for its neighbours, which is not seen, but not in most of what it does.
    """
    key = ["node", "team"]
    spans = (
        late.filter("pipeline")
        .group_by(key)
        .agg(
            pl.col("place").n_unique().alias("times"),
            first_ns=pl.col("entry_ns").min(),
            last_ns=pl.col("entry_ns").max(),
        )
    )
    between = compared.join(spans, on=key).filter(pl.col("entry_ns").is_between("first_ns", "last_ns"))
    counts = between.group_by(key).agg(pl.col("place").n_unique(), pl.col("times").first())
    often = pl.max_horizontal(pl.lit(STEADY_TIMES), STEADY * pl.col("place"))
    return counts.filter(pl.col("times") < often).select(key)


def _stands_out(
    machines: pl.DataFrame,
    costs: pl.DataFrame,
    window_ns: int,
    enough: Sequence[tuple[float, float, int, float]],
) -> str | None:
    """The machine that is late by far the most, and `enough`; None when lateness is rare, small or spread."""
    if machines.is_empty() or machines["seldom"][0] or costs["cost_ns"][0] > 1.05 * window_ns:
        return None
    node, cost_ns, times, chance = machines.select("node", "cost_ns", "times", "chance").row(0)
    second_ns = machines["cost_ns"][1] if machines.height > 1 else 0
    clear = any(
        cost_ns >= share * window_ns and cost_ns >= over * second_ns and times >= least and chance <= most
        for share, over, least, most in enough
    )
    return str(node) if clear else None


def _finding(
    worst: dict[str, Any], costs: pl.DataFrame, machines: pl.DataFrame, compared: pl.DataFrame, window_ns: int
) -> Finding:
    here = costs.filter(pl.col("node") == worst["node"], pl.col("pid") != worst["pid"])
    next_rank = int(here["cost_ns"].max() or 0)  # type: ignore[arg-type]
    one = worst["cost_ns"] >= OVER_NEXT_RANK * next_rank
    cost_ns, times = machines.select("cost_ns", "times").row(0)
    second = int(machines["cost_ns"][1]) if machines.height > 1 else 0
    who = f"Rank {worst['rank']}" if one else f"{worst['node']}"
    text = (
        f"{who} enters operators {worst['excess_ns'] / 1e6:.2f} ms later than its peers after its previous one ended "
        f"({times} times, {cost_ns / 1e6:.1f} ms in all; on the next machine {second / 1e6:.1f} ms); "
        "all others wait for it."
    )
    margin = min(1.0, cost_ns / max(1.0, 10.0 * second))
    return Finding(
        kind="gpu-slow",
        cause="compute",
        scope="node",
        confidence=round(min(0.95, 0.6 + 0.2 * margin + 0.15 * min(1.0, times / 10)), 3),
        slowdown=round(window_ns / max(1, window_ns - cost_ns), 3),
        first_ns=int(worst["first_ns"]),
        last_ns=int(worst["last_ns"]),
        lost_ns=int(cost_ns),
        evidence=[Evidence("start_lag_ns", float(worst["excess_ns"]), 0.0, int(times), text)],
        node=worst["node"],
        rank=worst["rank"] if one else None,
        pid=worst["pid"] if one else None,
        comm_id=worst["comm_id"],
        victims=[node for node in compared["node"].unique().sort() if node != worst["node"]],
        next_check=f"on {worst['node']}: nvidia-smi -q -d PERFORMANCE,CLOCK,PIDS; py-spy dump --pid {worst['pid']}",
    )
