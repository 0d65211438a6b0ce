"""The lives of queue pairs, where the other end of each is, and which process has it."""

from __future__ import annotations

import polars as pl

from pulse_bpf.schema import U64, flow_id

FOREVER = 2**62
QP = ["node", "nic", "port", "qpn"]


def queue_pairs(qps: pl.DataFrame) -> pl.DataFrame:
    """One row per life of a queue pair, in QPS columns, sorted by QP and creation.

    Rows of one QP whose lives overlap describe the same life: each column is taken from the best origin that
    knows it, uprobe before netlink before capture. A life without a `flow` gets the one the format derives.
    """
    priority = pl.col("origin").replace_strict({"uprobe": 0, "netlink": 1, "capture": 2}, default=3)
    begins, ends = pl.col("created_ns").fill_null(-FOREVER), pl.col("gone_ns").fill_null(FOREVER)
    lives = (
        qps.with_columns(priority=priority, begins=begins, ends=ends)
        .sort(*QP, "begins", "ends", "priority")
        .with_columns(
            apart=(pl.col("begins") > pl.col("ends").cum_max().shift(1).over(QP)).fill_null(False)
            | (pl.col("flow") != pl.col("flow").shift(1).over(QP)).fill_null(False)
        )
        .with_columns(life=pl.col("apart").cum_sum().over(QP))
    )
    others = [name for name in qps.columns if name not in QP]
    merged = (
        lives.sort(*QP, "life", "priority")
        .group_by(*QP, "life", maintain_order=True)
        .agg(pl.col(others).drop_nulls().first())
    )
    derived = [
        flow if flow is not None else flow_id(node, nic, port, qpn, life)
        for node, nic, port, qpn, life, flow in merged.select(*QP, "life", "flow").iter_rows()
    ]
    return merged.with_columns(pl.Series("flow", derived, U64)).select(qps.columns)


def with_peers(lives: pl.DataFrame, nics: pl.DataFrame) -> pl.DataFrame:
    """`lives` with where their other ends are.

    Adds owner_pid; peer_node and peer_nic by GID or, without one, by the only QP that names this one as its peer; and
    of that QP peer_flow and peer_owner_pid.
    """
    homes = (
        nics.explode("gids")
        .select(
            pl.col("gids").alias("peer_gid"), pl.col("node").alias("gid_node"), pl.col("nic").alias("gid_nic")
        )
        .drop_nulls("peer_gid")
        .unique("peer_gid", keep="none")  # link-local GIDs made from equal addresses name nobody
    )
    ends = lives.select(
        pl.col("flow").alias("peer_flow"),
        pl.col("node").alias("end_node"),
        pl.col("nic").alias("end_nic"),
        pl.col("qpn").alias("peer_qpn"),
        pl.col("peer_qpn").alias("qpn"),
        pl.col("pid").alias("peer_owner_pid"),
        pl.col("created_ns").fill_null(-FOREVER).alias("end_begins"),
        pl.col("gone_ns").fill_null(FOREVER).alias("end_ends"),
    ).drop_nulls(["qpn", "peer_qpn"])
    placed = lives.join(homes, on="peer_gid", how="left")
    # Identical nodes number their QPs alike, so without a GID a pair counts only where it is the only one.
    other_end = (
        placed.join(ends, on=["qpn", "peer_qpn"])
        .filter(
            pl.col("flow") != pl.col("peer_flow"),
            (pl.col("gid_node") == pl.col("end_node")).fill_null(True),
            (pl.col("gid_nic") == pl.col("end_nic")).fill_null(True),
            pl.col("created_ns").fill_null(-FOREVER) <= pl.col("end_ends"),
            pl.col("gone_ns").fill_null(FOREVER) >= pl.col("end_begins"),
        )
        .select("flow", "peer_flow", "end_node", "end_nic", "peer_owner_pid")
        .unique("flow", keep="none")
    )
    peer_node = pl.coalesce("gid_node", "end_node", "peer_gid").alias("peer_node")
    return (
        placed.rename({"pid": "owner_pid"})
        .join(other_end, on="flow", how="left")
        .with_columns(peer_node, pl.coalesce("gid_nic", "end_nic").alias("peer_nic"))
    )


def with_owners(known: pl.DataFrame, comms: pl.DataFrame) -> pl.DataFrame:
    """Gives a QP of unknown process to the only process on its node that has a communicator, if it is the only one."""
    alone = (
        comms.select("node", pl.col("pid").alias("only_pid"))
        .unique()
        .unique("node", keep="none")
        .rename({"node": "owner"})
    )
    mine = known.join(alone, left_on="node", right_on="owner", how="left").with_columns(
        pl.coalesce("owner_pid", "only_pid").alias("owner_pid")
    )
    theirs = alone.rename({"only_pid": "only_peer"})
    return (
        mine.join(theirs, left_on="peer_node", right_on="owner", how="left")
        .with_columns(pl.coalesce("peer_owner_pid", "only_peer").alias("peer_owner_pid"))
        .drop("only_pid", "only_peer")
    )
