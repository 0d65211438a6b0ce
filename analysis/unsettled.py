"""What was found of operators, until nothing of it can change any more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.callers import LATEST_NS
from pulse_bpf.analysis.curves import Floats, Longs
from pulse_bpf.analysis.pairing import FOREVER
from pulse_bpf.analysis.pool import Found
from pulse_bpf.analysis.shape import NOTHING, REAL, WHOLE
from pulse_bpf.schema import I64, STR, U64

TOTALS = pl.Schema(
    {"flow": U64, "direction": STR}
    | dict.fromkeys(("rows", "bytes", "retx_bytes", "ctl_packets", "first_ns", "last_ns", "bin_ns"), I64)
)


@dataclass(frozen=True)
class Segments:
    """What the samples of some nodes were cut into: so much of it as was settled at one time.

    `operators`: those of program.Program of which everything is here. Some are not `told` yet, as the one before is not
    settled, but one that follows is; what was `followed` by one that was told before is not asked for again. `groups`:
    flow groups, one per KEY and the flows that carried bytes of it so far, numbered by `group`, with these `flows` and
    `bin_ns`. `cuts`: one row per (group, operator `op` that should use it) with `expected_bytes`, `paced` and the
    columns WHOLE and REAL of shape.py.
    `sums`: these of operators over all peers of a NIC, per op and the PORT that a `group` has. `outside`: the bytes of
    each group that belong to no operator, burst by burst where it has no call. `totals`: the TOTALS of each flow and
    direction, with the last.
    """

    operators: pl.DataFrame
    groups: pl.DataFrame
    cuts: pl.DataFrame
    sums: pl.DataFrame
    outside: pl.DataFrame
    totals: pl.DataFrame


class Cuts:
    """Operators that were found on groups, in the order in which they were, until they are taken."""

    def __init__(self) -> None:
        self._parts: list[tuple[Longs, NDArray[np.uint32], Floats, Longs, Floats]] = []
        self.rows = 0

    def add(self, group: Longs, op: NDArray[np.uint32], expected: Floats, found: Found) -> None:
        """Adds operators `found`: what they are of, and the bytes `expected`."""
        self._parts.append((group, op, expected, found.whole, found.real))
        self.rows += len(group)

    def taken(self, ops: NDArray[np.uint32], peeked: NDArray[np.uint32]) -> tuple[pl.DataFrame, Longs]:
        """op, expected_bytes and the columns WHOLE and REAL of the operators `ops`, and the group of each row.

        Those of operators that are `peeked` at are there as well, and stay.
        """
        none = np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0)
        nothing = (*none, np.zeros((0, len(WHOLE)), np.int64), np.zeros((0, len(REAL))))
        columns = [np.concatenate(parts) for parts in zip(nothing, *self._parts, strict=True)]
        gone, wanted = np.isin(columns[1], ops), np.isin(columns[1], peeked)
        self._parts = [tuple(column[~gone] for column in columns)]  # type: ignore[list-item]
        columns = [column[gone | wanted] for column in columns]
        self.rows = sum(len(part[0]) for part in self._parts)
        group, op, expected, whole, real = columns
        numbers = pl.DataFrame(whole, list(WHOLE))
        frame = pl.concat(
            [
                pl.DataFrame({"op": op, "expected_bytes": expected}),
                numbers.select(pl.when(pl.col(name) != NOTHING).then(name).alias(name) for name in WHOLE),
                pl.DataFrame(real, list(REAL)).fill_nan(None),
            ],
            how="horizontal",
        )
        return frame, group


def versions(
    groups: pl.DataFrame, used: pl.DataFrame, settled_ns: Longs
) -> tuple[pl.DataFrame, Longs, Longs]:
    """`groups` with `flows` and `bin_ns`, one row for each set of flows that a group had, numbered anew by `group`.

    `used`: group, flow, bin_ns and first_byte_ns of flows that carried bytes. Those that a group had when it was
    `settled_ns` how it is cut are one set. Also since when each row holds, and where those of each of the groups begin.
    """
    of_group = used["group"].to_numpy()
    first_ns = used["first_byte_ns"].to_numpy()
    since = np.where(first_ns < settled_ns[of_group], -FOREVER, first_ns)
    used = used.with_columns(since_ns=pl.Series(since))
    sets = used.select("group", "since_ns").unique()
    sets = (
        sets.join(used.select("group", "flow", "bin_ns", at_ns="since_ns"), on="group")
        .filter(pl.col("at_ns") <= pl.col("since_ns"))
        .group_by("group", "since_ns")
        .agg(pl.col("flow").sort().alias("flows"), pl.col("bin_ns").max())
    )
    found = groups.join(sets, on="group", how="left").sort("group", "since_ns")
    of_set = found["group"].to_numpy()
    begin = np.searchsorted(of_set, np.arange(groups.height + 1))
    since_ns = found["since_ns"].fill_null(-FOREVER).to_numpy()
    return found.drop("since_ns", "group").with_row_index("group"), since_ns, begin


def version_of(group: Longs, call_ns: Longs, since_ns: Longs, begin: Longs) -> Longs:
    """The row of `versions` that holds of each `group` for what was called at `call_ns`."""
    row = begin[group]
    for later in range(1, int(np.diff(begin).max(initial=0))):
        at = begin[group] + later
        holds = (at < begin[group + 1]) & (since_ns[np.minimum(at, len(since_ns) - 1)] < call_ns + LATEST_NS)
        row = np.where(holds, at, row)
    return row


def directed(counts: pl.DataFrame) -> pl.DataFrame:
    """`counts` as TOTALS, with the direction in words."""
    way = pl.when(pl.col("tx") == 1).then(pl.lit("tx")).otherwise(pl.lit("rx"))
    return counts.with_columns(direction=way).select(
        pl.col(name).cast(dtype) for name, dtype in TOTALS.items()
    )


def totalled(totals: pl.DataFrame) -> pl.DataFrame:
    """One row of TOTALS per flow and direction."""
    first, last = pl.col("first_ns").min(), pl.col("last_ns", "bin_ns").max()
    sums = pl.col("rows", "bytes", "retx_bytes", "ctl_packets").sum()
    return totals.group_by("flow", "direction").agg(sums, first, last).select(TOTALS.names())
