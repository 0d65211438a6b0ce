"""Which component explains a set of bad flows: the one that nearly all of them cross, and nothing else does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import polars as pl

# A component is the cause when it covers this much of the weight of bad cells, ...
COVERED = 0.85
# ... when most of what crosses it meanwhile is bad, ...
CONSISTENT = 0.7
# ... and when the next best covers at most this share of what it covers.
RUNNER_UP = 0.75

Port = tuple[str, str]  # node, nic


@dataclass(frozen=True)
class Cause:
    """`what`: "link" src -> dst, the "egress" or "ingress" of one NIC, "nic" both of them, or "network"."""

    what: Literal["link", "egress", "ingress", "nic", "network"]
    src: Port | None
    dst: Port | None
    covered: float
    runner_up: float


SRC, DST = ["src_node", "src_nic"], ["dst_node", "dst_nic"]


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
    first, last = bad["start_ns"].min(), bad["start_ns"].max()
    during = cells.filter(pl.col("start_ns").is_between(first, last))
    from_src = bad.filter(pl.col("at_src").fill_null(True))
    into_dst = bad.filter(pl.col("at_dst").fill_null(True))
    link = _best(bad, [*SRC, *DST], total)
    egress, ingress = _best(from_src, SRC, total), _best(into_dst, DST, total)

    names, covered, second = link
    if covered >= COVERED and _share_bad(during, dict(zip([*SRC, *DST], names, strict=True))) >= CONSISTENT:
        return Cause("link", (names[0], names[1]), (names[2], names[3]), covered, second / covered)
    ports = sorted(
        [
            (_share_bad(during, dict(zip(SRC, egress[0], strict=True))), egress, "egress"),
            (_share_bad(during, dict(zip(DST, ingress[0], strict=True))), ingress, "ingress"),
        ],
        key=lambda port: port[1][1],
        reverse=True,
    )
    consistent, (names, covered, second), what = ports[0]
    second = max(second, ports[1][1][1])
    if covered >= COVERED and consistent >= CONSISTENT and second <= RUNNER_UP * covered:
        if what == "egress":
            return Cause("egress", (names[0], names[1]), None, covered, second)
        return Cause("ingress", None, (names[0], names[1]), covered, second)
    return _both_ways(bad, during, total) or Cause("network", None, None, covered, second)


def _both_ways(bad: pl.DataFrame, during: pl.DataFrame, total: float) -> Cause | None:
    """The NIC that is bad in both directions, if one is."""
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
    share = min(
        _share_bad(during, {"src_node": node, "src_nic": nic}),
        _share_bad(during, {"dst_node": node, "dst_nic": nic}),
    )
    if weight < COVERED * total or share < CONSISTENT or min(sent, received) < 0.2 * weight:
        return None
    if second > RUNNER_UP * weight / total:
        return None
    return Cause("nic", (node, nic), (node, nic), weight / total, second)


def _best(bad: pl.DataFrame, key: list[str], total: float) -> tuple[tuple[str, ...], float, float]:
    """The value of `key` with most weight, its share of `total`, and that of the next."""
    sums = (
        bad.group_by(key)
        .agg(pl.col("weight").sum())
        .sort("weight", *key, descending=[True] + [False] * len(key))
    )
    if sums.is_empty():
        return ("",) * len(key), 0.0, 0.0
    second = sums["weight"][1] / total if sums.height > 1 else 0.0
    return sums.select(key).row(0), sums["weight"][0] / total, second


def _share_bad(cells: pl.DataFrame, component: dict[str, str]) -> float:
    """How much of the cells that cross `component` is bad, each of its flows counting the same."""
    crossing = cells.filter(*(pl.col(name).eq_missing(pl.lit(value)) for name, value in component.items()))
    share = crossing.group_by(*SRC, *DST).agg((pl.col("weight") > 0).mean().alias("bad"))["bad"].mean()
    return float(share) if isinstance(share, float) else 0.0
