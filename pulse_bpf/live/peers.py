"""What a node has to know of others to tell where its queue pairs lead."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import polars as pl

from pulse_bpf.live.wire import NONE

State = Mapping[str, pl.DataFrame]


def peers(mine: State, others: Collection[State]) -> dict[str, pl.DataFrame]:
    """The tables of cutting.PEERS, with what the `others` said that has to do with what the agent itself said."""
    own = _of("qps", [mine])
    gids, comms = _of("nics", [mine])["gids"].explode().implode(), _of("comms", [mine])["comm_id"].implode()
    lead_here = pl.col("peer_gid").is_in(gids) | (
        pl.col("peer_gid").is_null() & pl.col("peer_qpn").is_in(own["qpn"].implode())
    )
    qps = _of("qps", others).filter(lead_here)
    there = pl.col("gids").list.set_intersection(own["peer_gid"].drop_nulls().unique().to_list())
    nics = _of("nics", others)
    nodes = pl.concat([nics.filter(there.list.len() > 0)["node"], qps["node"]]).unique().implode()
    in_mine = pl.col("comm_id").is_in(comms)
    return {
        "qps": qps,
        "nics": nics.filter(pl.col("node").is_in(nodes)),
        "comms": _of("comms", others).filter(in_mine),
        "channels": _of("channels", others).filter(in_mine).unique(["comm_id", "rank", "channel"]),
    }


def _of(table: str, states: Collection[State]) -> pl.DataFrame:
    frames = [state[table] for state in states if table in state]
    return pl.concat([NONE[table], *frames])
