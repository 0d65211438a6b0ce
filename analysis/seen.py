"""What a recording shows of a job and what not, and whether that is enough to call the job healthy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from pulse_bpf.analysis.call_numbers import call_numbers
from pulse_bpf.analysis.names import numbered
from pulse_bpf.analysis.twins import TWO_SIDED

# Fewer finished operators per communicator than this say nothing of it, and fewer per node are no ground for "healthy".
MIN_FINISHED, MIN_OPERATORS = 3, 10
# More unattributed traffic than this, or a smaller share of the bytes in operators that can be judged, leaves too much
# unseen.
MAX_UNATTRIBUTED, MIN_JUDGED = 0.1, 0.5
# Operators with fewer bytes than they should have, the last ones apart, above which traffic went unseen.
MAX_INCOMPLETE = 0.1
# Events lost per operator above which something may have been overlooked.
MAX_LOST = 0.01

# Operators of at least so many bytes show what a port can do; a job in which only one machine's ports came above this
# share of their speed, nine times in ten, may be held up as a whole.
LARGE_BYTES, NEAR_LINE = 16_000_000, 0.6

# Columns of the operators that moved bytes that are looked at.
NEEDED = (
    *(
        "level",
        "node",
        "pid",
        "nic",
        "peer_node",
        "peer_nic",
        "direction",
        "comm_id",
        "nranks",
        "kind",
        "op_seq",
    ),
    *("program_pos", "step", "bytes", "end_ns", "burst_gbps"),
)

# Why a communicator is not judged, and how many times: {} is the number, or the least and the most of several.
Reason = tuple[str, int]


def missing_in(aligned: pl.DataFrame, nics: pl.DataFrame, coverage: Mapping[str, Any]) -> list[str]:
    """What stands in the way of calling the recording healthy, by its operators (align.align), `nics` and `coverage`.

    Communicators that move little, or nothing between machines, do not: what is wrong shows in the others of the same
    processes. A rank, a machine or a NIC of which nothing was seen does.
    """
    calls = aligned.select("level", "node", "comm_id", "nranks", "rank")
    calls = calls.filter(pl.col("level").is_in(["flow", "call"]))
    if calls.is_empty():
        return ["no operator of a known communicator was seen"]
    ranks = (
        calls.group_by("comm_id")
        .agg(pl.col("nranks").max(), pl.col("rank").n_unique().alias("seen"))
        .filter(pl.col("seen") < pl.col("nranks"))
        .sort("comm_id")
    )
    missing = _folded(
        [
            (comm, nranks, ("{} of its ranks were recorded", seen))
            for comm, nranks, seen in ranks.select("comm_id", "nranks", "seen").iter_rows()
        ]
    )
    missing += _unseen_ports(aligned)
    missing += _far_from_line(aligned, nics)
    moved = _moved(aligned)
    finished = moved.filter(pl.col("end_ns").is_not_null())
    counts = finished.group_by("node").agg(pl.struct("comm_id", "op_seq").n_unique().alias("count"))
    few = calls.select("node").unique().join(counts, on="node", how="left").fill_null(0)
    few = few.filter(pl.col("count") < MIN_OPERATORS).sort("node")
    if few.height:
        least, most = few.select(pl.col("count").min(), most=pl.col("count").max()).row(0)
        number = f"{least}" if least == most else f"{least} to {most}"
        missing.append(
            f"{_listed(few['node'].to_list())}: {number} finished operators with traffic, {MIN_OPERATORS} are needed"
        )
    if coverage["judged_share"] < MIN_JUDGED:
        missing.append(f"{coverage['judged_share']:.0%} of the bytes in operators could be judged")
        missing += coverage["not_judged"]
    if coverage["unattributed_share"] > MAX_UNATTRIBUTED:
        missing.append(
            f"{coverage['unattributed_share']:.0%} of the traffic belongs to no known communicator"
        )
    if coverage["incomplete_share"] > MAX_INCOMPLETE:
        missing.append(f"bytes are missing in {coverage['incomplete_share']:.0%} of the operators")
    if coverage["lost"] > MAX_LOST * coverage["operators"]:
        missing.append(f"{coverage['lost']} events were lost")
    return missing


def coverage_of(
    aligned: pl.DataFrame, flows: pl.DataFrame, tables: Mapping[str, pl.DataFrame], damaged: list[str]
) -> dict[str, Any]:
    """What was seen and what was not, of the operators in `aligned` (align.align)."""
    levels = aligned.group_by("level").agg(pl.col("bytes").sum())
    by_level = dict(levels.filter(~pl.col("level").is_in(["nic", "port"])).iter_rows())
    total = sum(by_level.values())
    unattributed = aligned.select("level", "reason", "bytes").filter(pl.col("level") == "unattributed")
    reasons = unattributed.group_by("reason").agg(pl.col("bytes").sum()).sort("reason")
    expected = aligned.select("level", "node", "pid", "comm_id", "op_seq", "end_ns", "expected_bytes").filter(
        pl.col("level") == "flow", pl.col("expected_bytes") > 0
    )
    earlier = expected.filter(pl.col("op_seq") < pl.col("op_seq").max().over("node", "pid", "comm_id"))
    judged, why = _judged(aligned)
    return {
        "nodes": tables["nodes"]["node"].unique().sort().to_list(),
        "queue_pairs": flows.height,
        "queue_pairs_unattributed": flows["reason"].drop_nulls().len(),
        "bytes": total,
        "bytes_in_operators": by_level.get("flow", 0),
        "bytes_outside_calls": by_level.get("traffic", 0),
        "bytes_unattributed": dict(reasons.iter_rows()),
        "unattributed_share": by_level.get("unattributed", 0) / max(1, total),
        "operators": _count(aligned),
        "incomplete_share": earlier["end_ns"].null_count() / max(1, earlier.height),
        "operators_without_traffic": aligned.select("level", "covered")
        .filter(pl.col("level") == "call", "covered")
        .height,
        "judged_share": judged,
        "not_judged": why,
        "lost": lost_events(tables["coverage"]),
        "damaged_parts": damaged,
    }


def _count(aligned: pl.DataFrame) -> int:
    """How many calls there are."""
    name = numbered(aligned["node"])(pl.col("node")).alias("number")
    calls = aligned.select("op_seq", name, "pid", "program_pos").filter(pl.col("op_seq").is_not_null())
    key = calls.select(pl.col("number", "pid", "program_pos").cast(pl.Int64).fill_null(-1))
    _, numbers = call_numbers(*(np.array(column) for column in key))
    return int(numbers.max(initial=-1)) + 1


def lost_events(coverage: pl.DataFrame) -> int:
    """How many events were lost: readers that cannot tell which port lost repeat their total in each row."""
    return int(coverage.group_by("source").agg(pl.col("lost").max())["lost"].sum())


def _moved(aligned: pl.DataFrame) -> pl.DataFrame:
    return aligned.select(NEEDED).filter(pl.col("level") == "flow", pl.col("bytes") > 0)


def _judged(aligned: pl.DataFrame) -> tuple[float, list[str]]:
    """Of the bytes in operators, the share of those that can be judged, and why others cannot.

    An operator can be judged that ended and whose rate is known, to each peer or to all together, if it is known which
    ones of the other ranks it belongs to; of point-to-point calls, some ranks have no part in each other's.
    """
    key = ["node", "pid", "program_pos", "nic", "direction"]
    together = (
        aligned.select(*key, "level", "burst_gbps")
        .filter(pl.col("level") == "nic", pl.col("burst_gbps").is_not_null())
        .select(key)
        .unique()
    )
    moved = _moved(aligned).join(together.with_columns(together=True), on=key, how="left")
    matched = pl.col("step").is_not_null() | pl.col("kind").is_in([*TWO_SIDED, "Group"])
    measured = pl.col("end_ns").is_not_null() & pl.any_horizontal(
        pl.col("burst_gbps").is_not_null(), pl.col("together").fill_null(False)
    )
    comms = (
        moved.group_by("comm_id")
        .agg(
            pl.col("nranks").max(),
            pl.col("bytes").sum(),
            pl.col("op_seq").filter(pl.col("end_ns").is_not_null()).n_unique().alias("finished"),
            pl.col("bytes").filter(matched & measured).sum().alias("judged"),
            pl.col("bytes").filter(~matched).sum().alias("unmatched"),
        )
        .with_columns(judged=pl.when(pl.col("finished") >= MIN_FINISHED).then("judged").otherwise(0))
        .sort("comm_id")
    )
    reasons: list[tuple[str, int, Reason]] = []
    for row in comms.filter(pl.col("judged") < MIN_JUDGED * pl.col("bytes")).iter_rows(named=True):
        if row["finished"] < MIN_FINISHED:
            why = f"{{}} finished operators with traffic, {MIN_FINISHED} are needed", row["finished"]
        elif row["unmatched"]:
            why = "the operators of its ranks do not match each other", 0
        else:
            why = "its operators are too small for the bins, or unfinished", 0
        reasons.append((row["comm_id"], row["nranks"], why))
    share = comms.select(pl.col("judged").sum() / pl.col("bytes").sum().clip(1)).item()
    return float(share), _folded(reasons)


def _unseen_ports(aligned: pl.DataFrame) -> list[str]:
    """Machines that their peers exchange data with and of which nothing was seen, and NICs of those that were."""
    key = ["node", "nic"]
    moved = _moved(aligned).drop_nulls(["peer_node"])
    there = moved.select(node="peer_node", nic="peer_nic").unique()
    unseen = there.join(moved.select(key).unique(), on=key, how="anti", nulls_equal=True)
    unseen = unseen.filter(pl.col("nic").is_not_null() | ~pl.col("node").is_in(moved["node"].implode()))
    names = [f"{nic} of {node}" if nic else node for node, nic in unseen.sort(key).iter_rows()]
    return [f"no traffic of {_listed(names)} was seen, but of its peers with it"] if names else []


def _far_from_line(aligned: pl.DataFrame, nics: pl.DataFrame) -> list[str]:
    """Says so where no port came near its speed: in a ring, one slow machine makes all others as slow as itself."""
    large = aligned.select("level", "direction", "node", "nic", "bytes", "burst_gbps").filter(
        pl.col("level").is_in(["flow", "nic"]),
        pl.col("direction") == "tx",
        pl.col("bytes") >= LARGE_BYTES,
        pl.col("burst_gbps").is_not_null(),
    )
    speeds = nics.select("node", "nic", "link_gbps").drop_nulls().unique(["node", "nic"])
    best = (
        large.join(speeds, on=["node", "nic"])
        .group_by("node", "nic")
        .agg(share=(pl.col("burst_gbps") / pl.col("link_gbps")).quantile(0.9))
        .group_by("node")
        .agg(pl.col("share").max())["share"]
        .sort(descending=True)
    )
    if len(best) < 2 or best[1] >= NEAR_LINE:
        return []
    return [
        f"no port came near its speed ({best[1]:.0%} at most): channels may be few, or all wait for one machine"
    ]


def _folded(reasons: list[tuple[str, int, Reason]]) -> list[str]:
    """A line for each reason and size of communicator, of (comm_id, nranks, reason)."""
    alike: dict[tuple[int, str], list[tuple[str, int]]] = {}
    for comm, nranks, (why, number) in reasons:
        alike.setdefault((nranks, why), []).append((comm, number))
    lines = []
    for (nranks, why), those in alike.items():
        numbers = sorted({number for _, number in those})
        told = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        who = f"communicator {those[0][0]}" if len(those) == 1 else f"{len(those)} communicators"
        lines.append(f"{who} of {nranks} ranks: {why.format(told)}")
    return lines


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
