"""What a recording says: whose traffic, which operators, and who is at fault. Needs no privilege and no RDMA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import polars as pl

from pulse_bpf.analysis import attribute, metrics, segment, stream
from pulse_bpf.analysis.findings import Findings
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.localize import localize
from pulse_bpf.analysis.port_bursts import port_bursts
from pulse_bpf.analysis.samples import Batch
from pulse_bpf.analysis.window import Window

__all__ = ["Findings", "Window", "analyze", "conclude", "measure", "operators"]


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
    recording: Recording, on_read: Callable[[int], object] | None = None, known: pl.DataFrame | None = None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The operators table, and the owners of all QPs (attribute.FLOWS).

    `on_read` is told how many samples were read, batch after batch. `known` are the owners where an earlier part of the
    same recording told them.
    """
    flows = attribute.flows(recording) if known is None else known
    called, sent = segment.program(recording["ops"])
    covered = attribute.covered(recording)
    parts = [
        metrics.measure(
            segments,
            called.filter(pl.col("node").is_in(nodes)),
            flows.filter(pl.col("node").is_in(nodes)),
            recording.samples.unlisted,
            covered,
        )
        for nodes, segments in stream.segment(_read(recording, on_read), flows, called, sent, covered)
    ]
    return metrics.together([*parts, port_bursts(recording["port_samples"], parts)]), flows


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
    return localize(table, flows, small, recording.damaged, window)
