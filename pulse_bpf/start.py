"""The moment at which several hosts begin to record: given at once, or on stdin when all of them are ready."""

from __future__ import annotations

import argparse
import os
import select
from collections.abc import Callable

from pulse_bpf.arguments import moment

# Says when to begin, in ns since the Unix epoch, None while that is not known; EOFError when it will never be.
Start = Callable[[], int | None]
# What is said, in a line of its own, when everything but the moment is there.
READY = "ready: waiting for the moment to begin"


def start_at(text: str) -> Start:
    """An argument: ns since the Unix epoch, or "-" for a line on stdin that says so."""
    if text == "-":
        return StartLine(0)
    start_ns = moment(text)
    return lambda: start_ns


class StartLine:
    """Reads the moment from the file descriptor `source`, as a line, without ever waiting for it."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._read = b""

    def __call__(self) -> int | None:
        if b"\n" not in self._read and select.select([self._source], [], [], 0)[0]:
            data = os.read(self._source, 64)
            if not data:
                raise EOFError
            self._read += data
        line, end, _ = self._read.partition(b"\n")
        if not end:
            return None
        try:
            return moment(line.decode("ascii", "replace"))
        except argparse.ArgumentTypeError as error:
            raise EOFError from error
