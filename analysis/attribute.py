"""Which queue pair belongs to whom: process, communicator and rank at both ends of each flow."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
from pulse_bpf.analysis.load import Recording

from pulse_bpf.schema import flow_id

NIC_KEY = ["node", "nic", "port"]
QP_KEY = [*NIC_KEY, "qpn"]
_FIRST_NS, _LAST_NS = -(1 << 62), 1 << 62


@dataclass(frozen=True)
class Attribution:
    """`flows`: one row per flow with node, nic, port, qpn, flow, pid, gpu, comm_id, rank, peer_node, peer_nic,
    peer_pid, peer_rank and `reason` (why comm_id or a rank is null; null where both ends are known).

    `samples`: flow, direction, t_ns, bin_ns, bytes, retx_bytes, packets, ctl_packets; one row per bin, one source
    per flow and direction, sorted by (flow, direction, t_ns), only of flows that are attributed.
    `unattributed`: bytes per (node, nic, port, direction, reason), with first_ns and last_ns.
    The bytes of `samples` and `unattributed` add up to the bytes of the sources that were picked.
    """

    flows: pl.DataFrame
    samples: pl.DataFrame
    unattributed: pl.DataFrame


def attribute(recording: Recording) -> Attribution:
    """Every sample of `recording` on a known pair of ranks, or counted as unattributed with the reason.

    Assumes that the process that owns a queue pair is the rank whose data it carries; where NCCL hands data to
    another process of the node (PXN), volumes will not fit the calls and completion shows it.
    """
    qps = _lives(recording.tables["qps"])
    samples = _bins(_one_source(_with_flow(recording.tables["samples"], qps)))
    keys = samples.select(*QP_KEY, "flow").unique("flow")
    qps = pl.concat([qps, keys.join(qps, on="flow", how="anti")], how="diagonal_relaxed")
    flows = _communicators(_peers(qps, recording.tables["nics"]), recording)
    reasons = samples.join(flows.select("flow", "reason"), on="flow", how="left")
    unattributed = (
        reasons.filter(pl.col("reason").is_not_null() & (pl.col("bytes") > 0))
        .group_by(*NIC_KEY, "direction", "reason")
        .agg(
            pl.col("bytes").sum(),
            pl.col("flow").unique().sort().alias("flows"),
            first_ns=pl.col("t_ns").min(),
            last_ns=(pl.col("t_ns") + pl.col("bin_ns")).max(),
            bin_ns=pl.col("bin_ns").max(),
        )
        .sort(*NIC_KEY, "direction", "reason")
    )
    attributed = reasons.filter(pl.col("reason").is_null()).drop("reason", *QP_KEY)
    return Attribution(flows, attributed.sort("flow", "direction", "t_ns"), unattributed)


def _lives(qps: pl.DataFrame) -> pl.DataFrame:
    """One row per flow: rows of one life merged, what uprobes saw over netlink over captured packets."""
    qps = qps.with_columns(
        begin=pl.col("created_ns").fill_null(_FIRST_NS), end=pl.col("gone_ns").fill_null(_LAST_NS)
    ).sort(*QP_KEY, "begin", "end")
    unnamed = qps.filter(pl.col("flow").is_null())
    if not unnamed.is_empty():
        earlier_end = pl.col("end").cum_max().shift(1).over(QP_KEY).fill_null(_LAST_NS)
        unnamed = unnamed.with_columns(
            life=(pl.col("begin") >= earlier_end).cast(pl.Int32).cum_sum().over(QP_KEY)
        )
        named = [flow_id(*row) for row in unnamed.select(*QP_KEY, "life").iter_rows()]
        unnamed = unnamed.with_columns(flow=pl.Series(named, dtype=pl.UInt64)).drop("life")
        qps = pl.concat([qps.filter(pl.col("flow").is_not_null()), unnamed])
    trust = pl.col("origin").replace_strict({"uprobe": 0, "netlink": 1, "capture": 2}, default=3)
    merged = qps.sort(trust, maintain_order=True).group_by("flow", maintain_order=True)
    return merged.agg(pl.exclude("flow", "begin", "end").drop_nulls().first(), pl.col("begin", "end").min())


def _with_flow(samples: pl.DataFrame, qps: pl.DataFrame) -> pl.DataFrame:
    """`samples` with a flow everywhere: where the recorder left it out, the queue pair's life at that time."""
    samples = samples.filter(pl.col("t_ns").is_not_null() & pl.col("direction").is_in(["tx", "rx"]))
    samples = samples.with_columns(pl.col("bytes").fill_null(0), pl.col("bin_ns").fill_null(1))
    missing = samples.filter(pl.col("flow").is_null())
    if missing.is_empty():
        return samples
    lives = qps.select(*QP_KEY, "begin", known="flow").sort("begin")
    missing = missing.sort("t_ns").join_asof(
        lives, left_on="t_ns", right_on="begin", by=QP_KEY, check_sortedness=False
    )
    strangers = missing.filter(pl.col("known").is_null()).select(QP_KEY).unique()
    made = [flow_id(*row, 0) for row in strangers.iter_rows()]
    strangers = strangers.with_columns(made=pl.Series(made, dtype=pl.UInt64))
    missing = missing.join(strangers, on=QP_KEY, how="left", nulls_equal=True)
    missing = missing.with_columns(flow=pl.coalesce("known", "made")).select(samples.columns)
    return pl.concat([samples.filter(pl.col("flow").is_not_null()), missing])


def _one_source(samples: pl.DataFrame) -> pl.DataFrame:
    """Only one source of each (flow, direction): the finest bins, then the most bytes, then the first name."""
    choice = (
        samples.group_by("flow", "direction", "source")
        .agg(pl.col("bin_ns").median(), pl.col("bytes").sum())
        .sort("bin_ns", "bytes", "source", descending=[False, True, False], nulls_last=True)
        .unique(["flow", "direction"], keep="first", maintain_order=True)
        .select("flow", "direction", "source")
    )
    return samples.join(choice, on=["flow", "direction", "source"], how="semi", nulls_equal=True)


def _bins(samples: pl.DataFrame) -> pl.DataFrame:
    """Rows of one bin added up."""
    counters = ["bytes", "retx_bytes", "packets", "ctl_packets"]
    return samples.group_by("flow", "direction", "t_ns").agg(
        pl.col(QP_KEY).first(), pl.col("bin_ns").max(), pl.col(counters).cast(pl.Int64).sum()
    )


def _peers(qps: pl.DataFrame, nics: pl.DataFrame) -> pl.DataFrame:
    """`qps` with peer_node and peer_nic by GID and peer_pid by the queue pair at the other end."""
    gids = nics.select(gid="gids", gid_node="node", gid_nic="nic").explode("gid").drop_nulls("gid").unique()
    # A GID that several nodes claim (link-local addresses of a bridge, say) names nobody.
    owner = gids.group_by("gid").agg(
        pl.col("gid_node").n_unique().alias("claims"),
        pl.col("gid_node").first().alias("peer_node"),
        pl.when(pl.col("gid_nic").n_unique() == 1).then(pl.col("gid_nic").first()).alias("peer_nic"),
    )
    owner = owner.filter(pl.col("claims") == 1).drop("claims")
    flows = qps.join(owner, left_on="peer_gid", right_on="gid", how="left")
    if nics.is_empty():
        flows = flows.with_columns(peer_node="peer_gid")
    other = flows.select(
        peer_node="node",
        peer_qpn="qpn",
        node="peer_node",
        qpn="peer_qpn",
        other_nic="nic",
        other_pid="pid",
        other_begin="begin",
        other_end="end",
    )
    pairs = (
        flows.join(other, on=["node", "qpn", "peer_node", "peer_qpn"], how="inner")
        .filter(pl.col("peer_nic").is_null() | (pl.col("peer_nic") == pl.col("other_nic")))
        .filter((pl.col("begin") < pl.col("other_end")) & (pl.col("other_begin") < pl.col("end")))
        .group_by("flow")
        .agg(
            peer_pid=pl.when(pl.col("other_pid").drop_nulls().n_unique() == 1).then(
                pl.col("other_pid").drop_nulls().first()
            ),
            other_nic=pl.col("other_nic").first(),
        )
    )
    flows = flows.join(pairs, on="flow", how="left")
    return flows.with_columns(peer_nic=pl.coalesce("peer_nic", "other_nic")).drop("other_nic")


def _communicators(flows: pl.DataFrame, recording: Recording) -> pl.DataFrame:
    """`flows` with comm_id, rank and peer_rank: the one communicator that both ends belong to."""
    members = _members(recording)
    mine = members.select(*("node", "comm_id", "rank", "gpu", "used", "nranks"), owner="pid")
    theirs = members.select("comm_id", peer_node="node", peer_owner="pid", peer_rank="rank")
    ends = flows.select("flow", "node", "pid", "peer_node", "peer_pid", stated="comm_id")
    candidates = (
        ends.join(mine, on="node")
        .filter(pl.col("pid").is_null() | (pl.col("pid") == pl.col("owner")))
        .filter(pl.col("stated").is_null() | (pl.col("stated") == pl.col("comm_id")))
        .join(theirs, on=["peer_node", "comm_id"])
        .filter(pl.col("peer_pid").is_null() | (pl.col("peer_pid") == pl.col("peer_owner")))
        .filter(pl.col("rank") != pl.col("peer_rank"))
    )
    # A communicator nobody called anything on moved nothing; it only counts when there is no other.
    candidates = candidates.filter(pl.col("used") == pl.col("used").max().over("flow"))
    only = pl.col("comm_id").n_unique() == 1
    found = candidates.group_by("flow").agg(
        pl.when(only).then(pl.col("comm_id").first()).alias("comm_id"),
        *(
            pl.when(only & (pl.col(c).n_unique() == 1)).then(pl.col(c).first()).alias(c)
            for c in ("rank", "gpu", "owner", "peer_rank", "peer_owner")
        ),
        count=pl.col("comm_id").n_unique(),
    )
    flows = flows.drop("comm_id").join(found, on="flow", how="left")
    reason = (
        pl.when(pl.col("peer_node").is_null())
        .then(pl.lit("the peer's node is unknown"))
        .when(pl.col("count").is_null() & pl.col("pid").is_null())
        .then(pl.lit("the process is unknown"))
        .when(pl.col("count").is_null())
        .then(pl.lit("no communicator has both ends"))
        .when(pl.col("count") > 1)
        .then(pl.lit("several communicators have both ends"))
        .when(pl.col("rank").is_null() | pl.col("peer_rank").is_null())
        .then(pl.lit("several ranks share a node and the process is unknown"))
    )
    return flows.with_columns(
        reason=reason, pid=pl.coalesce("pid", "owner"), peer_pid=pl.coalesce("peer_pid", "peer_owner")
    ).select(
        *(*QP_KEY, "flow", "pid", "gpu", "comm_id", "rank"),
        *("peer_node", "peer_nic", "peer_pid", "peer_rank", "reason"),
    )


def _members(recording: Recording) -> pl.DataFrame:
    """One row per (process, communicator): node, pid, comm_id, rank, nranks, gpu and whether it was used."""
    columns = ["node", "pid", "comm_id", "rank", "nranks", "gpu"]
    comms, ops = recording.tables["comms"], recording.tables["ops"]
    both = pl.concat([comms.select(columns), ops.select(columns)]).drop_nulls(["comm_id", "rank"])
    used = ops.select("node", "pid", "comm_id").drop_nulls().unique().with_columns(used=pl.lit(True))
    key = ["node", "pid", "comm_id"]
    members = both.group_by(*key, "rank").agg(pl.col("nranks", "gpu").drop_nulls().first())
    return members.join(used, on=key, how="left").with_columns(pl.col("used").fill_null(False))
