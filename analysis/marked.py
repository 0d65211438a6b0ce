"""Flows that the network asks to slow down now and then, and what the operators cost meanwhile."""

from __future__ import annotations

import numpy as np
import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.slow import hot

# So many times as long an operator is busy on a flow while its sender is asked to slow down; in so many operators.
STRETCHED, MIN_OPERATORS = 1.2, 5
# Operators that are usually busy for fewer bins say nothing when they are for some more.
MIN_BINS = 2
# Where more ports are marked, it is what the job itself sends at once, or many small tenants.
MOST_PORTS = 3
# How many operators others must have had for their usual time to be one.
MIN_OTHERS = 12
# From so many on, congestion notifications to one of few ports are those of a queue that stays, where others have at
# most this share of them.
MANY_MARKS, OTHERS_MARKS = 100, 0.2
EDGE = ["node", "nic", "peer_node", "peer_nic"]


def find_marked(
    aligned: pl.DataFrame, flows: pl.DataFrame, marks: pl.DataFrame | None, events: pl.DataFrame
) -> list[Finding]:
    """The flows that a queue in the network slows down, where operators last longer while it does.

    `marks` has how often each node and nic was asked to slow down, `events` when. No other port may be asked as often,
    and no port of a machine may be full: then the queue is between switches. An operator is compared with those of
    the same flow in which it was not asked, or, where it always is, with other flows of ports that never are.
    """
    if marks is None:
        return []
    ports = hot(marks)
    asked = events.filter(pl.col("kind") == "cnp")
    if ports.is_empty() or ports.height > MOST_PORTS or asked.is_empty():
        return []
    rows = aligned.filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("step").is_not_null(),
        pl.col("start_ns").is_not_null(),
        pl.col("active_ns") > 0,
    ).with_columns(size=(pl.col("bytes").log(2) * 8).round())
    parts = [
        _asked(rows, asked, node, nic) for node, nic in ports.select("node", "nic").sort("node", "nic").rows()
    ]
    # Not from first to last byte: a rank that waits inside an operator is not slowed by the network.
    alike = ["kind", "nranks", "size"]
    own = pl.concat(parts).group_by(*EDGE, *alike)
    ratios = own.agg(
        pl.col("asked").sum().alias("times"),
        pl.col("active_ns").filter("asked").mean(),
        bin_ns=pl.col("bin_ns").max(),
        first_ns=pl.col("start_ns").filter("asked").min(),
        last_ns=pl.col("last_byte_ns").filter("asked").max(),
        own_ns=pl.when((~pl.col("asked")).sum() >= MIN_OPERATORS).then(
            pl.col("active_ns").filter(~pl.col("asked")).mean()
        ),
    )
    unmarked = rows.join(marks.filter(pl.col("marks") == 0), on=["node", "nic"], how="semi")
    others = unmarked.group_by(alike).agg(others_ns=pl.col("active_ns").mean(), others=pl.len())
    slow = (
        ratios.join(others.filter(pl.col("others") >= MIN_OTHERS), on=alike, how="left", nulls_equal=True)
        .with_columns(usual_ns=pl.coalesce("own_ns", "others_ns"))
        .with_columns(ratio=pl.col("active_ns") / pl.col("usual_ns"))
        .filter(
            pl.col("times") >= MIN_OPERATORS,
            pl.col("usual_ns") >= MIN_BINS * pl.col("bin_ns"),
            pl.col("ratio") >= STRETCHED,
        )
    )
    if slow.is_empty() or slow.select("node", "nic").n_unique() < ports.height:
        return []
    return [_finding(slow, flows.join(slow.select(EDGE).unique(), on=EDGE, how="semi"))]


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
    """The `rows` that a port sends, and whether it was `asked` to slow down meanwhile."""
    here = (pl.col("node") == node) & (pl.col("nic") == nic)
    own = rows.filter(here)
    times = np.sort(asked.filter(here)["t_ns"].to_numpy())
    within = np.searchsorted(times, own["last_byte_ns"].to_numpy()) - np.searchsorted(
        times, own["start_ns"].to_numpy()
    )
    return own.with_columns(asked=pl.Series(within > 0))


def _finding(slow: pl.DataFrame, flows: pl.DataFrame) -> Finding:
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
        evidence=[Evidence("stretched", ratio, 1.0, times, text)],
        flows=flows.sort("node", "nic", "qpn")
        .select("node", "nic", "qpn", "peer_node", "peer_nic")
        .to_dicts(),
        next_check="the switches' counters of marked packets on the uplinks of these paths",
    )
