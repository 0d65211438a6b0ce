"""A status document in words and bars, for a terminal of any width; nothing of it is markup or steers the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pulse_bpf.analysis.slow import speed
from pulse_bpf.analysis.text import printable
from pulse_bpf.live.status import LATE_NS
from pulse_bpf.live.words import headline

COLUMNS = ("job", "verdict", "sure", "iteration", "nodes", "open")
STYLES = {"anomaly": "bold red", "undecided": "yellow", "healthy": "green"}
_BARS = " ▁▂▃▄▅▆▇█"
_LONGEST_LABEL, _NAMED_NODES = 32, 20


def job_row(job: Mapping[str, Any]) -> list[Text]:
    """A job as cells: name, verdict, confidence, iteration, nodes heard of and all, how many findings are open."""
    missing = sum(node["missing"] for node in job["nodes"])
    nodes = f"{len(job['nodes']) - missing}/{len(job['nodes'])}"
    return [
        Text(printable(job["job"])),
        Text(printable(job["verdict"]).upper(), STYLES.get(job["verdict"], "")),
        Text(f"{job['confidence']:.0%}"),
        Text(_milliseconds(job["iteration_ns"])),
        Text(nodes, "yellow" if missing else ""),
        Text(str(len(job["open"]))),
    ]


def job_text(job: Mapping[str, Any], now_ns: int, columns: int) -> Text:
    """All of a job, in lines that `columns` cells hold, or wrap."""
    lines = [
        Text.assemble(
            f"Job {printable(job['job'])}: ",
            (printable(job["verdict"]).upper(), STYLES.get(job["verdict"], "")),
            f" (confidence {job['confidence']:.0%}), iteration {_milliseconds(job['iteration_ns'])}",
        )
    ]
    lines += [line for event in job["open"] for line in _finding(event, now_ns)]
    lines += _curves(job["curves"], columns)
    if job["lag_ns"] > LATE_NS:
        lines.append(
            Text(
                f"This is how it was {_age(job['lag_ns'])} ago: the collector has too much to judge", "yellow"
            )
        )
    missing = [node for node in job["nodes"] if node["missing"]]
    if missing:
        names = ", ".join(
            f"{printable(node['node'])} (for {_age(now_ns - node['last_seen_ns'])})"
            for node in missing[:_NAMED_NODES]
        )
        more = f" and {len(missing) - _NAMED_NODES} more" if len(missing) > _NAMED_NODES else ""
        lines.append(
            Text(f"{len(missing)} of {len(job['nodes'])} nodes are missing: {names}{more}", "yellow")
        )
    lost = sum(node["lost_events"] for node in job["nodes"])
    if lost:
        lines.append(Text(f"{lost} events were lost", "yellow"))
    alike = Counter((group["kind"], group["nranks"]) for group in job["groups"])
    if alike:
        parts = (f"{count} {printable(kind)} of {size}" for (kind, size), count in alike.items())
        lines.append(Text(f"Groups of ranks: {', '.join(parts)}"))
    lines += [Text(f"Not certain: {printable(why)}") for why in job.get("missing", ())]
    return Text("\n").join(lines)


def _finding(event: Mapping[str, Any], now_ns: int) -> list[Text]:
    finding = event["finding"]
    slower = f", {finding['slowdown']:.2f}x slower" if finding["slowdown"] > 1 else ""
    facts = f" {finding['confidence']:.0%} sure{slower}, for {_age(now_ns - event['opened_ns'])}"
    lines = [Text.assemble("► ", (headline(finding), "bold"), facts)]
    lines += [Text(f"  {printable(evidence['text'])}") for evidence in finding["evidence"]]
    if finding.get("next_check"):
        lines.append(Text(f"  next: {printable(finding['next_check'])}"))
    return lines


def _curves(curves: Sequence[Mapping[str, Any]], columns: int) -> list[Text]:
    """The rates of the suspect and of its twins, all on one scale, as the differences between them are what matters."""
    if not curves:
        return []
    top = max((rate for curve in curves for rate in curve["gbps"]), default=0.0)
    seconds = max(len(curve["gbps"]) * curve["bin_ns"] for curve in curves) / 1e9
    labels = [printable(curve["label"]) for curve in curves]
    width = min(max(map(cell_len, labels)), _LONGEST_LABEL, columns // 3)
    lines = [Text(f"Rate while sending, from 0 to {speed(top)}, over {seconds:.3g} s:")]
    for curve, label in zip(curves, labels, strict=True):
        suspect = curve["role"] == "suspect"
        lead = f"{'►' if suspect else ' '} {set_cell_size(label, width)} "
        bars = sparkline(curve["gbps"], max(columns - width - 3, 1), top)
        lines.append(Text.assemble(lead, (bars, "red" if suspect else "green"), no_wrap=True))
    return lines


def sparkline(values: Sequence[float], columns: int, top: float) -> str:
    """Bars of `values` from 0 to `top`, at most `columns` of them: of several values in one their mean.

    What is above 0 is seen, however small.
    """
    count = min(columns, len(values))
    bars = []
    for column in range(count):
        part = values[column * len(values) // count : (column + 1) * len(values) // count]
        mean = sum(part) / len(part)
        bars.append(_BARS[min(max(round(8 * mean / top), 1), 8)] if mean > 0 else _BARS[0])
    return "".join(bars).rstrip()


def _milliseconds(ns: int | None) -> str:
    return "unknown" if ns is None else f"{ns / 1e6:,.1f} ms"


def _age(ns: int) -> str:
    return str(timedelta(seconds=max(ns, 0) // 1_000_000_000))
