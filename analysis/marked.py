"""Flows that the network asks to slow down now and then, and what the operators cost meanwhile."""

from __future__ import annotations

import numpy as np
import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.slow import hot

# So many times as long an operator is busy on a flow while its sender is asked to slow down; in so many operators with
# and without.
STRETCHED, MIN_OPERATORS = 1.3, 5
# Operators that are usually busy for fewer bins say nothing when they are for some more.
MIN_BINS = 4
# Where more ports are marked, it is what the job itself sends at once, or many small tenants.
MOST_PORTS = 3


def find_marked(
    aligned: pl.DataFrame, flows: pl.DataFrame, marks: pl.DataFrame | None, events: pl.DataFrame
) -> list[Finding]:
    """The flows that a queue in the network slows down at times, where the operators of these times last longer.

    `marks` has how often each node and nic was asked to slow down, `events` when. No other port may be asked as often,
    and no port of a machine may be full: then the queue is between switches.
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
        # Who sends point to point may wait in the midst of it for what others do.
        ~pl.col("kind").is_in(["Send", "Recv", "Group"]),
    )
    parts = [
        _asked(rows, asked, node, nic) for node, nic in ports.select("node", "nic").sort("node", "nic").rows()
    ]
    # Not from first to last byte: a rank that waits inside an operator is not slowed by the network.
    busy = pl.concat(parts)
    edge = ["node", "nic", "peer_node", "peer_nic"]
    ratios = (
        busy.group_by(*edge, "comm_id", "kind", "op_bytes")
        .agg(
            pl.col("asked").sum().alias("times"),
            (~pl.col("asked")).sum().alias("otherwise"),
            pl.col("active_ns").filter("asked").median(),
            usual_ns=pl.col("active_ns").filter(~pl.col("asked")).median(),
            bin_ns=pl.col("bin_ns").max(),
            first_ns=pl.col("start_ns").filter("asked").min(),
            last_ns=pl.col("last_byte_ns").filter("asked").max(),
        )
        .filter(
            pl.col("times") >= MIN_OPERATORS,
            pl.col("otherwise") >= MIN_OPERATORS,
            pl.col("usual_ns") >= MIN_BINS * pl.col("bin_ns"),
        )
        .with_columns(ratio=pl.col("active_ns") / pl.col("usual_ns"))
    )
    slow = ratios.filter(pl.col("ratio") >= STRETCHED)
    if slow.is_empty() or slow.select("node", "nic").n_unique() < ports.height:
        return []
    return [_finding(slow, flows.join(slow.select(edge).unique(), on=edge, how="semi"))]


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
