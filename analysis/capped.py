"""Ports that send at a ceiling: never faster, and as fast as it for most of the time, whatever they send to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.in_order import in_order
from pulse_bpf.analysis.lags import IN_PAIRS
from pulse_bpf.analysis.rates import LEAST_PART, OPERATOR
from pulse_bpf.analysis.shared import OVER, PORT, not_held_up, not_shared
from pulse_bpf.analysis.slow import hot, speed
from pulse_bpf.analysis.twins import TWO_SIDED

# Bins that a flow must be busy for in an operator before its rate is judged, and how near its byte-weighted median
# bin is to its fastest one where a rate is constant.
MIN_BINS, FLAT = 4, 0.985
# Of the time that a flow is busy, the short silences between: what comes slice by slice from a slow GPU has them.
MAX_SILENT = 0.2
# Below this share of what ports usually reach in operators of the same kind and size, a constant rate is low.
LOW = 0.85
# So many ports make a usual rate, so many operators a ceiling.
MIN_PORTS, MIN_OPERATORS = 4, 5
# What shares a receiver's port with one or two others gets just a half or a third of it, now and then: so near to that,
# a ceiling takes so many operators.
SHARERS, PART, OFTEN = (2, 3), 0.005, 20
# Of a recording, for how long a port must send at its ceiling.
MIN_TIME = 0.01
# How far values may be apart that are the same.
SAME = 0.02
# Of the time that a port is busy meanwhile: at least this share at the ceiling, at most this above it.
MIN_SHARE, MAX_OVER = 0.6, 0.3
# Of a recording, how near to an operator at the ceiling others tell of the same time; so do those between two.
NEAR = 0.03
# Of the share of a port at its ceiling, that from which another has the same ceiling.
AS_MUCH = 0.5
# Of what a port sends, what goes to another that may be why it is slow.
MOSTLY = 0.6
# A port of whose bytes more than this belong to no operator, or an operator that misses more, is not judged.
MAX_UNKNOWN = 0.15
# Of a port's operators at the ceiling, those that a slower port holds up, from which it is the other's victim.
HELD_UP = 0.7
# Of what a port exchanges, the share of machines of which nothing was seen that leaves none to compare, and that from
# which they may be what is slow.
MOSTLY_UNSEEN, LITTLE_UNSEEN = 0.7, 0.3

# What is measured of a port with a ceiling.
CEILING = "ceiling_gbps"
# Columns of the operators that are looked at.
NEEDED = (
    *(
        *PORT,
        "pid",
        "level",
        "direction",
        "comm_id",
        "nranks",
        "kind",
        "op_bytes",
        "op_seq",
        "step",
        "completion",
    ),
    *(
        "peer_node",
        "peer_nic",
        "start_ns",
        "last_byte_ns",
        "active_ns",
        "gap_unknown_ns",
        "stall_ns",
        "bytes",
    ),
    *("bin_ns", "wmed_gbps", "max_gbps"),
)

Port = dict[str, Any]  # node, nic, and what `_ceilings` tells of it


def find_capped(aligned: pl.DataFrame, marks: pl.DataFrame | None) -> list[Finding]:
    """Ports, at most two, whose sending is limited by themselves to one rate, below what the others reach.

    Who waits for a slow port sends at the same average, but in bursts; a port that is slow by itself is flat, over all
    its communicators and peers, and its rate is the same each time. A rate that several ports of a ring or of
    a machine have in common is a limit elsewhere: of a GPU that handles it all, or, in wide bins, of one of them;
    that of the only two that exchange with a third may be the third's.
    Assumes that the limit is constant while it lasts. `marks` has how often each node and nic was asked to slow
    down (signals.marks): those were slowed by the network.
    """
    rows = not_held_up(aligned, not_shared(aligned, _rows(aligned)))
    low = rows.filter("low")
    if low.is_empty():
        return []
    ports = _ceilings(rows, low)
    ceilings = ports.filter(
        pl.col("operators") >= MIN_OPERATORS, pl.col("time") >= MIN_TIME, pl.col("tight") >= MIN_SHARE
    )
    parts = (pl.col("usual_gbps") / pl.col("gbps") / number - 1 for number in SHARERS)
    shared = pl.any_horizontal(part.abs() <= PART for part in parts) & (pl.col("operators") < OFTEN)
    chosen = ceilings.filter(~shared, pl.col("share") >= MIN_SHARE, pl.col("over") <= MAX_OVER).sort(
        "gbps", *PORT
    )
    if marks is not None:
        # Who is not asked again to slow down soon sends faster again: the network asks once per operator at least.
        asked = hot(marks).select(*PORT, "marks")
        chosen = chosen.join(asked, on=PORT, how="left", maintain_order="left").filter(
            (pl.col("marks") < pl.col("operators")).fill_null(True)
        )
    found: list[Port] = []
    partners: dict[tuple[str, ...], pl.DataFrame] = {}
    for port in chosen.iter_rows(named=True):
        alike = ceilings.filter(
            (pl.col("gbps") / port["gbps"] - 1).abs() <= SAME, pl.col("share") >= AS_MUCH * port["share"]
        )
        if alike.height > 2 or (alike.height == 2 and alike["node"].n_unique() == 1):
            continue
        if alike.height == 2 and (common := _only_served_by(aligned, alike)):
            partners[common] = alike
        elif not any(_held_up(low, port, other) for other in found):
            found.append(port)
    if len(found) > 2:
        return []
    if partners:
        shown = _partner(aligned, rows, low, partners)
        # With a third port at a ceiling of its own, who holds up whom is not known.
        return [replace(item, confidence=0.4) for item in shown] if found else shown
    if len(found) == 2 and _one_after_the_other(aligned, *found):
        return [_between(_finding(rows, low, port, True, False) for port in found)]
    return [
        replace(item, confidence=0.4) if _may_pass_on(aligned, low, port) else item
        for port in found
        for item in [_finding(rows, low, port, marks is not None, _takes_slowly(aligned, low, port))]
    ]


def _rows(aligned: pl.DataFrame) -> pl.DataFrame:
    """What each port sends in each operator, with the rate usual there and whether it is constant and low.

    Where several flows of a port belong to one operator, they count together. Ports much of whose traffic is of
    no known operator are left out. Where a port's own bins are all that is narrow, what it sent in one go stands for an
    operator.
    """
    sent = aligned.select(NEEDED).filter(pl.col("direction") == "tx", pl.col("bytes") > 0)
    pieces = sent.filter(pl.col("level") == "port")
    sent = sent.filter(pl.col("level") != "port").join(pieces, on=PORT, how="anti")
    unknown = pl.col("bytes").filter(pl.col("level") == "unattributed").sum()
    every = pl.col("bytes").filter(pl.col("level") != "nic").sum()
    known = sent.group_by(PORT).agg(unknown=unknown / every).filter(pl.col("unknown") <= MAX_UNKNOWN)
    rows = sent.join(known, on=PORT, how="semi").filter(pl.col("level").is_in(["flow", "nic"]))
    # Of several flows of one operator each has only a part of the port's rate, which is in their sum's row.
    summed = pl.col("level") == "nic"
    rows = in_order(rows, [*PORT, "pid", "comm_id", "op_seq"])
    rows = rows.with_columns(data=pl.col("bytes") >= LEAST_PART * pl.col("bytes").max().over("same"))
    alone = (pl.col("data") & ~summed).sum().over("same") == 1
    rows = rows.filter(summed | (pl.col("data") & alone & ~summed.any().over("same"))).drop("same", "data")
    rows = pl.concat([rows, pieces]).filter(
        pl.col("max_gbps") > 0,
        pl.col("active_ns") > 0,
        pl.col("start_ns").is_not_null(),
        pl.col("completion").fill_null(1.0) >= 1 - MAX_UNKNOWN,
    )
    size = pl.coalesce("op_bytes", pl.col("bytes").cast(pl.UInt64))
    rows = rows.with_columns(
        bins=pl.col("active_ns") / pl.col("bin_ns"),
        # Not for how long bytes were seen: a trickle of credits may go on long after an operator's data.
        busy_ns=pl.min_horizontal("active_ns", pl.col("bytes") * 8 / pl.col("wmed_gbps")),
        # Sizes a factor of 1.4 apart are alike: the parts of an operator depend on the rank.
        size=pl.when(pl.col("level") != "port").then((size.log(2) * 2).round()),
    )
    alike = ["kind", "nranks", "size"]
    tops = rows.filter(pl.col("bins") >= 2).group_by(*alike, *PORT).agg(pl.col("max_gbps").quantile(0.9))
    usual = tops.group_by(alike).agg(usual_gbps=pl.col("max_gbps").quantile(0.75), ports=pl.len())
    rows = rows.join(
        usual.filter(pl.col("ports") >= MIN_PORTS).drop("ports"), on=alike, how="left", nulls_equal=True
    )
    silent_ns = (pl.col("gap_unknown_ns") - pl.col("stall_ns")).fill_null(0)
    flat = (
        (pl.col("bins") >= MIN_BINS)
        & (pl.col("wmed_gbps") >= FLAT * pl.col("max_gbps"))
        & (silent_ns <= MAX_SILENT * pl.col("active_ns"))
    )
    low = pl.col("max_gbps") < LOW * pl.col("usual_gbps")
    return rows.with_columns(low=(flat & low).fill_null(False)).sort("start_ns")


def _ceilings(rows: pl.DataFrame, low: pl.DataFrame) -> pl.DataFrame:
    """Per port its ceiling (gbps) and what is usual (usual_gbps), over `operators` and `time`, how many are `tight` at
    it, and what it did meanwhile.

    `share` and `over`: of the time in which it was busy near those operators, that at the ceiling and above it.
    """
    first, last = rows.select(pl.col("start_ns").min(), pl.col("last_byte_ns").max()).row(0)
    ceilings = low.group_by(PORT).agg(
        pl.col("max_gbps").median().alias("gbps"),
        pl.col("usual_gbps").median(),
        pl.len().alias("operators"),
        time=pl.col("active_ns").sum() / (last - first),
        tight=((pl.col("max_gbps") / pl.col("max_gbps").median() - 1).abs() <= SAME).mean(),
    )
    times = low.select(*PORT, "start_ns", low_ns="start_ns")
    near = rows.join_asof(
        times,
        on="start_ns",
        by=PORT,
        strategy="nearest",
        tolerance=int(NEAR * (last - first)) + 1,
        check_sortedness=False,
    )
    between = pl.col("low").shift(1).over(PORT) & pl.col("low").shift(-1).over(PORT)
    near = near.filter(pl.col("low_ns").is_not_null() | between.fill_null(False))
    busy = near.join(ceilings.select(*PORT, "gbps"), on=PORT).group_by(PORT)
    at, above = pl.col("low"), pl.col("max_gbps") > OVER * pl.col("gbps")
    shares = busy.agg(
        share=pl.col("busy_ns").filter(at).sum() / pl.col("busy_ns").sum(),
        over=pl.col("busy_ns").filter(above).sum() / pl.col("busy_ns").sum(),
    )
    return ceilings.join(shares, on=PORT)


def _of(port: Port) -> pl.Expr:
    return pl.col("node").eq(port["node"]) & pl.col("nic").eq(port["nic"])


def _held_up(low: pl.DataFrame, port: Port, slower: Port) -> bool:
    """Whether `port` is low where a port with a lower ceiling takes part as well."""
    if port["gbps"] <= (1 + SAME) * slower["gbps"]:
        return False
    own = low.filter(_of(port))
    together = own.join(low.filter(_of(slower)), on=OPERATOR, how="semi")
    return together.height >= HELD_UP * own.height


def _one_after_the_other(aligned: pl.DataFrame, one: Port, other: Port) -> bool:
    """Whether one of two ports with the same ceiling sends mostly to the other, or to whom it sends is not known.

    What is between them may slow down both, and in wide bins one looks like the other that waits for it.
    """
    if abs(one["gbps"] / other["gbps"] - 1) > SAME:
        return False
    sent = aligned.filter(pl.col("level").is_in(["flow", "traffic"]), pl.col("direction") == "tx")
    sent = sent.drop_nulls(["peer_node", "peer_nic"])
    for sender, receiver in ((one, other), (other, one)):
        own = sent.filter(_of(sender))
        there = (pl.col("peer_node") == receiver["node"]) & (pl.col("peer_nic") == receiver["nic"])
        if int(own.filter(there)["bytes"].sum()) >= MOSTLY * int(own["bytes"].sum()):
            return True
    return False


def _only_served_by(aligned: pl.DataFrame, ports: pl.DataFrame) -> tuple[str, ...]:
    """The nodes to a port of which both of two `ports` with the same ceiling send, and hardly anybody else does.

    A machine that takes slowly gives each of those that send to it an equal part of what it takes.
    """
    sent = aligned.filter(
        pl.col("level").is_in(["flow", "traffic"]), pl.col("direction") == "tx", pl.col("bytes") > 0
    )
    to = ["peer_node", "peer_nic"]
    ways = sent.drop_nulls(to).group_by(*PORT, *to).agg(pl.col("bytes").sum())
    ways = ways.filter(pl.col("bytes") >= LEAST_PART * pl.col("bytes").max().over(to))
    ways = ways.filter(pl.len().over(to) == ports.height).join(ports.select(PORT), on=PORT, how="semi")
    served = ways.group_by(to).agg(pl.len()).filter(pl.col("len") == ports.height)
    return tuple(served["peer_node"].unique().sort())


def _partner(
    aligned: pl.DataFrame,
    rows: pl.DataFrame,
    low: pl.DataFrame,
    partners: dict[tuple[str, ...], pl.DataFrame],
) -> list[Finding]:
    """The machine that takes from two ports, and sends to them, at their ceiling; nobody for sure where it does not.

    That two machines are slow inside at just one rate, and nobody else with whom they exchange is held up by them, is
    not to be expected; that the one between them is, holds up both of them alike.
    """
    if len(partners) > 1:
        return []
    ((nodes, ports),) = partners.items()
    both = all(_takes_slowly(aligned, low, port) for port in ports.iter_rows(named=True))
    shown = [_finding(rows, low, port, True, both) for port in ports.sort(PORT).iter_rows(named=True)]
    if len(nodes) > 1 or not both:
        return [replace(item, confidence=0.4) for item in shown]
    node, (one, other) = nodes[0], shown
    return [
        replace(
            one,
            evidence=[item.evidence[0] for item in shown],
            node=node,
            lost_ns=max(one.lost_ns or 0, other.lost_ns or 0),
            victims=sorted({*(one.victims or ()), *(other.victims or ()), str(one.node)} - {node}),
            next_check=(one.next_check or "").replace(f"on {one.node}:", f"on {node}:"),
        )
    ]


def _takes_slowly(aligned: pl.DataFrame, low: pl.DataFrame, port: Port) -> bool:
    """Whether what the port receives in the same operators is as slow: a slow GPU sends and takes at one rate.

    In a ring those before a slow port send on in bursts, so the fastest bin counts; where ranks exchange in pairs
    nobody waits for what comes in, and all that comes in at once counts together. What takes few bins is no slower.
    """
    own = low.filter(_of(port))
    pieces = aligned.filter(_of(port), pl.col("level") == "port", pl.col("direction") == "rx")
    if pieces.is_empty():
        into = aligned.filter(
            pl.col("level") == "flow",
            pl.col("direction") == "tx",
            pl.col("peer_node") == port["node"],
            pl.col("peer_nic") == port["nic"],
            pl.col("active_ns") > 0,
        ).join(own, on=OPERATOR, how="semi")
        key = OPERATOR
    else:
        # What came in when each piece went out.
        tolerance_ns = int(own["active_ns"].max() or 0)  # type: ignore[arg-type]
        times = own.select("start_ns").sort("start_ns").with_row_index("row")
        into = times.join_asof(
            pieces.sort("start_ns"), on="start_ns", strategy="nearest", tolerance=tolerance_ns
        ).drop_nulls("bytes")
        key = ["row"]
    data = into.filter(pl.col("bytes") >= LEAST_PART * pl.col("bytes").max().over(key))
    operators = data.group_by(key).agg(
        gbps=pl.when(pl.col("kind").first().is_in([*IN_PAIRS, *TWO_SIDED]))
        .then(pl.col("wmed_gbps").sum())
        .otherwise(pl.col("max_gbps").sum()),
        judged=(pl.col("active_ns") >= MIN_BINS * pl.col("bin_ns")).all(),
    )
    slow = operators.select(((pl.col("gbps") <= OVER * port["gbps"]) & pl.col("judged")).mean()).item()
    return slow is not None and slow >= MIN_SHARE


def _may_pass_on(aligned: pl.DataFrame, low: pl.DataFrame, port: Port) -> bool:
    """Whether a machine of which nothing was seen may be what makes the port slow: what it sends on, or to whom.

    Not where as much goes to others, nor where what comes in meanwhile is faster.
    """
    moved = aligned.filter(_of(port), pl.col("level").is_in(["flow", "traffic"]), pl.col("bytes") > 0)
    unseen = ~pl.col("peer_node").is_in(aligned["node"].unique().implode())
    by = moved.group_by("direction").agg(share=pl.col("bytes").filter(unseen).sum() / pl.col("bytes").sum())
    shares = dict(by.iter_rows())
    if shares.get("tx", 0.0) > MOSTLY_UNSEEN:
        return True
    if shares.get("rx", 0.0) <= LITTLE_UNSEEN:
        return False
    into = aligned.filter(
        _of(port), pl.col("direction") == "rx", pl.col("level").is_in(["flow", "nic", "port"])
    )
    into = into.filter(pl.col("start_ns").is_between(low["start_ns"].min(), low["last_byte_ns"].max()))
    faster = pl.col("max_gbps") > OVER * port["gbps"]
    return (
        into.select(pl.col("bytes").filter(faster).sum() / pl.col("bytes").sum()).item() or 0.0
    ) < MIN_SHARE


def _finding(rows: pl.DataFrame, low: pl.DataFrame, port: Port, counted: bool, both: bool) -> Finding:
    own = low.filter(_of(port))
    node, nic, gbps, share = port["node"], port["nic"], port["gbps"], port["share"]
    usual = float(own.select(pl.col("usual_gbps").median()).item())
    first, last = int(own["start_ns"].min()), int(own["last_byte_ns"].max())  # type: ignore[arg-type]
    meanwhile = rows.filter(pl.col("start_ns").is_between(first, last))
    peers = own.select("peer_node", "peer_nic").unique().drop_nulls().sort("peer_node", "peer_nic")
    link = not counted and not both and peers.height == 1
    operators, comms = own.height, own["comm_id"].drop_nulls().n_unique()
    what = "pieces" if comms == 0 else f"operators of {comms} communicator{'s' if comms > 1 else ''}"
    span = (own["last_byte_ns"] - own["start_ns"]).sum()
    text = (
        f"{nic} of {node} sends at {speed(gbps)} and never faster, for {share:.0%} of the time that it sends "
        f"({operators} {what}); ports reach {speed(usual)} in others alike."
    )
    others = sorted(set(meanwhile["node"]) - {node, *(peers["peer_node"] if link else [])})
    return Finding(
        kind="intra-node-slow" if both else "unknown" if link else "nic-slow",
        cause="intra-node" if both else "network" if link else "nic",
        scope="node" if both else "link" if link else "nic",
        confidence=round(min(0.98, 0.75 + 0.15 * share + 0.1 * min(1.0, operators / 20)), 3),
        slowdown=round(usual / gbps, 3),
        first_ns=first,
        last_ns=last,
        lost_ns=int(span * max(0.0, 1 - gbps / usual)),
        evidence=[Evidence(CEILING, gbps, usual, operators, text)],
        node=node,
        nic=None if both else nic,
        peer_node=peers["peer_node"][0] if link else None,
        peer_nic=peers["peer_nic"][0] if link else None,
        nodes=[node, peers["peer_node"][0]] if link else None,
        victims=others,
        next_check=(
            f"on {node}: nvidia-smi -q -d PERFORMANCE,CLOCK; nvidia-smi nvlink -s; nvidia-smi topo -m"
            if both
            else f"on {node}: tc -s qdisc show dev NETDEV; ethtool NETDEV; ethtool -S NETDEV"
        ),
    )


def _between(findings: Iterable[Finding]) -> Finding:
    """The two neighbours at one of which, or at both, the ceiling is."""
    one, other = findings
    nodes = sorted([str(one.node), str(other.node)])
    return replace(
        one,
        kind="unknown",
        scope="group",
        cause="nic",
        evidence=[*one.evidence, *other.evidence],
        node=None,
        nic=None,
        nodes=nodes,
        victims=[victim for victim in one.victims or [] if victim not in nodes],
    )
