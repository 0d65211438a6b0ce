"""The findings for a person at a terminal: verdict first, then the evidence, then what was not seen."""

from __future__ import annotations

import io
import textwrap
from datetime import datetime

from rich.console import Console
from rich.table import Table

from pulse_bpf.analysis.findings import Finding, Findings
from pulse_bpf.analysis.seen import MIN_JUDGED
from pulse_bpf.errors import UsageError

WIDTH = 96


def render(findings: Findings, most: int | None = None) -> str:
    """Plain text, no line over 99 columns, with the `most` probable findings, None: all."""
    first_ns, last_ns = findings.window_ns
    seconds = (last_ns - first_ns) / 1e9
    coverage = findings.coverage
    lines = [f"Verdict: {findings.verdict.upper()}", ""]
    if findings.verdict == "healthy":
        lines += _wrapped(
            f"Nothing slow, late, lossy or stuck in {coverage['operators']} operators over {seconds:.1f} s.",
            "",
        )
    for number, finding in enumerate(findings.findings[:most], 1):
        lines += _finding(number, finding)
    if most is not None and len(findings.findings) > most:
        lines += [f"{len(findings.findings) - most} further findings are less probable.", ""]
    if findings.missing:
        lines.append("Why it is undecided:" if findings.verdict == "undecided" else "Also:")
        lines += [line for text in findings.missing for line in _wrapped(text, "  - ")]
        lines.append("")
    lines += _job(findings)
    unattributed = sum(coverage["bytes_unattributed"].values())
    lines += _wrapped(
        f"Coverage: {seconds:.1f} s, {len(coverage['nodes'])} nodes, {coverage['operators']} operators, "
        f"{coverage['queue_pairs']} queue pairs ({coverage['queue_pairs_unattributed']} unattributed), "
        f"{_size(coverage['bytes'])} seen, {_size(coverage['bytes_outside_calls'])} outside calls, "
        f"{_size(unattributed)} unattributed, {coverage['lost']} events lost, "
        f"{len(coverage['damaged_parts'])} damaged parts.",
        "",
    )
    if coverage["judged_share"] >= MIN_JUDGED:
        lines += [line for why in coverage["not_judged"] for line in _wrapped(f"not judged: {why}", "  ")]
    lines += [line for part in coverage["damaged_parts"] for line in _wrapped(f"damaged: {part}", "  ")]
    return _shown(lines)


def explain(findings: Findings, name: str) -> str:
    """All that the finding `name` ("F1" is the most probable) rests on; UsageError when there is none of that name."""
    names = [f"F{number}" for number in range(1, len(findings.findings) + 1)]
    if name not in names:
        raise UsageError(f"there is no finding {name}", f"there are {', '.join(names) or 'none'}")
    number = names.index(name)
    finding = findings.findings[number]
    lines = _finding(number + 1, finding)
    lines += ["What was measured, beside what it is compared with:"]
    for evidence in finding.evidence:
        beside = "" if evidence.reference is None else f" ({evidence.reference:,.4g})"
        over = f" in {evidence.operators} operators" if evidence.operators else ""
        lines += _wrapped(f"{evidence.metric}: {evidence.value:,.4g}{beside}{over}", "   ")
    if finding.flows:
        lines += ["", f"{len(finding.flows)} queue pairs:"]
        lines += [
            f"   {flow['node']} {flow['nic']} {flow['qpn']} to {flow['peer_node']} {flow['peer_nic']}"
            for flow in finding.flows
        ]
    return _shown([*lines, ""])


def _job(findings: Findings) -> list[str]:
    """The iteration and the parallel groups, a line or two each."""
    lines = []
    iteration = findings.iteration
    if iteration is not None:
        seen = f", {len(iteration.boundaries_ns)} seen" if iteration.boundaries_ns else ""
        lost = f", {iteration.slowed_ns / 1e6:.1f} ms of it lost" if iteration.slowed_ns else ""
        lines += _wrapped(
            f"Iteration: {iteration.period_ns / 1e6:.1f} ms{seen} (confidence {iteration.confidence:.0%}){lost}.",
            "",
        )
    alike: dict[tuple[str, int, bool], list[float]] = {}
    for group in findings.groups:
        alike.setdefault((group.kind, group.nranks, group.inferred), []).append(group.confidence)
    parts = [
        f"{len(sure)} {kind} of {size}{', inferred' if inferred else ''} ({min(sure):.0%})"
        for (kind, size, inferred), sure in alike.items()
    ]
    if parts:
        lines += _wrapped(f"Groups of ranks (confidence): {'; '.join(parts)}.", "")
    return lines


def _finding(number: int, finding: Finding) -> list[str]:
    lines = _wrapped(printable(suspect(finding)), f"{number}. ")
    start = datetime.fromtimestamp(finding.first_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_row("kind", f"{finding.kind}{f' ({finding.state})' if finding.state else ''}")
    table.add_row("confidence", f"{finding.confidence:.0%}")
    if finding.slowdown > 1:
        table.add_row("slower by", f"{finding.slowdown:.2f}x")
    if finding.lost_ns:
        table.add_row("time lost", f"{finding.lost_ns / 1e6:.1f} ms")
    if finding.slowed_ns:
        table.add_row("iteration", f"{finding.slowed_ns / 1e6:.1f} ms longer")
    table.add_row("seen", f"from {start} for {(finding.last_ns - finding.first_ns) / 1e9:.1f} s")
    if finding.victims:
        more = "" if len(finding.victims) <= 10 else f" and {len(finding.victims) - 10} more"
        table.add_row("held up", ", ".join(finding.victims[:10]) + more)
    if finding.next_check:
        table.add_row("next", finding.next_check)
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, no_color=True, highlight=False, markup=False).print(table)
    lines += [f"   {line}".rstrip() for line in buffer.getvalue().splitlines()]
    lines += [line for evidence in finding.evidence for line in _wrapped(evidence.text, "   - ")]
    return [*lines, ""]


def suspect(finding: Finding) -> str:
    """Who is at fault, in one line."""
    if finding.scope == "link":
        return f"The link from {finding.node} to {finding.peer_node} ({finding.kind})"
    if finding.scope == "nic":
        return f"NIC {finding.nic} of node {finding.node} ({finding.kind})"
    rank = "" if finding.rank is None else f", rank {finding.rank}"
    if finding.scope == "gpu":
        return f"GPU {finding.gpu} of node {finding.node}{rank} ({finding.kind}, cause: {finding.cause})"
    if finding.scope == "group":
        return f"One of {', '.join(finding.nodes or ())} ({finding.kind}, cause: {finding.cause})"
    if finding.scope == "node":
        return f"Node {finding.node}{rank} ({finding.kind}, cause: {finding.cause})"
    return f"No machine: {finding.scope} ({finding.kind})"


def _shown(lines: list[str]) -> str:
    """The lines without what would steer a terminal: names come from elsewhere."""
    return "\n".join(map(printable, lines))


def printable(text: str) -> str:
    """`text` with a question mark for each character that is not seen but steers what is."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _wrapped(text: str, lead: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.1f} TB"
