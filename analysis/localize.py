"""From operators to a verdict: what is wrong, where, and whether the recording is enough to say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.capped import find_capped
from pulse_bpf.analysis.clock_offsets import one_clock
from pulse_bpf.analysis.findings import ACCUSING, Finding, Findings, Verdict
from pulse_bpf.analysis.groups import find_groups
from pulse_bpf.analysis.hosts import find_hosts
from pulse_bpf.analysis.iteration import calls_of, find_iteration
from pulse_bpf.analysis.late import find_late, lags, same_clock
from pulse_bpf.analysis.loss import find_loss
from pulse_bpf.analysis.marked import find_marked, pressed
from pulse_bpf.analysis.refused import find_refused
from pulse_bpf.analysis.signals import find_signals, marks
from pulse_bpf.analysis.slow import find_slow
from pulse_bpf.analysis.slowed import with_slowed
from pulse_bpf.analysis.stalls import find_stalls
from pulse_bpf.analysis.stops import find_stops
from pulse_bpf.analysis.window import Window, operators_in, resolved, tables_in

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
# Of what a machine sends or receives, the share of unseen machines from which they may be what slows it.
MUCH_UNSEEN = 0.3


def localize(
    operators: pl.DataFrame,
    flows: pl.DataFrame,
    tables: Mapping[str, pl.DataFrame],
    damaged: list[str],
    part: Window | None = None,
) -> Findings:
    """The verdict from `operators` (metrics.OPERATORS), the owners of the QPs (attribute.FLOWS) and the small `tables`.

    Uses of the tables: comms, processes, nodes, nics, events, port_counters, coverage. Never opens the samples. With
    `part`, on that part of the time only.
    """
    clock = one_clock(operators, tables["nodes"])
    operators = clock.shifted("operators", operators)
    tables = {name: clock.shifted(name, table) for name, table in tables.items()}
    aligned = align(operators)
    same = same_clock(clock.error_ns, int(operators["bin_ns"].max() or 0))  # type: ignore[arg-type]
    window = _window(operators, tables)
    calls = calls_of(operators)
    iteration = find_iteration(calls, operators)
    groups = find_groups(calls, operators, tables["comms"], iteration)
    stops = find_stops(aligned, tables, window[1])
    if part is not None:
        # Only the rest of the recording tells a job that stands still from one that goes on after the window.
        window = resolved(part, window)
        stops = stops.between(*window)
        aligned, tables = operators_in(aligned, *window), tables_in(tables, *window)
        operators = aligned.drop("step")
    coverage = _coverage(operators, flows, tables, damaged)
    signals = find_signals(aligned, flows, tables)
    # A port at fault explains that a job all but stands still, and which rank waits for what tells nothing more.
    port = any(item.scope == "nic" for item in signals)
    found = [*(item for item in stops.findings if item.kind != "hang" or not port), *signals]
    unexplained: list[str] = []
    blind = _beside_unseen(aligned)
    if found and not signals:
        found += find_loss(aligned, tables["events"], flows)
    else:
        slowed, unexplained = _slowed(aligned, flows, tables, signals, same)
        # What an unseen machine sends slowly, or takes slowly, its neighbours in a ring pass on as slowly.
        found += [
            replace(item, confidence=0.4) if blind & {item.node, *(item.nodes or ())} else item
            for item in slowed
        ]
    if coverage["unattributed_share"] > MAX_UNATTRIBUTED or coverage["incomplete_share"] > MAX_INCOMPLETE:
        # What tells a culprit from its neighbours may be among the unknown.
        found = [
            item if item.cause == "stop" or item in signals else replace(item, confidence=0.4)
            for item in found
        ]
    if coverage["lost"] or damaged:
        found = [replace(finding, confidence=round(0.8 * finding.confidence, 3)) for finding in found]
    sure = [finding for finding in found if finding.confidence >= MIN_CONFIDENCE]
    missing = [*([] if port else stops.doubts), *unexplained, *_missing(aligned, coverage)]
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
    sure, iteration = with_slowed(sure, iteration)
    if iteration is not None:
        within = [ns for ns in iteration.boundaries_ns if window[0] <= ns <= window[1]]
        iteration = replace(iteration, boundaries_ns=within)
    return Findings(verdict, window, sure, groups, coverage, missing, iteration)


def _slowed(
    aligned: pl.DataFrame,
    flows: pl.DataFrame,
    tables: Mapping[str, pl.DataFrame],
    signals: list[Finding],
    same: bool,
) -> tuple[list[Finding], list[str]]:
    """What makes a job slow beside its `signals`, and what stands in the way of naming it.

    Each kind of evidence is looked for on its own, and what it shows by itself stands beside the others': a port that
    says of itself what is wrong, one that repeats what it sends, one with a ceiling, flows that share a queue in the
    network, a machine that comes late. The rates of flows beside each other, and silences, are told only where none of
    those explains them.
    """
    asked = marks(tables["port_counters"])
    faulty = {item.node for item in signals}
    capped = [item for item in find_capped(aligned, asked) if item.node not in faulty]
    if signals:
        # What a port says of itself explains what is slow and late around it.
        return capped, []
    lossy = find_refused(aligned, tables) or find_loss(aligned, tables["events"], flows)
    if lossy:
        faulty = {item.node for item in lossy}
        return lossy + [item for item in capped if item.node not in faulty], []
    ranks = lags(aligned, same)
    lost = tables["coverage"].filter(pl.col("nic").is_null())["lost"]
    late = find_hosts(ranks, same, int(lost.sum())) or find_late(
        ranks, tables["comms"], tables.get("channels")
    )
    network = find_marked(aligned, flows, asked, tables["events"])
    if capped or network:
        # Around slow flows others come late, those of a ring or of few pairs clearly less than what causes it: beside
        # a port with a ceiling, another machine's own lateness stands; of a path's flows, both ends may look late.
        places = {place for item in capped for place in (item.node, *(item.nodes or ()))}
        return [*capped, *network, *(item for item in late if not network and item.node not in places)], []
    if pressed(asked):
        # Whom the network slows down makes others late, and which rank is late by itself is not known.
        late = [item if item.cause == "host" else replace(item, confidence=0.4) for item in late]
    slow, unexplained, lost_ns = find_slow(aligned, flows, asked)
    # Around a slow port others come late, and what a late machine sends is slow: what costs more is the cause. Where no
    # port is named, what seems slow may have waited.
    needed_ns = lost_ns if slow else WAITED * lost_ns
    if late and (late[0].cause == "host" or int(late[0].lost_ns or 0) >= needed_ns):
        slow, unexplained = [], []
    found = slow if slow or unexplained else late
    if not found and not unexplained and same:
        found = find_stalls(aligned)
    return found, unexplained


def _with_netdev(finding: Finding, nics: pl.DataFrame) -> Finding:
    """`finding` with the network interface of its NIC in the command to run next."""
    if finding.nic is None or finding.next_check is None:
        return finding
    here = nics.filter(pl.col("node") == finding.node, pl.col("nic") == finding.nic)["netdev"].drop_nulls()
    return replace(
        finding, next_check=finding.next_check.replace("NETDEV", here[0] if len(here) else "NETDEV")
    )


def _beside_unseen(aligned: pl.DataFrame) -> set[str]:
    """The nodes none of whose traffic was seen, by whatever name, and those that exchange much with one of them."""
    moved = aligned.filter(pl.col("level") == "flow", pl.col("bytes") > 0)
    # Without a side that receives, what the unseen send is unknown, and taken to be as much as what is sent to them.
    pairs = moved.group_by("node", "peer_node", "direction").agg(pl.col("bytes").sum())
    unseen = ~pl.col("peer_node").is_in(pairs["node"].implode())
    shares = pairs.group_by("node", "direction").agg(
        share=pl.col("bytes").filter(unseen).sum() / pl.col("bytes").sum()
    )
    beside = shares.filter(pl.col("share") >= MUCH_UNSEEN)["node"]
    return {*beside, *pairs.filter(unseen)["peer_node"].drop_nulls()}


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
