"""What a recording says: whose traffic, which operators, and who is at fault. Needs no privilege and no RDMA."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import polars as pl

from pulse_bpf.analysis import attribute, metrics, segment, stream
from pulse_bpf.analysis.findings import Findings
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.localize import localize
from pulse_bpf.analysis.port_bursts import port_bursts
from pulse_bpf.analysis.samples import Batch
from pulse_bpf.analysis.window import Window

__all__ = ["Findings", "Window", "analyze", "conclude", "measure", "measure_with", "operators"]


def analyze(dirs: Sequence[Path], window: Window | None = None) -> Findings:
    """The verdict on the recordings in `dirs`, taken as one, or on what happened in a `window` of them.

    DataError when one of them is unusable, UsageError when nothing was recorded in the window.
    """
    recording = load(dirs)
    return conclude(recording, *measure(recording), window)


def operators(dirs: Sequence[Path]) -> pl.DataFrame:
    """The operators table (metrics.OPERATORS) of the recordings in `dirs`; DataError when one is unusable."""
    return measure(load(dirs))[0]


def measure(
    recording: Recording, on_read: Callable[[int], object] | None = None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The operators table, and the owners of all QPs (attribute.FLOWS).

    Of nodes whose operators the recording holds, these are taken, and what their flows are with them. `on_read` is told
    how many samples were read, batch after batch.
    """
    kept, flows = (
        recording.kept(table, schema)
        for table, schema in (("operators", metrics.OPERATORS), ("flows", attribute.FLOWS))
    )
    if kept.is_empty():
        flows = attribute.flows(recording)
        return measure_with(recording, flows, on_read=on_read), flows
    known = kept["node"].unique()
    if set(recording.samples.nodes) <= set(known):
        return kept, flows
    others = attribute.flows(recording).filter(~pl.col("node").is_in(known.implode()))
    flows = pl.concat([flows, others])
    return metrics.together([kept, measure_with(recording, flows, known, on_read)]), flows


def measure_with(
    recording: Recording,
    flows: pl.DataFrame,
    known: Collection[str] = (),
    on_read: Callable[[int], object] | None = None,
) -> pl.DataFrame:
    """The operators table of the nodes in `recording` that have samples, but those `known`; `flows` say whose they are.

    Of each node only its own data is used.
    """
    called, sent = segment.program(recording["ops"])
    covered = attribute.covered(recording)
    unknown = (batch for batch in _read(recording, on_read) if not set(batch.nodes) <= set(known))
    parts = [
        metrics.measure(
            segments,
            called.filter(pl.col("node").is_in(nodes)),
            flows.filter(pl.col("node").is_in(nodes)),
            recording.samples.unlisted,
            covered,
        )
        for nodes, segments in stream.segment(unknown, flows, called, sent, covered)
    ]
    ports = recording["port_samples"].filter(~pl.col("node").is_in(list(known)))
    return metrics.together([*parts, port_bursts(ports, parts)])


def _read(recording: Recording, on_read: Callable[[int], object] | None) -> Iterator[Batch]:
    for batch in recording.samples.batches():
        yield batch
        if on_read:
            on_read(batch.rows.height)


def conclude(
    recording: Recording, table: pl.DataFrame, flows: pl.DataFrame, window: Window | None = None
) -> Findings:
    """The verdict on `recording`, or on what happened in a `window` of it, from what `measure` gives of it."""
    small = {name: frame for name, frame in recording.tables.items() if name != "ops"}
    return localize(table, flows, small, recording.damaged, window, recording.absent)
