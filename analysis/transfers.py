"""What point-to-point calls say of a communicator: a pipeline and its order, a ring, an exchange of all with all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import polars as pl

TWO_SIDED = ("Group", "Send", "Recv")
# Columns of the operators that are looked at.
NEEDED = ("node", "pid", "comm_id", "rank", "peer_rank", "direction", "expected_bytes")
# A rank that sends to so many of those it can be seen to send to, in the median operator, sends to all.
ALL = 0.8
# In a pipeline so many transfers between two stages, at least, go one way only: it fills and drains.
ONE_WAY = 0.05
# Sizes of one operator in two iterations that differ by more are not the same.
SAME_SIZE = 0.01


@dataclass(frozen=True)
class Pattern:
    """`kind` as groups has it; `links`: pairs of ranks (first, then) with the share of iterations that say so.

    `first`: ranks that begin each iteration by sending, without having received.
    """

    kind: str
    confidence: float
    reason: str
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    first: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Seen:
    """Of one communicator: per (rank, peer) whether it sends and receives, and the share of transfers one way."""

    edges: dict[tuple[int, int], tuple[bool, bool, float]]
    fan: dict[int, float]  # peers that the median operator of a rank sends to
    leads: dict[
        tuple[int, int], float
    ]  # per (rank, peer): +1 it sends first in each iteration, -1 it receives
    opens: dict[int, float]  # per rank: +1 its first call of each iteration only sends, -1 only receives
    changing: float  # share of operators whose size is another in each iteration


def patterns(
    rows: pl.DataFrame,
    calls: pl.DataFrame,
    nodes: Mapping[str, Mapping[int, str]],
    nranks: Mapping[str, int],
) -> dict[str, Pattern]:
    """The pattern of each communicator that made point-to-point calls.

    `calls` are these calls, and `rows` the rows of the operators that show their traffic, one per peer and direction,
    both with `iteration` and the `offset` in it, null when there is none. `nodes` has the node of each recorded rank of
    each communicator: between ranks of one node no traffic is seen.
    """
    seen = _seen(rows, calls)
    return {
        comm: _pattern(seen[comm], nodes[comm], nranks[comm])
        for comm in calls["comm_id"].unique().sort().to_list()
        if comm in nodes
    }


def _pattern(seen: _Seen, nodes: Mapping[int, str], ranks: int) -> Pattern:
    first = frozenset(rank for rank, sends in seen.opens.items() if sends > 0.5)
    if not seen.edges:
        return _unseen(seen, nodes, first)
    sends = {(rank, peer) for (rank, peer), (tx, _, _) in seen.edges.items() if tx}
    sends |= {(peer, rank) for (rank, peer), (_, rx, _) in seen.edges.items() if rx}
    both_ways = {(a, b) for a, b in sends if (b, a) in sends}
    if ranks > 2 and not both_ways:
        steps = {(b - a) % ranks for a, b in sends}
        closed = sends & {(ranks - 1, 0), (0, ranks - 1)}
        if closed and len(steps) == 1 and steps <= {1, ranks - 1}:
            return Pattern("context", 0.8, "each rank sends to the next and never back: a ring")
        return Pattern("unknown", 0.2, "each pair of ranks sends one way only")
    one_way = [share for (a, b), (_, _, share) in seen.edges.items() if (a, b) in both_ways]
    degree: dict[int, int] = defaultdict(int)
    for rank, _ in sends:
        degree[rank] += 1
    fills = bool(one_way) and min(one_way) >= ONE_WAY
    if fills and sends == both_ways and max(degree.values()) <= 2:
        return Pattern(
            "pipeline", 0.9, "neighbours send both ways, one way when it fills or drains", _links(seen), first
        )
    remote = {
        rank: ranks - sum(node == nodes[rank] for node in nodes.values())
        for rank in seen.fan
        if rank in nodes
    }
    shares = sorted(seen.fan[rank] / count for rank, count in remote.items() if count)
    if ranks > 2 and shares and shares[len(shares) // 2] >= ALL and max(remote.values()) > 1:
        return Pattern("expert", 0.8, "each rank sends to all others at once")
    if ranks == 2 and not any(one_way) and seen.changing > 0.5:
        return Pattern("expert", 0.6, "two ranks exchange loads that change from iteration to iteration")
    return Pattern("unknown", 0.2, "point-to-point calls in no known pattern")


def _unseen(seen: _Seen, nodes: Mapping[int, str], first: frozenset[int]) -> Pattern:
    """All transfers stay inside nodes: only which call is which is known."""
    last = [rank for rank, sends in seen.opens.items() if sends < -0.5]
    if not first or len(first) + len(last) < len(nodes):
        return Pattern("unknown", 0.2, "its transfers stay inside a node and do not tell their peers")
    order = [*sorted(first), *sorted(last)]
    links = dict.fromkeys(pairwise(order), 0.5)
    reason = "inside a node: some begin by sending, the others by receiving"
    return Pattern("pipeline", 0.6 if len(nodes) == 2 else 0.4, reason, links, first)


def _links(seen: _Seen) -> dict[tuple[int, int], float]:
    """Who hands on to whom: the first transfer of an iteration is an activation. Both ends have a say."""
    votes: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (rank, peer), leads in seen.leads.items():
        low, high = sorted((rank, peer))
        votes[low, high].append(leads if rank == low else -leads)
    links = {}
    for (low, high), said in votes.items():
        mean = sum(said) / len(said)
        if mean:
            links[(low, high) if mean > 0 else (high, low)] = abs(mean)
    return links


def _seen(rows: pl.DataFrame, calls: pl.DataFrame) -> dict[str, _Seen]:
    key = ["comm_id", "rank", "peer_rank"]
    place = ["iteration", "offset"]
    sends = pl.col("direction") == "tx"
    transfers = (
        rows.group_by(*key, "node", "pid", "program_pos")
        .agg(
            pl.col(place).first(),
            tx=sends.any(),
            rx=(~sends).any(),
            sent=pl.col("expected_bytes").filter(sends).sum(),
        )
        .with_columns(
            leads=pl.when(pl.col("tx") == pl.col("rx")).then(0.0).when(pl.col("tx")).then(1.0).otherwise(-1.0)
        )
    )
    edges = transfers.group_by(key).agg(pl.col("tx", "rx").any(), one_way=pl.col("leads").abs().mean())
    first = pl.col("offset").arg_min()
    leads = (
        transfers.drop_nulls("offset")
        .group_by(*key, "iteration")
        .agg(pl.col("leads").get(first))
        .group_by(key)
        .agg(pl.col("leads").mean())
    )
    fan = (
        transfers.filter("tx")
        .group_by("comm_id", "rank", "program_pos")
        .len()
        .group_by("comm_id", "rank")
        .agg(pl.col("len").median())
    )
    changing = (
        transfers.drop_nulls("offset")
        .filter("tx")
        .group_by(*key, "offset")
        .agg(pl.len(), (pl.col("sent").max() > (1 + SAME_SIZE) * pl.col("sent").min()).alias("changing"))
        .filter(pl.col("len") > 1)
        .group_by("comm_id")
        .agg(pl.col("changing").mean())
    )
    # Of a call whose transfers are not seen its kind tells the direction, of a Group nothing does.
    seen = transfers.group_by("comm_id", "rank", "program_pos").agg(
        only=pl.when(~pl.col("rx").any()).then(1.0).when(~pl.col("tx").any()).then(-1.0).otherwise(0.0)
    )
    named = pl.col("kind").replace_strict({"Send": 1.0, "Recv": -1.0}, default=None, return_dtype=pl.Float64)
    opens = (
        calls.drop_nulls("offset")
        .join(seen, on=["comm_id", "rank", "program_pos"], how="left")
        .with_columns(only=pl.coalesce(named, pl.col("only")).fill_null(0.0))
        .group_by("comm_id", "rank", "iteration")
        .agg(pl.col("only").get(first))
        .group_by("comm_id", "rank")
        .agg(pl.col("only").mean())
    )
    found = {comm: _Seen({}, {}, {}, {}, 0.0) for comm in calls["comm_id"].unique().to_list()}
    for comm, rank, peer, tx, rx, one_way in edges.iter_rows():
        found[comm].edges[rank, peer] = (tx, rx, one_way)
    for comm, rank, peer, value in leads.iter_rows():
        found[comm].leads[rank, peer] = value
    for comm, rank, value in fan.iter_rows():
        found[comm].fan[rank] = value
    for comm, rank, value in opens.iter_rows():
        found[comm].opens[rank] = value
    shares = dict(changing.iter_rows())
    return {comm: _Seen(s.edges, s.fan, s.leads, s.opens, shares.get(comm, 0.0)) for comm, s in found.items()}
