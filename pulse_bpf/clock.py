"""This host's clocks: anchors between CLOCK_MONOTONIC and wall time, and how far wall time can be trusted."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import polars as pl

from pulse_bpf.schema import CLOCKS


@dataclass(frozen=True)
class Anchor:
    """One moment on both clocks; `error_ns` is half the time the two monotonic reads around it took."""

    monotonic_ns: int
    wall_ns: int
    error_ns: int

    @property
    def offset_ns(self) -> int:
        """What to add to a CLOCK_MONOTONIC time (BPF's bpf_ktime_get_ns) to get wall time."""
        return self.wall_ns - self.monotonic_ns

    def row(self, node: str) -> pl.DataFrame:
        """The anchor as a row of `clocks`."""
        values = {
            "node": [node],
            "domain": ["monotonic"],
            "raw": [self.monotonic_ns],
            "wall_ns": [self.wall_ns],
            "error_ns": [self.error_ns],
        }
        return pl.DataFrame(values, schema=CLOCKS)


def anchor() -> Anchor:
    """The tightest of a few bracketed readings of both clocks."""
    readings = []
    for _ in range(5):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        readings.append(Anchor((before_ns + after_ns) // 2, wall_ns, (after_ns - before_ns + 1) // 2))
    return min(readings, key=lambda reading: reading.error_ns)


class _Timex(ctypes.Structure):
    # struct timex of linux/timex.h on 64-bit machines, up to the fields that are read.
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


_STA_UNSYNC = 0x0040


def discipline() -> tuple[str, int | None]:
    """What keeps this host's wall clock right: ("ntp", error in ns) or ("none", None).

    Source: adjtimex(2). The kernel cannot tell chrony from a PTP daemon that sets the system clock: both show
    as "ntp", with the error bound that the daemon itself states.
    """
    timex = _Timex()
    ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if timex.status & _STA_UNSYNC:
        return "none", None
    return "ntp", int(timex.maxerror) * 1000
