"""The k-sigma rule of LLMPrism (DSN'25) on flow records, as a fabric's collectors write them.

Published, as noted of the paper: flow records without anything from the job; who talks to whom gives jobs and groups,
silences give steps; a step, a group or a switch is abnormal beyond the mean by k standard deviations, over the
steps, the groups of a step, and the flows of a switch.
Our reading: a record is the traffic of one queue pair between silences, and its rate is bytes over duration; k is 3,
less than a twentieth is not slow, and less than a tenth of a flow's records is chance; a rate is compared with those of
all records of about the same size, of all flows and steps at once. A NIC that sends or receives more than half of the
slow records is named, their link if two do, and else the network between them: which switch a flow crosses is in no
recording.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.baselines.calls import SENT, accuse, sent, verdict
from pulse_bpf.analysis.findings import Evidence
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.pairing import QP

SIGMAS = 3.0
# Of the records of a flow, below which slow ones are chance; and how many there must be.
OFTEN, MIN_RECORDS = 0.1, 3
# Rates of one machine may vary by less than anybody would call slow.
SLOW = 0.95
SILENCE_NS = 1_000_000
SRC, DST = ["node", "nic"], ["peer_node", "peer_nic"]


def locate(calls: pl.LazyFrame | None, recording: Recording) -> dict[str, Any]:
    samples = recording.samples.whole(*QP, "source", "direction", "t_ns", "bin_ns", "bytes", where=SENT)
    records = flow_records(sent(samples)).join(peers(recording), on=QP, how="left")
    window_ns = records.select(pl.col("start_ns").min(), pl.col("end_ns").max()).collect().row(0)
    window_ns = (int(window_ns[0] or 0), int(window_ns[1] or 0))
    low = slow(records).collect()
    if low.is_empty():
        return verdict([], window_ns)
    reference = float(low["mean_gbps"].mean())  # type: ignore[arg-type]
    rate = float(low["gbps"].mean())  # type: ignore[arg-type]
    text = f"{low.height} flow records are slower than the others by {SIGMAS:.0f} standard deviations."
    evidence = Evidence("gbps", rate, reference, low.height, text)
    further: dict[str, Any] = {"kind": "nic-slow", "cause": "nic", "slowdown": reference / max(rate, 1e-9)}
    src, dst = _most(low, SRC), _most(low, DST)
    if src and dst:
        link: dict[str, Any] = {"scope": "link", "kind": "unknown", "cause": "network"}
        ends = {"peer_node": dst[0], "peer_nic": dst[1], "nodes": [src[0], dst[0]]}
        who = {"node": src[0], "nic": src[1]}
        return verdict([accuse(who, window_ns, evidence, **(further | link), **ends)], window_ns)
    if src or dst:
        node, nic = src or dst or ("", "")
        return verdict([accuse({"node": node, "nic": nic}, window_ns, evidence, **further)], window_ns)
    flows = low.select(*SRC, "qpn", *DST).unique().sort(*SRC, "qpn").to_dicts()
    network: dict[str, Any] = {"scope": "network", "kind": "congestion", "cause": "network", "flows": flows}
    return verdict([accuse({}, window_ns, evidence, **(further | network))], window_ns)


def flow_records(samples: pl.LazyFrame) -> pl.LazyFrame:
    """QP, start_ns, end_ns, bytes, gbps of what each queue pair sent between silences."""
    ends_ns = pl.col("t_ns") + pl.col("bin_ns")
    # Many rows become few where they follow each other in the recording, so that only those have to be sorted.
    pieces = _joined(samples.select(*QP, "bytes", start_ns="t_ns", end_ns=ends_ns))
    in_order = pieces.sort(*QP, "start_ns").with_columns(pl.col("end_ns").cum_max().over(QP))
    return _joined(in_order).with_columns(gbps=pl.col("bytes") * 8 / (pl.col("end_ns") - pl.col("start_ns")))


def _joined(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Neighbours among `rows` (QP, bytes, start_ns, end_ns) as one, in order of time, up to the next silence."""
    start_ns = pl.col("start_ns")
    begins = pl.any_horizontal(
        *(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in QP),
        start_ns < start_ns.shift(1),
        start_ns - pl.col("end_ns").shift(1) > SILENCE_NS,
    )
    return (
        rows.with_columns(number=begins.fill_null(True).cum_sum().set_sorted())
        .group_by("number")
        .agg(pl.col(QP).first(), start_ns.min(), pl.col("end_ns").max(), pl.col("bytes").sum())
        .drop("number")
    )


def peers(recording: Recording) -> pl.LazyFrame:
    """QP, peer_node and peer_nic by the addresses of the NICs; of a number used again, the last."""
    homes = (
        recording["nics"]
        .lazy()
        .explode("gids")
        .select(
            pl.col("gids").alias("peer_gid"),
            pl.col("node").alias("peer_node"),
            pl.col("nic").alias("peer_nic"),
        )
        .unique("peer_gid")
    )
    pairs = recording["qps"].lazy().drop_nulls("peer_gid").unique(QP, keep="last", maintain_order=True)
    return pairs.select(*QP, "peer_gid").join(homes, on="peer_gid").drop("peer_gid")


def slow(records: pl.LazyFrame) -> pl.LazyFrame:
    """The records that are SIGMAS standard deviations slower than the mean of their size, with that mean."""
    return (
        records.with_columns(size=pl.col("bytes").log(2).round(), records=pl.len().over(QP))
        .with_columns(mean_gbps=pl.col("gbps").mean().over("size"), sigma=pl.col("gbps").std().over("size"))
        .filter(
            pl.col("gbps") < pl.col("mean_gbps") - SIGMAS * pl.col("sigma"),
            pl.col("gbps") < SLOW * pl.col("mean_gbps"),
        )
        .filter(pl.len().over(QP) >= pl.max_horizontal(pl.lit(MIN_RECORDS), OFTEN * pl.col("records")))
    )


def _most(low: pl.DataFrame, end: list[str]) -> tuple[str, str] | None:
    """The NIC that is this end of more than half of the records."""
    counts = low.group_by(end).len().filter(pl.col("len") > low.height / 2)
    return None if counts.is_empty() else counts.select(end).row(0)
