"""Which component explains a set of bad flows: the one that nearly all of them cross, and nothing else does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import polars as pl

# A component is the cause when it covers this much of the weight of bad cells, ...
COVERED = 0.85
# ... when most of what crosses it meanwhile is bad, ...
CONSISTENT = 0.7
# ... and when the next best covers at most this share of what it covers, or is refuted: much of it is good.
RUNNER_UP, REFUTED = 0.75, 0.5

# Of the time from the first bad cell to the last, how near to a bad one others tell of the same time.
NEAR = 0.03

# Of the weight of bad cells, what must touch a machine that is at fault as a whole, in so many cells.
TOUCHED, MIN_TOUCHING = 0.7, 15
# When others are bad as well, most of what crosses it must be bad.
MOSTLY = 0.6
# Of the weight of its worst flow, what others have that count.
PART = 0.2
# Of what crosses that machine meanwhile, the share that is bad; and of the weight of what it sends, that of what it
# receives, or the other way round: what goes through it is slow on both sides.
OFTEN, BALANCED = 0.1, 0.6
# How many times the weight of its worst flow a port has when it is not only that flow.
SEVERAL = 1.15

Port = tuple[str, str]  # node, nic


@dataclass(frozen=True)
class Cause:
    """`what`: "link" src -> dst, the "egress" or "ingress" of one NIC, "nic" both, "node" all NICs, or "network"."""

    what: Literal["link", "egress", "ingress", "nic", "node", "network"]
    src: Port | None
    dst: Port | None
    covered: float
    runner_up: float


SRC, DST = ["src_node", "src_nic"], ["dst_node", "dst_nic"]
EDGE = [*SRC, *DST]


def cover(cells: pl.DataFrame) -> Cause | None:
    """The component that explains the bad `cells`; None when there are none.

    A cell is one operator on one flow: src_node, src_nic, dst_node, dst_nic, start_ns, weight (> 0 where bad),
    at_src, at_dst (bool?: seen to be bad there; null where that end was not seen). Cells that are not bad must be
    there too: they tell a NIC from one of its links. Where nothing can tell an end from the link, it is the link.
    """
    bad = cells.filter(pl.col("weight") > 0)
    if bad.is_empty():
        return None
    total = float(bad["weight"].sum())
    during = near(cells, bad).with_columns(
        bad=pl.col("weight") > 0,
        bad_src=(pl.col("weight") > 0) & pl.col("at_src").fill_null(True),
        bad_dst=(pl.col("weight") > 0) & pl.col("at_dst").fill_null(True),
    )
    ends, covered, second = _best(during, "bad", EDGE, total)
    if covered >= COVERED and _share(during, EDGE, ends, "bad") >= CONSISTENT:
        link = pl.all_horizontal(
            pl.col(name).eq_missing(pl.lit(end)) for name, end in zip(EDGE, ends, strict=True)
        )
        others = during.filter(~link)
        # Where one end's other flows are as bad it is that end, however seldom they flow.
        if _share(others, SRC, ends[:2], "bad_src") >= CONSISTENT:
            return Cause("egress", (ends[0], ends[1]), None, *_against(during, "bad_src", SRC, total, second))
        if _share(others, DST, ends[2:], "bad_dst") >= CONSISTENT:
            return Cause(
                "ingress", None, (ends[2], ends[3]), *_against(during, "bad_dst", DST, total, second)
            )
        return Cause("link", (ends[0], ends[1]), (ends[2], ends[3]), covered, second)

    out, into = _best(during, "bad_src", SRC, total), _best(during, "bad_dst", DST, total)
    egress_wins = out[1] >= into[1]
    (ends, covered, second), other = (out, into) if egress_wins else (into, out)
    consistent = _share(during, *((SRC, ends, "bad_src") if egress_wins else (DST, ends, "bad_dst")))
    rival = _share(during, *((DST, other[0], "bad_dst") if egress_wins else (SRC, other[0], "bad_src")))
    refuted = second <= RUNNER_UP * covered and (other[1] <= RUNNER_UP * covered or rival < REFUTED)
    if covered >= COVERED and consistent >= CONSISTENT and refuted:
        port, second = (ends[0], ends[1]), max(second, other[1])
        return (
            Cause("egress", port, None, covered, second)
            if egress_wins
            else Cause("ingress", None, port, covered, second)
        )
    return _both_ways(during, total) or Cause("network", None, None, covered, max(second, other[1]))


def near(cells: pl.DataFrame, bad: pl.DataFrame) -> pl.DataFrame:
    """The `cells` of the time in which there are `bad` ones: what comes and goes is good in between."""
    span_ns = bad.select(pl.col("start_ns").max() - pl.col("start_ns").min()).item()
    if span_ns is None:
        return cells
    tolerance = int(NEAR * span_ns) + 1
    times = bad.select(bad_ns="start_ns").drop_nulls().unique().sort("bad_ns")
    return (
        cells.drop_nulls("start_ns")
        .sort("start_ns")
        .join_asof(times, left_on="start_ns", right_on="bad_ns", strategy="nearest", tolerance=tolerance)
        .drop_nulls("bad_ns")
        .drop("bad_ns")
    )


def explain(cells: pl.DataFrame, most: int = 2) -> list[Cause]:
    """The components that together explain the bad `cells`, the best first: one, or up to `most` that share none.

    A last one of "network" stands for what none of them explains.
    """
    causes: list[Cause] = []
    total = float(cells["weight"].sum())
    while total and float(cells["weight"].sum()) > (1 - COVERED) * total:
        if len(causes) == most:
            return [Cause("network", None, None, 0.0, 0.0)]
        cause = cover(cells)
        if cause is None:
            break
        if cause.what == "network" and not causes:
            cause = _machine(cells) or cause
        if cause.what == "network":
            cause = _alone(cells)
        causes.append(cause)
        if cause.what == "node":
            return causes
        if cause.what == "network":
            return causes if len(causes) == 1 else [cause]
        cells = cells.filter(~touched(cause))
    if len(causes) > 1:
        # Each explains its part of what they explain together.
        covered = 1 - float(cells["weight"].sum()) / total
        causes = [replace(cause, covered=covered) for cause in causes]
    return causes


def touched(cause: Cause) -> pl.Expr:
    """The cells that a cause explains."""
    if cause.what == "node" and cause.src is not None:
        return (pl.col("src_node") == cause.src[0]) | (pl.col("dst_node") == cause.src[0])
    ends = [
        pl.all_horizontal(
            pl.col(name).eq_missing(pl.lit(value)) for name, value in zip(port, end, strict=True)
        )
        for port, end in ((SRC, cause.src), (DST, cause.dst))
        if end is not None
    ]
    return pl.any_horizontal(ends) if cause.what == "nic" else pl.all_horizontal(ends)


def _machine(cells: pl.DataFrame) -> Cause | None:
    """The machine that the bad flows touch, over several of its NICs and at both ends, if one clearly is.

    Only in rings: where a port sends to several peers, these have unequal parts in the operator.
    """
    bad = cells.filter(pl.col("weight") > 0)
    if bad.group_by(SRC).agg(pl.struct(DST).n_unique().alias("peers"))["peers"].max() != 1:
        return None
    total = float(bad["weight"].sum())
    ends = pl.concat(
        [bad.select(pl.col(end).name.map(lambda name: name[4:]), "weight", *EDGE) for end in (SRC, DST)]
    )
    nodes = (
        ends.group_by("node")
        .agg(pl.col("weight").sum() / total, pl.col("nic").n_unique(), pl.len())
        .sort("weight", "node", descending=[True, False])
    )
    if nodes.height < 3 or nodes["nic"][0] < 2 or nodes["len"][0] < MIN_TOUCHING:
        return None
    first, second = float(nodes["weight"][0]), float(nodes["weight"][1])
    if first < TOUCHED or second > RUNNER_UP * first:
        return None
    port = (str(nodes["node"][0]), "")
    crossing = near(cells, bad).filter(touched(Cause("node", port, port, first, second)))
    flows = bad.group_by(EDGE).agg(pl.col("weight").sum())
    sides = [flows.filter(pl.col(name) == port[0])["weight"] for name in ("src_node", "dst_node")]
    # Two slow ports of neighbours have one slow flow on each side of a machine.
    if any(int((side >= PART * flows["weight"].max()).sum()) < 2 for side in sides):  # type: ignore[operator]
        return None
    out, into = (float(side.sum()) for side in sides)
    often = float((crossing["weight"] > 0).mean() or 0)  # type: ignore[arg-type]
    if often < OFTEN or min(out, into) < BALANCED * max(out, into):
        return None
    return Cause("node", port, port, first, second)


def _alone(cells: pl.DataFrame) -> Cause:
    """The port or flow that is bad nearly whenever it flows though others are bad as well; "network" without one."""
    bad = cells.filter(pl.col("weight") > 0)
    here, total = near(cells, bad).with_columns(bad=pl.col("weight") > 0), float(bad["weight"].sum())
    ends, covered, second = _best(here, "bad", EDGE, total)
    port, of_port, next_port = _best(here, "bad", SRC, total)
    if of_port > SEVERAL * covered and _share(here, SRC, port, "bad") > MOSTLY:
        return Cause("egress", (port[0], port[1]), None, of_port, next_port)
    if not covered or _share(here, EDGE, ends, "bad") < MOSTLY:
        return Cause("network", None, None, covered, second)
    return Cause("link", (ends[0], ends[1]), (ends[2], ends[3]), covered, second)


def _against(
    during: pl.DataFrame, flag: str, port: list[str], total: float, link: float
) -> tuple[float, float]:
    """What the best port covers, and what the next best port or link does."""
    _, covered, second = _best(during, flag, port, total)
    return covered, max(second, link)


def _both_ways(during: pl.DataFrame, total: float) -> Cause | None:
    """The NIC that is bad in both directions, if one is."""
    bad = during.filter("bad")
    ways = pl.concat(
        [
            bad.select(pl.col(SRC).name.map(lambda name: name[4:]), "weight", out=True),
            bad.select(pl.col(DST).name.map(lambda name: name[4:]), "weight", out=False),
        ]
    )
    nics = (
        ways.group_by("node", "nic")
        .agg(
            pl.col("weight").sum(),
            pl.col("weight").filter("out").sum().alias("sent"),
            pl.col("weight").filter(~pl.col("out")).sum().alias("received"),
        )
        .sort("weight", "node", "nic", descending=[True, False, False])
    )
    node, nic, weight, sent, received = nics.row(0)
    second = nics["weight"][1] / total if nics.height > 1 else 0.0
    share = min(_share(during, SRC, (node, nic), "bad"), _share(during, DST, (node, nic), "bad"))
    if weight < COVERED * total or share < CONSISTENT or min(sent, received) < 0.2 * weight:
        return None
    if second > RUNNER_UP * weight / total:
        return None
    return Cause("nic", (node, nic), (node, nic), weight / total, second)


def _best(
    during: pl.DataFrame, flag: str, key: list[str], total: float
) -> tuple[tuple[str, ...], float, float]:
    """The value of `key` with most weight of cells with `flag`, its share of `total`, and that of the next."""
    sums = (
        during.filter(flag)
        .group_by(key)
        .agg(pl.col("weight").sum())
        .sort("weight", *key, descending=[True] + [False] * len(key))
    )
    if sums.is_empty():
        return ("",) * len(key), 0.0, 0.0
    second = sums["weight"][1] / total if sums.height > 1 else 0.0
    return sums.select(key).row(0), sums["weight"][0] / total, second


def _share(cells: pl.DataFrame, key: list[str], value: tuple[str, ...], flag: str) -> float:
    """How much of the cells where `key` is `value` has `flag`, each flow counting the same; 0 where there are none."""
    crossing = cells.filter(
        pl.col(name).eq_missing(pl.lit(wanted)) for name, wanted in zip(key, value, strict=True)
    )
    share = crossing.group_by(EDGE).agg(pl.col(flag).mean().alias("share"))["share"].mean()
    return float(share) if isinstance(share, float) else 0.0
