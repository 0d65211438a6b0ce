"""Machines that hold up a ring from inside, by clear-to-sends: who may send and cannot, and who could and may not."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.lags import IN_PAIRS
from pulse_bpf.analysis.slow import RECEIVED
from pulse_bpf.analysis.twins import TWO_SIDED

# After so long a silence on a flow its receiver has taken all, and granted all slots again.
IDLE_NS = 200_000
# Operators of fewer bins say too little of when in them what moved; and so many of them must agree.
MIN_BINS, MIN_OPERATORS = 5, 5
# By how many messages a machine's two sides must differ, of 8 slots for each channel (NCCL_STEPS), in what share of
# the operators with such a machine it must be the same one, and of its difference how much the next may have.
MESSAGES, FIRST, NEXT = 5.0, 0.8, 0.4
# Of the longest time that an operator takes on a flow, what it takes on all others at least.
ALIKE = 0.75
# What is slow runs at most at this share of what others do, and what is as slow at most at so many times its share: a
# port that sends slowly acknowledges slowly as well, which slows those down that send to it, but less.
SLOW, AS_SLOW = 0.75, 1.6
# Of two machines either is before and after the other.
MIN_NODES = 3
EDGE = ["node", "nic", "pid", "comm_id", "peer_node", "peer_nic", "peer_pid"]
OPERATOR = ["comm_id", "kind", "step"]
# Columns of the operators by which what is behind a port is told.
BEHIND = (
    *(*OPERATOR, "level", "direction", "node", "nic", "peer_node", "peer_nic", "start_ns", "burst_gbps"),
)


def find_inside(aligned: pl.DataFrame) -> list[Finding]:
    """The machine that holds up rings from inside: a slow GPU, or a slow way between its GPUs.

    A receiver grants a slot when the data in it have been taken. Who sends to a machine that is slow inside has used
    up what was granted, and who gets data from it has granted all and waits. So on the way into the machine
    the sender holds the fewest grants, on the way out of it the most, and around the ring they become fewer. A slow
    port has all of its grants out as well, but on one NIC only. Takes operators before which a flow was silent, when
    all slots are known to be granted. Needs a source that tells clear-to-sends from data.
    """
    edges = _held(aligned)
    sides = _sides(edges)
    first = (
        sides.sort("more", "node", descending=[True, False])
        .group_by(OPERATOR)
        .agg(pl.col("node", "more").first(), pl.col("more").get(1).alias("next"))
    )
    # Where none stands out there was nothing to hold up, or not yet.
    telling = first.filter(pl.col("more") >= MESSAGES, pl.col("next") <= NEXT * pl.col("more"))
    nodes = (
        telling.group_by("node")
        .agg(pl.len().alias("times"), pl.col("more", "next").median())
        .sort("times", "node", descending=[True, False])
    )
    operators = telling.height
    if nodes.is_empty():
        return []
    node, times, more, others = nodes.row(0)
    if times < max(MIN_OPERATORS, FIRST * operators):
        return []
    share = times / operators
    seen = edges.join(telling.filter(pl.col("node") == node), on=OPERATOR, how="semi")
    text = (
        f"{node} holds up its rings from inside: in {times} of {operators} operators that tell, it is between a sender "
        f"that waits for permission and a receiver that waits for data (by it {more:.1f} messages more may be sent "
        f"than to it; on the next machine {others:.1f})."
    )
    return [
        Finding(
            kind="intra-node-slow",
            cause="intra-node",
            scope="node",
            confidence=round(min(0.95, 0.5 + 0.45 * share), 3),
            slowdown=1.0,
            first_ns=int(seen["start_ns"].min()),  # type: ignore[arg-type]
            last_ns=int(seen["last_byte_ns"].max()),  # type: ignore[arg-type]
            evidence=[Evidence("credits", float(more), others, operators, text)],
            node=node,
            victims=[other for other in sides["node"].unique().sort() if other != node],
            next_check=f"on {node}: nvidia-smi -q -d PERFORMANCE,CLOCK; nvidia-smi nvlink -s; nvidia-smi topo -m",
        )
    ]


def behind_ports(aligned: pl.DataFrame, slow: list[Finding]) -> list[Finding]:
    """Those of `slow` that are ports, with the machine named where it is slow behind its port.

    A port that sends slowly receives as fast as ever what others send it in exchanges in pairs, and the other ports of
    its machine send as fast as ever; one whose slot is slow pauses its switch and says so. Where that is not so,
    its GPU, or the way to it, holds it up. Of a port that is slow in what it receives neither tells.
    """
    return [
        replace(item, kind="intra-node-slow", cause="intra-node", scope="node", nic=None)
        if item.scope == "nic"
        and item.kind == "nic-slow"
        and all(shown.metric != RECEIVED for shown in item.evidence)
        and _is_behind(aligned, item)
        else item
        for item in slow
    ]


def _is_behind(aligned: pl.DataFrame, item: Finding) -> bool:
    """Whether, where a port sends slowly beside other machines', it is sent to as slowly or all of its machine's do."""
    rate = pl.col("burst_gbps")
    moved = aligned.select(*BEHIND).filter(
        pl.col("level").is_in(["flow", "nic"]),
        pl.col("step").is_not_null(),
        rate.is_not_null(),
        pl.col("start_ns").is_between(item.first_ns, item.last_ns),
    )
    here, sends = pl.col("node") == item.node, pl.col("direction") == "tx"
    mine = here & (pl.col("nic") == item.nic)
    to_it = (pl.col("peer_node") == item.node) & (pl.col("peer_nic") == item.nic)
    theirs = to_it.fill_null(False) & sends
    others = ~here & ~theirs
    usual = rate.filter(others & sends).median()
    # Where there are several peers, their sum tells.
    rows = moved.filter((pl.col("level") == "nic") | ~(pl.col("level") == "nic").any().over(OPERATOR))
    ratios = rows.group_by(OPERATOR).agg(
        out=rate.filter(mine & sends).mean() / usual,
        beside=rate.filter(here & ~mine & sends).median() / usual,
        into=pl.coalesce(
            rate.filter(mine & ~sends).mean() / rate.filter(others & ~sends).median(),
            rate.filter(theirs).mean() / usual,
        ),
    )
    # What each peer sends to several is in the sum of its port, and what it sends to this one in its flow.
    apart = moved.filter(pl.col("level") == "flow").group_by(OPERATOR)
    to_it_alone = apart.agg(alone=rate.filter(theirs).mean() / usual)
    ratios = ratios.join(to_it_alone, on=OPERATOR, how="left").with_columns(
        pl.coalesce("into", "alone").alias("into")
    )
    held = ratios.filter(pl.col("out") <= SLOW)
    # In a ring what comes in is as slow as what goes out, whatever the cause.
    pairs = held.filter(pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]))
    as_slow = pairs.select(pl.col("into") <= pl.min_horizontal(pl.lit(SLOW), AS_SLOW * pl.col("out")))
    beside = held.select(pl.col("beside") <= SLOW)
    return any(
        len(slow) >= MIN_OPERATORS and float(slow.mean()) >= 0.5  # type: ignore[arg-type]
        for slow in (as_slow.to_series().drop_nulls(), beside.to_series().drop_nulls())
    )


def _held(aligned: pl.DataFrame) -> pl.DataFrame:
    """Of what was sent after a silence, by how many messages less than at its start could be sent on average (held).

    That is the clear-to-sends that had come by a moment, less the messages that had gone, on average over the time of
    the operator. How many messages a byte makes is learned from operators with a silence on both sides, to which
    as many clear-to-sends belong as messages.
    """
    sent = aligned.filter(
        pl.col("level") == "flow", pl.col("direction") == "tx", pl.col("start_ns").is_not_null()
    )
    sent = sent.sort(*EDGE, "start_ns").with_columns(
        before=pl.col("start_ns") - pl.col("last_byte_ns").shift(1).over(EDGE) >= IDLE_NS,
        after=pl.col("start_ns").shift(-1).over(EDGE) - pl.col("last_byte_ns") >= IDLE_NS,
        granted=pl.col("credits_during") + pl.col("credits_before").shift(-1).over(EDGE),
    )
    alone = pl.col("before") & pl.col("after")
    per_byte = (pl.col("granted") / pl.col("bytes")).filter(alone).median()
    sent = sent.with_columns(messages=pl.col("bytes") * per_byte.over("comm_id", "kind", "op_bytes"))
    span_ns = pl.col("last_byte_ns") - pl.col("start_ns")
    rings = sent.filter(
        "before",
        pl.col("end_ns").is_not_null(),
        pl.col("step").is_not_null(),
        span_ns >= MIN_BINS * pl.col("bin_ns"),
        ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
    )
    came = pl.col("credits_during") * (pl.col("last_byte_ns") - pl.col("credit_mean_ns"))
    went = pl.col("messages") * (pl.col("last_byte_ns") - pl.col("byte_mean_ns"))
    # Who comes late to an operator is sent a part of it long before, which says nothing of what goes on inside.
    together = span_ns.min().over(OPERATOR) >= ALIKE * span_ns.max().over(OPERATOR)
    return rings.with_columns(held=(came - went) / span_ns).filter(together).drop_nulls("held")


def _sides(edges: pl.DataFrame) -> pl.DataFrame:
    """Per operator and node in a ring of nodes: how many messages `more` may be sent by it than to it.

    On average over its NICs but the one that shows it most on each side, which may be a port's own.
    """
    held = pl.col("held").sort()
    out = edges.group_by(*OPERATOR, "node").agg(
        held.head(pl.len() - 1).mean().alias("out"), pl.col("peer_node").n_unique().alias("following")
    )
    into = edges.group_by(*OPERATOR, pl.col("peer_node").alias("node")).agg(
        held.tail(pl.len() - 1).mean().alias("into"), pl.col("node").n_unique().alias("before")
    )
    return (
        out.join(into, on=[*OPERATOR, "node"])
        .filter(pl.col("following") == 1, pl.col("before") == 1)
        .with_columns(more=pl.col("out") - pl.col("into"))
        .drop_nulls("more")
        .filter(pl.len().over(OPERATOR) >= MIN_NODES)
    )
