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


# Of so many bytes one end's are no more than this share of the other's; in all, so much may be missing at one of them.
TELLING_BYTES, BACK, LOST = 1_000_000, 0.2, 0.1
ENDS = ["flow", "peer_flow", "peer_node", "peer_nic", "peer_owner_pid"]


def with_peers(
    lives: pl.DataFrame, nics: pl.DataFrame, comms: pl.DataFrame, totals: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`lives` with where their other ends are, and ENDS of those that may have one of several.

    Adds owner_pid; peer_node and peer_nic by GID or, without one, by the only QP that can be the other end; and of that
    QP peer_flow and peer_owner_pid. `totals`: flow, and its bytes `tx` and `rx`, from the same time of all.
    """
    homes = (
        nics.explode("gids")
        .select(
            pl.col("gids").alias("peer_gid"), pl.col("node").alias("gid_node"), pl.col("nic").alias("gid_nic")
        )
        .drop_nulls("peer_gid")
        .unique("peer_gid", keep="none")  # link-local GIDs made from equal addresses name nobody
    )
    gids = nics["gids"].explode().drop_nulls()
    addressed = nics.filter(pl.col("gids").list.len() > 0)["node"].unique()
    # A peer of another address is on none of the nodes whose addresses are known.
    abroad = pl.col("peer_gid").is_not_null() & ~pl.col("peer_gid").is_in(gids.implode())
    placed = (
        lives.join(homes, on="peer_gid", how="left")
        .rename({"pid": "owner_pid"})
        .with_columns(abroad=abroad.fill_null(False), addressed=pl.col("node").is_in(addressed.implode()))
    )
    carried = placed.select("flow", "node").join(totals, on="flow", how="left")
    watched = carried.filter(pl.sum_horizontal("tx", "rx").sum().over("node") > 0).drop("node")
    other_end, left = _only(_fitting(_mirrored(placed), watched), comms)
    known = (
        placed.drop("abroad", "addressed")
        .join(other_end, on="flow", how="left")
        .with_columns(
            peer_node=pl.coalesce("gid_node", "peer_node", "peer_gid"),
            peer_nic=pl.coalesce("gid_nic", "peer_nic"),
        )
    )
    return known, left.join(known.filter(pl.col("peer_node").is_null()), on="flow", how="semi")


def _mirrored(placed: pl.DataFrame) -> pl.DataFrame:
    """flow, node, owner_pid and peer_flow, end_node, end_nic, peer_owner_pid of every two QPs that name each other's
    number, live at a time and know of no other peer."""
    ends = placed.select(
        pl.col("flow").alias("peer_flow"),
        pl.col("node").alias("end_node"),
        pl.col("nic").alias("end_nic"),
        pl.col("qpn").alias("peer_qpn"),
        pl.col("peer_qpn").alias("qpn"),
        pl.col("owner_pid").alias("peer_owner_pid"),
        pl.col("created_ns").fill_null(-FOREVER).alias("end_begins"),
        pl.col("gone_ns").fill_null(FOREVER).alias("end_ends"),
        pl.col("gid_node").alias("back_node"),
        pl.col("gid_nic").alias("back_nic"),
        pl.col("abroad").alias("back_abroad"),
        pl.col("addressed").alias("end_addressed"),
    ).drop_nulls(["qpn", "peer_qpn"])
    return (
        placed.join(ends, on=["qpn", "peer_qpn"])
        .filter(
            pl.col("flow") != pl.col("peer_flow"),
            # No process talks to itself over the network.
            (
                (pl.col("node") != pl.col("end_node")) | (pl.col("owner_pid") != pl.col("peer_owner_pid"))
            ).fill_null(True),
            (pl.col("gid_node") == pl.col("end_node")).fill_null(True),
            (pl.col("gid_nic") == pl.col("end_nic")).fill_null(True),
            (pl.col("back_node") == pl.col("node")).fill_null(True),
            (pl.col("back_nic") == pl.col("nic")).fill_null(True),
            ~(pl.col("abroad") & pl.col("end_addressed")),
            ~(pl.col("back_abroad") & pl.col("addressed")),
            pl.col("created_ns").fill_null(-FOREVER) <= pl.col("end_ends"),
            pl.col("gone_ns").fill_null(FOREVER) >= pl.col("end_begins"),
        )
        .select(
            *("flow", "node", "owner_pid", "peer_flow", "end_node", "end_nic", "peer_owner_pid"),
            addressed=pl.col("gid_node").is_not_null() | pl.col("back_node").is_not_null(),
        )
    )


def _fitting(possible: pl.DataFrame, totals: pl.DataFrame) -> pl.DataFrame:
    """Those of the `possible` pairs of which one end sent what the other received.

    NCCL's connections carry data one way, and small clear-to-send writes the other. `totals` are of the nodes that
    were watched.
    """
    ways = ["tx", "rx"]
    both = possible.join(totals, on="flow", how="left").join(
        totals.rename({"flow": "peer_flow", "tx": "peer_tx", "rx": "peer_rx"}), on="peer_flow", how="left"
    )
    sent, received = (pl.max_horizontal(one, f"peer_{other}") for one, other in (ways, ways[::-1]))
    less, more = pl.min_horizontal(sent, received), pl.max_horizontal(sent, received)
    one_way = (more < TELLING_BYTES) | (less <= BACK * more)
    kept = [
        (pl.col(there) == 0) | ((pl.col(here) - pl.col(there)).abs() <= LOST * pl.max_horizontal(here, there))
        for here, there in (("tx", "peer_rx"), ("peer_tx", "rx"))
    ]
    seen = (pl.col("tx") + pl.col("rx") > 0) == (pl.col("peer_tx") + pl.col("peer_rx") > 0)
    fits = pl.col("addressed") | (one_way & kept[0] & kept[1] & seen)
    return both.filter(fits.fill_null(True)).select(possible.columns)


def _only(possible: pl.DataFrame, comms: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Those of the `possible` pairs that are the only one of both QPs, once others' and those without a common
    communicator are left out, and what is left of those (ENDS).

    Identical nodes number their QPs alike: that is how a QP has several. Where a communicator has members that were not
    recorded, one of them may be another.
    """
    processes = ["node", "owner_pid", "end_node", "peer_owner_pid"]
    members = comms.drop_nulls("comm_id").select(
        "node",
        owner_pid="pid",
        comm_id="comm_id",
        whole=pl.col("rank").n_unique().over("comm_id") >= pl.col("nranks"),
    )
    theirs = members.rename({"node": "end_node", "owner_pid": "peer_owner_pid"})
    both = possible.join(members, on=processes[:2], how="semi").join(theirs, on=processes[2:], how="semi")
    # Not of all who are in a communicator together, which are as many as its ranks squared.
    pairs = both.select(processes).unique().join(members, on=processes[:2])
    together = pairs.join(theirs, on=[*processes[2:], "comm_id"]).select(processes).unique()
    strangers = both.join(together, on=processes, how="anti")
    parted = members.filter(~pl.col("whole").fill_null(False)).select(processes[:2]).unique()
    left = possible.join(strangers, on=["flow", "peer_flow"], how="anti")
    alone = pl.concat(
        [
            left.filter("addressed"),
            left.filter(~pl.col("addressed")).join(parted, on=processes[:2], how="anti"),
        ]
    )
    left, unsure = alone, left.join(alone, on=["flow", "peer_flow"], how="anti")
    found = [left.clear()]
    while True:
        sure = left.filter((pl.len().over("flow") == 1) | (pl.len().over("peer_flow") == 1))
        # Two that have the same only end exclude each other.
        sure = sure.filter(pl.len().over("flow") == 1, pl.len().over("peer_flow") == 1)
        if sure.is_empty():
            break
        found.append(sure)
        taken = pl.concat([sure["flow"], sure["peer_flow"]]).implode()
        left, unsure = (
            frame.filter(~pl.col("flow").is_in(taken), ~pl.col("peer_flow").is_in(taken))
            for frame in (left, unsure)
        )
    columns = [
        "flow",
        "peer_flow",
        pl.col("end_node").alias("peer_node"),
        pl.col("end_nic").alias("peer_nic"),
        "peer_owner_pid",
    ]
    return pl.concat(found).select(columns), pl.concat([left, unsure]).select(columns)


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
