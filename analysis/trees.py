"""A tree that stands still: the node that holds back what it got, where nothing further on holds up what it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

# What one step of a buffer holds, and the whole of it (NCCL_BUFFSIZE, of NCCL_STEPS steps) but for headers and cuts.
STEP_BYTES, FULL_BYTES = 512 * 2**10, 0.95 * 4 * 2**20
# Smaller differences are none: cuts and headers.
SLACK_BYTES = STEP_BYTES / 2

Edge = tuple[str, str]


def holding_back(members: pl.DataFrame, step: int, nics: Sequence[str]) -> list[str]:
    """The nodes that stopped the tree operator number `step` of a communicator on `nics`; empty where it is not clear.

    `members` are rows of one communicator. In a tree what a node sends up is at most the least it got from below, and
    what it sends down at most what it got from above. Who sends less than that waits for its receiver, whose buffer is
    then full, or has stopped: then its receiver has passed on all it got. Each NIC must be a tree of its own in which
    every node either passes on all it gets, or fills the next one's buffer, but for one.
    """
    sent = members.filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("peer_node").is_not_null(),
        pl.col("step").is_not_null(),
        pl.col("nic").is_in(list(nics)),
    ).with_columns(pl.col("node", "peer_node", "nic").cast(pl.String))
    found: set[str] = set()
    for nic in sorted(set(sent["nic"])):
        lane = sent.filter(pl.col("nic") == nic)
        here = lane.filter(pl.col("step") == step)
        amounts = dict.fromkeys(lane.select("node", "peer_node").unique().iter_rows(), 0.0)
        rows = here.group_by("node", "peer_node").agg(pl.col("bytes").sum())
        amounts |= {(str(node), str(peer)): float(amount) for node, peer, amount in rows.iter_rows()}
        volume = float(here["expected_bytes"].median() or 0.0)  # type: ignore[arg-type]
        if all(amount >= volume - SLACK_BYTES for amount in amounts.values()):
            continue
        above = _parents(lane, amounts)
        stopped = None if above is None else _stopped(amounts, above, volume)
        if stopped is None:
            return []
        found |= stopped
    return sorted(found)


def _parents(lane: pl.DataFrame, amounts: Mapping[Edge, float]) -> dict[str, str] | None:
    """The parent of each node but the root; None where these are no tree.

    Of a pair more goes up than down, and it goes up first: what comes down has been up.
    """
    begins = pl.col("start_ns").min().alias("start_ns")
    starts = lane.drop_nulls("start_ns").group_by("step", "node", "peer_node").agg(begins)
    back = starts.select("step", node="peer_node", peer_node="node", back_ns="start_ns")
    earlier = {
        (str(node), str(peer)): float(ns)
        for node, peer, ns in starts.join(back, on=["step", "node", "peer_node"])
        .group_by("node", "peer_node")
        .agg((pl.col("back_ns") - pl.col("start_ns")).mean())
        .iter_rows()
    }
    above: dict[str, str] = {}
    for node, peer in amounts:
        if (peer, node) not in amounts:
            return None
        more = amounts[node, peer] - amounts[peer, node]
        if abs(more) < SLACK_BYTES:
            more = earlier.get((node, peer), 0.0)
            if more == 0.0:
                return None
        if more > 0:
            if node in above:
                return None
            above[node] = peer
    nodes = {node for node, _ in amounts}
    return above if len(nodes) >= 3 and len(nodes) == len(above) + 1 == len(amounts) // 2 + 1 else None


def _stopped(amounts: Mapping[Edge, float], above: Mapping[str, str], volume: float) -> set[str] | None:
    """The one node that got more than it sent on and sends to one that has passed on all; None where it is not one.

    None also where a node passed on more than it got, or neither less nor a full buffer less: cuts are wrong then.
    """
    below: dict[str, list[str]] = {}
    for node, parent in above.items():
        below.setdefault(parent, []).append(node)
    # By halves of a node's kernel: what it may send, to whom, and how much it sends.
    rooted = [node for node in below if node not in above]
    can = {
        (node, True): min([amounts[child, node] for child in below.get(node, [])] + [volume])
        for node in above
    }
    can |= {(node, False): amounts[parent, node] for node, parent in above.items() if node in below}
    can |= {(node, False): min(amounts[child, node] for child in below[node]) for node in rooted}
    goes = {
        (node, up): [(node, above[node])] if up else [(node, child) for child in below[node]]
        for node, up in can
    }
    found = set()
    for (node, up), most in can.items():
        for edge in goes[node, up]:
            if amounts[edge] > most + SLACK_BYTES:
                return None
            if amounts[edge] > most - SLACK_BYTES:
                continue
            peer = edge[1]
            onward = goes.get((peer, up and peer in above), [])
            passed = min((amounts[other] for other in onward), default=None)
            # Who is last passes nothing on: of it nothing tells whether its buffer is full.
            left = FULL_BYTES if passed is None else amounts[edge] - passed
            if left < SLACK_BYTES:
                found.add(node)
            elif left < FULL_BYTES:
                return None
    return found if len(found) == 1 else None
