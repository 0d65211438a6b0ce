"""Machines that hold up a ring from inside, by when bytes move on the ways into them, out of them and further on."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.lags import IN_PAIRS
from pulse_bpf.analysis.twins import TWO_SIDED

# A ring of fewer machines has no others to compare with, and on fewer NICs it may be one port's doing.
MIN_NODES, MIN_NICS = 4, 3
# Operators of fewer bins say too little of when in them what moved; so many must tell, over so much of the time.
MIN_BINS, MIN_OPERATORS, MIN_TIME = 5, 10, 0.2
# Of ten equal parts of the time in which operators are held up, in how many some are: once is no fault.
MIN_PARTS = 6
# Where all operators that tell begin in few of those parts, as those of long iterations do, so many will do, but all.
FEW_PARTS = 5
# A ring that moves more than this share of what its ports could is held up by nothing.
BUSY = 0.6
# By how much of an operator's time bytes must stay behind, and no more is possible of what buffers hold.
LEAST, MOST = 0.02, 0.5
# In what share of the operators since the first, or of their time, it must be that machine, and how much the next may
# hold up of what it does. Work that is unequal by chance was seen to reach 0.71 in two iterations, what faults do was
# above 0.85.
FIRST, NEXT = 0.75, 0.6
# A machine whose sender is held up as much as it itself, to this share, is what holds up both.
ALIKE = 0.6
# When bytes were sent and when they came may differ by so many bins, or by so much of the operator.
AGREE_BINS, AGREE = 2.0, 0.02
# What comes from the machine that holds up a ring passes the next one at once: this share of what stays may stay there.
PASSED_ON = 0.1
# A port whose ceiling is so much above what the other ports of its operators do on average holds up none of them.
ABOVE = 1.08
# Bytes in an operator may move faster than a ceiling by so much where some of them were counted with another.
AT_CEILING = 1.1
OPERATOR = ["comm_id", "kind", "step"]
# Columns of the operators that are looked at.
NEEDED = (
    *(*OPERATOR, "level", "direction", "node", "nic", "peer_node", "peer_nic", "nranks", "bytes", "bin_ns"),
    *("max_gbps", "start_ns", "last_byte_ns", "end_ns", "byte_mean_ns"),
)
RING = [*OPERATOR, "nic"]


def find_held(aligned: pl.DataFrame, nics: pl.DataFrame) -> list[Finding]:
    """The machine that holds up rings from inside: a slow GPU or host, or a slow way between its GPUs.

    Where a ring is slow, buffers before the slow place are full and those behind it empty: what moves on average on the
    way out of it is later than on the ways before and behind (the second difference along the ring). A full sending
    buffer before the machine, and a full receiving buffer in it, count as one each, so that a machine as late as the
    one before it is what holds up both. A slow port shows this on one NIC; here, most NICs of an operator must, and
    several in all. Assumes one clock for all machines, and that all rings of a communicator visit them in one order;
    where the times at both ends of a way disagree, operators were cut wrongly and say nothing.
    """
    held = _held(aligned, nics)
    if held.is_empty():
        return []
    nodes = (
        held.group_by("node")
        .agg(
            pl.col("stays").median(),
            pl.col("stays_ns").median(),
            pl.col("peer_node").mode().min(),
        )
        .sort("stays", "node", descending=[True, False])
    )
    pair = _pair(nodes)
    top, node = nodes.row(0, named=True), pair[-1]
    others = nodes.filter(~pl.col("node").is_in(pair))
    # Where each of two is it in operators of its own, they hold up nothing together, but come late by turns.
    seen = (
        held.filter(pl.col("node").is_in(pair))
        .group_by(OPERATOR)
        .agg(
            pl.col("first").any(),
            pl.col("stays").min(),
            pl.col("start_ns").min(),
            pl.col("last_byte_ns").max(),
        )
        .filter("first", pl.col("stays") >= LEAST)
    )
    # What buffers hold is much of a short operator, whoever holds it up, and little of a long one.
    span_ns = pl.col("last_byte_ns") - pl.col("start_ns")
    if seen.is_empty():
        return []
    # A fault may have come while it was recorded.
    during = held.filter(pl.col("start_ns") >= seen["start_ns"].min())
    lasting = during.group_by(OPERATOR).agg(pl.col("start_ns").min(), pl.col("last_byte_ns").max())
    times, operators = seen.height, lasting.height
    in_time = float(seen.select(span_ns.sum()).item() / lasting.select(span_ns.sum()).item())
    share = max(times / operators, in_time)
    next_stays = float(others["stays"].max() or 0.0)  # type: ignore[arg-type]
    behind = nodes.filter(pl.col("node") == nodes.filter(pl.col("node") == node)["peer_node"][0])["stays"]
    if (
        operators < MIN_OPERATORS
        or share < FIRST
        or not top["stays"] >= LEAST
        or next_stays > NEXT * top["stays"]
        or float(behind.max() or 0.0) > PASSED_ON * top["stays"]  # type: ignore[arg-type]
        or held.filter(pl.col("node") == top["node"], "first")["nics"].explode().n_unique() < MIN_NICS
        or not _lasts(seen["start_ns"], lasting["start_ns"], aligned)
    ):
        return []
    text = (
        f"{node} holds up its rings from inside: in {times} of {operators} slow operators what leaves it moves later "
        f"than what comes in and what its successor passes on, by {top['stays_ns'] / 1e6:.2f} ms in the median "
        f"({top['stays']:.0%} of an operator; the next machine {next_stays:.0%})."
    )
    return [
        Finding(
            kind="intra-node-slow",
            cause="intra-node",
            scope="node",
            confidence=round(min(0.9, 0.5 + 0.4 * share), 3),
            slowdown=1.0,
            first_ns=int(seen["start_ns"].min()),  # type: ignore[arg-type]
            last_ns=int(seen["last_byte_ns"].max()),  # type: ignore[arg-type]
            evidence=[Evidence("held_up", float(top["stays"]), next_stays, operators, text)],
            node=node,
            victims=sorted(name for name in nodes["node"] if name != node),
            next_check=f"on {node}: nvidia-smi -q -d PERFORMANCE,CLOCK; nvidia-smi nvlink -s; top -b -n 1",
        )
    ]


def no_brake(aligned: pl.DataFrame, port: Finding) -> bool:
    """Whether a port with a ceiling (its first evidence, Gbit/s) moves more than the other ports of its rings do on
    average: what they wait for is then something else.

    What a slow GPU takes from a port comes at one constant rate, as from a slow port, but its other rings are as slow,
    where those of a slow port, which share nothing with it, are done before.
    """
    span_ns = pl.col("last_byte_ns").max() - pl.col("start_ns").min()
    sent = aligned.filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("step").is_not_null(),
        pl.col("end_ns").is_not_null(),
        ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
    )
    # Each machine of a tree may send to several, or gets from several.
    one = (pl.col("peer_node").n_unique() == 1).over(*OPERATOR, "node")
    from_one = (pl.col("node").n_unique() == 1).over(*OPERATOR, "peer_node")
    rates = (
        sent.filter((one & from_one).all().over(OPERATOR))
        .group_by(*OPERATOR, "node", "nic")
        .agg(gbps=8 * pl.col("bytes").sum() / span_ns)
    )
    mine = (pl.col("node") == port.node) & (pl.col("nic") == port.nic)
    ceiling_gbps = port.evidence[0].value
    shares = (
        rates.group_by(OPERATOR)
        .agg(
            own=pl.col("gbps").filter(mine).first(),
            others=pl.col("gbps").filter(pl.col("nic") != port.nic).median(),
        )
        .filter(pl.col("own") <= AT_CEILING * ceiling_gbps)
        .select(ceiling_gbps / pl.col("others"))
        .to_series()
        .drop_nulls()
    )
    return len(shares) >= MIN_OPERATORS and float(shares.median()) >= ABOVE  # type: ignore[arg-type]


def beside(aligned: pl.DataFrame, port: Finding, machine: Finding) -> bool:
    """Whether a port sends for or to a machine."""
    to_it = (
        (pl.col("node") == port.node) & (pl.col("nic") == port.nic) & (pl.col("peer_node") == machine.node)
    )
    return port.node == machine.node or not aligned.filter(pl.col("direction") == "tx", to_it).is_empty()


def _pair(nodes: pl.DataFrame) -> list[str]:
    """The first of `nodes`, with the one before it or else after it that is as late, in the order of the ring."""
    first = nodes.row(0, named=True)
    alike = nodes.filter(pl.col("stays") >= ALIKE * first["stays"])
    before = alike.filter(pl.col("peer_node") == first["node"])["node"].to_list()
    behind = alike.filter(pl.col("node") == first["peer_node"])["node"].to_list()
    return [*before[:1], first["node"], *([] if before else behind)]


def _held(aligned: pl.DataFrame, nics: pl.DataFrame) -> pl.DataFrame:
    """Per slow operator and machine of a ring: `stays_ns`, by how much later what it sends moves (`ways`); `stays`, as
    a share of the operator; `first`, whether no other's is larger; nics, peer_node, start_ns and last_byte_ns."""
    long = pl.col("last_byte_ns") - pl.col("start_ns") >= MIN_BINS * pl.col("bin_ns")
    speeds = nics.select("node", "nic", "link_gbps").unique(["node", "nic"])
    rings = ways(aligned.filter(long)).join(speeds, on=["node", "nic"], how="left")
    span_ns = pl.col("last_byte_ns") - pl.col("start_ns")
    return (
        rings.with_columns(load=8 * pl.col("bytes") / span_ns / pl.col("link_gbps"))
        .group_by(*OPERATOR, "node")
        .agg(
            pl.col("peer_node").first(),
            pl.col("start_ns").min(),
            pl.col("last_byte_ns").max(),
            pl.col("stays_ns", "stays", "load").median(),
            peers=pl.col("peer_node").n_unique(),
            nics=pl.col("nic").unique(),
        )
        .filter((pl.col("peers") == 1).all().over(OPERATOR))
        .filter(pl.len().over(OPERATOR) >= MIN_NODES)
        .filter(pl.col("load").median().over(OPERATOR) <= BUSY)
        .with_columns(first=pl.col("stays") == pl.col("stays").max().over(OPERATOR))
    )


def ways(aligned: pl.DataFrame) -> pl.DataFrame:
    """Per operator, NIC (RING) and machine of a ring: `stays_ns`, by how much later what it sends moves on average,
    twice the mean of the ways before and behind being the reference; `stays`, as a share of the operator; and of what
    it sends bytes, nranks, peer_node, peer_nic, start_ns, last_byte_ns and bin_ns.

    Rings whose times at both ends of a way disagree are left out, and those where more stays than buffers can hold.
    """
    span_ns = pl.col("last_byte_ns") - pl.col("start_ns")
    moved = aligned.select(NEEDED).filter(
        pl.col("level") == "flow",
        pl.col("step").is_not_null(),
        pl.col("end_ns").is_not_null(),
        pl.col("byte_mean_ns").is_not_null(),
        ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
    )
    weighted = ((pl.col("byte_mean_ns") - pl.col("start_ns").min()) * pl.col("bytes")).sum()
    mean_ns = pl.col("start_ns").min() + weighted / pl.col("bytes").sum()
    sent = (
        moved.filter(pl.col("direction") == "tx")
        .group_by(*RING, "node")
        .agg(
            pl.col("peer_node", "peer_nic", "nranks").first(),
            pl.col("start_ns").min(),
            pl.col("last_byte_ns", "bin_ns").max(),
            pl.col("bytes").sum(),
            gbps=pl.col("max_gbps").sum(),
            peers=pl.col("peer_node").n_unique(),
            sent_ns=mean_ns,
        )
        .filter(pl.col("peers") == 1)
    )
    came = moved.filter(pl.col("direction") == "rx")
    came = came.group_by(*RING, pl.col("node").alias("peer_node")).agg(came_ns=mean_ns)
    before = sent.select(*RING, node="peer_node", before_ns="sent_ns")
    behind = sent.select(*RING, peer_node="node", behind_ns="sent_ns")
    agree_ns = pl.max_horizontal(AGREE_BINS * pl.col("bin_ns"), AGREE * span_ns)
    astray = (pl.col("came_ns") - pl.col("sent_ns")).abs() > agree_ns
    stays_ns = 2 * pl.col("sent_ns") - pl.col("before_ns") - pl.col("behind_ns")
    return (
        sent.join(came, on=[*RING, "peer_node"], how="left")
        .filter(~astray.fill_null(False).any().over(RING))
        .join(before, on=[*RING, "node"])
        .join(behind, on=[*RING, "peer_node"])
        .with_columns(stays_ns=stays_ns, stays=stays_ns / span_ns)
        .filter(pl.col("stays").abs().max().over(RING) <= MOST)
    )


def _lasts(starts_ns: pl.Series, among_ns: pl.Series, aligned: pl.DataFrame) -> bool:
    """Whether operators that began at `starts_ns`, `among_ns` those that tell, are spread over a good part of the time
    of all: few iterations have their operators in few parts of it, and in all of them then."""
    whole_ns = int(aligned["last_byte_ns"].max()) - int(aligned["start_ns"].min())  # type: ignore[arg-type]
    first_ns = int(starts_ns.min() or 0)  # type: ignore[arg-type]
    time_ns = int(starts_ns.max() or 0) - first_ns  # type: ignore[arg-type]
    parts, of = (
        ((times_ns - first_ns) * 10 // (time_ns + 1)).n_unique() for times_ns in (starts_ns, among_ns)
    )
    return time_ns >= MIN_TIME * whole_ns and (parts >= MIN_PARTS or parts == of >= FEW_PARTS)
