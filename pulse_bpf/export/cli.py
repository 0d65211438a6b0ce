"""`pulse export`: its arguments, and where its files go."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pulse_bpf.arguments import window
from pulse_bpf.errors import OK, PARTIAL, UsageError
from pulse_bpf.output import write

if TYPE_CHECKING:
    import polars as pl

    from pulse_bpf.judge import Judged

TABLES = ("operators", "findings")
_notices = Console(stderr=True)


def add_commands(verbs: Any) -> None:
    """Adds `export` to the subparsers `verbs` of the command line."""
    export = verbs.add_parser("export", help="operators, rate curves and findings for other programs")
    export.add_argument("recordings", type=Path, nargs="+", metavar="DIR", help="recordings, read as one")
    export.add_argument(
        "--format",
        choices=("perfetto", "csv", "parquet", "json"),
        required=True,
        help="a timeline for ui.perfetto.dev, or tables",
    )
    export.add_argument(
        "--table", choices=TABLES, help="of tables, only this one: to a file, or else to standard output"
    )
    export.add_argument(
        "-o", "--output", type=Path, metavar="PATH", help="a file; a directory where it is both tables"
    )
    export.add_argument(
        "--window", type=window, metavar="A..B", help="only that time, as `pulse analyze` takes it"
    )
    export.set_defaults(func=_export)


def _export(arguments: argparse.Namespace) -> int:
    form, table, output = arguments.format, arguments.table, arguments.output
    if form == "perfetto" and table:
        raise UsageError("--table does not go with --format perfetto", "a timeline has all of it")
    if output is None and (form == "perfetto" or not table):
        why = "a timeline is no text" if form == "perfetto" else "there are two tables"
        advice = "Name a file" if form == "perfetto" else "Name a directory, or choose one with --table"
        raise UsageError("-o is missing", why, advice)
    if output is None and form == "parquet":
        raise UsageError("-o is missing", "Parquet is no text", "Name a file")

    from pulse_bpf.judge import judge

    judged = judge(arguments.recordings, arguments.window, _notices)
    if form == "perfetto":
        _timeline(judged, output)
    elif table is None:
        for name in TABLES:
            _table(judged, name, form, output / f"{name}.{form}", arguments.window is not None)
    else:
        _table(judged, table, form, output, arguments.window is not None)
    damaged = judged.recording.damaged
    for part in damaged:
        _say(f"damaged: {part}")
    return PARTIAL if damaged else OK


def _timeline(judged: Judged, output: Path) -> None:
    from pulse_bpf.export.trace import write_trace
    from pulse_bpf.store import write_file

    notes: list[str] = []
    with _notices.status("timeline") as status:

        def write_to(path: Path) -> None:
            notes.extend(write_trace(path, *judged, lambda what: status.update(f"timeline: {what}")))

        write_file(output, write_to)
    for note in notes:
        _say(f"{output}: {note}")
    _say(f"{output} is written; open it at https://ui.perfetto.dev, which keeps it in your browser")


def _table(judged: Judged, name: str, form: str, output: Path | None, part: bool) -> None:
    from pulse_bpf.export import tables
    from pulse_bpf.store import write_file

    if name == "findings":
        content = tables.findings(judged.findings, form)
    else:
        content = tables.rows(_in_window(judged) if part else judged.operators, form)
    if output is None:
        write(content.decode().rstrip("\n"))
        return
    write_file(output, lambda path: path.write_bytes(content))
    _say(f"{output} is written")


def _in_window(judged: Judged) -> pl.DataFrame:
    from pulse_bpf.analysis.align import align
    from pulse_bpf.analysis.window import operators_in

    return operators_in(align(judged.operators), *judged.findings.window_ns).drop("step")


def _say(text: str) -> None:
    _notices.print(text, markup=False, highlight=False, soft_wrap=True)
