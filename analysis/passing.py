"""Which port passes on what another one sends: the ways of rings through machines."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.capped import CEILING
from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.lags import IN_PAIRS
from pulse_bpf.analysis.twins import TWO_SIDED

# Two ports whose speeds differ by no more are as slow as each other.
ALIKE = 1.02
# Columns of the operators that are looked at.
NEEDED = ("level", "direction", "comm_id", "kind", "rank", "peer_rank", "node", "nic", "peer_node")

Port = tuple[str, str | None]


def not_passed_on(
    aligned: pl.DataFrame, channels: pl.DataFrame | None, found: list[Finding], signals: list[Finding]
) -> list[Finding]:
    """`found` without ports as slow as another one whose bytes they pass on, or that passes on theirs, and that lost
    more; and without ports at a ceiling that do so for one that says of itself what is wrong (`signals`).

    A ring passes on what it gets at the speed at which it comes, and takes it no faster than it can pass it on: in
    wide bins that looks like two slow ports. Two that are really as slow as each other and follow each other in a ring
    count as one.
    """
    speed_of = {id(item): item.evidence[0].value for item in found if item.scope == "nic" and item.evidence}
    faulty = [(str(item.node), item.nic) for item in signals if item.scope == "nic"]
    if len(speed_of) + len(faulty) < 2 or not speed_of:
        return found
    passed = _passed(aligned, channels)

    def one(item: Finding, other: Finding) -> bool:
        if item is other or not {id(item), id(other)} <= speed_of.keys():
            return False
        ports = (str(item.node), item.nic), (str(other.node), other.nic)
        speeds = sorted((speed_of[id(item)], speed_of[id(other)]))
        alike = item.evidence[0].metric == other.evidence[0].metric and speeds[1] <= ALIKE * speeds[0]
        return alike and bool({ports, ports[::-1]} & passed)

    def of_faulty(item: Finding) -> bool:
        port = (str(item.node), item.nic)
        capped = id(item) in speed_of and item.evidence[0].metric == CEILING
        return capped and any({(port, other), (other, port)} & passed for other in faulty)

    return [
        item
        for item in found
        if not of_faulty(item)
        and not any(one(item, other) and (item.lost_ns or 0) < (other.lost_ns or 0) for other in found)
    ]


def _passed(aligned: pl.DataFrame, channels: pl.DataFrame | None) -> set[tuple[Port, Port]]:
    """Each port with those of the next machine that pass on what it sends.

    In a ring that is what leaves the machine by the rank at its end; in exchanges in pairs, what the same rank sends.
    Where the rings of a communicator are not known, it may be any port of the next machine.
    """
    sends = aligned.select(NEEDED).filter(
        pl.col("level") == "flow", pl.col("direction") == "tx", pl.col("rank").is_not_null()
    )
    pairs = pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS])
    ways = sends.select("comm_id", "rank", "peer_rank", "node", "nic", "peer_node", pairs=pairs).unique()
    into = ways.select("comm_id", "pairs", "peer_node", "peer_rank", "node", "nic", "rank")
    rings = _ends(channels, ways.filter(~pl.col("pairs"))) if channels is not None else _NO_ENDS
    rings = rings.cast({"comm_id": aligned.schema["comm_id"]})
    known = pl.col("comm_id").is_in(rings["comm_id"].implode())
    out = ways.select("comm_id", "pairs", "node", "rank", "peer_rank", by="nic")
    next_ring = (
        into.filter(~pl.col("pairs"), known)
        .join(rings, on=["comm_id", "rank", "peer_rank"])
        .join(out, left_on=["comm_id", "last", "after"], right_on=["comm_id", "rank", "peer_rank"])
    )
    next_any = into.filter(~pl.col("pairs"), ~known).join(
        out.rename({"node": "peer_node"}), on=["comm_id", "pairs", "peer_node"]
    )
    next_pair = into.filter("pairs").join(
        out.rename({"rank": "same"}),
        left_on=["comm_id", "pairs", "peer_rank"],
        right_on=["comm_id", "pairs", "same"],
    )
    found = pl.concat(
        [frame.select("node", "nic", "peer_node", "by") for frame in (next_ring, next_any, next_pair)]
    ).unique()
    return {((node, nic), (peer, by)) for node, nic, peer, by in found.iter_rows()}


_NO_ENDS = pl.DataFrame(
    schema={
        "comm_id": pl.String,
        "rank": pl.Int32,
        "peer_rank": pl.Int32,
        "last": pl.Int32,
        "after": pl.Int32,
    }
)


def _ends(channels: pl.DataFrame, ways: pl.DataFrame) -> pl.DataFrame:
    """Of each way between machines in a ring (rank to peer_rank): the rank by which it leaves the next machine again
    (last), and to whom (after)."""
    rings = channels.filter(pl.col("ring_next").is_not_null())
    between = set(ways.select("comm_id", "rank", "peer_rank").iter_rows())
    rows = []
    for (comm, _channel), part in rings.group_by("comm_id", "channel"):
        after = dict(part.select("rank", "ring_next").iter_rows())
        for rank, peer in after.items():
            if (comm, rank, peer) not in between:
                continue
            last = peer
            for _ in range(len(after)):
                if last not in after or (comm, last, after[last]) in between:
                    break
                last = after[last]
            if last in after:
                rows.append((comm, rank, peer, last, after[last]))
    return pl.DataFrame(rows, schema=_NO_ENDS.schema, orient="row").unique()
