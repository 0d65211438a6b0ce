"""From recording directories to the verdict, with progress on a terminal: what every verb that judges begins with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from pulse_bpf.store import RowsFile

COMPILING = "pulse: compiling the analysis, once after an installation; that takes half a minute or more"


class Judged(NamedTuple):
    """Recordings read as one, and what the analysis makes of them: see analysis.measure and analysis.conclude."""

    recording: Recording
    operators: pl.DataFrame
    flows: pl.DataFrame
    findings: Findings


def judge(directories: Sequence[Path], window: Window | None, console: Console) -> Judged:
    """What the recordings in `directories` say; a terminal behind `console` is shown how far that is, and what is lost.

    DataError when one of them is unusable, UsageError when nothing was recorded in the window.
    """
    with _shown(console) as shown:
        recording = shown.load(directories)
        operators, flows = analysis.measure(recording, shown.on_read)
        shown.describe("comparing ranks")
        return Judged(recording, operators, flows, analysis.conclude(recording, operators, flows, window))


def findings_of(directories: Sequence[Path], window: Window | None, console: Console, rows: Path) -> Findings:
    """The findings that `judge` would come to, by way of the file `rows` that it writes the operators to, so that they
    are in memory only as far as the findings need them.
    """
    with _shown(console) as shown:
        recording = shown.load(directories)
        flows = analysis.owners(recording)
        with RowsFile(rows) as file:
            for block in analysis.rows(recording, flows, shown.on_read):
                file.append(block)
        shown.describe("comparing ranks")
        return analysis.conclude_written(recording, rows, flows, window)


class _Shown:
    """How far it is, as a `progress` shows it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("reading tables", total=None, losses="")

    def load(self, directories: Sequence[Path]) -> Recording:
        self._recording = load(directories)
        self.describe("finding whose traffic")
        return self._recording

    def describe(self, what: str) -> None:
        self._progress.update(self._task, description=what, total=None, losses=_losses(self._recording))

    def on_read(self, rows: int) -> None:
        rate = self._progress.tasks[self._task].speed or 0.0
        self._progress.update(
            self._task,
            description=f"cutting operators, {rate / 1e6:.1f} M samples/s",
            total=self._recording.samples.rows,
            advance=rows,
            losses=_losses(self._recording),
        )


@contextmanager
def _shown(console: Console) -> Iterator[_Shown]:
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
        yield _Shown(progress)


def _losses(recording: Recording) -> str:
    """What is missing of a recording as far as it was read; nothing where nothing is."""
    counts = {"events lost": lost_events(recording["coverage"]), "damaged parts": len(recording.damaged)}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
