"""From recording directories to the verdict, with progress on a terminal: what every verb that judges begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pulse_bpf import analysis
from pulse_bpf.analysis.compiled import when_compiling
from pulse_bpf.analysis.findings import Findings
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.seen import lost_events
from pulse_bpf.analysis.window import Window

COMPILING = "pulse: compiling the analysis, once after an installation; that takes half a minute or more"


class Judged(NamedTuple):
    """Recordings read as one, and what the analysis makes of them: see analysis.measure and analysis.conclude."""

    recording: Recording
    operators: pl.DataFrame
    flows: pl.DataFrame
    findings: Findings


def judge(
    directories: Sequence[Path],
    window: Window | None,
    console: Console,
    on_rows: Callable[[pl.DataFrame], object] | None = None,
) -> Judged:
    """What the recordings in `directories` say; a terminal behind `console` is shown how far that is, and what is lost.

    `on_rows` gets the rows of the operators table as they are made, see analysis.measure.
    DataError when one of them is unusable, UsageError when nothing was recorded in the window.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("[yellow]{task.fields[losses]}"),
    )
    with (
        when_compiling(lambda: console.print(COMPILING, highlight=False, soft_wrap=True)),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("reading tables", total=None, losses="")
        recording = load(directories)
        progress.update(task, description="finding whose traffic", losses=_losses(recording))

        def on_read(rows: int) -> None:
            rate = progress.tasks[task].speed or 0.0
            progress.update(
                task,
                description=f"cutting operators, {rate / 1e6:.1f} M samples/s",
                total=recording.samples.rows,
                advance=rows,
                losses=_losses(recording),
            )

        operators, flows = analysis.measure(recording, on_read, on_rows)
        progress.update(task, description="comparing ranks", total=None)
        findings = analysis.conclude(recording, operators, flows, window)
    return Judged(recording, operators, flows, findings)


def _losses(recording: Recording) -> str:
    """What is missing of a recording as far as it was read; nothing where nothing is."""
    counts = {"events lost": lost_events(recording["coverage"]), "damaged parts": len(recording.damaged)}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
