"""What a recording says: whose traffic, which operators, and who is at fault. Needs no privilege and no RDMA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import polars as pl

from pulse_bpf.analysis import attribute, metrics, segment, stream
from pulse_bpf.analysis.findings import Findings
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.localize import localize
from pulse_bpf.analysis.port_bursts import narrowest_bins, port_bursts
from pulse_bpf.analysis.samples import Batch
from pulse_bpf.analysis.window import Window

__all__ = ["Findings", "Window", "analyze", "conclude", "measure", "operators", "rows"]


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
    recording: Recording,
    on_read: Callable[[int], object] | None = None,
    on_rows: Callable[[pl.DataFrame], object] | None = None,
    known: pl.DataFrame | None = None,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The operators table, and the owners of all QPs (attribute.FLOWS).

    `on_read` is told how many samples were read, batch after batch, `on_rows` gets all rows as `rows` gives them.
    `known` are the owners where an earlier part of the same recording told them.
    """
    flows = attribute.flows(recording) if known is None else known
    parts = [pl.DataFrame(schema=metrics.OPERATORS)]
    for blocks in _blocks(recording, flows, on_read):
        held = []
        for block in blocks:
            held.append(block)
            if on_rows:
                on_rows(metrics.table([block]))
        parts.append(metrics.table(held))
    ports = port_bursts(recording["port_samples"], map(narrowest_bins, parts))
    if on_rows:
        on_rows(ports)
    return pl.concat([*parts, ports]), flows


def rows(recording: Recording) -> Iterator[pl.DataFrame]:
    """The operators table some rows at a time, in no order but that of the nodes: for tables too large for memory."""
    narrowest = [narrowest_bins(pl.DataFrame(schema=metrics.OPERATORS))]
    for blocks in _blocks(recording, attribute.flows(recording), None):
        for block in blocks:
            table = metrics.table([block])
            narrowest.append(narrowest_bins(table))
            yield table
    yield port_bursts(recording["port_samples"], narrowest)


def _blocks(
    recording: Recording, flows: pl.DataFrame, on_read: Callable[[int], object] | None
) -> Iterator[Iterator[pl.DataFrame]]:
    """What metrics.measure makes of some nodes, then of others; one is to be read to its end before the next."""
    covered = attribute.covered(recording)
    for nodes, batches in groupby(_read(recording, on_read), lambda batch: batch.nodes):
        here = pl.col("node").is_in(nodes)
        own = flows.filter(here)
        called, sent = segment.program(recording["ops"].filter(here))
        segments = stream.segment(batches, own, called, sent, covered)
        yield metrics.measure(segments, called, own, recording.samples.unlisted, covered)


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
