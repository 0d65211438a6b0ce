"""Slow NICs and links: flows that send slower than their peers even while they send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from pulse_bpf.analysis.cover import EDGE, PART, SRC, Cause, explain, touched
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.rates import MIN_OPERATORS, OPERATOR, rate_cells

# Of an operator's time, what the flow that holds it up is busy for at least.
MIN_BUSY = 0.6
# Of how busy it is, how busy the others may be at most.
BUSIER = 0.97
# Half as fast as others, in so many operators, is surely slow; of both together, less than this share is chance.
SURE_RATIO, SURE_OPERATORS, LEAST_MARGIN = 0.5, 20, 0.2
# Congestion notifications that say that a sender was slowed down by the network, and how many times others' usual.
MIN_MARKS, OVER_OTHERS = 8, 3.0
# What is measured of a port that is slow in what it sends, and in what it receives.
SENT, RECEIVED = "burst_gbps", "rx_burst_gbps"


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
        if _margin(own) < LEAST_MARGIN:
            continue
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
            RECEIVED if cause.what == "ingress" else SENT,
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
    return Finding(
        kind="nic-slow" if not link else "unknown",
        cause="nic" if not link else "network",
        scope="link" if link else "nic",
        confidence=round(cause.covered * (0.6 + 0.39 * _margin(bad)), 3),
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


def _margin(bad: pl.DataFrame) -> float:
    """How clearly flows are slow and how often, as a share of what is sure."""
    ratio = float(bad.select((-pl.col("weight").median()).exp()).item())
    operators = bad.select("comm_id", "step").unique().height
    return min(1.0, (1 - ratio) / (1 - SURE_RATIO)) * min(1.0, operators / SURE_OPERATORS)


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
