"""Rates that are low because of what else happens at the time: a port that sends more, or receivers that are full."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.rates import LEAST_PART, OPERATOR

PORT = ["node", "nic"]
# How far above a rate a port is when it is faster: by its own bins, and by the sum of flows that bins blur.
OVER, OVER_BLURRED = 1.03, 1.3
# Of what a port sends in an operator, what must go to receivers that are full for it to be held up by them, and what it
# must send while it sends more for the operator's rate not to be the port's.
MOSTLY_FULL, MOSTLY_SHARED = 0.9, 0.5


def not_shared(aligned: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """`rows`, not `low` where the port sends more at the time than the row says: for another operator, as far as known.

    So do the flows of one operator that are wrongly taken to be of two.
    """
    rows = rows.with_row_index("row")
    low = rows.filter("low").select("row", "max_gbps", *PORT, "pid", "comm_id", "op_seq")
    sent = aligned.lazy().filter(
        pl.col("level") == "flow",
        pl.col("direction") == "tx",
        pl.col("bytes") > 0,
        pl.col("last_byte_ns") > pl.col("start_ns"),
    )
    flows = (
        sent.join(low.lazy(), on=PORT, how="semi")
        .select(
            *PORT,
            *("pid", "comm_id", "op_seq", "bytes"),
            at_ns=(pl.col("start_ns") + pl.col("last_byte_ns")) // 2,
            start_ns="start_ns",
            last_byte_ns="last_byte_ns",
            gbps=pl.min_horizontal(
                "max_gbps", pl.col("bytes") * 8 / (pl.col("last_byte_ns") - pl.col("start_ns"))
            ),
        )
        .collect()
    )
    moments = low.join(flows, on=[*PORT, "pid", "comm_id", "op_seq"]).sort("at_ns")
    for edge in ("start_ns", "last_byte_ns"):
        # What all flows that began, or ended, by then send while they do.
        until = flows.sort(edge).select(
            *PORT, pl.col(edge).alias("at_ns"), pl.col("gbps").cum_sum().over(PORT).alias(f"by_{edge}")
        )
        moments = moments.join_asof(until, on="at_ns", by=PORT, check_sortedness=False)
    sends = pl.col("by_start_ns").fill_null(0.0) - pl.col("by_last_byte_ns").fill_null(0.0)
    faster = pl.col("bytes").filter(sends > OVER_BLURRED * pl.col("max_gbps")).sum() / pl.col("bytes").sum()
    shared = moments.group_by("row").agg(share=faster).filter(pl.col("share") >= MOSTLY_SHARED)
    return rows.with_columns(low=pl.col("low") & ~pl.col("row").is_in(shared["row"].implode())).drop("row")


def not_held_up(aligned: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """`rows`, not `low` where the receivers are full: who shares their ports sends at a constant part of a rate.

    A receiver is full when the senders of one operator together reach what ports usually send, by more than half
    of what it would lack if this sender alone were slow. What the senders do at the same time counts.
    """
    rows = rows.with_row_index("row")
    low = rows.filter("low")
    to = ["peer_node", "peer_nic"]
    sent = aligned.lazy().filter(
        pl.col("level") == "flow", pl.col("direction") == "tx", pl.col("step").is_not_null()
    )
    flows = (
        sent.join(low.lazy(), on=OPERATOR, how="semi")
        .select(*OPERATOR, *PORT, *to, "bytes", "wmed_gbps", "start_ns", "last_byte_ns")
        .collect()
    )
    flows = flows.filter(pl.col("bytes") >= LEAST_PART * pl.col("bytes").max().over(OPERATOR))
    ratio = pl.col("max_gbps") / pl.col("usual_gbps")
    mine = low.select("row", *OPERATOR, *PORT, "usual_gbps", ratio=ratio).join(flows, on=[*OPERATOR, *PORT])
    both = mine.join(flows.drop("bytes"), on=[*OPERATOR, *to], suffix="_other")
    together_ns = pl.min_horizontal("last_byte_ns", "last_byte_ns_other") - pl.max_horizontal(
        "start_ns", "start_ns_other"
    )
    share = (together_ns / (pl.col("last_byte_ns") - pl.col("start_ns"))).clip(0, 1)
    full = both.group_by("row", *to).agg(
        pl.col("bytes").first(),
        lacks=1 - (pl.col("wmed_gbps_other") * share).sum() / pl.col("usual_gbps").first(),
        least=(1 - pl.col("ratio").first()) / share.sum(),
        senders=share.sum(),
    )
    full = full.with_columns(full=(pl.col("senders") > 1.5) & (pl.col("lacks") < 0.5 * pl.col("least")))
    held = full.group_by("row").agg(
        full=pl.col("bytes").filter("full").sum() >= MOSTLY_FULL * pl.col("bytes").sum()
    )
    held_up = pl.col("row").is_in(held.filter("full")["row"].implode())
    return rows.with_columns(low=pl.col("low") & ~held_up).drop("row")
