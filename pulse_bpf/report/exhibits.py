"""What a report shows: each plot with what it says in words, and its most telling numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go
import polars as pl

from pulse_bpf.analysis import plots
from pulse_bpf.analysis.callers import PROCESS
from pulse_bpf.analysis.findings import Finding, Findings
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.plots.frames import Grid, covered_ns
from pulse_bpf.analysis.plots.rates import RateCurves
from pulse_bpf.analysis.plots.style import ALIKE, place, row_label
from pulse_bpf.analysis.text import suspect
from pulse_bpf.report.words import length, rate, size

# Findings whose curves are shown, and rows of a table beside a plot.
SHOWN, ROWS = 2, 8
# Lateness that is told, and the share of an iteration that it must be to shine.
LATE_MS, MATTERS = 0.05, 0.02


@dataclass(frozen=True)
class Exhibit:
    """One plot, or where there is nothing to draw (None) why: `says` is what it shows, for those who don't see it.

    `rows` are the most telling numbers, in `columns`.
    """

    name: str
    title: str
    says: str
    figure: go.Figure | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def exhibits(view: plots.View, findings: Findings, recording: Recording) -> list[Exhibit]:
    """All plots about `findings` on `recording` as `view` has it, the most telling first."""
    shown = findings.findings[:SHOWN] if findings.verdict == "anomaly" else []
    about: list[Finding | None] = [*shown] or [None]
    nodes = suspects(findings)
    first = shown[0] if shown else None
    curves = [
        plots.cut(view.aligned, view.late, recording.samples, view.clock, finding, nodes) for finding in about
    ]
    line = None if curves[0] is None else curves[0].lines.row(0, named=True)
    comm = first.comm_id if first else None
    alike = plots.family(view.aligned, comm or (line["comm_id"] if line else None))
    # A NIC is known by the rank that sends through it, and what a GPU computes by the one that sends it.
    rank = line["rank"] if line and first and first.scope in ("nic", "gpu") else None
    nics = recording["nics"]
    return [
        *(
            _rates(number, finding, cut, _link_gbps(nics, cut))
            for number, (finding, cut) in enumerate(zip(about, curves, strict=True), 1)
        ),
        _late(view, alike, nodes, rank, findings),
        _slow(view, alike, nodes, rank),
        _ring(view, alike, first, nodes),
        _matrix(view, nodes),
        _iterations(findings, shown),
        _timeline(view, findings, first, curves[0], nodes),
        _counters(view, nodes),
    ]


def suspects(findings: Findings) -> set[str]:
    """The nodes that `findings` name, nobody where the verdict is undecided."""
    if findings.verdict != "anomaly":
        return set()
    return {
        node
        for finding in findings.findings
        for node in (
            finding.node,
            finding.peer_node if finding.scope == "link" else None,
            *(finding.nodes or ()),
        )
        if node is not None
    }


def _rates(number: int, finding: Finding | None, cut: RateCurves | None, link_gbps: float | None) -> Exhibit:
    title = "Rate curves of ranks that do the same"
    called = "suspect"
    if finding is not None and finding.scope == "network":
        title, called = "A flow that the network holds up beside two others", "held up"
    elif finding is not None:
        title = f"{suspect(finding)}: its rate curve"
    name = f"rates{number}"
    if cut is None:
        why = "no traffic of it between nodes was seen" if finding else "no operator with traffic was seen"
        return Exhibit(name, title, f"There are no curves: {why}.")
    one = cut.lines.row(0, named=True)
    twins = cut.lines[1:]
    partners = (twins["node"] == one["peer_node"]) | (twins["peer_node"] == one["node"])
    if finding is not None and finding.scope != "network" and twins.height:
        free = twins.height == 2 and not partners.any()
        title += " beside two healthy ones" if free else " beside those of others at that time"
    rows = []
    for line in cut.lines.iter_rows(named=True):
        spans = cut.spans.filter(pl.col("panel") == line["panel"])
        begin = int(spans["start_ns"].min() or cut.first_ns)  # type: ignore[arg-type]
        rows.append(
            (
                (f"{called}: " if line["suspect"] else "") + f"{place(line)} to {line['peer_node']}",
                rate(spans["gbps"].median()),
                f"{spans['ended'].sum()} of {spans.height}",
                length(max(0, begin - cut.first_ns)),
                size(float(spans["bytes"].sum())),
            )
        )
    says = "; ".join(f"{who} sends at {told} while it sends" for who, told, *_ in rows)
    if finding is not None and finding.scope != "network" and partners.any():
        says += "; who exchanges data with it is held up by it, too"
    bare = ", ".join(place(line) for line in cut.lines.filter(~pl.col("sampled")).iter_rows(named=True))
    source = (
        f" The recording has no samples of {bare}: drawn from its operators, each at its average rate."
        if bare
        else ""
    )
    if finding is not None and finding.pid not in (None, one["pid"]) and one["node"] == finding.node:
        source += " What the suspect computes leaves by a neighbour's NIC, whose curve this is."
    figure = plots.rate_curves(cut, link_gbps, called)
    says = (
        f"{says}. Over {length(cut.last_ns - cut.first_ns)}; solid: what is sent, dotted: what is received, boxes: "
        f"operators from their start to their end (open where they never ended).{source}"
    )
    columns = ("flow", "rate while sending", "operators ended", "first begins after", "sent")
    return Exhibit(name, title, says, figure, columns, rows)


def _link_gbps(nics: pl.DataFrame, cut: RateCurves | None) -> float | None:
    if cut is None:
        return None
    known = nics.join(cut.lines.select("node", "nic"), on=["node", "nic"], how="semi")[
        "link_gbps"
    ].drop_nulls()
    return float(known.max()) if len(known) else None  # type: ignore[arg-type]


def _late(
    view: plots.View, alike: list[str], nodes: set[str], rank: int | None, findings: Findings
) -> Exhibit:
    title = "When each rank comes to each operator"
    cells = view.late.filter(pl.col("comm_id").is_in(alike)).drop_nulls("value")
    if cells.is_empty():
        return Exhibit(
            "late", title, "No lateness is known: starts of operators could not be compared between ranks."
        )
    grid = plots.grid(cells, "max")
    times = np.nansum(grid.values > LATE_MS, axis=1)
    usual = np.array([np.nanmedian(row) if np.isfinite(row).any() else np.nan for row in grid.values])
    order = np.argsort(-np.nan_to_num(np.nanmean(np.nan_to_num(grid.values), axis=1)))[:ROWS]
    rows = [
        (_label(grid, at), f"{np.nanmax(grid.values[at]):.2f}", f"{usual[at]:.2f}", f"{times[at]}")
        for at in order
    ]
    least_ms = max(LATE_MS, MATTERS * (findings.iteration.period_ns if findings.iteration else 0) / 1e6)
    says = f"How much later than usual for its operator each {_what(grid)} begins to send. "
    if np.nanmax(usual) < least_ms:
        says += f"Nobody is throughout, single times are {np.nanmax(grid.values):.2f} ms at most. "
    else:
        says += (
            f"Latest on average: {rows[0][0]}, {rows[0][2]} ms at the median and {rows[0][1]} ms at most. "
        )
    says += _axes(grid, alike)
    figure = plots.heat_map(grid, "later than its peers", "ms", "high", nodes, rank, least_ms)
    return Exhibit(
        "late", title, says, figure, ("rank", "most, ms", "median, ms", f"times above {LATE_MS} ms"), rows
    )


def _slow(view: plots.View, alike: list[str], nodes: set[str], rank: int | None) -> Exhibit:
    title = "How fast each rank sends in each operator, while it sends"
    cells = plots.rate_cells(view.aligned).filter(pl.col("comm_id").is_in(alike)).drop_nulls("value")
    if cells.is_empty():
        return Exhibit(
            "slow", title, "No rates are known: operators are too short for the bins, or none was seen."
        )
    grid = plots.grid(cells, "min")
    usual = np.array([np.nanmedian(row) if np.isfinite(row).any() else np.nan for row in grid.values])
    order = np.argsort(np.nan_to_num(usual, nan=np.inf))[:ROWS]
    rows = [(_label(grid, at), rate(usual[at]), rate(np.nanmin(grid.values[at]))) for at in order]
    says = (
        f"The rate at which each {_what(grid)} sends, pauses left out, to its slowest peer. Slowest at the median: "
        f"{rows[0][0]} with {rows[0][1]}, of all {rate(np.nanmedian(usual))}. In a ring those behind "
        f"a slow sender pass on what they get at its rate. {_axes(grid, alike)}"
    )
    figure = plots.heat_map(grid, "rate while sending", "Gbit/s", "low", nodes, rank)
    return Exhibit("slow", title, says, figure, ("rank", "median", "least"), rows)


def _what(grid: Grid) -> str:
    return "rank" if grid.ranks_a_row == 1 else "machine (the worst of its ranks)"


def _axes(grid: Grid, alike: list[str]) -> str:
    of = "1 communicator" if len(alike) == 1 else f"{len(alike)} communicators that do the same"
    wide = "" if grid.steps_a_column == 1 else f", {grid.steps_a_column} a column, the worst of them"
    return (
        f"Operators of {of}, from first to last{wide}. Bright is what to look at; blank cannot be compared."
    )


def _label(grid: Grid, at: int) -> str:
    return row_label(grid.rows.row(int(at), named=True))


def _ring(view: plots.View, alike: list[str], finding: Finding | None, nodes: set[str]) -> Exhibit:
    title = "Who waits on whom"
    stopped = finding is not None and finding.cause == "stop"
    nic = None if finding is None or finding.scope != "nic" else finding.nic
    comms = alike if finding is None or finding.comm_id not in alike else [finding.comm_id]
    edges = plots.edges(view.aligned, comms, nic, stopped)
    if edges.is_empty():
        return Exhibit("ring", title, "Nothing is known of it: no operator moved bytes between nodes.")
    by = "share" if stopped else "busy"
    shown = edges.sort(by, "node", "peer_node", descending=[not stopped, False, False], nulls_last=True).head(
        ROWS
    )
    rows = [
        (edge["node"], edge["peer_node"], _percent(edge[by]), rate(edge["gbps"]), size(edge["bytes"]))
        for edge in shown.iter_rows(named=True)
    ]
    what = "sent of the last operator" if stopped else "of the time sending"
    if stopped:
        says = (
            f"How much of the last operator each node sent. The least by {rows[0][0]} to {rows[0][1]}: {rows[0][2]}. "
            "In a ring, what was sent grows from where it stopped on."
        )
    else:
        least, most = float(edges["busy"].min() or 0), float(edges["busy"].max() or 0)  # type: ignore[arg-type]
        says = "Arrows go from sender to receiver, the brighter the larger the share of an operator's time in which it "
        # Where nobody is suspected, who is busiest holds up nobody for certain.
        held = ", on which the others wait" if nodes else ""
        if most - least < ALIKE:
            says += (
                f"sends; the rest is waiting. All send for about as long, {least:.0%} to {most:.0%}: nobody waits for "
                "a slow sender; what they wait for, if for anything, happens before it sends."
            )
        else:
            says += (
                f"sends; the rest is waiting. The busiest{held}: "
                f"{rows[0][0]} to {rows[0][1]}, {rows[0][2]}; the least busy {least:.0%}."
            )
    if nic is not None:
        says += f" Through the NICs named {nic}."
    return Exhibit(
        "ring",
        title,
        says,
        plots.ring(edges, nodes),
        ("from", "to", what, "rate while sending", "sent"),
        rows,
    )


def _matrix(view: plots.View, nodes: set[str]) -> Exhibit:
    title = "From node to node"
    pairs = plots.node_pairs(view.aligned)
    known = pairs.drop_nulls("gbps").sort("gbps", "node", "peer_node")
    if known.is_empty():
        return Exhibit("matrix", title, "No rate between two nodes is known.")
    rows = [
        (row["node"], row["peer_node"], row["nic"] or "", rate(row["gbps"]), size(row["bytes"]))
        for row in known.head(ROWS).iter_rows(named=True)
    ]
    says = (
        f"The usual rate while sending of the slowest pair of NICs between each two of {len({*pairs['node']})} nodes. "
        f"The slowest: {rows[0][0]} to {rows[0][1]} by {rows[0][2]}, {rows[0][3]}; at the median "
        f"{rate(known['gbps'].median())}. Empty where nothing was sent."
    )
    figure = plots.node_matrix(pairs, nodes)
    return Exhibit(
        "matrix", title, says, figure, ("from", "to", "slowest NIC", "rate while sending", "sent"), rows
    )


def _iterations(findings: Findings, shown: Sequence[Finding]) -> Exhibit:
    title = "How long iterations take"
    iteration = findings.iteration
    if iteration is None:
        return Exhibit(
            "iterations", title, "No iteration was found: nothing that the job does repeats itself."
        )
    lengths = plots.lengths(iteration.boundaries_ns)
    if lengths.is_empty():
        says = f"Traffic repeats every {length(iteration.period_ns)}; when iterations begin is not known without calls."
        return Exhibit("iterations", title, says)
    longest = lengths.sort("length_ns", descending=True).head(ROWS)
    start_ns = iteration.boundaries_ns[0]
    rows = [
        (f"{(begin - start_ns) / 1e9:.3f}", f"{lasted / 1e6:.1f}") for begin, lasted in longest.iter_rows()
    ]
    slowed = f" {length(iteration.slowed_ns)} of it is lost by what was found." if iteration.slowed_ns else ""
    says = (
        f"Of {len(iteration.boundaries_ns) - 1} the median lasts {length(iteration.period_ns)}, the longest "
        f"{length(float(longest['length_ns'][0]))}.{slowed}"
    )
    spans = [(finding.first_ns, finding.last_ns) for finding in shown]
    says += " Shaded: when the fault was seen." if spans else ""
    return Exhibit(
        "iterations", title, says, plots.iterations(lengths, spans), ("begun at, s", "lasted, ms"), rows
    )


def _timeline(
    view: plots.View, findings: Findings, finding: Finding | None, cut: RateCurves | None, nodes: set[str]
) -> Exhibit:
    title = "One iteration of the same ranks"
    if cut is None:
        return Exhibit("timeline", title, "There is none: no operator with traffic was seen.")
    boundaries = np.array(findings.iteration.boundaries_ns if findings.iteration else [], np.int64)
    at = int(np.searchsorted(boundaries, (cut.first_ns + cut.last_ns) // 2))
    if 0 < at < len(boundaries):
        first_ns, last_ns = int(boundaries[at - 1]), int(boundaries[at])
    else:
        title = "The same ranks around that time"
        first_ns, last_ns = cut.first_ns - 2 * (cut.last_ns - cut.first_ns), cut.last_ns
    bars = plots.bars(view.ranks, _callers(view, finding, cut), first_ns, last_ns)
    if bars.is_empty():
        return Exhibit("timeline", title, "There is none: no call was seen at that time.")
    rows = []
    for (node, _), part in bars.partition_by(*PROCESS, as_dict=True, maintain_order=True).items():
        kinds = part.group_by("kind").agg(pl.col("count").sum()).sort("kind")
        begun = max(0, int(part["begin_ns"].min()) - first_ns)  # type: ignore[arg-type]
        busy = covered_ns(part, first_ns, last_ns)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.iter_rows())
        who = f"{node} rank {part['rank'][0]}" if part["rank"].n_unique() == 1 else str(node)
        rows.append((who, told, f"after {length(begun)}" if begun else "before", length(busy)))
    says = (
        f"{length(last_ns - first_ns)} of the suspect and its twins: each bar is an operator, "
        "from the first byte that the rank sends to its end there. "
        + "; ".join(f"{who} begins {begins} and is in operators for {busy}" for who, _, begins, busy in rows)
        + "."
    )
    if finding is None:
        says = says.replace("the suspect and its twins", "the same ranks")
    figure = plots.timeline(bars, first_ns, last_ns, nodes)
    return Exhibit(
        "timeline", title, says, figure, ("rank", "operators", "first begins", "in operators"), rows
    )


def _callers(view: plots.View, finding: Finding | None, cut: RateCurves) -> pl.DataFrame:
    """node, pid of the ranks to follow: those that send, and the suspect where that is another."""
    lines = cut.lines.select(PROCESS)
    if finding is not None and finding.pid is not None and finding.node is not None:
        own = pl.DataFrame({"node": [finding.node], "pid": [finding.pid]}, schema=lines.schema)
        lines = pl.concat([own, lines])
    return lines.unique(maintain_order=True)


def _counters(view: plots.View, nodes: set[str]) -> Exhibit:
    title = "What ports counted"
    counts = plots.counts(view.tables)
    if counts.is_empty():
        return Exhibit("counters", title, "No counters of ports were recorded, and no events.")
    told = f"{counts['counter'].n_unique()} counters of {counts.select('node', 'nic').n_unique()} ports"
    counted = counts.filter(pl.col("count") > 0)
    if counted.is_empty():
        return Exhibit("counters", title, f"{told} of errors, pauses and congestion all stayed at 0.")
    own = pl.col("node").is_in(list(nodes))
    rows = [
        (row["counter"], _count(row["own"]), _count(row["usual"]), _count(row["most"]), row["where"])
        for row in counted.group_by("counter")
        .agg(
            pl.col("count").filter(own).max().alias("own"),
            pl.col("count").filter(~own).median().alias("usual"),
            pl.col("count").max().alias("most"),
            (pl.col("nic") + " of " + pl.col("node")).sort_by("count", "node").last().alias("where"),
        )
        .sort("most", "counter", descending=[True, False])
        .head(2 * ROWS)
        .iter_rows(named=True)
    ]
    says = (
        f"By how much {told} grew, {counted['counter'].n_unique()} of them at all. The most: {rows[0][0]} by "
        f"{rows[0][3]} at {rows[0][4]}."
    )
    columns = ("counter", "suspect's ports, most", "other ports that counted, median", "most of all", "where")
    return Exhibit("counters", title, says, plots.counters(counts, nodes), columns, rows)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: object) -> str:
    return "-" if value is None else f"{value:.0%}"
