"""The ratios of Aegis (NSDI'25, Alibaba): who launched less, who is short, who sends slowly.

Published, as noted of the paper: a modified library counts, per GPU, collectives launched and work requests posted and
completed. In a stop, the GPU that launched fewer than its group is at fault; if all launched as many, the one whose
requests did not complete. In a slow-down, a GPU whose time in collectives is below 0.8 of its group's computes too
slowly, and one whose requests take more than 1.5 times the mean communicates too slowly.
Our reading: requests are not in a recording. Their rate is stood for by the byte-weighted median bin of what the NIC
sends, which is the rate of a request where bins are no longer than one lasts; whether they complete is unknown, so a
stop after equal launches goes to all that wait, and so does a slow-down that is spread over several machines; nothing
is named where that is every machine. A group of all ranks beside smaller ones is not compared: its members play
different parts.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.baselines.calls import (
    PROCESS,
    SENT,
    accuse,
    accuse_group,
    collectives,
    culprit,
    of_parts,
    sent,
    stopped,
    timed,
    verdict,
    window,
)
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.load import Recording
from pulse_bpf.schema import PORT_SAMPLES

SHORT, SLOW = 0.8, 1.5


def locate(calls: pl.LazyFrame | None, recording: Recording) -> dict[str, Any]:
    window_ns = window(timed(calls))
    found = (
        _stop(calls, recording, window_ns)
        # Late ranks do not slow requests down, but a slow port makes ranks late.
        or _communicating(calls, recording, window_ns)
        or _computing(calls, window_ns)
    )
    return verdict(found, window_ns)


def _stop(calls: pl.LazyFrame | None, recording: Recording, window_ns: tuple[int, int]) -> list[Finding]:
    """Who launched fewer collectives than the rest of a group that stopped, and waits for no group itself."""
    waiting = stopped(calls, recording).collect()
    if waiting.is_empty():
        return []
    launched = (
        collectives(calls)
        .join(waiting.lazy(), on="comm_id", how="semi")
        .group_by(*PROCESS, "gpu", "comm_id")
        .agg(pl.len().alias("launches"))
        .with_columns(most=pl.col("launches").max().over("comm_id"))
    )
    behind = launched.filter(pl.col("launches") < pl.col("most")).with_columns(weight=1.0).collect()
    free = behind.join(waiting, on=PROCESS, how="anti")
    who = culprit(behind if free.is_empty() else free)
    stop: dict[str, Any] = {"kind": "hang", "cause": "stop"}
    text = f"{waiting.height} calls never ended; " + (
        "all launched the same." if who is None else "it launched less."
    )
    evidence = Evidence("unfinished", float(waiting.height), 0.0, waiting.height, text)
    if who is None:
        return accuse_group(waiting["node"].unique().to_list(), timed(calls), window_ns, evidence, **stop)
    return [accuse(who, window_ns, evidence, **stop)]


def _computing(calls: pl.LazyFrame | None, window_ns: tuple[int, int]) -> list[Finding]:
    """Whose time in a group's collectives is below SHORT of the group's mean."""
    short = (
        of_parts(collectives(calls))
        .group_by(*PROCESS, "gpu", "comm_id")
        .agg(pl.col("duration_ns").mean(), pl.col("duration_ns").count().alias("operators"))
        .with_columns(mean_ns=pl.col("duration_ns").mean().over("comm_id"))
        .filter(pl.col("duration_ns") < SHORT * pl.col("mean_ns"))
        .with_columns(weight=(pl.col("mean_ns") - pl.col("duration_ns")) * pl.col("operators"))
        .collect()
    )
    if short.is_empty():
        return []
    ratio = short.select((pl.col("duration_ns") / pl.col("mean_ns")).min()).item()
    text = f"It spends {ratio:.2f} of its group's mean time in collectives: the others wait for it."
    evidence = Evidence("duration_ratio", ratio, SHORT, int(short["operators"].sum()), text)
    who = culprit(short)
    if who is None:
        return accuse_group(short["node"].unique().to_list(), timed(calls), window_ns, evidence)
    return [accuse(who, window_ns, evidence)]


def _communicating(
    calls: pl.LazyFrame | None, recording: Recording, window_ns: tuple[int, int]
) -> list[Finding]:
    """The NIC whose requests take more than SLOW times the mean; the machines, if several do."""
    port = ["node", "nic"]
    columns = [name for name in PORT_SAMPLES if name != "packets"]
    share = pl.col("bytes").cum_sum().over(port) / pl.col("bytes").sum().over(port)
    rates = (
        sent(
            pl.concat(
                [recording["port_samples"].select(columns), recording.samples.whole(*columns, where=SENT)]
            )
        )
        .group_by(*port, "t_ns", "bin_ns")
        .agg(pl.col("bytes").sum().cast(pl.Float64))
        .with_columns(gbps=pl.col("bytes") * 8 / pl.col("bin_ns"))
        .sort("gbps")
        .with_columns(share=share)
        .filter(pl.col("share") >= 0.5)
        .group_by(port)
        .agg(pl.col("gbps").first())
        .with_columns(
            slowdown=(1 / pl.col("gbps")) / (1 / pl.col("gbps")).mean(), reference=pl.col("gbps").mean()
        )
        .filter(pl.col("slowdown") > SLOW)
        .sort("slowdown", *port, descending=[True, False, False])
        .collect()
    )
    if rates.is_empty():
        return []
    top = rates.row(0, named=True)
    text = f"What it sends moves at {top['gbps']:.1f} Gbit/s, at {top['reference']:.1f} on average over all."
    evidence = Evidence("gbps", top["gbps"], top["reference"], 0, text)
    further: dict[str, Any] = {"kind": "nic-slow", "cause": "nic", "slowdown": top["slowdown"]}
    if rates.height > 1:
        return accuse_group(rates["node"].unique().to_list(), timed(calls), window_ns, evidence, **further)
    return [accuse({"node": top["node"], "nic": top["nic"]}, window_ns, evidence, **further)]
