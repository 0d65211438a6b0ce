"""What is known of each job right now, as one JSON document: for `pulse watch`, scripts and the collector's own API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from pulse_bpf.analysis import Findings

SCHEMA_VERSION = 1
# A bin of the curves, how many there are, and how many healthy ports are shown beside the suspect.
BIN_NS, BINS, TWINS = 250_000_000, 40, 2
# A verdict on operators that are older than this is told to be late.
LATE_NS = 10_000_000_000

Json = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """A machine of a job as the collector sees it: `last_seen_ns` is when its agent last said something."""

    node: str
    last_seen_ns: int
    missing: bool
    lost_events: int


@dataclass(frozen=True)
class Judgement:
    """The latest verdict on a job; before the first one nothing is known, and the verdict is "undecided".

    `confidence` (0 to 1) counts the machines of the job of which nothing is heard as doubt.
    """

    verdict: str = "undecided"
    confidence: float = 0.0
    iteration_ns: int | None = None
    groups: Sequence[Json] = ()
    findings: Sequence[Json] = ()
    missing: Sequence[str] = ()
    curves: Sequence[Json] = field(default=())


def document(now_ns: int, jobs: Sequence[Json]) -> Json:
    """The whole document; `jobs` as `of_job` makes them."""
    return {"schema_version": SCHEMA_VERSION, "now_ns": now_ns, "jobs": list(jobs)}


def of_job(
    job: str,
    judgement: Judgement,
    nodes: Sequence[Node],
    opened: Sequence[Mapping[str, Any]],
    lag_ns: int,
) -> Json:
    """One job of the document; `opened` are the findings that are open, as findings_log has them.

    `lag_ns` is how much time of the job's operators waits to be judged.
    """
    return {
        "job": job,
        "iteration_ns": judgement.iteration_ns,
        "groups": list(judgement.groups),
        "verdict": judgement.verdict,
        "confidence": judgement.confidence,
        "lag_ns": lag_ns,
        "missing": list(judgement.missing),
        "nodes": [vars(node) for node in nodes],
        "open": [dict(event) for event in opened],
        "curves": list(judgement.curves),
    }


def judged(found: Findings, operators: pl.DataFrame, present: float, least: float) -> Judgement:
    """The judgement that `found`, concluded from `operators` (metrics.OPERATORS), comes to.

    `present` is the share of the job's machines that were heard of: what was found is so much less sure, as a machine
    that nobody looks at may be the one at fault, and below `least` is not said. Without them all no job is healthy.
    """
    content = found.to_dict()
    findings = [
        item | {"confidence": round(item["confidence"] * present, 3)}
        for item in content["findings"]
        if item["confidence"] * present >= least
    ]
    verdict = found.verdict
    if present < 1 and (verdict == "healthy" or not findings):
        verdict = "undecided"
    return Judgement(
        verdict,
        max((item["confidence"] for item in findings), default=round(present, 3)),
        found.iteration.period_ns if found.iteration else None,
        content["groups"],
        findings,
        found.missing,
        curves(operators, findings[0], found.window_ns[1]) if findings else (),
    )


def curves(operators: pl.DataFrame, finding: Mapping[str, Any], until_ns: int) -> list[Json]:
    """How fast the suspect of `finding` sent while it sent, and TWINS other ports of the same communicators: GBit/s.

    Of a link the suspect is what its one end sends to the other. Of each of the BINS of BIN_NS before `until_ns` the
    mean of burst_gbps by bytes, 0 where no operator ended. Averages over whole operators would be equal on all ranks,
    as those wait for the slowest.
    """
    sent = operators.filter(
        pl.col("level") == "flow", pl.col("direction") == "tx", pl.col("burst_gbps").is_not_null()
    ).with_columns(bin=BINS - 1 - (until_ns - pl.col("last_byte_ns")) // BIN_NS)
    sent = sent.filter(pl.col("bin").is_between(0, BINS - 1))
    named = finding.get("nodes") or [finding.get("node")]
    own = sent.filter(pl.col("node").is_in(named if finding["scope"] != "link" else [finding["node"]]))
    for column in ("nic", "peer_node", "peer_nic"):
        if finding.get(column):
            own = own.filter(pl.col(column) == finding[column])
    others = sent.filter(
        ~pl.col("node").is_in(named), pl.col("comm_id").is_in(own["comm_id"].unique().implode())
    )
    chosen = [
        (role, frame, *place)
        for role, frame, count in (("suspect", own, 1), ("twin", others, TWINS))
        for place in _busiest(frame, count)
    ]
    return [
        {
            "role": role,
            "label": f"{node} {nic}",
            "bin_ns": BIN_NS,
            "gbps": _binned(frame.filter(pl.col("node") == node, pl.col("nic") == nic)),
        }
        for role, frame, node, nic in chosen
    ]


def _busiest(sent: pl.DataFrame, count: int) -> list[tuple[str, str]]:
    ports = (
        sent.group_by("node", "nic").agg(pl.col("bytes").sum()).sort("bytes", "node", "nic", descending=True)
    )
    return list(ports.head(count).select("node", "nic").iter_rows())


def _binned(sent: pl.DataFrame) -> list[float]:
    place, weight = sent["bin"].to_numpy(), sent["bytes"].to_numpy().astype(np.float64)
    total = np.bincount(place, weight, BINS)
    rate = np.bincount(place, weight * sent["burst_gbps"].to_numpy(), BINS)
    return [round(value, 2) for value in np.divide(rate, total, out=np.zeros(BINS), where=total > 0).tolist()]
