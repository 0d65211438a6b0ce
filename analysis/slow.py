"""Slow NICs and links: flows that send slower than their peers even while they send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from pulse_bpf.analysis.cover import DST, EDGE, PART, SRC, Cause, explain, touched
from pulse_bpf.analysis.findings import Evidence, Finding

# Slower than its peers by this factor at least, and by this many robust deviations of all flows.
SLOW_RATIO, DEVIATIONS = 0.75, 5.0
# From this ratio of median bins on, a flow that looks slow over windows is starved. Bins that hold few packets
# take few values, so it is nearer to 1.
STARVED_RATIO = 0.9
# What is slow by itself is steady: its median bin is near its fastest ones, at least so near as with the steadiest
# slow port of the operator. What is starved now and then sends faster than the slow one.
STEADY_SHARE = 0.97
# Bins of an operator without which its rate is not judged.
MIN_BINS = 5
# Of the bytes of an operator's largest flow, those without which a flow carries no data.
LEAST_PART = 0.02
# Operators whose median makes one value, and how many such values a flow must be slow in.
SMOOTHED, MIN_OPERATORS = 5, 5
# Of an operator's time, what the flow that holds it up is busy for at least.
MIN_BUSY = 0.6
# Of how busy it is, how busy the others may be at most.
BUSIER = 0.97
# Congestion notifications that say that a sender was slowed down by the network, and how many times others' usual.
MIN_MARKS, OVER_OTHERS = 8, 3.0
OPERATOR = ["comm_id", "kind", "step"]
# Columns of the operators that are looked at.
NEEDED = (
    *(
        *OPERATOR,
        "level",
        "direction",
        "pid",
        "node",
        "nic",
        "peer_node",
        "peer_nic",
        "start_ns",
        "last_byte_ns",
    ),
    *("bytes", "bin_ns", "burst_gbps", "wmed_gbps", "p95_gbps"),
)
# What is measured of a port that is slow in what it receives.
RECEIVED = "rx_burst_gbps"


def find_slow(
    aligned: pl.DataFrame, flows: pl.DataFrame, marks: pl.DataFrame | None
) -> tuple[list[Finding], list[str], int]:
    """The slow components in the operators, what stands in the way of naming them, and the time lost by slow flows.

    The average rate of a ring is the same everywhere; the rate while sending is not. Each flow is compared
    with the others of the same operator, at both of its ends. Assumes that the flows of one operator have equal
    rights, which a communicator over unequal NICs does not give. `flows` are the owners of the queue pairs;
    `marks` has how often each node and nic was asked to slow down (`marks`), None where nobody counted: a queue
    in the network that fills marks what passes, so that what is slow without it is slow at its sender.
    """
    cells = rate_cells(aligned)
    bad = cells.filter(pl.col("weight") > 0)
    if marks is not None:
        marked = bad.join(hot(marks), left_on=SRC, right_on=["node", "nic"], how="semi")
        if marked.select("comm_id", "step").unique().height >= MIN_OPERATORS:
            # Who waits for a marked flow is slow at times, and not marked.
            return [_network(cells, marked, flows)], [], _lost_ns(bad)
    causes = explain(cells)
    if any(cause.what == "network" for cause in causes):
        text = f"{bad.select(EDGE).unique().height} flows were slow now and then, and no one component explains them"
        return [], [text], _lost_ns(bad)
    found, why = [], list[str]()
    for cause in [part for whole in causes for part in _parts(whole, bad, marks)]:
        own = bad.filter(touched(cause))
        busy = _busy(own.filter(pl.col("at_src") | pl.col("at_dst")), _side(bad, cause))
        unmarked = _unmarked(own, marks)
        if busy is not None and busy < MIN_BUSY:
            # What is slow holds all up, and is never idle meanwhile.
            why.append(f"a slow flow from {own['src_node'][0]} was idle for much of the time")
        elif busy is not None and _as_busy(cells, own, _side(bad, cause)) > BUSIER * busy:
            # Those that wait for it are idle meanwhile.
            why.append(f"a slow flow from {own['src_node'][0]} was no busier than others of its operators")
        elif cause.what == "link" and marks is not None and not (unmarked and own["at_src"].any()):
            why.append(f"a flow from {own['src_node'][0]} is slow, and neither its sender nor the network is")
        elif cause.what == "node" or (unmarked and cause.what == "ingress"):
            found.append(_of_machine(_finding(cells, own, cause)))
        elif unmarked and cause.what == "link":
            found.append(_finding(cells, own, replace(cause, what="egress", dst=None)))
        else:
            found.append(_finding(cells, own, cause))
    return found, why, _lost_ns(bad)


def _parts(cause: Cause, bad: pl.DataFrame, marks: pl.DataFrame | None) -> list[Cause]:
    """`cause`, or the senders to which it comes down: what a NIC receives slowly and unmarked is slow at its sender."""
    own = bad.filter(touched(cause))
    if cause.what != "nic" or not _unmarked(own, marks):
        return [cause]
    senders = (
        own.group_by(SRC)
        .agg(pl.col("weight").sum())
        .filter(pl.col("weight") >= PART * pl.col("weight").max())
    )
    return [
        replace(cause, what="egress", src=(node, nic), dst=None)
        for node, nic in senders.select(SRC).sort(SRC).rows()
    ]


def hot(marks: pl.DataFrame) -> pl.DataFrame:
    """The ports that were asked to slow down far more often than most."""
    usual = float(marks["marks"].quantile(0.75) or 0.0)
    return marks.filter(pl.col("marks") >= MIN_MARKS + OVER_OTHERS * usual)


def _unmarked(own: pl.DataFrame, marks: pl.DataFrame | None) -> bool:
    """Whether it is known that the senders of these flows were hardly asked to slow down."""
    if marks is None:
        return False
    senders = own.select(node="src_node", nic="src_nic").unique()
    counted = senders.join(marks, on=["node", "nic"])["marks"]
    return len(counted) == senders.height and bool((counted < MIN_MARKS).all())


def _lost_ns(bad: pl.DataFrame) -> int:
    """By how much slow flows lengthened their operators, each counted once."""
    span = pl.max_horizontal("tx_span_ns", "rx_span_ns").fill_null(0)
    lost = span * (1 - (-pl.col("weight")).exp())
    return int(bad.select(*OPERATOR, lost=lost).group_by(OPERATOR).agg(pl.col("lost").max())["lost"].sum())


def rate_cells(aligned: pl.DataFrame) -> pl.DataFrame:
    """One row per operator (comm_id, kind, step) and flow (EDGE), in the shape `cover` wants.

    A port's rate is that of all its flows together, since they share it: `tx_*` of the sending, `rx_*` of
    the receiving port, in Gbit/s while bursting. Its ratio is the running median over SMOOTHED operators of the
    rate against the upper quartile of the other ports in the same operator. `link_ratio` compares a flow with
    those that share its sender and with those that share its receiver, the better of both; null where nothing
    shares them.
    """
    flows = _measured(aligned).filter(pl.col("level") == "flow")
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


def _measured(aligned: pl.DataFrame) -> pl.DataFrame:
    """The rows whose operators are long enough to judge a rate: that of fast bins where these are wide."""
    bins = (pl.col("last_byte_ns") - pl.col("start_ns")) / pl.col("bin_ns")
    # Of a source that sees only what is sent, credits and acknowledgements are rows as well.
    data = pl.col("bytes") >= LEAST_PART * pl.col("bytes").max().over(*OPERATOR, "direction")
    rows = aligned.select(NEEDED).filter(pl.col("step").is_not_null())
    rows = rows.filter(data).with_columns(
        burst_gbps=pl.coalesce("burst_gbps", pl.when(bins >= MIN_BINS).then("p95_gbps"))
    )
    return rows.filter(pl.col("burst_gbps").is_not_null())


def _port_rates(aligned: pl.DataFrame) -> pl.DataFrame:
    """Per operator, port and direction: gbps, reference, ratio, span_ns, bytes, and whether it is slow.

    A port that receives as fast as others can send is not slow, however much faster several senders together
    reach somebody else.
    """
    rows = _measured(aligned)
    summed = rows.filter(pl.col("level") == "nic")
    port = ["node", "nic", "direction"]
    single = rows.filter(pl.col("level") == "flow").join(
        summed, on=[*OPERATOR, *port, "pid"], how="anti", nulls_equal=True
    )
    rates = (
        pl.concat([summed, single])
        .with_columns(span_ns=pl.col("last_byte_ns") - pl.col("start_ns"))
        .group_by(*OPERATOR, *port)
        .agg(pl.col("burst_gbps", "wmed_gbps", "p95_gbps", "bytes").sum(), pl.col("span_ns").max())
    )
    for rate in ("burst_gbps", "wmed_gbps"):
        sent = pl.col(rate).filter(pl.col("direction") == "tx").quantile(0.75).over(OPERATOR)
        reference = pl.min_horizontal(
            _others(rate, [*OPERATOR, "direction"], 0.75), pl.when(pl.col("direction") == "rx").then(sent)
        )
        # Who moves less than the others, as the leaves of a tree, may do so at a lower rate: it takes no longer.
        rates = rates.with_columns(reference.alias(f"{rate}_reference"), pace=pl.col(rate) / pl.col("bytes"))
        rates = rates.with_columns(usual_pace=_others("pace", [*OPERATOR, "direction"], 0.75))
        ratio = pl.max_horizontal(
            pl.col(rate) / pl.col(f"{rate}_reference"), pl.col("pace") / pl.col("usual_pace")
        )
        rates = rates.with_columns(_smooth(ratio, port).alias(f"{rate}_ratio"))
    rates = rates.with_columns(
        steady=_smooth(pl.col("wmed_gbps") / pl.max_horizontal("p95_gbps", "wmed_gbps"), port),
        # The median bin must be slow too: what bursts at full speed inside a window is starved, not slow.
        candidate=_slow("burst_gbps_ratio", port) & (pl.col("wmed_gbps_ratio") < STARVED_RATIO),
    )
    steadiest = pl.col("steady").filter("candidate").max().over(*OPERATOR, "direction")
    slow = pl.col("candidate") & (pl.col("steady") >= STEADY_SHARE * steadiest)
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
    ordered, place = pl.col(rate).sort(), pl.col(rate).rank("ordinal").cast(pl.Int64) - 1
    quartile = ((pl.len().cast(pl.Int64) - 2).clip(0) * share).ceil().cast(pl.Int64)
    of_two = [ordered.slice(at, 1).first().over(group) for at in (quartile, quartile + 1)]
    others = pl.when((place <= quartile).over(group)).then(of_two[1]).otherwise(of_two[0])
    return pl.when(pl.len().over(group) > 1, pl.col(rate).is_not_null()).then(others)


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
    sided = _side(bad, cause)
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
        "node": f"what {src[0]} sends and receives",
        "link": f"what {src[0]} sends to {dst[0]}",
    }[cause.what]
    busy, others_busy = _busy(bad, sided), _busy(good, sided)
    evidence = [
        Evidence(
            RECEIVED if cause.what == "ingress" else "burst_gbps",
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
        lost_ns=_lost_ns(during),
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


def _side(bad: pl.DataFrame, cause: Cause) -> str:
    """At which end what the cause touches was seen to be slow."""
    return "rx" if cause.what == "ingress" or bad.filter(touched(cause))["at_src"].sum() == 0 else "tx"


def _of_machine(finding: Finding) -> Finding:
    """`finding` for the machine: what several of its NICs send and receive, or one takes without a queue, is slow."""
    return replace(
        finding,
        kind="intra-node-slow",
        cause="intra-node",
        scope="node",
        nic=None,
        next_check=f"on {finding.node}: nvidia-smi -q -d PERFORMANCE,CLOCK; nvidia-smi nvlink -s; nvidia-smi topo -m",
    )


def _network(cells: pl.DataFrame, bad: pl.DataFrame, flows: pl.DataFrame) -> Finding:
    """Flows that the network itself slows down, at a port between switches that they share with others."""
    weights = bad.group_by(EDGE).agg(pl.col("weight").sum())
    edges = weights.filter(pl.col("weight") >= PART * pl.col("weight").max()).sort(EDGE).select(EDGE)
    first = edges.row(0)
    shown = _finding(cells, bad, Cause("link", (first[0], first[1]), (first[2], first[3]), 0.9, 0.0))
    ports = edges.rename(dict(zip(EDGE, ("node", "nic", "peer_node", "peer_nic"), strict=True)))
    pairs = flows.join(ports, on=["node", "nic", "peer_node", "peer_nic"], how="semi").sort(
        "node", "nic", "qpn"
    )
    named: list[dict[str, Any]] = pairs.select("node", "nic", "qpn", "peer_node", "peer_nic").to_dicts()
    names = "; ".join(f"{a} {b} to {c} {d}" for a, b, c, d in edges.head(4).iter_rows())
    text = f"The network asked the senders of these flows to slow down, and no port of a machine is full: {names}."
    return replace(
        shown,
        kind="path-collision" if edges.height > 1 else "congestion",
        cause="network",
        scope="network",
        evidence=[*shown.evidence, Evidence("marked_flows", float(edges.height), None, bad.height, text)],
        node=None,
        nic=None,
        peer_node=None,
        peer_nic=None,
        nodes=None,
        flows=named,
        next_check="the switches' counters of marked packets on the uplinks of these paths",
    )


def _as_busy(cells: pl.DataFrame, own: pl.DataFrame, way: str) -> float:
    """How busy flows that are not slow are in the operators of those that are; 0 where there are none."""
    others = cells.filter(pl.col("weight") == 0).join(own, on=OPERATOR, how="semi", nulls_equal=True)
    return _busy(others, way) or 0.0


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
