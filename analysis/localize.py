"""From operators to a verdict: what is wrong, where, and whether the recording is enough to say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.findings import ACCUSING, Finding, Findings, Verdict
from pulse_bpf.analysis.groups import find_groups
from pulse_bpf.analysis.hosts import find_hosts
from pulse_bpf.analysis.iteration import calls_of, find_iteration
from pulse_bpf.analysis.late import find_late, lags, same_clock
from pulse_bpf.analysis.loss import find_loss
from pulse_bpf.analysis.marked import find_marked
from pulse_bpf.analysis.signals import find_signals, marks
from pulse_bpf.analysis.slow import find_slow
from pulse_bpf.analysis.stalls import find_stalls
from pulse_bpf.analysis.stops import find_stops

# Fewer finished operators per communicator than this are no ground for "healthy".
MIN_OPERATORS = 10
# More unattributed traffic, or fewer measurable operators, than these shares leave too much unseen.
MAX_UNATTRIBUTED, MIN_MEASURED = 0.1, 0.5
MIN_CONFIDENCE = 0.5
# Operators with fewer bytes than they should have, the last ones apart, above which traffic went unseen.
MAX_INCOMPLETE = 0.1
# Of the time lost by flows that are slow for no known reason, what a late machine must have cost to be the reason.
WAITED = 0.7
# Events lost per operator above which something may have been overlooked.
MAX_LOST = 0.01


def localize(
    operators: pl.DataFrame,
    flows: pl.DataFrame,
    tables: Mapping[str, pl.DataFrame],
    damaged: list[str],
) -> Findings:
    """The verdict from `operators` (metrics.OPERATORS), the owners of the QPs (attribute.FLOWS) and the small `tables`.

    Uses of the tables: comms, processes, nodes, nics, events, port_counters, coverage. Never opens the samples.
    """
    aligned = align(operators)
    window = _window(operators, tables)
    coverage = _coverage(operators, flows, tables, damaged)
    stops = find_stops(aligned, tables, window[1])
    signals = find_signals(aligned, flows, tables)
    # A port at fault explains that a job all but stands still, and which rank waits for what tells nothing more.
    port = any(item.scope == "nic" for item in signals)
    found = [*(item for item in stops.findings if item.kind != "hang" or not port), *signals]
    unexplained: list[str] = []
    # What a port says of itself explains what is slow and late around it.
    if not signals:
        found += find_loss(aligned, tables["events"], flows)
        if not found:
            asked = marks(tables["port_counters"])
            slow, unexplained, lost_ns = find_slow(aligned, flows, asked)
            # What an unseen machine sends slowly, or takes slowly, its neighbours in a ring pass on as slowly.
            blind = _beside_unseen(aligned)
            slow = [replace(item, confidence=0.4) if item.node in blind else item for item in slow]
            one_clock = same_clock(tables["nodes"])
            ranks = lags(aligned, one_clock)
            lost = tables["coverage"].filter(pl.col("nic").is_null())["lost"]
            hosts, late = (
                find_hosts(ranks, one_clock, int(lost.sum())),
                find_late(ranks, tables["comms"], tables.get("channels")),
            )
            # Around a slow port others come late, and what a late machine sends is slow: what costs more is the cause.
            # Where no port is named, what seems slow may have waited.
            if hosts or (late and int(late[0].lost_ns or 0) >= (1.0 if slow else WAITED) * lost_ns):
                slow, unexplained = [], []
            found = hosts or (slow if slow or unexplained else late)
            found = found or find_marked(aligned, flows, asked, tables["events"])
            if not found and not unexplained and one_clock:
                found = find_stalls(aligned)
    if coverage["unattributed_share"] > MAX_UNATTRIBUTED or coverage["incomplete_share"] > MAX_INCOMPLETE:
        # What tells a culprit from its neighbours may be among the unknown.
        found = [
            item if item.cause == "stop" or item in signals else replace(item, confidence=0.4)
            for item in found
        ]
    if coverage["lost"] or damaged:
        found = [replace(finding, confidence=round(0.8 * finding.confidence, 3)) for finding in found]
    sure = [finding for finding in found if finding.confidence >= MIN_CONFIDENCE]
    missing = [*([] if port else stops.undecided), *unexplained, *_missing(aligned, coverage)]
    missing += [
        f"a {finding.kind} at {finding.node} is likely but not certain"
        for finding in found
        if finding not in sure
    ]
    verdict: Verdict = "undecided" if missing else "healthy"
    if any(finding.scope in (*ACCUSING, "group", "network") for finding in sure):
        verdict = "anomaly"
    sure = [
        _with_netdev(finding, tables["nics"]) for finding in sorted(sure, key=lambda item: -item.confidence)
    ]
    calls = calls_of(operators)
    iteration = find_iteration(calls, operators)
    groups = find_groups(calls, operators, tables["comms"], iteration)
    return Findings(verdict, window, sure, groups, coverage, missing, iteration)


def _with_netdev(finding: Finding, nics: pl.DataFrame) -> Finding:
    """`finding` with the network interface of its NIC in the command to run next."""
    if finding.nic is None or finding.next_check is None:
        return finding
    here = nics.filter(pl.col("node") == finding.node, pl.col("nic") == finding.nic)["netdev"].drop_nulls()
    return replace(
        finding, next_check=finding.next_check.replace("NETDEV", here[0] if len(here) else "NETDEV")
    )


def _beside_unseen(aligned: pl.DataFrame) -> set[str]:
    """The nodes none of whose traffic was seen, by whatever name, and those that exchange data with one of them."""
    pairs = (
        aligned.filter(pl.col("level") == "flow", pl.col("bytes") > 0).select("node", "peer_node").unique()
    )
    beside = pairs.filter(~pl.col("peer_node").is_in(pairs["node"].implode()))
    return {*beside["node"], *beside["peer_node"].drop_nulls()}


def _window(operators: pl.DataFrame, tables: Mapping[str, pl.DataFrame]) -> tuple[int, int]:
    """From when to when traffic was watched; without such a statement, the first and last moment in the data."""
    coverage = tables["coverage"].drop_nulls("nic")
    if not coverage.is_empty():
        return tuple(coverage.select(pl.col("first_ns").min(), pl.col("last_ns").max()).row(0))
    coverage = tables["coverage"]
    first = [coverage["first_ns"].min(), operators["call_ns"].min(), operators["start_ns"].min()]
    last = [coverage["last_ns"].max(), operators["call_ns"].max(), operators["last_byte_ns"].max()]
    known_first = [value for value in first if isinstance(value, int)]
    known_last = [value for value in last if isinstance(value, int)]
    return min(known_first, default=0), max(known_last, default=0)


def _missing(aligned: pl.DataFrame, coverage: Mapping[str, Any]) -> list[str]:
    """What stands in the way of calling the recording healthy."""
    calls = aligned.filter(pl.col("level").is_in(["flow", "call"]))
    if calls.is_empty():
        return ["no operator of a known communicator was seen"]
    missing = []
    for (comm,), part in sorted(calls.group_by("comm_id"), key=lambda item: str(item[0])):
        nranks, seen = int(part["nranks"].max() or 0), part["rank"].n_unique()  # type: ignore[arg-type]
        if seen < nranks:
            missing.append(f"communicator {comm}: {seen} of {nranks} ranks were recorded")
        if part["step"].null_count():
            missing.append(f"communicator {comm}: the operators of its ranks do not match each other")
        finished = part.filter(pl.col("end_ns").is_not_null())
        count = finished.select("step").n_unique() if not finished.is_empty() else 0
        if count < MIN_OPERATORS:
            missing.append(
                f"communicator {comm}: {count} finished operators with traffic, {MIN_OPERATORS} are needed"
            )
        moving = finished["rank"].n_unique()
        if count and moving < seen:
            missing.append(f"communicator {comm}: traffic of {seen - moving} of its ranks was not seen")
        measured = part.filter(pl.col("level") == "flow")["burst_gbps"]
        if count and measured.null_count() > (1 - MIN_MEASURED) * len(measured):
            missing.append(f"communicator {comm}: its operators are too small for the bins")
    if coverage["unattributed_share"] > MAX_UNATTRIBUTED:
        missing.append(
            f"{coverage['unattributed_share']:.0%} of the traffic belongs to no known communicator"
        )
    if coverage["incomplete_share"] > MAX_INCOMPLETE:
        missing.append(f"bytes are missing in {coverage['incomplete_share']:.0%} of the operators")
    if coverage["lost"] > MAX_LOST * coverage["operators"]:
        missing.append(f"{coverage['lost']} events were lost")
    return missing


def _coverage(
    operators: pl.DataFrame, flows: pl.DataFrame, tables: Mapping[str, pl.DataFrame], damaged: list[str]
) -> dict[str, Any]:
    """What was seen and what was not."""
    by_level = dict(
        operators.filter(pl.col("level") != "nic").group_by("level").agg(pl.col("bytes").sum()).iter_rows()
    )
    total = sum(by_level.values())
    unattributed = operators.filter(pl.col("level") == "unattributed")
    reasons = unattributed.group_by("reason").agg(pl.col("bytes").sum()).sort("reason")
    moved = operators.filter(pl.col("level") == "flow", pl.col("expected_bytes") > 0)
    earlier = moved.filter(pl.col("op_seq") < pl.col("op_seq").max().over("node", "pid", "comm_id"))
    lost = tables["coverage"].group_by("node", "source").agg(pl.col("lost").max())
    return {
        "nodes": tables["nodes"]["node"].unique().sort().to_list(),
        "queue_pairs": flows.height,
        "queue_pairs_unattributed": flows["reason"].drop_nulls().len(),
        "bytes": total,
        "bytes_in_operators": by_level.get("flow", 0),
        "bytes_outside_calls": by_level.get("traffic", 0),
        "bytes_unattributed": dict(reasons.iter_rows()),
        "unattributed_share": by_level.get("unattributed", 0) / max(1, total),
        "operators": operators.filter(pl.col("op_seq").is_not_null())
        .select("node", "pid", "program_pos")
        .n_unique(),
        "incomplete_share": earlier["end_ns"].null_count() / max(1, earlier.height),
        "operators_without_traffic": operators.filter(pl.col("level") == "call", "covered").height,
        # Readers that cannot tell which port lost repeat their total in each row, so the largest is it.
        "lost": int(lost.group_by("source").agg(pl.col("lost").max())["lost"].sum()),
        "damaged_parts": damaged,
    }
