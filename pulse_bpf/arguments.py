"""What a single argument of the command line may be."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulse_bpf.analysis import Window


def seconds(text: str) -> float:
    """A length of time as an argument: a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def at_least_one(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)


# A moment farther ahead than this is a mistake: of another unit, or of another clock.
MOST_AHEAD_NS = 3_600_000_000_000


def moment(text: str) -> int:
    """A moment in ns since the Unix epoch, at most an hour ahead."""
    if not text.isdecimal() or len(text) != 19:
        raise argparse.ArgumentTypeError(f"{text[:40]} is no time in ns since the Unix epoch")
    if int(text) > time.time_ns() + MOST_AHEAD_NS:
        raise argparse.ArgumentTypeError(f"{text} is more than an hour ahead")
    return int(text)


def place(text: str) -> Path | str:
    """Where a recording is: a directory, or a URL of an object store."""
    return text if "://" in text else Path(text)


_UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000}


def window(text: str) -> Window:
    """A part of a recording's time, as A..B: `window.Window` says what A and B may be."""
    from pulse_bpf.analysis import Window

    begin, dots, end = text.partition("..")
    if not dots:
        raise argparse.ArgumentTypeError(f"{text} is not A..B, for example 2s..5s")
    return Window(_moment(begin), _moment(end))


def _moment(text: str) -> int | None:
    """As window.Window has a moment: ns from the start, or since the epoch; None where nothing is said."""
    if not text:
        return None
    if text.isdecimal() and len(text) >= 19:
        return int(text)
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m)", text)
    if number is None:
        units = ", ".join(_UNITS_NS)
        raise argparse.ArgumentTypeError(
            f"{text} is no time: a number of {units}, or ns since the Unix epoch"
        )
    return round(float(number[1]) * _UNITS_NS[number[2]])


def address(text: str) -> tuple[str, int]:
    """A host and a port as HOST:PORT; an IPv6 address is in brackets."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise argparse.ArgumentTypeError(f"{text}: an IPv6 address is in brackets, as [::1]:9000")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return host, int(port)
