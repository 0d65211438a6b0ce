"""Lossy links and NICs: flows that repeat themselves while the others do not."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.cover import DST, EDGE, SRC, cover
from pulse_bpf.analysis.findings import Evidence, Finding

# Share of repeated bytes from which a flow counts as lossy, unless others repeat nearly as much.
LOSSY_SHARE, OVER_OTHERS = 0.001, 10.0
# One incident, such as a pause that lets timers run out, proves nothing: so many operators of a port must hold repeats.
MIN_HIT = 5
# As often as on the lossy flows, one without repeats would have been hit so many times, or it is without by chance.
BY_CHANCE = 3.0


def find_loss(aligned: pl.DataFrame, events: pl.DataFrame, flow_ends: pl.DataFrame) -> list[Finding]:
    """The component that loses packets, by total repeats and refusals per flow.

    `flow_ends`: node, nic, port, qpn, peer_node, peer_nic of each QP, which says whose flow an event
    belongs to. Repeats come from the sender's side. Loss on one flow names its link: which end of it, or what
    between them, lost the packets does not show in repeats.
    """
    flows = aligned.lazy().filter(
        pl.col("level").is_in(["flow", "traffic"]),
        pl.col("peer_node").is_not_null(),
        pl.col("direction") == "tx",
    )
    sent = flows.select(
        pl.col("node").alias("src_node"),
        pl.col("nic").alias("src_nic"),
        pl.col("peer_node").alias("dst_node"),
        pl.col("peer_nic").alias("dst_nic"),
        pl.coalesce("call_ns", "start_ns").alias("at_ns"),
        "bytes",
        pl.col("retx_bytes").fill_null(0),
        "start_ns",
        "last_byte_ns",
    ).collect()
    refused = (
        events.filter(pl.col("kind") == "nak")
        .join(flow_ends, on=["node", "nic", "port", "qpn"])
        .group_by(
            pl.col("node").alias("src_node"),
            pl.col("nic").alias("src_nic"),
            pl.col("peer_node").alias("dst_node"),
            pl.col("peer_nic").alias("dst_nic"),
        )
        .agg(pl.col("value").sum().alias("naks"))
    )
    # What one operator does to several flows of a port is one incident.
    hit = sent.filter(pl.col("retx_bytes") > 0)
    ports = [
        hit.group_by(port).agg(pl.col("at_ns").n_unique().alias(f"hit_{port[0]}")) for port in (SRC, DST)
    ]
    totals = (
        sent.group_by(EDGE)
        .agg(
            pl.col("bytes", "retx_bytes").sum(),
            (pl.col("retx_bytes") > 0).sum().alias("hit"),
            pl.col("start_ns").min(),
            pl.col("last_byte_ns").max(),
        )
        .join(refused, on=EDGE, how="left", nulls_equal=True)
        .join(ports[0], on=SRC, how="left", nulls_equal=True)
        .join(ports[1], on=DST, how="left", nulls_equal=True)
        .with_columns(pl.col("naks").fill_null(0), share=pl.col("retx_bytes") / pl.col("bytes"))
        .sort(EDGE)
    )
    usual = float(totals.select(pl.col("share").median()).item() or 0.0)
    often = pl.max_horizontal(f"hit_{SRC[0]}", f"hit_{DST[0]}") >= MIN_HIT
    lossy = (pl.col("share") >= max(LOSSY_SHARE, OVER_OTHERS * usual)) & often
    hits = pl.col("bytes") * pl.col("hit").filter(lossy).sum() / pl.col("bytes").filter(lossy).sum()
    cells = totals.filter(lossy | (pl.col("hit") > 0) | (hits >= BY_CHANCE)).with_columns(
        weight=pl.when(lossy).then("share").otherwise(0.0),
        at_src=pl.lit(None, pl.Boolean),
        at_dst=pl.lit(None, pl.Boolean),
        begins=pl.col("start_ns"),
    )
    cause = cover(cells.with_columns(start_ns=pl.lit(0)))
    if cause is None or cause.what == "network":
        return []
    bad = cells.filter(pl.col("weight") > 0)
    repeated = float(bad.select(pl.col("retx_bytes").sum() / pl.col("bytes").sum()).item())
    naks = int(bad["naks"].sum())
    first, last = bad.select(pl.col("begins").min(), pl.col("last_byte_ns").max()).row(0)
    src, dst = cause.src, cause.dst
    link = cause.what == "link"
    place = src if link or cause.what != "ingress" else dst
    assert place is not None
    operators = int(bad["hit"].sum())
    evidence = [
        Evidence(
            "retx_share",
            repeated,
            usual,
            operators,
            f"{repeated:.1%} of the bytes that cross it are sent again, {usual:.1%} on the median flow "
            f"({operators} operators hit).",
        ),
        Evidence(
            "naks", naks, None, operators, f"Receivers refused packets out of sequence {naks} times there."
        ),
    ]
    return [
        Finding(
            kind="lossy-link",
            cause="network",
            scope="link" if link else "nic",
            confidence=round(min(0.95, 0.5 + cause.covered / 2 * min(1.0, operators / 10)), 3),
            slowdown=1.0,
            first_ns=first,
            last_ns=last,
            evidence=evidence,
            node=place[0],
            nic=place[1],
            peer_node=dst[0] if link and dst else None,
            peer_nic=dst[1] if link and dst else None,
            nodes=[src[0], dst[0]] if link and src and dst else None,
            next_check=f"on {place[0]}: ethtool -S NETDEV; rdma statistic show link {place[1]}",
        )
    ]
