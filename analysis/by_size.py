"""Which queue pairs are those of a ring or of an all-to-all, by how many there are of a size."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.bursts import Bursts
from pulse_bpf.schema import F64

# So near are all bytes of a queue pair to a channel's part of all calls where each was seen from begin to end.
EXACT = 0.002
# So near are bytes of a ring's channel to its part of all calls while operators are on their way, and to those of
# another channel; and those of all channels to all calls, up to this factor, where calls before the recording began
# were not seen. What has less than this share of a channel's may be a tree's.
ABOUT, ALIKE_CHANNELS, WHOLE, LEAST_BESIDE = 0.05, 0.02, 1.25, 0.1
# So near are bytes of an all-to-all to one peer to those to another, while those of a ring's channel are not.
SAME = 0.0005
# A tree has at most so many, its parent and two children (ncclTopoPostset in src/graph/connect.cc); a ring has two.
PEERS = 3


def alike_to_all(
    candidates: pl.DataFrame, scored: pl.DataFrame, directions: pl.DataFrame, bursts: Bursts
) -> pl.DataFrame:
    """The rows in `scored` (by_volume.score) of what a rank sends to all others, with `confidence` and `evidence`.

    Those are the `candidates` of one size to more peers than a ring or a tree has, as many to each. Where one peer has
    more of that size, they are a ring's too, and nothing is said. Assumes that a rank sends as much to all peers; where
    it does not, sizes differ and nothing is said.
    """
    key = ["flow", "comm_id", "use", "rank", "peer_rank"]
    of_rank = ["node", "comm_id", "use", "rank", "direction"]
    size = [*of_rank, "size"]
    next_size = pl.col("bytes") > (1 + SAME) * pl.col("bytes").shift().over(of_rank)
    carried = directions.join(bursts.totals(), on="flow").select(
        "flow", "direction", bytes=pl.when(pl.col("direction") == "tx").then("tx").otherwise("rx")
    )
    found = (
        candidates.filter(pl.col("use") != "collective", pl.col("peer_rank").is_not_null())
        .join(carried.filter(pl.col("bytes") > 0), on="flow")
        .sort(*of_rank, "bytes", "flow")
        .with_columns(size=next_size.fill_null(False).cum_sum().over(of_rank))
        .with_columns(of_peer=pl.len().over(*size, "peer_rank"))
        .filter(
            pl.col("peer_rank").n_unique().over(size) > PEERS,
            pl.col("of_peer").n_unique().over(size) == 1,
        )
        .filter(pl.len().over("flow") == 1)
    )
    said = {"confidence": pl.lit(0.9), "evidence": pl.lit("as large as to all other peers")}
    return scored.join(found.select(key), on=key, how="semi").with_columns(**said)


def channels(scored: pl.DataFrame, directions: pl.DataFrame) -> pl.DataFrame:
    """flow, comm_id, whether it is a `channel` of a ring that is whole, and what is `told` by that, with `confidence`.
    Of what is far smaller nothing is said.

    A ring is whole when flows between two nodes are as many as their part of all calls makes, exactly or about; else,
    when those of one size are all together about as large as all calls. Assumes that all rings of a communicator visit
    nodes in one order, so that each node sends to one other, and gets from one.
    """
    where, way = ["node", "comm_id", "direction"], "peer_node"
    parts = pl.col("called") / pl.col("carried")
    apart = pl.col("carried") > (1 + ALIKE_CHANNELS) * pl.col("carried").shift().over(*where, way)
    flows = (
        scored.filter(pl.col("use") == "collective", pl.col("called") > 0, pl.col("carried") > 0)
        .unique(["flow", "comm_id"], maintain_order=True)
        .join(directions, on="flow")
        .drop_nulls(way)
        .sort(*where, way, "carried", "flow")
        .with_columns(
            exactly=pl.when(pl.col("apart") <= EXACT).then(parts.round()),
            about=pl.when((parts / parts.round() - 1).abs() <= ABOUT).then(parts.round()),
            size=apart.fill_null(False).cum_sum().over(*where, way).cast(F64),
        )
    )
    as_many = pl.col("flows") == pl.col("ring")
    as_large = pl.col("whole").is_between(1 / WHOLE, WHOLE)
    told, left = [], flows
    for by, is_whole, confidence, evidence in (
        ("exactly", as_many, 0.9, "its part of all calls"),
        ("about", as_many, 0.7, "about its part of all calls"),
        ("size", as_large, 0.7, "as large as all channels of a ring"),
    ):
        rings = (
            left.group_by(*where, pl.col(way).alias("to"), pl.col(by).alias("ring"))
            .agg(
                flows=pl.len(),
                each=pl.col("carried").mean(),
                whole=pl.col("carried").sum() / pl.col("called").max(),
            )
            .filter(pl.col("flows") > 1, is_whole)
            .unique(where, keep="none")
        )
        channel = (pl.col(by) == pl.col("ring")).fill_null(False) & (pl.col(way) == pl.col("to"))
        told.append(
            left.join(rings, on=where)
            .filter(pl.col("carried") >= LEAST_BESIDE * pl.col("each"))
            .select(
                "flow", "comm_id", channel=channel, confidence=pl.lit(confidence), evidence=pl.lit(evidence)
            )
        )
        left = left.join(rings, on=where, how="anti")
    return pl.concat(told)
