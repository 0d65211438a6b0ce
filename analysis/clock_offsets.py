"""How far the wall clocks of nodes are apart, by packets that were seen leaving one and arriving at the other.

Times of different nodes are only put in order where `Offsets.order` dares to: a fleet's clocks differ by more than many
operators last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]

# The best packets of each window count. Within one, a clock is taken to drift evenly.
WINDOW_NS = 100_000_000
MIN_WINDOWS = 3
# An order is claimed only where it is this many times clearer than the residual.
CLEAR = 3.0


@dataclass(frozen=True)
class Offsets:
    """One row a node: node str, group str (its reference: only times of one group compare), offset_ns f64 and
    drift_ppm f64 (what its clock is ahead of the reference's when that shows `first_ns`, and how much that grows),
    residual_ns f64. Known from `first_ns` to `last_ns`."""

    first_ns: int
    last_ns: int
    nodes: pl.DataFrame

    def order(self, node: str, t_ns: int, other: str, other_ns: int) -> int | None:
        """-1 when `t_ns` on the clock of `node` was before `other_ns` on that of `other`, 1 when after; None when
        they are closer than CLEAR times the larger residual, or the clocks were never compared."""
        if node == other:
            return (t_ns > other_ns) - (t_ns < other_ns) or None
        rows = {row["node"]: row for row in self.nodes.iter_rows(named=True)}
        one, two = rows.get(node), rows.get(other)
        if one is None or two is None or one["group"] != two["group"]:
            return None
        moments = [self._on_reference(row, moment) for row, moment in ((one, t_ns), (two, other_ns))]
        if not all(-WINDOW_NS <= moment <= self.last_ns - self.first_ns + WINDOW_NS for moment in moments):
            return None
        if abs(moments[0] - moments[1]) <= CLEAR * max(one["residual_ns"], two["residual_ns"]):
            return None
        return 1 if moments[0] > moments[1] else -1

    def _on_reference(self, row: dict[str, Any], t_ns: int) -> float:
        """ns since first_ns on the clock of the reference; that much, unlike ns since 1970, a float64 can hold."""
        elapsed_ns = t_ns - self.first_ns - row["offset_ns"]
        return float(elapsed_ns / (1 + row["drift_ppm"] * 1e-6))


def solve(packets: pl.DataFrame) -> Offsets:
    """Offsets of all nodes by `packets` that were seen at both ends.

    Columns: node (sender), peer_node (receiver), sent_ns i64 on the sender's clock, received_ns i64 on the receiver's;
    the same packet by its queue pair and PSN. Assumes that no packet arrives before it is sent, and that clocks drift
    evenly; the bounds hold on asymmetric paths too, and the estimate is in their middle. A pair of nodes counts where
    packets went both ways. The pairs' offsets are fitted together (least squares, weighted by their bounds).
    `residual_ns` is how far a node's offset can be off: the sum of bound and misfit of the pairs on the best way to
    the reference. The misfit alone does not tell, as a chain of nodes has none.
    """
    first_ns, last_ns = (
        int(packets.select(moment.fill_null(0)).item())
        for moment in (pl.col("sent_ns").min(), pl.col("received_ns").max())
    )
    edges = _pairs(packets, first_ns)
    names = sorted({name for edge in edges.iter_rows() for name in edge[:2]})
    index = {name: position for position, name in enumerate(names)}
    one, two = (
        np.array([index[name] for name in edges[column]], np.int64) for column in ("node", "peer_node")
    )
    offset, drift, bound = (edges[column].to_numpy() for column in ("offset_ns", "drift_ppm", "bound_ns"))
    group = _groups(len(names), one, two)
    solved_drift = _fit(len(names), one, two, drift, 1 / bound, group)
    solved_offset = np.zeros(len(names))
    for _ in range(2):
        # Each pair's line is in the time of its first node; where that shows the reference's first_ns, it has drifted.
        aligned = offset + drift * 1e-6 * solved_offset[one]
        solved_offset = _fit(len(names), one, two, aligned, 1 / bound, group)
    misfit = np.abs(solved_offset[two] - solved_offset[one] - aligned)
    misfit += np.abs(solved_drift[two] - solved_drift[one] - drift) * 1e-6 * (last_ns - first_ns)
    nodes = pl.DataFrame(
        {
            "node": pl.Series(names, dtype=pl.String),
            "group": pl.Series([names[reference] for reference in group], dtype=pl.String),
            "offset_ns": solved_offset,
            "drift_ppm": solved_drift,
            "residual_ns": _distances(one, two, bound + misfit, group),
        }
    )
    return Offsets(first_ns, last_ns, nodes)


def _pairs(packets: pl.DataFrame, first_ns: int) -> pl.DataFrame:
    """A row a pair: node, peer_node, and offset_ns, drift_ppm, bound_ns of the second's clock against the first's."""
    first = pl.col("node") < pl.col("peer_node")
    rows = (
        packets.filter(pl.col("node") != pl.col("peer_node"))
        .with_columns(
            # A packet to the second bounds the offset from above, one from it from below.
            forth=first,
            at=pl.when(first).then("sent_ns").otherwise("received_ns") - first_ns,
            limit=pl.when(first).then(1).otherwise(-1) * (pl.col("received_ns") - pl.col("sent_ns")),
            node=pl.min_horizontal("node", "peer_node"),
            peer_node=pl.max_horizontal("node", "peer_node"),
        )
        .sort("node", "peer_node", "at")
    )
    found = [
        (*pair, *line)
        for pair, part in rows.group_by("node", "peer_node", maintain_order=True)
        if (line := _line(*(part[name].to_numpy() for name in ("at", "limit", "forth")))) is not None
    ]
    columns = {
        "node": pl.String,
        "peer_node": pl.String,
        "offset_ns": pl.Float64,
        "drift_ppm": pl.Float64,
        "bound_ns": pl.Float64,
    }
    return pl.DataFrame(found, schema=columns, orient="row")


def _line(at: Longs, limit: Longs, forth: NDArray[np.bool_]) -> tuple[float, float, float] | None:
    """Offset at 0 ns, drift in ppm, and how far the line can be off within what was seen; None without both ways in
    MIN_WINDOWS windows, as the drift is then anybody's guess."""
    base = int(limit[0]) if len(limit) else 0
    slope = 0.0
    # The second time, what drift there is within a window is taken out.
    for _ in range(2):
        middle, high, low = _envelopes(at // WINDOW_NS, (limit - base) - slope * at, forth)
        if len(middle) < MIN_WINDOWS:
            return None
        drift, start = np.polyfit(middle, (high + low) / 2, 1)
        line = start + drift * middle
        slope += float(drift)
    # Limits that exclude each other come of packets that were not the same: what that takes is no less uncertain.
    bound = float(np.max(np.maximum(np.abs(high - line), np.abs(line - low))))
    return base + float(start), slope * 1e6, max(bound, 1.0)


def _envelopes(window: Longs, flat: Floats, forth: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Middle (ns), least upper and greatest lower limit of each window that has both."""
    frame = (
        pl.DataFrame({"window": window, "flat": flat, "forth": forth})
        .group_by("window")
        .agg(
            high=pl.col("flat").filter("forth").min(),
            low=pl.col("flat").filter(~pl.col("forth")).max(),
        )
        .drop_nulls()
        .sort("window")
    )
    middle = (frame["window"].to_numpy() + 0.5) * WINDOW_NS
    return middle, frame["high"].to_numpy(), frame["low"].to_numpy()


def _groups(count: int, one: Longs, two: Longs) -> Longs:
    """For each node the reference of those it is connected to: the one with the most pairs, the first of several."""
    group = np.arange(count)
    for _ in range(count):
        before = group.copy()
        np.minimum.at(group, one, group[two])
        np.minimum.at(group, two, group[one])
        if (group == before).all():
            break
    degree = np.bincount(one, minlength=count) + np.bincount(two, minlength=count)
    order = np.lexsort((np.arange(count), -degree))
    reference = {int(group[node]): int(node) for node in order[::-1]}
    return np.array([reference[int(member)] for member in group], np.int64)


def _fit(count: int, one: Longs, two: Longs, value: Floats, weight: Floats, group: Longs) -> Floats:
    """x with x[two] - x[one] = value as nearly as can be, and 0 at each reference."""
    if not count:
        return np.zeros(0)
    rows = np.arange(len(one))
    matrix = np.zeros((len(one), count))
    matrix[rows, two] = weight
    matrix[rows, one] = -weight
    free = np.flatnonzero(group != np.arange(count))
    solved = np.zeros(count)
    solved[free] = np.linalg.lstsq(matrix[:, free], value * weight, rcond=None)[0]
    return solved


def _distances(one: Longs, two: Longs, length: Floats, group: Longs) -> Floats:
    """The shortest way from each node to its reference; that of the reference is the shortest of its pairs."""
    references = np.unique(group)
    distance = np.full(len(group), np.inf)
    distance[references] = 0
    for _ in range(len(group)):
        before = distance.copy()
        np.minimum.at(distance, one, distance[two] + length)
        np.minimum.at(distance, two, distance[one] + length)
        if (distance == before).all():
            break
    nearest = np.full(len(group), np.inf)
    np.minimum.at(nearest, one, length)
    np.minimum.at(nearest, two, length)
    distance[references] = nearest[references]
    return distance
