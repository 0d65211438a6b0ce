"""Which channel of its communicator a queue pair is."""

from __future__ import annotations

import polars as pl

from pulse_bpf.schema import I32

CONNECTION = ["node", "nic", "comm_id", "rank", "peer_rank"]


def with_channels(flows: pl.DataFrame, directions: pl.DataFrame, channels: pl.DataFrame) -> pl.DataFrame:
    """`flows` (attribute.FLOWS) with `channel` where a communicator's layout tells it.

    A channel has a connection each way to every neighbour in its ring and its tree, and NCCL makes those to one peer in
    the order of channels (ncclTransportP2pSetup in src/transport.cc): so where two ranks have as many queue pairs of a
    direction as channels between them, these are numbered alike. Unknown where some were idle, or one has several.
    """
    used = flows.filter(pl.col("use") == "collective", pl.col("rank").is_not_null()).join(
        directions, on="flow", how="left"
    )
    here = [*CONNECTION, "direction"]
    busy = pl.col("direction").is_not_null().all().over(CONNECTION)
    counted = used.filter(busy).with_columns(
        number=pl.col("qpn").rank("ordinal").over(here), many=pl.len().over(here)
    )
    between = ["comm_id", "rank", "peer_rank", "direction"]
    neighbours = pl.concat(
        [
            channels.select(
                "comm_id", "rank", "channel", pl.col(name).alias("peer_rank"), direction=pl.lit(way)
            )
            for name, way in (("ring_next", "tx"), ("ring_prev", "rx"), ("tree_up", "tx"), ("tree_up", "rx"))
        ]
        + [
            channels.explode("tree_down").select(
                "comm_id", "rank", "channel", pl.col("tree_down").alias("peer_rank"), direction=pl.lit(way)
            )
            for way in ("tx", "rx")
        ]
    )
    known = (
        neighbours.drop_nulls()
        .unique()
        .with_columns(
            number=pl.col("channel").rank("ordinal").over(between),
            many=pl.len().over(between),
            found="channel",
        )
        .drop("channel")
    )
    # Those of a rank are on one NIC, or else their order is not known.
    whole = counted.filter(pl.len().over(between) == pl.col("many"))
    found = whole.join(known, on=[*between, "number", "many"]).select("flow", "found")
    return (
        flows.join(found, on="flow", how="left", maintain_order="left")
        .with_columns(channel=pl.col("found").cast(I32))
        .drop("found")
    )
