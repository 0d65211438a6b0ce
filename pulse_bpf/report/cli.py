"""`pulse report`: its arguments, and where the page goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from pulse_bpf.arguments import window
from pulse_bpf.errors import OK, PARTIAL, UsageError
from pulse_bpf.output import write

_notices = Console(stderr=True)


def add_commands(verbs: Any) -> None:
    """Adds `report` to the subparsers `verbs` of the command line."""
    report = verbs.add_parser("report", help="the verdict with its evidence as one HTML page")
    report.add_argument("recordings", type=Path, nargs="+", metavar="DIR", help="recordings, read as one")
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the page, report.html; - for stdout",
    )
    report.add_argument(
        "--window", type=window, metavar="A..B", help="only that time, as `pulse analyze` takes it"
    )
    report.set_defaults(func=_report)


def _report(arguments: argparse.Namespace) -> int:
    output, to_stdout = arguments.output, str(arguments.output) == "-"
    if output.is_dir():
        raise UsageError(
            f"{output} is a directory", "a report is one file", f"Write to {output / 'report.html'}"
        )

    from pulse_bpf.judge import judge
    from pulse_bpf.report.page import page
    from pulse_bpf.report.words import headline, size
    from pulse_bpf.store import write_file

    judged = judge(arguments.recordings, arguments.window, _notices)
    with _notices.status("drawing"):
        names = [path.resolve().name for path in arguments.recordings]
        content = page(judged, names, arguments.window).encode()
        if not to_stdout:
            write_file(output, lambda path: path.write_bytes(content))
    if to_stdout:
        write(content.decode())
    written = "the report" if to_stdout else output
    text = (
        f"{written} is written ({size(len(content))}): {judged.findings.verdict}. {headline(judged.findings)}"
    )
    _notices.print(text, markup=False, highlight=False, soft_wrap=True)
    return PARTIAL if judged.recording.damaged else OK
