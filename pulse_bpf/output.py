"""Data on stdout: what a verb was asked for, as text, JSON or tables."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

from pulse_bpf.errors import HostError

# Columns of a table in a pipe, which has no width of its own.
PIPED_COLUMNS = 200


def write(*parts: Table | str) -> None:
    """Writes `parts` to stdout, each on lines of its own; a table is as wide as the terminal.

    A reader that has left is no error; HostError when the result cannot be written.
    """
    # Python's way to say that it was started with stdout closed; print() would drop all in silence.
    if sys.stdout is None:
        raise HostError("cannot write the result", "stdout is closed", "Let it go to a file or a pipe")
    try:  # rich flushes stdout, too
        print("\n".join(part if isinstance(part, str) else _drawn(part) for part in parts), flush=True)
    except OSError as error:
        # Else the interpreter would try again, and complain, when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise HostError("cannot write the result", error.strerror or str(error)) from error


def _drawn(table: Table) -> str:
    console = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
