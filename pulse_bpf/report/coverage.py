"""What a recording saw and what it did not, as tables: nodes, clocks, sources, versions, and everything missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from pulse_bpf.analysis.findings import Findings
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.plots.frames import natural
from pulse_bpf.report.words import length, size

# Lines of a list of names, of which there may be thousands.
LISTED = 40


class Table(NamedTuple):
    """A table of the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def seen(findings: Findings) -> list[tuple[str, str]]:
    """(what, how much) of all that was seen."""
    coverage = findings.coverage
    return [
        ("time", length(findings.window_ns[1] - findings.window_ns[0])),
        ("nodes", f"{len(coverage['nodes']):,}"),
        ("operators", f"{coverage['operators']:,}"),
        (
            "queue pairs",
            f"{coverage['queue_pairs']:,}, {coverage['queue_pairs_unattributed']:,} of them nobody's",
        ),
        ("traffic", f"{size(coverage['bytes'])}, {size(coverage['bytes_in_operators'])} of it in operators"),
        ("outside calls", size(coverage["bytes_outside_calls"])),
        ("nobody's traffic", f"{coverage['unattributed_share']:.1%}"),
        ("of operators' bytes judged", f"{coverage['judged_share']:.1%}"),
        ("operators that lack bytes", f"{coverage['incomplete_share']:.1%}"),
        ("operators without traffic", f"{coverage['operators_without_traffic']:,}"),
        ("events lost", f"{coverage['lost']:,}"),
        ("damaged parts", f"{len(coverage['damaged_parts']):,}"),
    ]


def unseen(findings: Findings, recording: Recording) -> list[str]:
    """What was not seen, a line each."""
    coverage = findings.coverage
    others = [why for why in coverage["not_judged"] if why not in findings.missing]
    lines = [*findings.missing, *(f"not judged: {why}" for why in others)]
    lines += [
        f"{size(count)} of traffic: {why}" for why, count in coverage["bytes_unattributed"].items() if count
    ]
    said = recording["coverage"].explode("unseen").drop_nulls("unseen").group_by("unseen").agg(
        pl.col("node").n_unique(), pl.col("pid").n_unique()
    )  # fmt: skip
    lines += [
        f"{what} ({pids} processes on {nodes} nodes)" for what, nodes, pids in said.sort("unseen").iter_rows()
    ]
    lines += [f"damaged: {part}" for part in coverage["damaged_parts"]]
    lines += [f"left out when recording: {what}" for what in _redactions(recording)]
    lines = list(dict.fromkeys(lines))
    more = [f"and {len(lines) - LISTED:,} more"] if len(lines) > LISTED else []
    return lines[:LISTED] + more


def _redactions(recording: Recording) -> list[str]:
    listed = [item for manifest in recording.manifests for item in _list(manifest.get("redactions"))]
    return list(dict.fromkeys(map(str, listed)))


def tables(recording: Recording) -> list[Table]:
    """Clocks, versions and sources; nodes of which the same can be said are one row."""
    nodes = recording["nodes"].unique("node")
    clocks = nodes.with_columns(
        error=pl.col("clock_error_ns").map_elements(length, return_dtype=pl.String).fill_null("unknown")
    )
    libraries = recording["libraries"].with_columns(
        version=pl.col("version").fill_null("unknown"), transport=pl.col("transport").fill_null("unknown")
    )
    sources = recording["coverage"].filter(pl.col("source").is_not_null())
    spans = sources.group_by("node", "source").agg(
        pl.col("nic").drop_nulls().n_unique().alias("nics"), pl.col("lost").max().fill_null(0).cast(pl.String)
    )
    return [
        Table(
            "Clocks and kernels",
            ("nodes", "clock", "may be wrong by", "kernel"),
            _alike(clocks, ["clock_source", "error", "kernel"]),
        ),
        Table(
            "Libraries that were probed",
            ("nodes", "version", "carries traffic by", "file"),
            _alike(libraries, ["version", "transport", "path"]),
        ),
        Table(
            "Sources",
            ("nodes", "source", "NICs", "events lost"),
            _alike(spans, ["source", "nics", "lost"]),
        ),
        Table("How sources count", ("source", "sees traffic at", "bin", "bytes are"), _sources(recording)),
        Table("Recorded by", ("program", "recordings"), _tools(recording)),
    ]


def _alike(frame: pl.DataFrame, columns: list[str]) -> list[tuple[str, ...]]:
    """The distinct rows of `columns`, with the nodes that have them."""
    groups = frame.group_by(columns, maintain_order=True).agg(pl.col("node").unique())
    rows = []
    for row in groups.iter_rows(named=True):
        names = natural(row["node"])
        told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        rows.append((told, *("unknown" if row[name] is None else str(row[name]) for name in columns)))
    rows.sort()
    return rows[:LISTED]


def _sources(recording: Recording) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for manifest in recording.manifests:
        for source in _list(manifest.get("sources")):
            if not isinstance(source, dict):
                continue
            bin_ns = source.get("bin_ns", manifest.get("bin_ns"))
            bytes_are = source.get("bytes_are", manifest.get("bytes_are"))
            wide = length(bin_ns) if isinstance(bin_ns, int) else "-"
            rows.append(
                (str(source.get("name")), str(source.get("vantage", "-")), wide, str(bytes_are or "-"))
            )
    return list(dict.fromkeys(rows))[:LISTED]


def _tools(recording: Recording) -> list[tuple[str, ...]]:
    counted: dict[str, int] = {}
    for manifest in recording.manifests:
        tool = manifest.get("tool")
        named = f"{tool.get('name')} {tool.get('version')}" if isinstance(tool, dict) else "unknown"
        counted[named] = counted.get(named, 0) + 1
    return [(named, f"{count:,}") for named, count in sorted(counted.items())]


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
