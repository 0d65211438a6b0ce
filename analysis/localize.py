"""From operators to a verdict: what is wrong, where, and whether the recording is enough to say so."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import polars as pl

from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.causes import ALONE, find_causes
from pulse_bpf.analysis.clock_offsets import one_clock
from pulse_bpf.analysis.findings import ACCUSING, Finding, Findings, Verdict
from pulse_bpf.analysis.groups import Group, find_groups
from pulse_bpf.analysis.iteration import Iteration, calls_of, find_iteration
from pulse_bpf.analysis.late import same_clock
from pulse_bpf.analysis.loss import find_loss
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.names import numbered_names
from pulse_bpf.analysis.seen import MAX_INCOMPLETE, MAX_UNATTRIBUTED, coverage_of, missing_in
from pulse_bpf.analysis.signals import find_signals, intervals
from pulse_bpf.analysis.slowed import with_slowed
from pulse_bpf.analysis.stops import find_stops
from pulse_bpf.analysis.window import Window, operators_in, resolved, tables_in

# The columns of operators that some rule reads; the others are for people and other programs.
NEEDED = tuple(
    name
    for name in OPERATORS
    if name
    not in (
        *("start_err_ns", "end_err_ns", "ctl_packets", "active_gbps", "peak_gbps", "bin_cv", "tail_ns"),
        *("gap_sender_ns", "gap_receiver_ns", "gap_network_ns", "stalls", "stall_trickle_ns", "paced"),
    )
)
# Evidence of a port beside itself.
ITSELF = "stretched"
# So long a NIC repeats, by what NCCL asks of it (NCCL_IB_TIMEOUT 20, 4.3 s, NCCL_IB_RETRY_CNT 7), before it gives up.
REPEATING_NS = 30_000_000_000
# Less sure than this is not said to be so.
MIN_CONFIDENCE = 0.5


def localize(
    operators: pl.DataFrame,
    flows: pl.DataFrame,
    tables: Mapping[str, pl.DataFrame],
    damaged: list[str],
    part: Window | None = None,
    absent: Mapping[str, str] | None = None,
) -> Findings:
    """The verdict from `operators` (metrics.OPERATORS), the owners of the QPs (attribute.FLOWS) and the small `tables`.

    Uses of the tables: comms, processes, nodes, nics, events, port_counters, coverage. Never opens the samples. With
    `part`, on that part of the time only. `absent` says of nodes that should have been recorded why they were not.
    """
    absent = absent or {}
    operators, flows, tables = numbered_names(operators, flows, tables)
    clock = one_clock(operators, tables["nodes"])
    operators = clock.shifted("operators", operators)
    tables = {name: clock.shifted(name, table) for name, table in tables.items()}
    aligned = align(operators, clock.error_ns)
    same = same_clock(clock.error_ns, int(operators["bin_ns"].max() or 0))  # type: ignore[arg-type]
    window = _window(operators, tables)
    # What depends on nothing of each other runs side by side.
    with ThreadPoolExecutor() as beside:
        layout = beside.submit(_layout, operators, tables["comms"])
        stopped = beside.submit(find_stops, aligned, tables, window[1])
        if part is not None:
            window = resolved(part, window)
            aligned, tables = operators_in(aligned, *window), tables_in(tables, *window)
        tables["readings"] = intervals(tables)
        seen = beside.submit(coverage_of, aligned, flows, tables, damaged)
        signals = find_signals(aligned, flows, tables)
    iteration, groups = layout.result()
    # Only the rest of the recording tells a job that stands still from one that goes on after the window.
    stops = stopped.result() if part is None else stopped.result().between(*window)
    coverage = seen.result()
    # A port at fault explains that a job all but stands still, and which rank waits for what tells nothing more.
    port = any(item.scope == "nic" for item in signals)
    found = [*(item for item in stops.findings if item.kind != "hang" or not port), *signals]
    unexplained: list[str] = []
    if found and not signals:
        lossy = find_loss(aligned, tables["events"], flows)
        found = [item for item in found if not (lossy and item.kind == "hang" and _repeating(item))] + lossy
    else:
        slows, unexplained = find_causes(aligned, flows, tables, signals, same, clock.error_ns)
        found += slows
    if coverage["unattributed_share"] > MAX_UNATTRIBUTED or coverage["incomplete_share"] > MAX_INCOMPLETE:
        # What tells a culprit from its neighbours may be among the unknown, but of calls nothing is, and what is
        # slower than itself while its network marks what it sends has no neighbours.
        found = [
            item
            if item.cause in ("stop", "host")
            or item in signals
            or item.evidence[0].metric in (*ALONE, ITSELF)
            else replace(item, confidence=0.4)
            for item in found
        ]
    coverage["nodes_missing"] = [{"node": node, "reason": why} for node, why in sorted(absent.items())]
    if coverage["lost"] or damaged or absent:
        found = [replace(finding, confidence=round(0.8 * finding.confidence, 3)) for finding in found]
    sure = [finding for finding in found if finding.confidence >= MIN_CONFIDENCE]
    missing = [*([] if port else stops.doubts), *unexplained, *missing_in(aligned, tables["nics"], coverage)]
    missing += [f"{node} was not recorded: {why}" for node, why in sorted(absent.items())]
    missing += [
        f"{finding.kind} at {finding.node or 'a queue between switches'} is likely but not certain"
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


def _repeating(stop: Finding) -> bool:
    """Whether a job stands still no longer than one that only waits for what was lost to be repeated."""
    return stop.lost_ns is not None and stop.lost_ns < REPEATING_NS


def _layout(operators: pl.DataFrame, comms: pl.DataFrame) -> tuple[Iteration | None, list[Group]]:
    calls = calls_of(operators)
    iteration = find_iteration(calls, operators)
    return iteration, find_groups(calls, operators, comms, iteration)


def _with_netdev(finding: Finding, nics: pl.DataFrame) -> Finding:
    """`finding` with the network interface of its NIC in the command to run next."""
    if finding.nic is None or finding.next_check is None:
        return finding
    here = nics.filter(pl.col("node") == finding.node, pl.col("nic") == finding.nic)["netdev"].drop_nulls()
    return replace(
        finding, next_check=finding.next_check.replace("NETDEV", here[0] if len(here) else "NETDEV")
    )


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
