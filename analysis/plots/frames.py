"""What plots show of operators, as frames that stay small whatever was recorded."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.callers import PROCESS
from pulse_bpf.analysis.signals import PORT, readings
from pulse_bpf.schema import F64, I32, I64, STR, U64

# More rows and columns than a screen tells apart are drawn as blocks.
MAX_ROWS, MAX_COLUMNS = 128, 120
# Points beside each other on a small screen, and how many a bar has that is not put together with its neighbours.
SCREEN, WIDE = 600, 8
# Of an operator's largest flow, the part below which another carries no data.
LEAST_PART = 0.02
# Counters of traffic, in which nothing is wrong.
TRAFFIC = ("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets")

CELLS = pl.Schema(
    {"comm_id": STR, "step": I64, "node": STR, "pid": I64, "gpu": I32, "rank": I32, "value": F64}
)
ROWS = pl.Schema({"node": STR, "gpu": I32, "rank": I32, "last_node": STR, "ranks": I64})
PAIRS = pl.Schema({"node": STR, "peer_node": STR, "nic": STR, "gbps": F64, "bytes": I64})
EDGES = pl.Schema({"node": STR, "peer_node": STR, "busy": F64, "gbps": F64, "share": F64, "bytes": I64})
LENGTHS = pl.Schema({"begin_ns": I64, "length_ns": I64})
BARS = pl.Schema(
    {
        "node": STR,
        "pid": I64,
        "rank": I32,
        "kind": STR,
        "begin_ns": I64,
        "end_ns": I64,
        "bytes": I64,
        "count": I64,
    }
)
COUNTS = pl.Schema({"counter": STR, "node": STR, "nic": STR, "count": F64})


@dataclass(frozen=True)
class Grid:
    """A value for each of `rows` (ROWS, in the order of nodes and GPUs) and column; NaN where nothing is known.

    `columns` has the first and last step of each column that anything is known of, `ranks_a_row` and `steps_a_column`
    how many are one.
    """

    rows: pl.DataFrame
    columns: list[tuple[int, int]]
    values: NDArray[np.float32]
    ranks_a_row: int
    steps_a_column: int


def natural(names: Collection[str]) -> list[str]:
    """`names` in the order of a person: node2 before node10."""

    def order(name: str) -> list[tuple[int, str]]:
        parts = [str(part) for part in re.split(r"(\d+)", name)]
        # Not int(): a name may have more digits than that takes.
        return [
            (len(part.lstrip("0")), part.lstrip("0")) if part.isdecimal() else (0, part) for part in parts
        ]

    return sorted(sorted(names), key=order)


def late_cells(ranks: pl.DataFrame) -> pl.DataFrame:
    """CELLS of `ranks` (late.excesses): by how many ms each came later to an operator than its ranks usually did.

    0 where it came no later; null where no other rank's end bears it out, or who it waited for is late.
    """
    founded = pl.when(~pl.col("unfounded").fill_null(True)).then("excess_ns")
    return ranks.select(
        *CELLS.names()[:-1],
        value=pl.when(pl.col("excess_ns") <= 0).then(0.0).otherwise(founded).cast(F64) / 1e6,
    )


def rate_cells(aligned: pl.DataFrame) -> pl.DataFrame:
    """CELLS of the operators in `aligned` (align.align): Gbit/s of each rank's slowest flow while it sends."""
    key = ["comm_id", "step", *PROCESS]
    return (
        _sent(aligned)
        .filter(pl.col("bytes") >= LEAST_PART * pl.col("bytes").max().over("comm_id", "step"))
        .group_by(key, maintain_order=True)
        .agg(pl.col("gpu", "rank").first(), value=pl.col("burst_gbps").min())
        .select(CELLS.names())
    )


def _sent(aligned: pl.DataFrame) -> pl.DataFrame:
    return aligned.filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("bytes") > 0,
        pl.col("step").is_not_null(),
        pl.col("start_ns").is_not_null(),
    )


def family(aligned: pl.DataFrame, comm_id: str | None) -> list[str]:
    """The communicators that do what `comm_id` does, itself among them: of its size, with its kinds of operators.

    None: the one that moved most between machines, and those like it.
    """
    kinds = (
        aligned.filter(pl.col("comm_id").is_not_null(), pl.col("step").is_not_null())
        .group_by("comm_id")
        .agg(
            pl.col("nranks").max(),
            pl.col("kind").drop_nulls().unique().sort().str.join(),
            pl.col("bytes").filter(pl.col("level") == "flow").sum(),
        )
        .sort("bytes", "comm_id", descending=[True, False])
    )
    own = kinds.filter(pl.col("comm_id") == pl.lit(comm_id, STR))
    own = kinds.head(1) if own.is_empty() else own
    # Nulls are of equal size too.
    alike = kinds.join(own, on=["nranks", "kind"], how="semi", nulls_equal=True)
    return list(alike["comm_id"].sort())


def grid(cells: pl.DataFrame, worst: str) -> Grid:
    """`cells` (CELLS) by rank and step; where several are one cell, its `worst` is the "max" or the "min" of them.

    Ranks are put together by node where there are more than MAX_ROWS, nodes in blocks where these are still more.
    Communicators may be several: their steps count from the first of each.
    """
    known = cells.drop_nulls("value").with_columns(pl.col("step") - pl.col("step").min().over("comm_id"))
    # Operators of which nothing is known, as those without traffic, have no column.
    known = known.with_columns(column=pl.col("step").rank("dense").cast(I64) - 1)
    order = {name: number for number, name in enumerate(natural(known["node"].unique().to_list()))}
    places = (
        known.group_by(PROCESS)
        .agg(pl.col("gpu", "rank").first())
        .with_columns(order=pl.col("node").replace_strict(order, return_dtype=I64))
        .sort("order", "gpu", "rank", "pid")
        .with_row_index("row")
        .with_columns(pl.col("row").cast(I64))
    )
    ranks, most = places.height, 1
    if ranks > MAX_ROWS:
        most = -(-len(order) // MAX_ROWS)
        places = places.with_columns(row=pl.col("order") // most, gpu=None, rank=None)
    rows = (
        places.sort("order", maintain_order=True)
        .group_by("row", maintain_order=True)
        .agg(
            pl.col("node").first(),
            pl.col("gpu").first().cast(I32),
            pl.col("rank").first().cast(I32),
            pl.col("node").last().alias("last_node"),
            pl.len().cast(I64).alias("ranks"),
        )
    )
    last = int(known["column"].max() or 0)  # type: ignore[arg-type]
    width = last // MAX_COLUMNS + 1
    value = pl.col("value").max() if worst == "max" else pl.col("value").min()
    filled = (
        known.join(places.select(*PROCESS, "row"), on=PROCESS)
        .group_by("row", pl.col("column") // width)
        .agg(value)
    )
    count = last // width + 1 if known.height else 0
    values = np.full((rows.height, count), np.nan, np.float32)
    values[filled["row"].to_numpy(), filled["column"].to_numpy()] = filled["value"].to_numpy()
    steps = known["step"].unique().sort().to_list()
    columns = [(steps[at], steps[min(at + width, len(steps)) - 1]) for at in range(0, len(steps), width)]
    per_row = int(rows["ranks"].max() or 1)  # type: ignore[arg-type]
    return Grid(rows.select(ROWS.names()), columns, values, per_row, width)


def node_pairs(aligned: pl.DataFrame) -> pl.DataFrame:
    """PAIRS: from each node to each other, `gbps` is the usual rate while sending of the slowest pair of NICs (`nic` of
    the sender), `bytes` are those of all of them."""
    between = _sent(aligned).filter(pl.col("peer_node").is_not_null(), pl.col("peer_node") != pl.col("node"))
    return (
        between.group_by("node", "peer_node", "nic", "peer_nic")
        .agg(
            pl.col("burst_gbps").median().alias("gbps"),
            pl.col("bytes").sum(),
        )
        .sort("gbps", "nic", nulls_last=True)
        .group_by("node", "peer_node", maintain_order=True)
        .agg(pl.col("nic", "gbps").first(), pl.col("bytes").sum())
        .sort("node", "peer_node")
        .select(PAIRS.names())
        .cast(PAIRS)
    )


def edges(aligned: pl.DataFrame, comms: Collection[str], nic: str | None, stopped: bool) -> pl.DataFrame:
    """EDGES: what each node sent each other in operators of `comms`, through NICs named `nic` (None: all).

    `busy` is the share of an operator's time, over all its ranks, in which the flow sends: the others' rest is waiting.
    `gbps` is the rate while sending. `share` is how much of it was sent of the last operator that anybody began where
    the job `stopped`, and null else. Of several flows the busiest counts, the slowest, and that which sent least.
    """
    own = _sent(aligned).filter(pl.col("comm_id").is_in(list(comms)), pl.col("peer_node") != pl.col("node"))
    rail = own.filter(pl.col("nic") == nic) if nic is not None else own
    rail = own if rail.is_empty() else rail
    lasted = (pl.col("last_byte_ns").max() - pl.col("start_ns").min()).over("comm_id", "step")
    last = pl.col("step") == pl.col("step").max().over("comm_id")
    flows = (
        rail.with_columns(busy=pl.col("active_ns") / lasted.clip(1))
        .group_by("node", "peer_node", "nic", "peer_nic", "comm_id")
        .agg(
            pl.col("busy").median().clip(0, 1),
            pl.col("burst_gbps").median().alias("gbps"),
            pl.col("completion").filter(last).min().clip(0, 1).alias("share"),
            pl.col("bytes").sum(),
        )
    )
    found = flows.group_by("node", "peer_node").agg(
        pl.col("busy").max(), pl.col("gbps").min(), pl.col("share").min(), pl.col("bytes").sum()
    )
    share = pl.col("share").fill_null(0.0) if stopped else pl.lit(None, F64)
    return found.with_columns(share=share).sort("node", "peer_node").select(EDGES.names()).cast(EDGES)


def around(edges: pl.DataFrame) -> list[str]:
    """The nodes of `edges` (EDGES) in the order of a ring: after each the one that it sends most, if still to come."""
    names = natural({*edges["node"], *edges["peer_node"]})
    most = edges.sort("bytes", "peer_node", descending=[True, False])
    after: dict[str, list[str]] = {}
    for node, peer in most.select("node", "peer_node").iter_rows():
        after.setdefault(node, []).append(peer)
    order: list[str] = []
    placed: set[str] = set()
    for name in names:
        at: str | None = name
        while at is not None and at not in placed:
            order.append(at)
            placed.add(at)
            at = next((peer for peer in after.get(at, ()) if peer not in placed), None)
    return order


def lengths(boundaries_ns: Collection[int]) -> pl.DataFrame:
    """LENGTHS of the iterations between `boundaries_ns`; as many as a line shows, else the longest of each block."""
    begin = np.array(sorted(boundaries_ns), np.int64)
    frame = pl.DataFrame({"begin_ns": begin[:-1], "length_ns": np.diff(begin)}, schema=LENGTHS)
    block = frame.height // (4 * MAX_COLUMNS) + 1
    return (
        frame.with_row_index("number")
        .group_by(pl.col("number") // block, maintain_order=True)
        .agg(pl.col("begin_ns").first(), pl.col("length_ns").max())
        .select(LENGTHS.names())
    )


def bars(ranks: pl.DataFrame, processes: pl.DataFrame, first_ns: int, last_ns: int) -> pl.DataFrame:
    """BARS of the operators of `processes` (node, pid), in their order, between two moments, of `ranks` (late.lags).

    From the first byte sent to the end of the operator on that rank. Those of one kind so near to each other that they
    would be one line on a screen are one, `count` of them.
    """
    begin = pl.coalesce("entry_ns", "call_ns")
    asked = processes.select(PROCESS).unique(maintain_order=True).with_row_index("order")
    own = (
        ranks.join(asked, on=PROCESS)
        .with_columns(begin_ns=begin, until_ns=pl.max_horizontal("own_end_ns", begin))
        .filter(pl.col("begin_ns") < last_ns, pl.col("until_ns") > first_ns)
        .sort("order", "begin_ns")
    )
    near_ns = max(1, (last_ns - first_ns) // SCREEN)
    wide = pl.col("until_ns") - pl.col("begin_ns") > WIDE * near_ns
    apart = (
        (pl.col("kind") != pl.col("kind").shift().over(PROCESS))
        | (pl.col("begin_ns") - pl.col("until_ns").cum_max().shift().over(PROCESS) > near_ns)
        | wide
        | wide.shift().over(PROCESS)
    )
    return (
        own.with_columns(bar=apart.fill_null(True).cum_sum().over(PROCESS))
        .group_by(*PROCESS, "bar", maintain_order=True)
        .agg(
            pl.col("rank", "kind").first(),
            pl.col("begin_ns").min(),
            pl.col("until_ns").max().alias("end_ns"),
            pl.col("sent_bytes").sum().alias("bytes"),
            count=pl.len().cast(I64),
        )
        .select(BARS.names())
        .cast(BARS)
    )


def covered_ns(bars: pl.DataFrame, first_ns: int, last_ns: int) -> int:
    """For how long between these moments any of `bars` (BARS) of one rank lasts."""
    shown = bars.select(pl.col("begin_ns", "end_ns").clip(first_ns, last_ns)).sort("begin_ns")
    until = pl.col("end_ns").cum_max()
    since = pl.max_horizontal("begin_ns", until.shift())
    return int(shown.select((until - since).sum()).item())


def counts(tables: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """COUNTS: by how much each counter of a port grew, and how many events of each kind there were, in `tables`.

    Counters of traffic are left out; a port that never counted something has no row of it.
    """
    found = [pl.DataFrame(schema=COUNTS)]
    if not tables["port_counters"].is_empty():
        since = readings(tables["port_counters"])
        names = [name for name in since.columns if name not in (*PORT, "t_ns", "since_ns", *TRAFFIC)]
        found.append(
            since.unpivot(names, index=["node", "nic"], variable_name="counter", value_name="count")
            .drop_nulls("count")
            .group_by("counter", "node", "nic")
            .agg(pl.col("count").sum())
            .select(COUNTS.names())
            .cast(COUNTS)
        )
    events = (
        tables["events"]
        .group_by(counter="kind", node="node", nic="nic")
        .agg(pl.col("value").clip(1).cast(U64).sum().alias("count"))
    )
    found.append(events.with_columns(pl.col("counter") + " (events)").select(COUNTS.names()).cast(COUNTS))
    return pl.concat(found).sort("counter", "node", "nic")
