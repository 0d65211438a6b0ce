"""What a recording says: whose traffic, which operators, and who is at fault. Needs no privilege and no RDMA."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import polars as pl

from pulse_bpf.analysis import attribute, metrics, stream
from pulse_bpf.analysis.findings import Findings
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.localize import NEEDED, localize
from pulse_bpf.analysis.port_bursts import least_of, narrowest_bins, port_bursts
from pulse_bpf.analysis.program import CALLED, Program
from pulse_bpf.analysis.samples import Batch
from pulse_bpf.analysis.window import Window

__all__ = [
    "Findings",
    "Window",
    "analyze",
    "conclude",
    "conclude_written",
    "cut",
    "measure",
    "measure_with",
    "operators",
    "owners",
    "rows",
]


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
    flows = owners(recording)
    return cut(recording, flows, on_read), flows


def rows(
    recording: Recording, flows: pl.DataFrame, on_read: Callable[[int], object] | None = None
) -> Iterator[pl.DataFrame]:
    """The operators table some rows at a time, in no order but that of the nodes: for tables too large for memory.

    `flows` say whose queue pairs are, `on_read` as in `measure`.
    """
    kept = recording.kept("operators", metrics.OPERATORS)
    known = kept["node"].unique()
    narrowest = [narrowest_bins(kept)]
    yield kept
    for blocks in _blocks(recording, flows, known, on_read):
        for block in blocks:
            if block.is_empty():
                continue
            table = metrics.table([block])
            narrowest = [least_of([*narrowest, narrowest_bins(table)])]
            yield table
    yield _of_ports(recording, narrowest, known)


def cut(
    recording: Recording,
    flows: pl.DataFrame,
    on_read: Callable[[int], object] | None = None,
) -> pl.DataFrame:
    """The operators table, with those that the recording holds taken as they are; `flows` say whose queue pairs are."""
    kept = recording.kept("operators", metrics.OPERATORS)
    known = kept["node"].unique()
    if not kept.is_empty() and set(recording.samples.nodes) <= set(known):
        return kept
    return metrics.together([kept, measure_with(recording, flows, known, on_read)])


def measure_with(
    recording: Recording,
    flows: pl.DataFrame,
    known: Collection[str] = (),
    on_read: Callable[[int], object] | None = None,
) -> pl.DataFrame:
    """The operators table of the nodes in `recording` that have samples, but those `known`; `flows` say whose they are.

    Of each node only its own data is used.
    """
    parts = [metrics.table(list(blocks)) for blocks in _blocks(recording, flows, known, on_read)]
    ports = _of_ports(recording, [narrowest_bins(metrics.together([])), *map(narrowest_bins, parts)], known)
    return metrics.together([*parts, ports])


def owners(recording: Recording) -> pl.DataFrame:
    """Whose all queue pairs are (attribute.FLOWS): what the recording holds, and of other nodes what it tells."""
    kept = recording.kept("flows", attribute.FLOWS)
    known = kept["node"].unique()
    if not kept.is_empty() and set(recording.samples.nodes) <= set(known):
        return kept
    return pl.concat([kept, attribute.flows(recording).filter(~pl.col("node").is_in(known.implode()))])


def _of_ports(recording: Recording, narrowest: list[pl.DataFrame], known: Collection[str]) -> pl.DataFrame:
    samples = recording["port_samples"].filter(~pl.col("node").is_in(list(known)))
    return port_bursts(samples, narrowest)


def _blocks(
    recording: Recording,
    flows: pl.DataFrame,
    known: Collection[str],
    on_read: Callable[[int], object] | None,
) -> Iterator[Iterator[pl.DataFrame]]:
    """What metrics.measure makes of some nodes, then of others; one is to be read to its end before the next."""
    covered = attribute.covered(recording)
    unknown = (batch for batch in _read(recording, on_read) if not set(batch.nodes) <= set(known))
    for nodes, batches in groupby(unknown, lambda batch: batch.nodes):
        here = pl.col("node").is_in(nodes)
        own = flows.filter(here)
        program = Program(recording.calls.in_time(nodes, CALLED))
        segments = stream.segment(batches, own, program, covered)
        yield metrics.measure(segments, own, recording.samples, covered)


def _read(recording: Recording, on_read: Callable[[int], object] | None) -> Iterator[Batch]:
    for batch in recording.samples.batches():
        yield batch
        if on_read:
            on_read(batch.rows.height)


def conclude(
    recording: Recording, table: pl.DataFrame, flows: pl.DataFrame, window: Window | None = None
) -> Findings:
    """The verdict on `recording`, or on what happened in a `window` of it, from what `measure` gives of it."""
    return localize(table, flows, recording.tables, recording.damaged, window, recording.absent)


def conclude_written(
    recording: Recording, path: Path, flows: pl.DataFrame, window: Window | None = None
) -> Findings:
    """The same from the file `path` with what `rows` gave, of which it takes the columns that tell it something."""
    # Named nowhere, so that localization can let go of it.
    return localize(
        metrics.written(path, NEEDED), flows, recording.tables, recording.damaged, window, recording.absent
    )
