"""Writes docs/metrics-exported.md from what agents and collectors export."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from pulse_bpf.live.metrics import (
    LONGEST_LABEL,
    MOST_FINDINGS,
    MOST_JOBS,
    MOST_REASONS,
    AgentMetrics,
    CollectorMetrics,
)

PAGE = Path(__file__).parents[1] / "docs/metrics-exported.md"

# What each label may be. A metric with a label that is not here cannot be described.
LABELS = {
    "training_job": "as its agents name it; `other` stands for all beyond the bound",
    "state": "of nodes: `reporting`, `missing`; of finding events: `opened`, `updated`, `closed`",
    "verdict": "`anomaly`, `healthy`, `undecided`",
    "kind": "of the finding, as `pulse analyze --json` has it",
    "scope": "of the finding: `gpu`, `nic`, `node`, `link`, `group`, `network`, `workload`",
    "node": "the machine that the finding names; empty where it names none, or several",
    "part": "its NIC, `gpu N` or `rank N`; of a link the other end",
    "reason": "why a collector refused",
}


def page() -> str:
    """The whole page."""
    agent, collector = CollectorRegistry(), CollectorRegistry()
    AgentMetrics(agent)
    metrics = CollectorMetrics(collector)
    metrics.reject("reason")
    metrics.event("opened")
    finding = {"kind": "nic-slow", "scope": "nic", "node": "node", "nic": "nic", "confidence": 0.9}
    job = {"job": "job", "iteration_ns": 1, "verdict": "anomaly", "nodes": [], "open": [{"finding": finding}]}
    metrics.observe({"jobs": [job]})
    lines = [
        "# Metrics that agents and collectors export",
        "",
        "Prometheus reads them at `/metrics`. Made from the code by `scripts/describe_exported.py`. Names end in the",
        "unit; `process_*` come from prometheus-client: CPU seconds, memory and open files of the agent or collector.",
        "",
        "## Agent",
        "",
        *table(agent.collect()),
        "",
        "## Collector",
        "",
        f"At most {MOST_JOBS} jobs, {MOST_FINDINGS} findings (the most certain first) and {MOST_REASONS} reasons",
        "have series of their own; the rest is together under `other`. A value of a label has at most",
        f"{LONGEST_LABEL} characters, and `?` for each that cannot be printed.",
        "",
        *table(collector.collect()),
        "",
        "| label | |",
        "|---|---|",
        *(f"| `{label}` | {text} |" for label, text in LABELS.items()),
    ]
    return "\n".join(lines) + "\n"


def table(families: Iterable[Metric]) -> list[str]:
    """A row for each metric but those of prometheus-client's own."""
    rows = ["| metric | type | labels | |", "|---|---|---|---|"]
    for family in families:
        if family.name.startswith("process_"):
            continue
        name = family.name + "_total" * (family.type == "counter")
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        unknown = labels.keys() - LABELS.keys()
        if unknown:
            raise ValueError(f"{name} has labels that are not described: {unknown}")
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page())
