"""How fast ports and flows send and receive in each operator, beside the others of it."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.cover import DST, EDGE, SRC

# Slower than its peers by this factor at least, and by this many robust deviations of all flows.
SLOW_RATIO, DEVIATIONS = 0.75, 5.0
# From this ratio of median bins on, a flow that looks slow over windows is starved. Bins that hold few packets
# take few values, so it is nearer to 1.
STARVED_RATIO = 0.9
# What is slow by itself is steady: its median bin is near its fastest ones, at least so near as with the steadiest
# slow port of the operator. What is starved now and then sends faster than the slow one.
STEADY_SHARE = 0.97
# Bins of an operator without which its rate is not judged.
MIN_BINS = 5
# Of the bytes of an operator's largest flow, those without which a flow carries no data.
LEAST_PART = 0.02
# Operators whose median makes one value, and how many such values a flow must be slow in.
SMOOTHED, MIN_OPERATORS = 5, 5
OPERATOR = ["comm_id", "kind", "step"]
# Columns of the operators that are looked at.
NEEDED = (
    *(
        *OPERATOR,
        "level",
        "direction",
        "pid",
        "node",
        "nic",
        "peer_node",
        "peer_nic",
        "start_ns",
        "last_byte_ns",
    ),
    *("bytes", "bin_ns", "burst_gbps", "wmed_gbps", "p95_gbps"),
)


def rate_cells(aligned: pl.DataFrame) -> pl.DataFrame:
    """One row per operator (comm_id, kind, step) and flow (EDGE), in the shape `cover` wants.

    A port's rate is that of all its flows together, since they share it: `tx_*` of the sending, `rx_*` of
    the receiving port, in Gbit/s while bursting. Its ratio is the running median over SMOOTHED operators of the
    rate against the upper quartile of the other ports in the same operator. `link_ratio` compares a flow with
    those that share its sender and with those that share its receiver, the better of both; null where nothing
    shares them.
    """
    flows = _measured(aligned).filter(pl.col("level") == "flow")
    ends = [
        flows.filter(pl.col("direction") == way).select(
            *OPERATOR,
            *(pl.col(name).alias(edge) for name, edge in zip(columns, EDGE, strict=True)),
            pl.col("burst_gbps").alias(f"{way}_flow_gbps"),
            pl.col("start_ns").alias(f"{way}_start_ns"),
        )
        for way, columns in (
            ("tx", ("node", "nic", "peer_node", "peer_nic")),
            ("rx", ("peer_node", "peer_nic", "node", "nic")),
        )
    ]
    key = [*OPERATOR, *EDGE]
    # Where a process has several flow groups to one peer port they count as one.
    ends = [
        end.group_by(key).agg(pl.col("^.*_flow_gbps$").sum(), pl.col("^.*_start_ns$").min()) for end in ends
    ]
    cells = ends[0].join(ends[1], on=key, how="full", coalesce=True, nulls_equal=True)
    cells = cells.with_columns(
        start_ns=pl.min_horizontal("tx_start_ns", "rx_start_ns"),
        flow_gbps=pl.min_horizontal("tx_flow_gbps", "rx_flow_gbps"),
    )
    ports = _port_rates(aligned)
    for way, port, flag in (("tx", SRC, "at_src"), ("rx", DST, "at_dst")):
        values = ("gbps", "reference", "ratio", "span_ns", "bytes")
        rates = ports.filter(pl.col("direction") == way).drop("direction")
        rates = rates.rename(
            {"node": port[0], "nic": port[1], "slow": flag} | {name: f"{way}_{name}" for name in values}
        )
        cells = cells.join(rates, on=[*OPERATOR, *port], how="left", nulls_equal=True)
    cells = cells.with_columns(
        (pl.col("flow_gbps") / _others("flow_gbps", [*OPERATOR, *port], 0.5)).alias(ratio)
        for ratio, port in (("beside_src", SRC), ("beside_dst", DST))
    )
    cells = cells.with_columns(
        link_ratio=pl.when(pl.col("beside_src").is_not_null() & pl.col("beside_dst").is_not_null()).then(
            pl.max_horizontal("beside_src", "beside_dst")
        )
    )
    cells = cells.with_columns(
        _smooth(pl.col(ratio), EDGE).alias(ratio) for ratio in ("beside_src", "beside_dst", "link_ratio")
    )
    # What a port sends is slow because of the port only if its flows are slow beside what others send to the same
    # receivers, and what it receives only if they are slow beside what the same senders send elsewhere.
    cells = cells.with_columns(
        at_src=pl.col("at_src")
        & (pl.col("beside_dst").median().over(*OPERATOR, *SRC) < SLOW_RATIO).fill_null(True),
        at_dst=pl.col("at_dst")
        & (pl.col("beside_src").median().over(*OPERATOR, *DST) < SLOW_RATIO).fill_null(True),
        at_link=_slow("link_ratio", EDGE),
    )
    # Seen in few operators after all that, it is nothing.
    flags = ("at_src", "at_dst", "at_link")
    cells = cells.with_columns(
        pl.col(flag) & (pl.col(flag).sum().over("comm_id", "kind", *EDGE) >= MIN_OPERATORS) for flag in flags
    )
    worst = pl.min_horizontal(
        pl.when(flag).then(ratio)
        for flag, ratio in (("at_src", "tx_ratio"), ("at_dst", "rx_ratio"), ("at_link", "link_ratio"))
    )
    return cells.with_columns(weight=(-worst.log()).fill_null(0.0)).sort(key)


def _measured(aligned: pl.DataFrame) -> pl.DataFrame:
    """The rows whose operators are long enough to judge a rate: that of fast bins where these are wide."""
    bins = (pl.col("last_byte_ns") - pl.col("start_ns")) / pl.col("bin_ns")
    # Of a source that sees only what is sent, credits and acknowledgements are rows as well.
    data = pl.col("bytes") >= LEAST_PART * pl.col("bytes").max().over(*OPERATOR, "direction")
    rows = aligned.select(NEEDED).filter(pl.col("step").is_not_null())
    rows = rows.filter(data).with_columns(
        burst_gbps=pl.coalesce("burst_gbps", pl.when(bins >= MIN_BINS).then("p95_gbps"))
    )
    return rows.filter(pl.col("burst_gbps").is_not_null())


def _port_rates(aligned: pl.DataFrame) -> pl.DataFrame:
    """Per operator, port and direction: gbps, reference, ratio, span_ns, bytes, and whether it is slow.

    A port that receives as fast as others can send is not slow, however much faster several senders together
    reach somebody else.
    """
    rows = _measured(aligned)
    summed = rows.filter(pl.col("level") == "nic")
    port = ["node", "nic", "direction"]
    single = rows.filter(pl.col("level") == "flow").join(
        summed, on=[*OPERATOR, *port, "pid"], how="anti", nulls_equal=True
    )
    rates = (
        pl.concat([summed, single])
        .with_columns(span_ns=pl.col("last_byte_ns") - pl.col("start_ns"))
        .group_by(*OPERATOR, *port)
        .agg(pl.col("burst_gbps", "wmed_gbps", "p95_gbps", "bytes").sum(), pl.col("span_ns").max())
    )
    for rate in ("burst_gbps", "wmed_gbps"):
        sent = pl.col(rate).filter(pl.col("direction") == "tx").quantile(0.75).over(OPERATOR)
        reference = pl.min_horizontal(
            _others(rate, [*OPERATOR, "direction"], 0.75), pl.when(pl.col("direction") == "rx").then(sent)
        )
        # Who moves less than the others, as the leaves of a tree, may do so at a lower rate: it takes no longer.
        rates = rates.with_columns(reference.alias(f"{rate}_reference"), pace=pl.col(rate) / pl.col("bytes"))
        rates = rates.with_columns(usual_pace=_others("pace", [*OPERATOR, "direction"], 0.75))
        ratio = pl.max_horizontal(
            pl.col(rate) / pl.col(f"{rate}_reference"), pl.col("pace") / pl.col("usual_pace")
        )
        rates = rates.with_columns(_smooth(ratio, port).alias(f"{rate}_ratio"))
    rates = rates.with_columns(
        steady=_smooth(pl.col("wmed_gbps") / pl.max_horizontal("p95_gbps", "wmed_gbps"), port),
        # The median bin must be slow too: what bursts at full speed inside a window is starved, not slow.
        candidate=_slow("burst_gbps_ratio", port) & (pl.col("wmed_gbps_ratio") < STARVED_RATIO),
    )
    steadiest = pl.col("steady").filter("candidate").max().over(*OPERATOR, "direction")
    slow = pl.col("candidate") & (pl.col("steady") >= STEADY_SHARE * steadiest)
    return rates.select(
        *OPERATOR,
        *port,
        pl.col("burst_gbps").alias("gbps"),
        pl.col("burst_gbps_reference").alias("reference"),
        pl.col("burst_gbps_ratio").alias("ratio"),
        "span_ns",
        "bytes",
        slow.alias("slow"),
    )


def _others(rate: str, group: list[str], share: float) -> pl.Expr:
    """The quantile `share` of `rate` over the others of the group, the higher of two; null for one alone."""
    ordered, place = pl.col(rate).sort(), pl.col(rate).rank("ordinal").cast(pl.Int64) - 1
    quartile = ((pl.len().cast(pl.Int64) - 2).clip(0) * share).ceil().cast(pl.Int64)
    of_two = [ordered.slice(at, 1).first().over(group) for at in (quartile, quartile + 1)]
    others = pl.when((place <= quartile).over(group)).then(of_two[1]).otherwise(of_two[0])
    return pl.when(pl.len().over(group) > 1, pl.col(rate).is_not_null()).then(others)


def _smooth(ratio: pl.Expr, which: list[str]) -> pl.Expr:
    """The running median of `ratio` over the steps of one kind of operator."""
    return ratio.rolling_median(SMOOTHED, min_samples=3, center=True).over(
        "comm_id", "kind", *which, order_by="step"
    )


def _slow(ratio: str, which: list[str]) -> pl.Expr:
    """Whether `ratio` is low, by more than it wavers over time, in enough operators."""
    log, group = pl.col(ratio).log(), ["comm_id", "kind"]
    # Between medians of separate operators: a fault that begins half-way is no wavering.
    moves = (pl.col(ratio) / pl.col(ratio).shift(SMOOTHED)).log().abs().over(*group, *which, order_by="step")
    wavers = 1.4826 * moves.median().over(group) / 2**0.5
    slow = log < pl.min_horizontal(pl.lit(SLOW_RATIO).log(), -DEVIATIONS * wavers)
    return slow & (slow.sum().over(*group, *which) >= MIN_OPERATORS)
