"""Slow NICs and links: flows that send slower than their peers even while they send."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.cover import DST, EDGE, SRC, Cause, cover
from pulse_bpf.analysis.findings import Evidence, Finding

# Slower than its peers by this factor at least, and by this many robust deviations of all flows.
SLOW_RATIO, DEVIATIONS = 0.75, 5.0
# From this ratio of median bins on, a flow that looks slow over windows is starved. Bins that hold few packets
# take few values, so it is nearer to 1.
STARVED_RATIO = 0.9
# Operators whose median makes one value, and how many such values a flow must be slow in.
SMOOTHED, MIN_OPERATORS = 5, 5
OPERATOR = ["comm_id", "kind", "step"]


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
    """One row per operator (comm_id, kind, step) and flow (EDGE), in the shape `cover` wants.

    A port's rate is that of all its flows together, since they share it: `tx_*` of the sending, `rx_*` of
    the receiving port, in Gbit/s while bursting. Its ratio is the running median over SMOOTHED operators of the
    rate against the upper quartile of the other ports in the same operator. `link_ratio` compares a flow with
    those that share its sender and with those that share its receiver, the better of both; null where nothing
    shares them.
    """
    flows = aligned.filter(
        pl.col("level") == "flow", pl.col("step").is_not_null(), pl.col("burst_gbps").is_not_null()
    )
    ends = [
        flows.filter(pl.col("direction") == way).select(
            *OPERATOR,
            *(pl.col(name).alias(edge) for name, edge in zip(columns, EDGE, strict=True)),
            pl.col("burst_gbps").alias(f"{way}_flow_gbps"),
            pl.col("start_ns").alias(f"{way}_start_ns"),
        )
        for way, columns in (
            ("tx", ("node", "nic", "peer_node", "peer_nic")),
            ("rx", ("peer_node", "peer_nic", "node", "nic")),
        )
    ]
    key = [*OPERATOR, *EDGE]
    # Where a process has several flow groups to one peer port they count as one.
    ends = [
        end.group_by(key).agg(pl.col("^.*_flow_gbps$").sum(), pl.col("^.*_start_ns$").min()) for end in ends
    ]
    cells = ends[0].join(ends[1], on=key, how="full", coalesce=True, nulls_equal=True)
    cells = cells.with_columns(
        start_ns=pl.min_horizontal("tx_start_ns", "rx_start_ns"),
        flow_gbps=pl.min_horizontal("tx_flow_gbps", "rx_flow_gbps"),
    )
    ports = _port_rates(aligned)
    for way, port, flag in (("tx", SRC, "at_src"), ("rx", DST, "at_dst")):
        values = ("gbps", "reference", "ratio", "span_ns", "bytes")
        rates = ports.filter(pl.col("direction") == way).drop("direction")
        rates = rates.rename(
            {"node": port[0], "nic": port[1], "slow": flag} | {name: f"{way}_{name}" for name in values}
        )
        cells = cells.join(rates, on=[*OPERATOR, *port], how="left", nulls_equal=True)
    cells = cells.with_columns(
        (pl.col("flow_gbps") / _others("flow_gbps", [*OPERATOR, *port], 0.5)).alias(ratio)
        for ratio, port in (("beside_src", SRC), ("beside_dst", DST))
    )
    cells = cells.with_columns(
        link_ratio=pl.when(pl.col("beside_src").is_not_null() & pl.col("beside_dst").is_not_null()).then(
            pl.max_horizontal("beside_src", "beside_dst")
        )
    )
    cells = cells.with_columns(
        _smooth(pl.col(ratio), EDGE).alias(ratio) for ratio in ("beside_src", "beside_dst", "link_ratio")
    )
    # What a port sends is slow because of the port only if its flows are slow beside what others send to the same
    # receivers, and what it receives only if they are slow beside what the same senders send elsewhere.
    cells = cells.with_columns(
        at_src=pl.col("at_src")
        & (pl.col("beside_dst").median().over(*OPERATOR, *SRC) < SLOW_RATIO).fill_null(True),
        at_dst=pl.col("at_dst")
        & (pl.col("beside_src").median().over(*OPERATOR, *DST) < SLOW_RATIO).fill_null(True),
        at_link=_slow("link_ratio", EDGE),
    )
    # Seen in few operators after all that, it is nothing.
    flags = ("at_src", "at_dst", "at_link")
    cells = cells.with_columns(
        pl.col(flag) & (pl.col(flag).sum().over("comm_id", "kind", *EDGE) >= MIN_OPERATORS) for flag in flags
    )
    worst = pl.min_horizontal(
        pl.when(flag).then(ratio)
        for flag, ratio in (("at_src", "tx_ratio"), ("at_dst", "rx_ratio"), ("at_link", "link_ratio"))
    )
    return cells.with_columns(weight=(-worst.log()).fill_null(0.0)).sort(key)


def _port_rates(aligned: pl.DataFrame) -> pl.DataFrame:
    """Per operator, port and direction: gbps, reference, ratio, span_ns, bytes, and whether it is slow.

    A port that receives as fast as others can send is not slow, however much faster several senders together
    reach somebody else.
    """
    rows = aligned.filter(pl.col("step").is_not_null(), pl.col("burst_gbps").is_not_null())
    summed = rows.filter(pl.col("level") == "nic")
    port = ["node", "nic", "direction"]
    single = rows.filter(pl.col("level") == "flow").join(
        summed, on=[*OPERATOR, *port, "pid"], how="anti", nulls_equal=True
    )
    rates = (
        pl.concat([summed, single])
        .with_columns(span_ns=pl.col("last_byte_ns") - pl.col("start_ns"))
        .group_by(*OPERATOR, *port)
        .agg(pl.col("burst_gbps", "wmed_gbps", "bytes").sum(), pl.col("span_ns").max())
    )
    for rate in ("burst_gbps", "wmed_gbps"):
        sent = pl.col(rate).filter(pl.col("direction") == "tx").quantile(0.75).over(OPERATOR)
        reference = pl.min_horizontal(
            _others(rate, [*OPERATOR, "direction"], 0.75), pl.when(pl.col("direction") == "rx").then(sent)
        )
        rates = rates.with_columns(reference.alias(f"{rate}_reference"))
        ratio = pl.col(rate) / pl.col(f"{rate}_reference")
        rates = rates.with_columns(_smooth(ratio, port).alias(f"{rate}_ratio"))
    # The median bin must be slow too: what bursts at full speed inside a window is starved, not slow.
    slow = _slow("burst_gbps_ratio", port) & (pl.col("wmed_gbps_ratio") < STARVED_RATIO)
    return rates.select(
        *OPERATOR,
        *port,
        pl.col("burst_gbps").alias("gbps"),
        pl.col("burst_gbps_reference").alias("reference"),
        pl.col("burst_gbps_ratio").alias("ratio"),
        "span_ns",
        "bytes",
        slow.alias("slow"),
    )


def _others(rate: str, group: list[str], share: float) -> pl.Expr:
    """The quantile `share` of `rate` over the others of the group, the higher of two; null for one alone."""
    ordered = pl.col(rate).sort().implode().over(group).list
    place = pl.col(rate).rank("ordinal").over(group).cast(pl.Int64) - 1
    quartile = ((pl.len().over(group).cast(pl.Int64) - 2).clip(0) * share).ceil().cast(pl.Int64)
    others = ordered.get(quartile + (place <= quartile).cast(pl.Int64), null_on_oob=True)
    return pl.when(pl.len().over(group) > 1).then(others)


def _smooth(ratio: pl.Expr, which: list[str]) -> pl.Expr:
    """The running median of `ratio` over the steps of one kind of operator."""
    return ratio.rolling_median(SMOOTHED, min_samples=3, center=True).over(
        "comm_id", "kind", *which, order_by="step"
    )


def _slow(ratio: str, which: list[str]) -> pl.Expr:
    """Whether `ratio` is low, by more than it wavers over time, in enough operators."""
    log, group = pl.col(ratio).log(), ["comm_id", "kind"]
    # Between medians of separate operators: a fault that begins half-way is no wavering.
    moves = (pl.col(ratio) / pl.col(ratio).shift(SMOOTHED)).log().abs().over(*group, *which, order_by="step")
    wavers = 1.4826 * moves.median().over(group) / 2**0.5
    slow = log < pl.min_horizontal(pl.lit(SLOW_RATIO).log(), -DEVIATIONS * wavers)
    return slow & (slow.sum().over(*group, *which) >= MIN_OPERATORS)


def _finding(cells: pl.DataFrame, bad: pl.DataFrame, cause: Cause) -> Finding:
    sided = "rx" if cause.what == "ingress" or bad["at_src"].sum() == 0 else "tx"
    ratio = float(bad.select((-pl.col("weight").median()).exp()).item())
    rate = _median(bad["flow_gbps"] if cause.what == "link" else bad[f"{sided}_gbps"])
    reference = rate / ratio
    span = pl.col("start_ns") + pl.col(f"{sided}_span_ns").fill_null(0)
    first, last = bad.select(pl.col("start_ns").min(), last=span.max()).row(0)
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
        next_check=f"on {node}: tc -s qdisc show dev NETDEV; ethtool NETDEV; ethtool -S NETDEV"
        if not link
        else f"ib_write_bw between {src[0]} and {dst[0]} in both directions, then each with a third node",
    )


def _busy(cells: pl.DataFrame, way: str) -> float | None:
    """Median share of an operator's time that a flow would need at its own bursting rate."""
    needed = pl.col(f"{way}_bytes") * 8 / pl.col(f"{way}_gbps") / pl.col(f"{way}_span_ns")
    value = cells.select(needed.median()).item() if not cells.is_empty() else None
    return None if value is None else min(1.0, float(value))


def _median(values: pl.Series) -> float:
    return float(values.to_frame().select(pl.all().median()).item() or 0.0)


def speed(gbps: float) -> str:
    """A rate as people write it."""
    return f"{gbps:.1f} Gbit/s" if gbps >= 1 else f"{gbps * 1000:.1f} Mbit/s"
