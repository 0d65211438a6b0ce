"""Slow NICs and links: flows that send slower than their peers even while they send."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.cover import Cause, cover
from pulse_bpf.analysis.findings import Evidence, Finding

# Slower than its peers by this factor at least, and by this many robust deviations of all flows.
SLOW_RATIO, DEVIATIONS = 0.75, 5.0
# Operators whose median makes one value, and how many such values a flow must be slow in.
SMOOTHED, MIN_OPERATORS = 5, 5
EDGE = ["src_node", "src_nic", "dst_node", "dst_nic"]


def find_slow(aligned: pl.DataFrame) -> tuple[list[Finding], list[str]]:
    """The slow component in the operators, and what stands in the way of naming one.

    The average rate of a ring is the same everywhere; the rate while sending is not. Each flow is compared
    with the others of the same operator, at both of its ends. Assumes that the flows of one operator have equal
    rights, which a communicator over unequal NICs does not give.
    """
    cells = rate_cells(aligned)
    cause = cover(cells)
    if cause is None:
        return [], []
    bad = cells.filter(pl.col("weight") > 0)
    if cause.what == "network":
        text = f"{bad.select(EDGE).unique().height} flows were slow now and then, and no one component explains them"
        return [], [text]
    return [_finding(cells, bad, cause)], []


def rate_cells(aligned: pl.DataFrame) -> pl.DataFrame:
    """One row per operator (comm_id, step) and flow (EDGE), in the shape `cover` wants, with rates and ratios.

    Rates are Gbit/s at the sender (`tx`) and the receiver (`rx`) while bursting; a ratio is the running median
    over SMOOTHED operators of the rate against the upper quartile of the other flows of the operator.
    """
    ends = [
        _end(aligned.filter(pl.col("direction") == "tx"), "tx", ("node", "nic", "peer_node", "peer_nic")),
        _end(aligned.filter(pl.col("direction") == "rx"), "rx", ("peer_node", "peer_nic", "node", "nic")),
    ]
    key = ["comm_id", "kind", "step", *EDGE]
    cells = ends[0].join(ends[1], on=key, how="full", coalesce=True, nulls_equal=True)
    cells = cells.with_columns(start_ns=pl.min_horizontal("tx_start_ns", "rx_start_ns"))
    return cells.with_columns(
        weight=pl.when(pl.col("at_src").fill_null(False) | pl.col("at_dst").fill_null(False))
        .then(-pl.min_horizontal("tx_ratio", "rx_ratio").log())
        .otherwise(0.0)
    ).sort(*key)


def _end(rows: pl.DataFrame, way: str, columns: tuple[str, str, str, str]) -> pl.DataFrame:
    rates = (
        rows.filter(
            pl.col("level") == "flow", pl.col("step").is_not_null(), pl.col("burst_gbps").is_not_null()
        )
        .select(
            "comm_id",
            "kind",
            "step",
            *(pl.col(name).alias(edge) for name, edge in zip(columns, EDGE, strict=True)),
            "burst_gbps",
            "wmed_gbps",
            "start_ns",
            (pl.col("last_byte_ns") - pl.col("start_ns")).alias("span_ns"),
            "bytes",
        )
        .group_by("comm_id", "kind", "step", *EDGE)
        .agg(pl.col("burst_gbps", "wmed_gbps", "bytes").sum(), pl.col("start_ns").min(), pl.col("span_ns").max())
    )
    for rate in ("burst_gbps", "wmed_gbps"):
        rates = _ratio(rates, rate)
    log = pl.col("burst_gbps_ratio").log()
    group = ["comm_id", "kind"]
    deviation = 1.4826 * (log - log.median().over(group)).abs().median().over(group)
    limit = pl.min_horizontal(pl.lit(SLOW_RATIO).log(), -DEVIATIONS * deviation)
    # The median bin must be slow too: a flow that bursts at full speed inside a window is starved, not slow.
    slow = (log < limit) & (pl.col("wmed_gbps_ratio") < SLOW_RATIO)
    enough = slow.sum().over("comm_id", "kind", *EDGE) >= MIN_OPERATORS
    names = {name: f"{way}_{name}" for name in ("burst_gbps", "start_ns", "span_ns", "bytes")}
    names |= {"burst_gbps_ratio": f"{way}_ratio", "burst_gbps_reference": f"{way}_reference"}
    return (
        rates.with_columns((slow & enough).alias("at_src" if way == "tx" else "at_dst"))
        .rename(names)
        .drop("wmed_gbps", "wmed_gbps_ratio", "wmed_gbps_reference")
    )


def _ratio(rates: pl.DataFrame, rate: str) -> pl.DataFrame:
    """Adds RATE_reference, the upper quartile over the other flows of the operator, and RATE_ratio against it."""
    group = ["comm_id", "kind", "step"]
    ordered = pl.col(rate).sort().implode().over(group).list
    place = pl.col(rate).rank("ordinal").over(group).cast(pl.Int64) - 1
    quartile = ((pl.len().over(group).cast(pl.Int64) - 2).clip(0) * 0.75).ceil().cast(pl.Int64)
    others = ordered.get(quartile + (place <= quartile).cast(pl.Int64), null_on_oob=True)
    rates = rates.with_columns(pl.when(pl.len().over(group) > 1).then(others).alias(f"{rate}_reference"))
    ratio = pl.col(rate) / pl.col(f"{rate}_reference")
    smooth = ratio.rolling_median(SMOOTHED, min_samples=3, center=True)
    return rates.with_columns(
        smooth.over("comm_id", "kind", *EDGE, order_by="step").alias(f"{rate}_ratio")
    )


def _finding(cells: pl.DataFrame, bad: pl.DataFrame, cause: Cause) -> Finding:
    sided = "rx" if cause.what == "ingress" or bad["at_src"].sum() == 0 else "tx"
    rate = _median(bad[f"{sided}_burst_gbps"])
    reference = _median(bad[f"{sided}_reference"])
    ratio = rate / reference
    first, last = int(bad["start_ns"].min()), int((bad["start_ns"] + bad[f"{sided}_span_ns"].fill_null(0)).max())  # type: ignore[arg-type, operator]
    during = cells.filter(pl.col("start_ns").is_between(first, last))
    good = during.filter(pl.col("weight") == 0)
    operators = bad.select("comm_id", "step").unique().height
    src, dst = cause.src or ("", ""), cause.dst or ("", "")
    place = {
        "egress": f"what {src[1]} of {src[0]} sends",
        "ingress": f"what {dst[1]} of {dst[0]} receives",
        "nic": f"what {src[1]} of {src[0]} sends and receives",
        "link": f"what {src[0]} sends to {dst[0]}",
    }[cause.what]
    busy, others_busy = _busy(bad, sided), _busy(good, sided)
    evidence = [
        Evidence(
            "burst_gbps",
            rate,
            reference,
            operators,
            f"While it flows, {place} runs at {speed(rate)}, the other flows of the same operators at "
            f"{speed(reference)} (median of {operators} operators).",
        ),
        Evidence(
            "covered",
            cause.covered,
            cause.runner_up,
            operators,
            f"{cause.covered:.0%} of all slowness crosses this component; the next best explanation covers "
            f"{cause.runner_up:.0%}.",
        ),
    ]
    if busy is not None and others_busy is not None:
        evidence.append(
            Evidence(
                "busy",
                busy,
                others_busy,
                operators,
                f"It is busy for {busy:.0%} of the time of an operator, the others for {others_busy:.0%}: they wait.",
            )
        )
    link = cause.what == "link"
    node, nic = dst if cause.what == "ingress" else src
    victims = sorted(set(during["src_node"]) | set(during["dst_node"]) - {None})
    victims = [victim for victim in victims if victim and victim != node and not (link and victim == dst[0])]
    margin = min(1.0, (1 - ratio) / 0.5) * min(1.0, operators / 20)
    return Finding(
        kind="nic-slow" if not link else "unknown",
        cause="nic" if not link else "network",
        scope="link" if link else "nic",
        confidence=round(cause.covered * (0.6 + 0.39 * margin), 3),
        slowdown=round(1 / ratio, 3),
        first_ns=first,
        last_ns=last,
        evidence=evidence,
        node=node,
        nic=nic or None,
        peer_node=dst[0] if link else None,
        peer_nic=(dst[1] or None) if link else None,
        nodes=[src[0], dst[0]] if link else None,
        victims=victims,
        next_check=f"on {node}: ethtool -S NETDEV, tc -s qdisc show, mlnx_qos and the rate limit of {nic or 'its NIC'}"
        if not link
        else f"ib_write_bw between {src[0]} and {dst[0]} in both directions, then each with a third node",
    )


def _busy(cells: pl.DataFrame, way: str) -> float | None:
    """Median share of an operator's time that a flow would need at its own bursting rate."""
    needed = pl.col(f"{way}_bytes") * 8 / pl.col(f"{way}_burst_gbps") / pl.col(f"{way}_span_ns")
    value = cells.select(needed.median()).item() if not cells.is_empty() else None
    return None if value is None else min(1.0, float(value))


def _median(values: pl.Series) -> float:
    return float(values.drop_nulls().median() or 0.0)  # type: ignore[arg-type]


def speed(gbps: float) -> str:
    """A rate as people write it."""
    return f"{gbps:.1f} Gbit/s" if gbps >= 1 else f"{gbps * 1000:.1f} Mbit/s"
