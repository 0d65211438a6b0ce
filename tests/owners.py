"""Flows beside the truth of a simulated recording: how many bytes are attributed rightly, wrongly and not at all.

`python tests/owners.py RECORDING...` prints a line for each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pulse_bpf.analysis import attribute
from pulse_bpf.analysis.load import load


@dataclass(frozen=True)
class Owners:
    """Shares of the bytes on the job's queue pairs: communicator and peer node `right`, or `wrong`; the rest is listed.

    A peer outside the recording has no name: its address is right.

    `caller`, `caller_wrong`: shares of the bytes whose rank on this node is named rightly, or wrongly; the rest
    names several ranks, which contain the true ones.
    `foreign`: bytes of queue pairs that are not the job's and that were attributed nevertheless.
    """

    right: float
    wrong: float
    caller: float
    caller_wrong: float
    foreign: int
    bytes: int


def compare(directory: Path) -> Owners:
    """The attribution of the recording in `directory` beside its truth_operators.parquet."""
    recording = load([directory])
    rows = attribute.samples(recording, recording.lives)
    flows = attribute.flows(recording)
    sizes = rows.group_by("flow").agg(pl.col("bytes").sum())
    # A row of a collective also lists the queue pairs that serve point-to-point calls of the same two processes.
    pairs = pl.col("kind").is_in(["Send", "Recv", "Group"])
    truth = (
        pl.read_parquet(directory / "truth_operators.parquet")
        .explode("flows")
        .group_by(pl.col("flows").alias("flow"))
        .agg(
            pl.col("comm_id").first().alias("true_comm"),
            pl.col("peer_node").first().alias("true_peer"),
            pl.col("rank").filter(pairs).unique().alias("callers"),
            pl.col("rank").filter(~pairs).unique().alias("members"),
        )
    )
    recorded = recording["nodes"]["node"].to_list()
    found = sizes.join(flows, on="flow", how="left").join(truth, on="flow", how="left")
    ours, known = pl.col("true_comm").is_not_null(), pl.col("comm_id").is_not_null()
    right = (pl.col("comm_id") == pl.col("true_comm")) & (
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
            wrong=size.filter(known & ~right.fill_null(False)).sum() / size.sum(),
            caller=size.filter(known & named.fill_null(False)).sum() / size.sum(),
            caller_wrong=size.filter(known & (outside | ~named).fill_null(False)).sum() / size.sum(),
        )
        .row(0),
        int(found.filter(~ours & known)["bytes"].sum()),
        int(found.filter(ours)["bytes"].sum()),
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = compare(Path(name))
        print(
            f"{Path(name).name:28} right {found.right:8.3%} wrong {found.wrong:8.3%} "
            f"caller {found.caller:8.3%} wrong {found.caller_wrong:8.3%} of {found.bytes} foreign {found.foreign}",
            flush=True,
        )
