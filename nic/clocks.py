"""The clocks that times come from, and how one is turned into another: anchors, kept as rows of `clocks`.

Times of different clocks never meet but through here. Sources: linux/ptp_clock.h of the kernel's user API.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.errors import DataError, HostError
from pulse_bpf.schema import CLOCKS

Kind = Literal["realtime", "monotonic", "phc", "hca", "rtc", "dpa"]


@dataclass(frozen=True)
class Clock:
    """One timeline. `kind`: "realtime" and "monotonic" of the kernel, "phc" a network card's own clock as /dev/ptpN,
    "hca" the free-running cycle counter of an RDMA device (cycles, not ns), "rtc" its real-time clock (ns), "dpa" the
    timer of its processors. `device` names which, for those of which a host has several."""

    kind: Kind
    device: str | None = None

    @property
    def domain(self) -> str:
        """As `clocks.domain` has it: the kind, with the device behind a slash."""
        return f"{self.kind}/{self.device}" if self.device else self.kind


def anchor(node: str, clock: Clock, before_ns: int, raw: int, after_ns: int) -> pl.DataFrame:
    """The CLOCKS row of a reading `raw` that was made between two readings of the wall clock."""
    row = (node, clock.domain, raw, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2)
    return pl.DataFrame([row], schema=CLOCKS, orient="row")


# Anchors do not tell what happened between them: this much a clock may go fast or slow (typical crystals).
DRIFT_PPM = 50


def to_wall(
    clocks: pl.DataFrame, clock: Clock, raw: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Wall time of moments on `clock`, and how far off it may be, by the CLOCKS rows of one node; int64 ns both.

    Between two anchors the clock is taken to run evenly, outside of them as fast as between the nearest two. The
    error adds, to that of the anchors, DRIFT_PPM of the time to the nearest. DataError with fewer than two anchors of
    that clock: its rate is then unknown.
    """
    own = clocks.filter(pl.col("domain") == clock.domain).unique("raw").sort("raw")
    if own.height < 2:
        raise DataError(
            f"times of the clock {clock.domain} cannot be converted", f"it has {own.height} anchors"
        )
    at, wall, error = (own[name].to_numpy() for name in ("raw", "wall_ns", "error_ns"))
    left = np.clip(np.searchsorted(at, raw, "right") - 1, 0, len(at) - 2)
    # Relative to the anchor, as a float64 cannot hold ns since 1970.
    rate = np.diff(wall)[left] / np.diff(at)[left]
    result = wall[left] + np.rint((raw - at[left]) * rate).astype(np.int64)
    nearest = np.minimum(np.abs(raw - at[left]), np.abs(raw - at[left + 1])) * rate
    bound = np.maximum(error[left], error[left + 1]) + np.ceil(nearest * (DRIFT_PPM / 1e6)).astype(np.int64)
    return result, bound


# linux/ptp_clock.h: struct ptp_clock_time {s64 sec; u32 nsec; u32 reserved}
_TIME = struct.Struct("=qII")
_SAMPLES = 25
_EXTENDED_BYTES = 16 + _SAMPLES * 3 * _TIME.size
_PRECISE_NS = 100
_PRECISE_BYTES = 3 * _TIME.size + 16


def _iowr(number: int, size: int) -> int:
    """_IOWR('=', number, size) of asm-generic/ioctl.h, which x86 and arm64 follow."""
    return 3 << 30 | size << 16 | ord("=") << 8 | number


PTP_SYS_OFFSET_PRECISE = _iowr(8, _PRECISE_BYTES)
PTP_SYS_OFFSET_EXTENDED = _iowr(9, _EXTENDED_BYTES)

Ioctl = Callable[[int, int, bytearray], object]


def phc_anchor(node: str, netdev: str, root: Path = Path("/"), ioctl: Ioctl = fcntl.ioctl) -> pl.DataFrame:
    """The CLOCKS row of the card's clock behind `netdev`; HostError when it has none or does not answer.

    Where the hardware stamps both clocks at once (PRECISE), its error is taken as _PRECISE_NS; else it is the
    tightest of 25 readings between two of the system's.
    """
    name = next((path.name for path in (root / f"sys/class/net/{netdev}/device/ptp").glob("ptp*")), None)
    if name is None:
        raise HostError(f"{netdev} has no hardware clock", f"/sys/class/net/{netdev}/device/ptp is empty")
    try:
        device = os.open(root / "dev" / name, os.O_RDWR)
    except OSError as error:
        why = f"/dev/{name}: {error.strerror}"
        raise HostError(f"cannot read the hardware clock of {netdev}", why, "Run as root") from error
    try:
        return anchor(node, Clock("phc", name), *(_precise(device, ioctl) or _extended(device, ioctl)))
    except OSError as error:
        raise HostError(f"{name} does not answer", error.strerror or str(error)) from error
    finally:
        os.close(device)


def _precise(device: int, ioctl: Ioctl) -> tuple[int, int, int] | None:
    buffer = bytearray(_PRECISE_BYTES)
    try:
        ioctl(device, PTP_SYS_OFFSET_PRECISE, buffer)
    except OSError:
        return None
    raw, wall_ns = _ns(buffer, 0), _ns(buffer, 1)
    return wall_ns - _PRECISE_NS, raw, wall_ns + _PRECISE_NS


def _extended(device: int, ioctl: Ioctl) -> tuple[int, int, int]:
    buffer = bytearray(_EXTENDED_BYTES)
    struct.pack_into("=I", buffer, 0, _SAMPLES)
    ioctl(device, PTP_SYS_OFFSET_EXTENDED, buffer)
    times = bytes(buffer[16:])
    readings = [(_ns(times, at), _ns(times, at + 1), _ns(times, at + 2)) for at in range(0, 3 * _SAMPLES, 3)]
    # A bracket that runs backwards: the wall clock was set in between.
    forward = [reading for reading in readings if reading[0] <= reading[2]]
    if not forward:
        raise OSError(errno.EAGAIN, "the wall clock was set while it was read")
    return min(forward, key=lambda reading: reading[2] - reading[0])


def _ns(buffer: bytes | bytearray, index: int) -> int:
    seconds, ns, _ = _TIME.unpack_from(buffer, index * _TIME.size)
    return int(seconds) * 1_000_000_000 + int(ns)
