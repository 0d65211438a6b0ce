"""Plots of a recording, for a report or a notebook: small frames of what the analysis found, and figures of them.

recording = load([Path("rec")])
operators, flows = measure(recording)
findings = conclude(recording, operators, flows)
view = look(recording, operators)
heat_map(grid(rate_cells(view.aligned), "min"), "rate while sending", "Gbit/s", "low").show()
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.clock_offsets import Clock, one_clock
from pulse_bpf.analysis.lags import lags
from pulse_bpf.analysis.late import excesses, same_clock
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.plots.figures import (
    counters,
    heat_map,
    iterations,
    node_matrix,
    rate_curves,
    timeline,
)
from pulse_bpf.analysis.plots.frames import (
    bars,
    counts,
    edges,
    family,
    grid,
    late_cells,
    lengths,
    node_pairs,
    rate_cells,
)
from pulse_bpf.analysis.plots.rates import cut
from pulse_bpf.analysis.plots.rings import ring
from pulse_bpf.analysis.window import operators_in, tables_in

__all__ = [
    "View",
    "bars",
    "counters",
    "counts",
    "cut",
    "edges",
    "family",
    "grid",
    "heat_map",
    "iterations",
    "late_cells",
    "lengths",
    "look",
    "node_matrix",
    "node_pairs",
    "rate_cells",
    "rate_curves",
    "ring",
    "timeline",
]


@dataclass(frozen=True)
class View:
    """A recording on one `clock`: its operators, `aligned` (align.align), what `ranks` did with each (late.lags), how
    `late` they were to it (frames.CELLS), and its small `tables`."""

    clock: Clock
    aligned: pl.DataFrame
    ranks: pl.DataFrame
    late: pl.DataFrame
    tables: dict[str, pl.DataFrame]

    def between(self, first_ns: int, last_ns: int) -> View:
        """What was under way between these moments."""
        aligned = operators_in(self.aligned, first_ns, last_ns)
        here = aligned.select("comm_id", "step").unique()
        ranks = self.ranks.join(here, on=["comm_id", "step"], how="semi", nulls_equal=True)
        late = self.late.join(here, on=["comm_id", "step"], how="semi")
        return replace(
            self, aligned=aligned, ranks=ranks, late=late, tables=tables_in(self.tables, first_ns, last_ns)
        )


def look(recording: Recording, operators: pl.DataFrame) -> View:
    """What the plots of `recording` are made of, given its `operators` (metrics.OPERATORS)."""
    clock = one_clock(operators, recording["nodes"])
    aligned = align(clock.shifted("operators", operators), clock.error_ns)
    bin_ns = int(operators["bin_ns"].max() or 0)  # type: ignore[arg-type]
    same = same_clock(clock.error_ns, bin_ns)
    ranks = lags(aligned, same)
    tables = {name: clock.shifted(name, frame) for name, frame in recording.tables.items()}
    return View(clock, aligned, ranks, late_cells(excesses(ranks, same)), tables)
