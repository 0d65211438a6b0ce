"""Which communicators, and whose calls, a queue pair may serve."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.bursts import Bursts
from pulse_bpf.analysis.by_volume import TO_ALL, TWO_SIDED
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.pairing import ENDS, FOREVER
from pulse_bpf.schema import I32, STR

# A clear-to-send is a packet of 142 bytes for a slice of data, and all but the smallest have more than 20 times that.
CONTROL_SHARE = 0.05


def data_directions(carried: Bursts, known: pl.DataFrame, possible: pl.DataFrame, wire: bool) -> pl.DataFrame:
    """flow, `direction`: which way the data of each flow went, by what both its ends `carried`; and `data`, that way
    where what went the other way can only be control.

    NCCL's connections carry data one way, and small clear-to-send writes the other, which not all sources tell apart:
    by far the most bytes are data. Where a few bytes are all there is, and headers are counted (`wire`), a way is
    control that has nothing but whole clear-to-sends, while the other has not. Assumes that both ends were recorded:
    without that, what goes the other way may just not be seen.
    """
    seen = carried.totals().join(carried.controls(), on="flow", suffix="_control")
    there = seen.select(
        pl.col("flow").alias("peer_flow"),
        *(pl.col(name).alias(other) for name, other in (("rx", "out"), ("tx", "back"))),
        *(
            pl.col(f"{name}_control").alias(f"{other}_control")
            for name, other in (("rx", "out"), ("tx", "back"))
        ),
    )
    pairs = pl.concat([frame.select("flow", "peer_flow") for frame in (known, possible)])
    controls = [f"{name}_control" for name in ("tx", "rx", "out", "back")]
    both = (
        pairs.join(seen, on="flow", how="left")
        .join(there, on="peer_flow", how="left")
        .group_by("flow", maintain_order=True)
        .agg(pl.col("tx", "rx").first(), pl.col("out", "back").mean(), pl.col(controls).any())
    )
    sent, received = pl.sum_horizontal("tx", "out"), pl.sum_horizontal("rx", "back")
    most = pl.when(sent >= received).then(pl.lit("tx")).otherwise(pl.lit("rx"))
    less = pl.min_horizontal(sent, received)
    little = (less > 0) & (less <= CONTROL_SHARE * pl.max_horizontal(sent, received))
    none_sent = pl.any_horizontal("tx_control", "out_control")
    none_received = pl.any_horizontal("rx_control", "back_control")
    known_ends = pl.lit(wire) & pl.col("out").is_not_null() & (none_sent != none_received)
    by_size = pl.when(none_sent).then(pl.lit("rx")).otherwise(pl.lit("tx"))
    direction = pl.when(known_ends).then(by_size).otherwise(most)
    return both.filter(sent + received > 0).select(
        "flow", direction=direction, data=pl.when(little | known_ends).then(direction)
    )


def candidates(
    known: pl.DataFrame, possible: pl.DataFrame, recording: Recording, directions: pl.DataFrame
) -> pl.DataFrame:
    """Every (communicator, use, rank, peer, peer rank) that a QP could serve; `known` and `possible` peers as pairing
    gives them.

    `use` "collective" and "alltoall" name the ranks of the processes that have the QPs, as all members take part.
    `use` "pairs" names those that call: the receiver has the QP itself, while the sender hands its data to the process
    that has, if that sits on the receiver's rail (PXN, ncclTopoGetNetDev in src/graph/search.cc). `use` is null where
    no call of the communicator was seen that could use the QP. Between ranks that are no neighbours in a layout of the
    communicator's channels, as far as that is known, a QP serves a collective only when nothing else can use it.
    """
    members = members_of(recording["comms"])
    open_ends = known.drop(ENDS[1:]).join(possible, on="flow").select(known.columns)
    ends = _both_inside(pl.concat([known, open_ends]), members, recording["comms"])
    kinds = _calls(recording.calls.kinds)
    used = kinds.select("comm_id", "use").unique()
    collective = ends.join(used.filter(pl.col("use") != "pairs"), on="comm_id")
    pairs = _pairs(ends, kinds, members, recording["nics"], directions)
    with_calls = pl.concat([collective.select("flow", "comm_id"), pairs.select("flow", "comm_id")])
    unknown = ends.join(with_calls, on=["flow", "comm_id"], how="anti").with_columns(use=pl.lit(None, STR))
    columns = ["flow", "peer_flow", "node", "peer_node", "comm_id", "use", "rank", "nranks", "peer_rank"]
    strange = _strangers(collective, recording["channels"], members, recording["nics"])
    every = pl.concat([frame.select(columns) for frame in (collective, unknown, pairs)])
    return (
        every.unique(maintain_order=True)
        .join(strange, on=["flow", "comm_id", "use", "rank", "peer_rank"], how="left", nulls_equal=True)
        .with_columns(stranger=pl.col("stranger").fill_null(False))
        .filter(~pl.col("stranger") | pl.col("stranger").all().over("flow"))
        .drop("stranger")
        .with_columns(open=pl.col("flow").is_in(possible["flow"].implode()))
        .sort("flow", "comm_id", "use", "rank", "peer_rank")
    )


def _strangers(
    collective: pl.DataFrame, channels: pl.DataFrame, members: pl.DataFrame, nics: pl.DataFrame
) -> pl.DataFrame:
    """flow, comm_id, use, rank, peer_rank of the rows of `collective` whose ranks are no neighbours, and `stranger`.

    With PXN who sends is beside the rank that does so in the ring or tree, on the receiver's rail.
    """
    of_rank = _neighbours(channels)
    homes = members.select("comm_id", "rank", "node").unique(["comm_id", "rank"], keep="none")
    of_node = (
        of_rank.join(homes, on=["comm_id", "rank"])
        .explode("neighbours")
        .group_by("comm_id", "node")
        .agg(pl.col("neighbours").unique().alias("of_node"))
    )
    of_peer = of_node.rename({"node": "peer_node", "of_node": "of_peer"})
    beside = pl.col("peer_rank").is_in(pl.col("of_node")) | pl.col("rank").is_in(pl.col("of_peer"))
    stranger = ~pl.col("peer_rank").is_in(pl.col("neighbours")) & ~(
        beside.fill_null(False) & pl.col("handed")
    )
    return (
        _with_rails(collective.filter(pl.col("use") == "collective"), nics)
        .join(of_rank, on=["comm_id", "rank"])
        .join(of_node, on=["comm_id", "node"], how="left")
        .join(of_peer, on=["comm_id", "peer_node"], how="left")
        .group_by("flow", "comm_id", "use", "rank", "peer_rank")
        .agg(stranger.fill_null(False).all().alias("stranger"))
    )


def _with_rails(ends: pl.DataFrame, nics: pl.DataFrame) -> pl.DataFrame:
    """`ends` with `handed`: whether both ends may be on one rail, so that PXN may have handed data to the sender."""
    rails = nics.select("node", "nic", "rail").unique(["node", "nic"], keep="none")
    there = rails.rename({"node": "peer_node", "nic": "peer_nic", "rail": "peer_rail"})
    return (
        ends.join(rails, on=["node", "nic"], how="left")
        .join(there, on=["peer_node", "peer_nic"], how="left")
        .with_columns(handed=(pl.col("rail") == pl.col("peer_rail")).fill_null(True))
    )


def _neighbours(channels: pl.DataFrame) -> pl.DataFrame:
    """comm_id, rank and its `neighbours` in all rings and trees, of ranks with a neighbour."""
    beside = pl.concat_list("ring_prev", "ring_next", "tree_up", pl.col("tree_down").fill_null([]))
    return (
        channels.select("comm_id", "rank", neighbours=beside)
        .explode("neighbours")
        .drop_nulls()
        .group_by("comm_id", "rank")
        .agg(pl.col("neighbours").unique())
    )


def members_of(comms: pl.DataFrame) -> pl.DataFrame:
    """One row per (node, pid, communicator, rank) in `comms`, with its GPUs."""
    return (
        comms.drop_nulls(["comm_id", "rank"])
        .group_by("node", "pid", "comm_id", "rank", "nranks", maintain_order=True)
        .agg(pl.col("gpu").drop_nulls().first(), pl.col("gone_ns").max(), pl.col("first_seen_ns").min())
    )


def _calls(kinds: pl.DataFrame) -> pl.DataFrame:
    """node, comm_id, rank, kind, peer and `use` of the calls, each once."""
    use = (
        pl.when(pl.col("kind").is_in(TWO_SIDED))
        .then(pl.lit("pairs"))
        .when(pl.col("kind").is_in(TO_ALL))
        .then(pl.lit("alltoall"))
        .otherwise(pl.lit("collective"))
    )
    return kinds.select("node", "comm_id", "rank", "kind", "peer", use=use).unique(maintain_order=True)


def _both_inside(known: pl.DataFrame, members: pl.DataFrame, comms: pl.DataFrame) -> pl.DataFrame:
    """The communicators of which both processes that have the QP are members, with their ranks.

    A peer outside the recording may be any rank that was not seen: it counts for every communicator of the
    process, and has a rank only where one is missing.
    """
    mine = known.select(
        "flow", "peer_flow", "node", "nic", "owner_pid", "peer_node", "peer_nic", "peer_owner_pid", "gone_ns"
    ).join(members.rename({"pid": "owner_pid", "gone_ns": "comm_gone_ns"}), on=["node", "owner_pid"])
    # Whatever was made later does not use a queue pair that was gone.
    mine = mine.filter(pl.col("gone_ns").fill_null(FOREVER) >= pl.col("first_seen_ns").fill_null(-FOREVER))
    peers = members.select(
        "comm_id",
        pl.col("node").alias("peer_node"),
        pl.col("pid").alias("member_pid"),
        pl.col("rank").alias("peer_rank"),
    )
    inside = mine.join(peers, on=["comm_id", "peer_node"]).filter(
        (pl.col("peer_owner_pid") == pl.col("member_pid")).fill_null(True),
        pl.col("rank") != pl.col("peer_rank"),
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
    outside = mine.filter(~pl.col("peer_node").is_in(seen_nodes.implode()).fill_null(False)).join(
        missing.select("comm_id", pl.col("only").alias("peer_rank")), on="comm_id"
    )
    columns = [
        "flow",
        "peer_flow",
        "node",
        "nic",
        "peer_node",
        "peer_nic",
        "comm_id",
        "rank",
        "nranks",
        "peer_rank",
    ]
    return pl.concat([inside.select(columns), outside.select(columns)])


def _pairs(
    ends: pl.DataFrame,
    kinds: pl.DataFrame,
    members: pl.DataFrame,
    nics: pl.DataFrame,
    directions: pl.DataFrame,
) -> pl.DataFrame:
    """The point-to-point calls whose data may take a QP, by the calls of its own node only."""
    calls = kinds.filter(pl.col("use") == "pairs").drop("use")
    ways = _with_rails(ends.join(directions, on="flow", how="left"), nics).rename(
        {"rank": "owner", "peer_rank": "peer_owner"}
    )
    sends = calls.filter(pl.col("kind") == "Send").select(
        "node", "comm_id", "rank", pl.col("peer").alias("peer_rank")
    )
    sent = (
        ways.filter(pl.col("direction").fill_null("tx") == "tx")
        .join(sends, on=["node", "comm_id"])
        .filter(
            (pl.col("peer_owner") == pl.col("peer_rank")).fill_null(True),
            pl.col("handed") | (pl.col("owner") == pl.col("rank")),
        )
    )
    receives = calls.filter(pl.col("kind") == "Recv").select(
        "node", "comm_id", "rank", pl.col("peer").alias("peer_rank")
    )
    homes = members.select("comm_id", pl.col("rank").alias("peer_rank"), pl.col("node").alias("home"))
    received = (
        ways.filter(pl.col("direction") == "rx")
        .join(receives, left_on=["node", "comm_id", "owner"], right_on=["node", "comm_id", "rank"])
        .join(homes.unique(["comm_id", "peer_rank"], keep="none"), on=["comm_id", "peer_rank"], how="left")
        .filter(
            (pl.col("home") == pl.col("peer_node")).fill_null(True),
            pl.col("handed") | (pl.col("peer_owner") == pl.col("peer_rank")).fill_null(True),
        )
        .with_columns(rank="owner")
    )
    columns = ["flow", "peer_flow", "node", "peer_node", "comm_id", "rank", "nranks", "peer_rank"]
    return pl.concat([sent.select(columns), received.select(columns)]).with_columns(use=pl.lit("pairs"))
