"""What a report says beside figures: the verdict in a line, what a kind of fault means, what would settle a doubt."""

from __future__ import annotations

from math import isnan
from typing import Any

import polars as pl

from pulse_bpf.analysis.clock_offsets import ONE_CLOCK_NS
from pulse_bpf.analysis.findings import Finding, Findings
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.seen import MAX_INCOMPLETE, MAX_LOST, MAX_UNATTRIBUTED, MIN_JUDGED
from pulse_bpf.analysis.slow import speed
from pulse_bpf.analysis.text import suspect

MEANING = {
    "gpu-slow": "It comes late to each operator because it computes longer than its peers; all of them wait for it.",
    "gpu-contended": "Something else uses its GPU, so that it copies and reduces in bursts; all others wait for it.",
    "host-cpu": "Its threads do not get the CPU time that they need, so that its calls and transfers come late.",
    "host-pause": "Its process stops now and then, and calls late afterwards; all others wait meanwhile.",
    "pcie-slow": "Data moves slowly between this port and the memory of its machine, in both directions.",
    "nic-slow": "This port sends slowly and without a pause; the ports around it send fast, and wait for it.",
    "nic-down": "This port was down; what should have passed it waited, or had to be sent again.",
    "lossy-link": "Packets are lost on this cable, or at its port, and sent again; everybody waits for these repeats.",
    "congestion": "Traffic of others fills a port of the network that this job needs. No machine is at fault.",
    "path-collision": "Flows of this job share one path of the network, and each gets a part of it. No machine is at "
    "fault.",
    "pause-storm": "This port keeps its switch from sending to it, so that all who send to it have to wait.",
    "intra-node-slow": "Data moves slowly between the GPUs inside this machine, and its neighbours wait for it.",
    "hang": "It stopped, and all others wait in the operator that it does not finish.",
    "crash": "Its process ended while the others of the job go on waiting for it.",
    "mismatch": "It called another operator than the others on a communicator, so that none of them can end.",
    "imbalance": "Ranks have unequal work by the job's own doing. Nothing is broken.",
    "uneven-stage": "A stage of the pipeline has more to do by the job's own doing. Nothing is broken.",
    "unknown": "What is slow is certain, and why is not.",
}


def headline(findings: Findings) -> str:
    """The verdict in a line that can be read out."""
    if findings.verdict == "anomaly":
        return suspect(findings.findings[0])
    if findings.verdict == "healthy":
        return "Nothing is wrong in what was seen"
    return "No machine is named: the recording does not single one out"


def lead(findings: Findings) -> str:
    """What the verdict means, in a sentence or two."""
    if findings.verdict == "anomaly":
        return MEANING.get(findings.findings[0].kind, MEANING["unknown"])
    if findings.verdict == "healthy":
        seconds = (findings.window_ns[1] - findings.window_ns[0]) / 1e9
        return (
            f"Nothing slow, late, lossy or stuck in {findings.coverage['operators']:,} operators over "
            f"{seconds:.1f} s. If the job feels slow, it was not meanwhile, or all its ranks are slow alike."
        )
    return "What was seen fits more than one culprit, or none well enough. Naming a healthy machine would be worse."


def facts(finding: Finding) -> list[tuple[str, str]]:
    """(name, value) of what is known of `finding` beside its evidence."""
    rows = [("confidence", f"{finding.confidence:.0%}")]
    if finding.slowdown > 1:
        rows.append(("slower by", f"{finding.slowdown:.2f}x"))
    if finding.lost_ns:
        rows.append(("time lost", length(finding.lost_ns)))
    if finding.slowed_ns:
        rows.append(("each iteration", f"{length(finding.slowed_ns)} longer"))
    if finding.state:
        rows.append(("state", finding.state))
    return rows


def settle(findings: Findings, recording: Recording) -> list[str]:
    """What to do so that the next recording tells more, by what this one lacks; most useful first."""
    coverage = findings.coverage
    steps = []
    if not coverage["operators"]:
        steps.append(
            "No call was seen: record while the job runs, as root; `pulse check` says if a host can."
        )
    elif not coverage["bytes"]:
        steps.append(
            "No traffic was seen: `pulse nic list` says on each node what its cards can tell, and why not."
        )
    nodes = set(coverage["nodes"])
    peers = set(recording.tables["comms"]["node"].drop_nulls()) - nodes
    ranks = recording.tables["comms"].group_by("comm_id").agg(
        pl.col("nranks").max(), pl.col("rank").n_unique().alias("seen")
    )  # fmt: skip
    if peers or ranks.filter(pl.col("seen") < pl.col("nranks")).height:
        steps.append(
            "Ranks are missing: record on all nodes of the job at once, and give all recordings together."
        )
    if coverage["lost"] > MAX_LOST * coverage["operators"] or coverage["damaged_parts"]:
        steps.append(
            "Events or parts were lost: record fewer processes or wider bins, onto a disk with room."
        )
    if coverage["unattributed_share"] > MAX_UNATTRIBUTED:
        steps.append(
            "Traffic belongs to nobody known: begin to record before the job connects, or record all of it."
        )
    if coverage["judged_share"] < MIN_JUDGED:
        steps.append("Operators are short for the bins: narrower ones (`--bin-us 32`) show their shape.")
    if coverage["incomplete_share"] > MAX_INCOMPLETE:
        steps.append(
            "Bytes of operators are missing: record at every NIC that the job uses (`pulse nic list`)."
        )
    errors = recording.tables["nodes"]["clock_error_ns"]
    if errors.null_count() or (errors.len() and int(errors.max()) > ONE_CLOCK_NS):  # type: ignore[arg-type]
        steps.append(
            "Clocks of the nodes may differ by more than operators last: PTP would put them in order."
        )
    steps.append("Record once more while it is slow, and for longer (`pulse record --all -d 30`).")
    return steps


def length(ns: float) -> str:
    """A length of time with a fitting unit."""
    for unit, factor in (("s", 1e9), ("ms", 1e6)):
        if abs(ns) >= factor:
            return f"{ns / factor:,.1f} {unit}"
    return f"{ns / 1e3:,.1f} µs"


def size(count: float) -> str:
    """A number of bytes with a fitting unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def rate(gbps: Any) -> str:
    """A rate in Gbit/s with a fitting unit; None and NaN are unknown."""
    return "an unknown rate" if gbps is None or isnan(gbps) else speed(gbps)
