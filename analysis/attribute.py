"""Whose traffic a queue pair carries: process, communicator and peer of each flow."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.load import Recording
from pulse_bpf.schema import F64, I32, I64, STR, U8, U32, U64, flow_id

QP = ["node", "nic", "port", "qpn"]
_FOREVER = 2**62

# One row per life of a queue pair.
#
# `owner_pid` made the queue pair and posts on it. `pid`, `gpu`, `rank` are those of the process whose operators its
# bytes belong to: of a collective the owner, as all its members take part; of point-to-point calls (`use` "pairs") the
# caller, which with PXN is any process of the node, and null where several may be (`ranks`, then of more than one).
# `peer_pid`, `peer_rank`, `peer_ranks` and `peer_owner_pid` are the same of the other end. `channel` is null where
# unknown. `confidence` (0 to 1) and `evidence` tell why it is attributed, `reason` why it is not: then comm_id is null.
FLOWS = pl.Schema(
    {
        "flow": U64,
        "node": STR,
        "nic": STR,
        "port": U8,
        "qpn": U32,
        "owner_pid": I64,
        "pid": I64,
        "gpu": I32,
        "comm_id": STR,
        "use": STR,
        "channel": I32,
        "rank": I32,
        "ranks": pl.List(I32),
        "nranks": I32,
        "peer_node": STR,
        "peer_nic": STR,
        "peer_owner_pid": I64,
        "peer_pid": I64,
        "peer_rank": I32,
        "peer_ranks": pl.List(I32),
        "created_ns": I64,
        "confidence": F64,
        "evidence": STR,
        "reason": STR,
    }
)


def queue_pairs(qps: pl.DataFrame) -> pl.DataFrame:
    """One row per life of a queue pair, in QPS columns, sorted by QP and creation.

    Rows of one QP whose lives overlap describe the same life: each column is taken from the best origin that
    knows it, uprobe before netlink before capture. A life without a `flow` gets the one the format derives.
    """
    priority = pl.col("origin").replace_strict({"uprobe": 0, "netlink": 1, "capture": 2}, default=3)
    begins, ends = pl.col("created_ns").fill_null(-_FOREVER), pl.col("gone_ns").fill_null(_FOREVER)
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


def samples(recording: Recording, lives: pl.DataFrame) -> pl.DataFrame:
    """The samples of one source per (node, nic, port, direction), one row per (flow, direction, bin), sorted so.

    The source with the narrowest bins is taken, by name where equal. Rows without a flow get that of the
    life of their QP that had begun by then. `flow` stays null where the QP is in no qps row.
    """
    rows = recording["samples"]
    port = ["node", "nic", "port", "direction"]
    sources = rows.select(*port, "source", "bin_ns").unique()
    best = sources.sort("bin_ns", "source").unique(port, keep="first", maintain_order=True).drop("bin_ns")
    if best.height < sources.height:
        rows = rows.join(best, on=[*port, "source"], how="semi", nulls_equal=True)
    if rows["flow"].null_count():
        begun = lives.select(
            *QP, pl.col("flow").alias("lived"), pl.col("created_ns").fill_null(-_FOREVER).alias("t_ns")
        )
        rows = (
            rows.sort("t_ns")
            .join_asof(begun.sort("t_ns"), on="t_ns", by=QP, check_sortedness=False)
            .with_columns(pl.coalesce("flow", "lived").alias("flow"))
        )
    counts = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]
    # Not by the names, which a flow implies: strings are slow to sort.
    order = ["flow", "qpn", "direction", "t_ns"]
    rows = rows.select(*QP, "flow", "direction", "t_ns", "bin_ns", *counts).sort(order, maintain_order=True)
    again = pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift()) for name in order)
    if rows.select(again.any()).item():
        rows = rows.group_by(rows.columns[: -len(counts)], maintain_order=True).agg(
            pl.when(pl.col(counts).count() > 0).then(pl.col(counts).sum())
        )
    return rows


def covered(recording: Recording, rows: pl.DataFrame) -> pl.DataFrame:
    """node, nic, port, direction, from_ns, to_ns: when bytes of a port would have been seen, had there been any.

    From the coverage table; where that says nothing of a port, from its first to its last sample in `rows`.
    """
    port = ["node", "nic", "port", "direction"]
    stated = (
        recording["coverage"]
        .drop_nulls(port)
        .group_by(port)
        .agg(pl.col("first_ns").min().alias("from_ns"), pl.col("last_ns").max().alias("to_ns"))
    )
    observed = rows.group_by(port).agg(
        pl.col("t_ns").min().alias("from_ns"), (pl.col("t_ns") + pl.col("bin_ns")).max().alias("to_ns")
    )
    return pl.concat([stated, observed.join(stated, on=port, how="anti").select(stated.columns)]).sort(port)


def flows(recording: Recording, lives: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Each life of a QP in `lives` with what it belongs to, in FLOWS columns; `reason` says why not, where so.

    `rows` are the samples: they settle which of several communicators of the same two processes a QP serves,
    by whose calls its bytes follow. That assumes that the process waits for an operator before the next call;
    where it does not, the shares are mixed and the QP stays unattributed.
    """
    known = _with_peers(lives, recording)
    known = _with_owner(known, recording["comms"])
    candidates = _candidates(known, recording["comms"])
    count = candidates.group_by("flow").len("candidates")
    several = candidates.join(count.filter(pl.col("candidates") > 1), on="flow", how="semi")
    settled = _by_calls(several, recording["ops"], rows)
    chosen = pl.concat(
        [candidates.join(count.filter(pl.col("candidates") == 1), on="flow", how="semi"), settled]
    )
    reason = (
        pl.when(pl.col("comm_id").is_not_null())
        .then(None)
        .when(pl.col("pid").is_null())
        .then(pl.lit("its process is unknown"))
        .when(pl.col("candidates") > 1)
        .then(pl.lit("several communicators could use it"))
        .when(pl.col("peer_node").is_null())
        .then(pl.lit("its peer is unknown"))
        .otherwise(pl.lit("no communicator seen holds both its ends"))
    )
    joined = known.drop("comm_id").join(chosen.drop("node", "pid"), on="flow", how="left")
    joined = joined.join(count, on="flow", how="left")
    known_ends = pl.col("comm_id").is_not_null()
    return joined.with_columns(
        reason=reason,
        owner_pid="pid",
        peer_owner_pid="peer_pid",
        use=pl.lit(None, STR),
        channel=pl.lit(None, I32),
        ranks=pl.when(known_ends).then(pl.concat_list("rank")),
        peer_ranks=pl.when(known_ends & pl.col("peer_rank").is_not_null()).then(pl.concat_list("peer_rank")),
        confidence=pl.when(known_ends).then(1.0),
        evidence=pl.when(known_ends).then(pl.lit("the only communicator of both its ends")),
    ).select(pl.col(name).cast(dtype) for name, dtype in FLOWS.items())


def _with_peers(lives: pl.DataFrame, recording: Recording) -> pl.DataFrame:
    """Adds peer_node and peer_nic by GID, and peer_pid by the other end of the pair."""
    homes = (
        recording["nics"]
        .explode("gids")
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
        pl.col("pid").alias("peer_pid"),
        pl.col("created_ns").fill_null(-_FOREVER).alias("end_begins"),
        pl.col("gone_ns").fill_null(_FOREVER).alias("end_ends"),
    ).drop_nulls(["qpn", "peer_qpn"])
    placed = lives.join(homes, on="peer_gid", how="left")
    # Identical nodes number their QPs alike, so without a GID a pair counts only where it is the only one.
    other_end = (
        placed.join(ends, on=["qpn", "peer_qpn"])
        .filter(
            pl.col("flow") != pl.col("peer_flow"),
            (pl.col("gid_node") == pl.col("end_node")).fill_null(True),
            (pl.col("gid_nic") == pl.col("end_nic")).fill_null(True),
            pl.col("created_ns").fill_null(-_FOREVER) <= pl.col("end_ends"),
            pl.col("gone_ns").fill_null(_FOREVER) >= pl.col("end_begins"),
        )
        .select("flow", "end_node", "end_nic", "peer_pid")
        .unique("flow", keep="none")
    )
    peer_node = pl.coalesce("gid_node", "end_node", "peer_gid").alias("peer_node")
    return placed.join(other_end, on="flow", how="left").with_columns(
        peer_node, pl.coalesce("gid_nic", "end_nic").alias("peer_nic")
    )


def _with_owner(known: pl.DataFrame, comms: pl.DataFrame) -> pl.DataFrame:
    """Gives a QP of unknown process to the only process on its node that has a communicator, if it is the only one."""
    alone = (
        comms.select("node", pl.col("pid").alias("only_pid"))
        .unique()
        .unique("node", keep="none")
        .rename({"node": "owner"})
    )
    mine = known.join(alone, left_on="node", right_on="owner", how="left").with_columns(
        pl.coalesce("pid", "only_pid").alias("pid")
    )
    theirs = alone.rename({"only_pid": "only_peer"})
    return (
        mine.join(theirs, left_on="peer_node", right_on="owner", how="left")
        .with_columns(pl.coalesce("peer_pid", "only_peer").alias("peer_pid"))
        .drop("only_pid", "only_peer")
    )


def _candidates(known: pl.DataFrame, comms: pl.DataFrame) -> pl.DataFrame:
    """Every (communicator, rank, peer rank) that a QP could serve, by the processes at its two ends.

    A peer outside the recording may be any rank that was not seen: it counts for every communicator of the
    process, and has a rank only where one is missing.
    """
    members = comms.select("node", "pid", "comm_id", "rank", "nranks", "gpu").drop_nulls("comm_id").unique()
    mine = known.select("flow", "node", "pid", "peer_node", "peer_pid").join(members, on=["node", "pid"])
    peers = members.select(
        "comm_id",
        pl.col("node").alias("peer_node"),
        pl.col("pid").alias("member_pid"),
        pl.col("rank").alias("peer_rank"),
    )
    inside = mine.join(peers, on=["comm_id", "peer_node"]).filter(
        (pl.col("peer_pid") == pl.col("member_pid")).fill_null(True), pl.col("rank") != pl.col("peer_rank")
    )
    seen_nodes = comms["node"].unique()
    missing = (
        members.group_by("comm_id")
        .agg(pl.col("rank").unique().alias("seen"), pl.col("nranks").first())
        .filter(pl.col("seen").list.len() < pl.col("nranks"))
        .with_columns(
            only=pl.when(pl.col("seen").list.len() == pl.col("nranks") - 1).then(
                (pl.col("nranks") * (pl.col("nranks") - 1) // 2 - pl.col("seen").list.sum()).cast(I32)
            )
        )
    )
    outside = (
        mine.filter(pl.col("peer_node").is_not_null() & ~pl.col("peer_node").is_in(seen_nodes.implode()))
        .join(missing.select("comm_id", pl.col("only").alias("peer_rank")), on="comm_id")
        .with_columns(member_pid=pl.lit(None, I64))
    )
    columns = ["flow", "node", "pid", "comm_id", "rank", "nranks", "gpu", "peer_rank"]
    return pl.concat([inside.select(columns), outside.select(columns)]).unique(maintain_order=True)


def _by_calls(candidates: pl.DataFrame, ops: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """The candidate whose communicator the latest call before at least 9 in 10 bytes of the QP was made on."""
    if candidates.is_empty():
        return candidates
    calls = ops.select("node", "pid", pl.col("call_ns").alias("t_ns"), pl.col("comm_id").alias("called"))
    traffic = (
        rows.filter(pl.col("bytes") > 0)
        .select("flow", "t_ns", "bytes")
        .join(candidates.select("flow", "node", "pid").unique(), on="flow")
        .sort("t_ns")
        .join_asof(calls.sort("t_ns"), on="t_ns", by=["node", "pid"], check_sortedness=False)
    )
    share = traffic.group_by("flow", "called").agg(pl.col("bytes").sum())
    share = share.filter(pl.col("bytes") >= 0.9 * pl.col("bytes").sum().over("flow"))
    return candidates.join(
        share, left_on=["flow", "comm_id"], right_on=["flow", "called"], how="semi"
    ).unique("flow", keep="none")
