"""Flows beside the truth of a simulated recording: how many bytes are attributed rightly, wrongly and not at all."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from pulse_bpf.analysis import attribute
from pulse_bpf.analysis.load import Recording


@dataclass(frozen=True)
class Owners:
    """Shares of the bytes on the job's queue pairs: communicator and peer node `right`, or one of them `wrong`, or the
    first right and the other not known (`unpaired`); the rest is listed.

    A peer outside the recording has no name: its address is right.

    `caller`, `caller_wrong`: shares of the bytes whose rank on this node is named rightly, or wrongly; the rest
    names several ranks, which contain the true ones.
    `foreign`: bytes of queue pairs that are not the job's and that were attributed nevertheless.
    """

    right: float
    wrong: float
    unpaired: float
    caller: float
    caller_wrong: float
    foreign: int
    bytes: int


def compare(recording: Recording, flows: pl.DataFrame, truth: pl.DataFrame) -> Owners:
    """The `flows` (attribute.FLOWS) of a recording beside its `truth` (truth_operators.parquet)."""
    rows = attribute.samples(recording, recording.lives)
    sizes = rows.group_by("flow").agg(pl.col("bytes").sum())
    # A row of a collective also lists the queue pairs that serve point-to-point calls of the same two processes.
    pairs = pl.col("kind").is_in(["Send", "Recv", "Group"])
    true = (
        truth.explode("flows")
        .group_by(pl.col("flows").alias("flow"))
        .agg(
            pl.col("comm_id").first().alias("true_comm"),
            pl.col("peer_node").first().alias("true_peer"),
            pl.col("rank").filter(pairs).unique().alias("callers"),
            pl.col("rank").filter(~pairs).unique().alias("members"),
        )
    )
    recorded = recording["nodes"]["node"].to_list()
    found = sizes.join(flows, on="flow", how="left").join(true, on="flow", how="left")
    ours, known = pl.col("true_comm").is_not_null(), pl.col("comm_id").is_not_null()
    same_comm, unpaired = pl.col("comm_id") == pl.col("true_comm"), pl.col("peer_node").is_null()
    right = same_comm & (
        (pl.col("peer_node") == pl.col("true_peer"))
        | (pl.col("peer_node").str.starts_with("::ffff:") & ~pl.col("true_peer").is_in(recorded))
    )
    true_ranks = pl.when(pl.col("callers").list.len() > 0).then("callers").otherwise("members")
    named = pl.col("rank").is_in(true_ranks)
    outside = pl.col("rank").is_null() & (true_ranks.list.set_difference("ranks").list.len() > 0)
    size = pl.col("bytes")
    return Owners(
        *found.filter(ours)
        .select(
            right=size.filter(right.fill_null(False)).sum() / size.sum(),
            wrong=size.filter(known & ~right.fill_null(False) & ~(same_comm & unpaired)).sum() / size.sum(),
            unpaired=size.filter(known & same_comm & unpaired).sum() / size.sum(),
            caller=size.filter(known & named.fill_null(False)).sum() / size.sum(),
            caller_wrong=size.filter(known & (outside | ~named).fill_null(False)).sum() / size.sum(),
        )
        .row(0),
        int(found.filter(~ours & known)["bytes"].sum()),
        int(found.filter(ours)["bytes"].sum()),
    )
