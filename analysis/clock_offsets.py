"""How far the wall clocks of nodes are apart, by operators of which one node saw what it sent and another receive it.

Most fleets' clocks differ by more than many operators last, and only times on one clock can be put in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.pipelines import components
from pulse_bpf.schema import F64, I64, STR

Floats = NDArray[np.float64]

MOMENTS = pl.Schema({"node": STR, "peer_node": STR, "sent_ns": I64, "received_ns": I64})
OFFSETS = pl.Schema({"node": STR, "since_ns": I64, "offset_ns": F64, "drift": F64})
# Clocks that are stated to be so near to each other are as good as one.
ONE_CLOCK_NS = 10_000
# Of each window of time the quickest transfer counts. Within one, a clock is taken to drift evenly.
WINDOW_NS = 100_000_000
# A drift is known from so many windows on, when they tell it to this accuracy; else clocks that nothing disciplines
# are taken to gain so much on each other.
MIN_WINDOWS, KNOWN_DRIFT, UNKNOWN_DRIFT = 10, 1e-5, 5e-5
# The times in the tables that are on a node's own clock.
TIMES = {
    "operators": (
        "call_ns",
        "prev_end_ns",
        "start_ns",
        "end_ns",
        "last_byte_ns",
        "byte_mean_ns",
        "credit_mean_ns",
        "first_gap_ns",
        "first_stall_ns",
    ),
    "events": ("t_ns",),
    "samples": ("t_ns",),
    "port_counters": ("t_ns",),
    "coverage": ("first_ns", "last_ns"),
    "processes": ("start_ns", "gone_ns"),
    "comms": ("first_seen_ns", "gone_ns"),
}


@dataclass(frozen=True)
class Clock:
    """One clock for all nodes: what each node's is ahead of it (OFFSETS), and by how much that may be wrong.

    `error_ns` is None where the clocks of some nodes were never compared: these keep their own.
    """

    offsets: pl.DataFrame
    error_ns: int | None

    def shifted(self, table: str, frame: pl.DataFrame) -> pl.DataFrame:
        """`frame`, a `table` of TIMES with times of each node's clock, on the one clock."""
        times = [name for name in TIMES.get(table, ()) if name in frame.columns]
        if self.offsets.is_empty() or not times:
            return frame
        ahead = pl.col("offset_ns") + pl.col("drift") * (pl.col(times[0]) - pl.col("since_ns"))
        return (
            frame.join(
                self.offsets.cast({"node": frame.schema["node"]}),
                on="node",
                how="left",
                maintain_order="left",
            )
            .with_columns(_ahead_ns=pl.coalesce(ahead, "offset_ns").fill_null(0).round().cast(I64))
            .with_columns(pl.col(times) - pl.col("_ahead_ns"))
            .drop(OFFSETS.names()[1:], "_ahead_ns")
        )


def one_clock(operators: pl.DataFrame, nodes: pl.DataFrame) -> Clock:
    """The Clock of `nodes`: their own where they say that they agree, else what `operators` (metrics.OPERATORS) tell.

    Takes the operators that NCCL itself has numbered: which are the same on all ranks is certain only there.
    """
    stated = nodes["clock_error_ns"]
    known = len(stated) > 0 and not stated.null_count()
    stated_ns = int(stated.max()) if known else None  # type: ignore[arg-type]
    if stated_ns is not None and stated_ns <= ONE_CLOCK_NS:
        return Clock(OFFSETS.to_frame(), stated_ns)
    found = solve(moments(operators))
    apart = set(nodes["node"]) - set(found.offsets["node"])
    if found.error_ns is None or apart or (stated_ns is not None and found.error_ns >= stated_ns):
        return Clock(OFFSETS.to_frame(), stated_ns)
    return found


def moments(operators: pl.DataFrame) -> pl.DataFrame:
    """MOMENTS of the first and the last byte of numbered operators on each flow that was seen at both ends.

    What begins in a bin was sent when the bin began at the earliest, and was received when it ended at the latest, and
    so with the last byte: what a transfer can have taken at most.
    """
    rows = operators.filter(
        pl.col("level") == "flow",
        pl.col("nccl_seq").is_not_null(),
        pl.col("end_ns").is_not_null(),
        pl.col("node") != pl.col("peer_node"),
    ).with_columns(last_ns=pl.col("last_byte_ns") - pl.col("bin_ns"))
    operator = ["comm_id", "kind", "nccl_seq"]
    near, far = ["node", "nic", "rank"], ["peer_node", "peer_nic", "peer_rank"]
    key = [*operator, *near, *far]
    sent = rows.filter(pl.col("direction") == "tx").select(*key, "start_ns", "last_ns")
    received = rows.filter(pl.col("direction") == "rx").select(
        *operator,
        *(pl.col(name).alias(other) for name, other in zip([*near, *far], [*far, *near], strict=True)),
        first_end_ns=pl.col("start_ns") + pl.col("bin_ns"),
        end_ns=pl.col("last_byte_ns"),
    )
    # Where a port has several flow groups to a peer in one operator, whose is whose is unknown.
    sent, received = (side.unique(key, keep="none") for side in (sent, received))
    both = sent.join(received, on=key, nulls_equal=True)
    return pl.concat(
        [
            both.select("node", "peer_node", sent_ns=early, received_ns=late)
            for early, late in (("start_ns", "first_end_ns"), ("last_ns", "end_ns"))
        ]
    )


def solve(seen: pl.DataFrame) -> Clock:
    """The Clock by MOMENTS at which the same bytes were sent by node and received by peer_node, each on its own clock.

    Nothing arrives before it is sent: how long the quickest transfer seems to take is the most that the receiver's
    clock can be ahead of the sender's, and the sum along any path a bound as well. A node's offset is the middle of
    its bounds against the first node's, and half of their distance is how far that can be off. A ring in one direction
    will do. Assumes that clocks drift evenly, and that in most windows some transfer was not held up.
    """
    if seen.is_empty():
        return Clock(OFFSETS.to_frame(), None)
    names = sorted({*seen["node"], *seen["peer_node"]})
    since_ns = int(seen.filter(pl.col("node") == names[0])["sent_ns"].min() or 0)  # type: ignore[arg-type]
    index = {name: number for number, name in enumerate(names)}
    numbered = seen.select(
        one=pl.col("node").replace_strict(index, return_dtype=I64),
        two=pl.col("peer_node").replace_strict(index, return_dtype=I64),
        at_ns=pl.col("sent_ns") - since_ns,
        took_ns=pl.col("received_ns") - pl.col("sent_ns"),
    )
    ahead_ns = np.zeros(len(names))
    # The second time, drift is taken in the first node's time.
    for _ in range(2):
        windows = (
            numbered.with_columns(
                window=(pl.col("at_ns") - pl.Series(ahead_ns[numbered["one"]]).cast(I64)) // WINDOW_NS
            )
            .group_by("one", "two", "window")
            .agg(pl.col("took_ns").min())
            .sort("one", "two", "window")
        )
        drift, doubt = _drift(windows, len(names))
        gained = (
            pl.Series(drift[windows["two"]] - drift[windows["one"]]) * (pl.col("window") + 0.5) * WINDOW_NS
        )
        most = _bounds(windows.with_columns(pl.col("took_ns") - gained), len(names))
        ahead, behind = most[0], most[:, 0]
        if not (np.isfinite(ahead).all() and np.isfinite(behind).all()):
            return Clock(OFFSETS.to_frame(), None)
        ahead_ns = (ahead - behind) / 2
    # Bounds that exclude each other come of operators that were cut badly: what that takes is no less uncertain.
    error_ns = float(np.abs(ahead + behind).max() / 2 - min(0.0, np.diag(most).min()))
    error_ns += doubt * float(numbered["at_ns"].max() - numbered["at_ns"].min())  # type: ignore[arg-type, operator]
    offsets = {
        "node": names,
        "since_ns": since_ns + np.rint(ahead_ns).astype(np.int64),
        "offset_ns": ahead_ns,
        "drift": drift,
    }
    return Clock(pl.DataFrame(offsets, schema=OFFSETS), int(error_ns))


def _bounds(windows: pl.DataFrame, count: int) -> Floats:
    """The most that the clock of each node (column) can be ahead of that of each other (row), by any path."""
    most = np.full((count, count), np.inf)
    np.fill_diagonal(most, 0.0)
    pairs = windows.group_by("one", "two").agg(pl.col("took_ns").median())
    most[pairs["one"].to_numpy(), pairs["two"].to_numpy()] = pairs["took_ns"].to_numpy()
    _by_any_path(most)
    return most


@compiled
def _by_any_path(most: Floats) -> None:
    """Lowers each distance in `most` to the shortest by any path (Floyd and Warshall)."""
    for middle in range(len(most)):
        after = most[middle].copy()
        before = most[:, middle].copy()
        for one in range(len(most)):
            if before[one] < np.inf:
                for two in range(len(most)):
                    most[one, two] = min(most[one, two], before[one] + after[two])


def _drift(windows: pl.DataFrame, count: int) -> tuple[Floats, float]:
    """By how much each clock gains on the first one's (least squares over all pairs), and how far that may be off."""
    at_ns = pl.col("window") * float(WINDOW_NS)
    # The residues of a line are what of a variance it does not explain.
    slope = pl.cov(at_ns, "took_ns", ddof=0) / at_ns.var(ddof=0)
    residue = (pl.col("took_ns").var(ddof=0) - slope**2 * at_ns.var(ddof=0)).clip(0).sqrt()
    pairs = (
        windows.group_by("one", "two", maintain_order=True)
        .agg(pl.len(), slope=slope, error=residue / (at_ns.std(ddof=0) * pl.len().sqrt()))
        .filter(pl.col("len") >= MIN_WINDOWS, pl.col("error") <= KNOWN_DRIFT)
    )
    drift = np.zeros(count)
    together = components(pairs.select("one", "two").rows())
    if len(together) < count or len(set(together.values())) > 1:
        return drift, UNKNOWN_DRIFT
    one, two, slopes = (pairs[name].to_numpy() for name in ("one", "two", "slope"))
    # Normal equations: each clock's drift less that of all it was compared with.
    matrix, right = np.zeros((count, count)), np.zeros(count)
    for at, sign, other in ((one, -1.0, two), (two, 1.0, one)):
        np.add.at(matrix, (at, at), 1.0)
        np.add.at(matrix, (at, other), -1.0)
        np.add.at(right, at, sign * slopes)
    drift[1:] = np.linalg.solve(matrix[1:, 1:], right[1:])
    return drift, float(pairs["error"].max())  # type: ignore[arg-type]
