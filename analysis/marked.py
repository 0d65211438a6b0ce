"""Flows that the network asks to slow down now and then, and what the operators cost meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.slow import hot

# So many times as long an operator is busy on a flow while its sender is asked to slow down; in so many operators.
STRETCHED, MIN_OPERATORS = 1.15, 5
# Less, or operators that are usually busy for fewer bins, say nothing unless there are many and the means are so many
# standard errors apart.
MIN_BINS, MANY, CERTAIN = 2, 20, 5.0
# Of the time seen, what the operators of some port are longer by: flows of one healthy job collide now and then too.
LEAST_OF_TIME = 0.005
# Where more ports are marked, it is what the job itself sends at once, or many small tenants: of the elephants of
# a job that are spread over the uplinks of a switch, more hardly ever share one.
MOST_PORTS = 4
# How many operators others must have had for their usual time to be one.
MIN_OTHERS = 12
# How many other communicators of the same kind tell what is usual, and how far they differ.
MIN_TWINS = 3
# From so many on, congestion notifications to one of few ports are those of a queue that stays, where others have at
# most this share of them.
MANY_MARKS, OTHERS_MARKS = 100, 0.2
# Where the port of a machine that was not recorded may be full instead.
MAYBE = 0.4
EDGE = ["node", "nic", "peer_node", "peer_nic"]
ALIKE = ["kind", "nranks", "size"]


def find_marked(
    aligned: pl.DataFrame, flows: pl.DataFrame, marks: pl.DataFrame | None, since: pl.DataFrame
) -> list[Finding]:
    """The flows that a queue in the network slows down, where operators last longer while it does.

    `marks` has how often each node and nic was asked to slow down, `since` that in each interval between two readings
    (signals.intervals), which all sources of traffic have. No other port may be asked as often, and no port of
    a machine may be full: then the queue is between switches. An operator is compared with those of the same flow
    in which it was not asked, or, where it always is, with other flows of ports that never are, or with those of other
    communicators. Assumes that a job does its work alike in all intervals: where it moves the same operators more
    slowly in some for another reason, and is asked by chance, that counts as the network's. Where all that is slowed
    down goes to one machine that was not recorded, its own port may be full as well, and the finding is no claim.
    """
    if marks is None:
        return []
    ports = hot(marks)
    if ports.is_empty() or ports.height > MOST_PORTS:
        return []
    asked = hot(
        since.group_by("node", "nic", "since_ns", "t_ns").agg(
            marks=pl.col("rp_cnp_handled").sum().cast(pl.Int64)
        )
    )
    rows = aligned.filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("step").is_not_null(),
        pl.col("start_ns").is_not_null(),
        pl.col("active_ns") > 0,
    ).with_columns(
        size=(pl.coalesce("op_bytes", pl.col("bytes").cast(pl.UInt64)).log(2) * 2).round(),
        # Not from first to last byte: a rank that waits inside an operator is not slowed by the network.
        busy=pl.col("active_ns") / pl.col("bytes"),
    )
    parts = [
        _asked(rows, asked, node, nic) for node, nic in ports.select("node", "nic").sort("node", "nic").rows()
    ]
    sent = pl.concat(parts)
    ratios = sent.group_by(*EDGE, *ALIKE).agg(
        *_mean("asked", pl.col("busy").filter("asked")),
        *_mean("own", pl.col("busy").filter(~pl.col("asked"))),
        bins=(pl.col("active_ns") / pl.col("bin_ns")).filter(~pl.col("asked")).mean(),
        bytes=pl.col("bytes").filter("asked").mean(),
        first_ns=pl.col("start_ns").filter("asked").min(),
        last_ns=pl.col("last_byte_ns").filter("asked").max(),
    )
    unmarked = rows.join(marks.filter(pl.col("marks") == 0), on=["node", "nic"], how="semi")
    others = unmarked.group_by(ALIKE).agg(
        *_mean("others", pl.col("busy")), others_bins=(pl.col("active_ns") / pl.col("bin_ns")).mean()
    )
    ratios = ratios.join(others, on=ALIKE, how="left", nulls_equal=True)
    compared = [_stretched(ratios, "asked", "own", "bins", MIN_OPERATORS)]
    if pressed(marks):
        compared.append(_stretched(ratios, "asked", "others", "others_bins", MIN_OTHERS))
        compared.append(
            _stretched(_beside_twins(ratios, rows, sent), "all", "twins", "twins_bins", MIN_TWINS)
        )
    # Of the comparisons of a flow the clearest one tells.
    slow = pl.concat(part.select(compared[0].columns) for part in compared)
    slow = slow.sort("ratio", descending=True).unique([*EDGE, *ALIKE], keep="first", maintain_order=True)
    if slow.is_empty() or slow.select("node", "nic").n_unique() < ports.height:
        return []
    costs = slow.group_by("node", "nic").agg(pl.col("cost_ns").sum())
    seen_ns = rows.select(pl.col("last_byte_ns").max() - pl.col("start_ns").min()).item()
    cost_ns = int(costs["cost_ns"].max() or 0)  # type: ignore[arg-type]
    if cost_ns < LEAST_OF_TIME * seen_ns:
        return []
    found = _finding(slow, cost_ns, flows.join(slow.select(EDGE).unique(), on=EDGE, how="semi"))
    to = slow["peer_node"].unique()
    own_port = len(to) == 1 and not to.is_in(aligned["node"].unique().implode()).all()
    return [replace(found, confidence=MAYBE) if own_port else found]


def _mean(name: str, values: pl.Expr) -> list[pl.Expr]:
    """Mean, number and variance of the mean of `values`."""
    return [
        values.mean().alias(f"{name}_mean"),
        values.count().alias(f"{name}_times"),
        (values.var() / values.count()).alias(f"{name}_var"),
    ]


def _beside_twins(ratios: pl.DataFrame, rows: pl.DataFrame, sent: pl.DataFrame) -> pl.DataFrame:
    """`ratios` with what `all` flows of the asked operators do, and those of its `twins`: communicators without any.

    In a ring all flows are as slow as the slowest, so that all tell how long it takes: the bins of one port that are
    too wide to see that begin at other moments than those of the next. A communicator is one value, for it may
    differ from others by its place in the cluster.
    """
    operator = ["comm_id", "step"]
    asked = sent.filter("asked").select(*EDGE, *operator).unique()
    inside = asked.join(rows.select(*operator, *ALIKE, "busy"), on=operator)
    every = inside.group_by(*EDGE, *ALIKE).agg(_mean("all", pl.col("busy")))
    apart = rows.join(sent.select("comm_id").unique(), on="comm_id", how="anti")
    comms = apart.group_by("comm_id", *ALIKE).agg(
        pl.col("busy").mean(), bins=(pl.col("active_ns") / pl.col("bin_ns")).mean()
    )
    twins = comms.group_by(ALIKE).agg(
        pl.col("busy").mean().alias("twins_mean"),
        pl.len().alias("twins_times"),
        pl.col("busy").var().alias("twins_var"),
        pl.col("bins").mean().alias("twins_bins"),
    )
    return ratios.join(every, on=[*EDGE, *ALIKE], how="left", nulls_equal=True).join(
        twins, on=ALIKE, how="left", nulls_equal=True
    )


def _stretched(ratios: pl.DataFrame, asked: str, beside: str, bins: str, least: int) -> pl.DataFrame:
    """The `ratios` of which `asked` operators are busy for clearly longer by byte than those they are set `beside`."""
    apart = pl.col(f"{asked}_mean") - pl.col(f"{beside}_mean")
    sure = apart >= CERTAIN * (pl.col(f"{asked}_var") + pl.col(f"{beside}_var")).sqrt()
    return ratios.with_columns(
        ratio=pl.col(f"{asked}_mean") / pl.col(f"{beside}_mean"),
        times=pl.col("asked_times"),
        cost_ns=apart * pl.col("bytes") * pl.col("asked_times"),
    ).filter(
        pl.col("times") >= MIN_OPERATORS,
        pl.col(f"{beside}_times") >= least,
        # Many tell none the less: of short operators, for which bins are coarse, and of small differences.
        ((pl.col("ratio") >= STRETCHED) & (pl.col(bins) >= MIN_BINS)) | (sure & (pl.col("times") >= MANY)),
    )


def pressed(marks: pl.DataFrame | None) -> bool:
    """Whether the network slows down few ports, and much, by how often each was asked to slow down (`marks`)."""
    if marks is None:
        return False
    ports = hot(marks)
    least = int(ports["marks"].min() or 0)  # type: ignore[arg-type]
    others = marks.join(ports, on=["node", "nic"], how="anti")["marks"]
    alone = int(others.max() or 0) <= OTHERS_MARKS * least  # type: ignore[arg-type]
    return ports.height <= MOST_PORTS and least >= MANY_MARKS and alone


def _asked(rows: pl.DataFrame, asked: pl.DataFrame, node: str, nic: str) -> pl.DataFrame:
    """The `rows` that a port sends, and whether they overlap an interval in which it was `asked` to slow down."""
    here = (pl.col("node") == node) & (pl.col("nic") == nic)
    own = rows.filter(here)
    times = asked.filter(here).sort("t_ns")
    begun = np.searchsorted(times["since_ns"].to_numpy(), own["last_byte_ns"].to_numpy())
    ended = np.searchsorted(times["t_ns"].to_numpy(), own["start_ns"].to_numpy(), side="right")
    return own.with_columns(asked=pl.Series(begun > ended))


def _finding(slow: pl.DataFrame, cost_ns: int, flows: pl.DataFrame) -> Finding:
    ratio, times = float(slow["ratio"].median()), int(slow["times"].sum())  # type: ignore[arg-type]
    first = slow.sort("times", descending=True).row(0, named=True)
    text = (
        f"{first['nic']} of {first['node']} was asked to slow down in {times} operators, and sent for "
        f"{ratio:.2f} times as long as in others of their kind; "
        f"what it sends to {first['peer_node']} shares a queue in the network."
    )
    return Finding(
        kind="path-collision" if slow.select("node", "nic").n_unique() > 1 else "congestion",
        cause="network",
        scope="network",
        confidence=round(min(0.9, 0.6 + times / 100), 3),
        slowdown=round(ratio, 3),
        first_ns=int(slow["first_ns"].min()),  # type: ignore[arg-type]
        last_ns=int(slow["last_ns"].max()),  # type: ignore[arg-type]
        lost_ns=cost_ns,
        evidence=[Evidence("stretched", ratio, 1.0, times, text)],
        flows=flows.sort("node", "nic", "qpn")
        .select("node", "nic", "qpn", "peer_node", "peer_nic")
        .to_dicts(),
        next_check="the switches' counters of marked packets on the uplinks of these paths",
    )
