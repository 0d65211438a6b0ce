"""ERSPAN: frames that a switch mirrors inside GRE packets, type III with the switch's own time stamp.

Layouts: RFC 2784 and 2890 (GRE), draft-foschiano-erspan-03. Type I has no header, type II one of 8 bytes, type III
one of 12 and sometimes a platform's own of 8 more.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.nic.captured import Frames, I64Array, load

GRE = 47
_TYPES_1_AND_2, _TYPE_3 = 0x88BE, 0x22EB
_CHECKSUM, _ROUTING, _KEY, _SEQUENCE, _VERSION = 0x8000, 0x4000, 0x2000, 0x1000, 0x0007
_GRE = np.dtype([("flags", ">u2"), ("protocol", ">u2")])
_ERSPAN = np.dtype(
    [
        ("version_vlan", ">u2"),
        ("session", ">u2"),
        ("stamp", ">u4"),
        ("group", ">u2"),
        (
            "flags",
            ">u2",
        ),  # PDU 1, frame type 5, hardware 6, direction 1, granularity 2, has a platform's header 1
        ("platform", ">u4"),
        ("platform_stamp", ">u4"),
    ]
)
_ETHERNET, _ETHERNET_BYTES = 1, 14  # LINKTYPE_ETHERNET
# Granularity 0 is 100 us, coarser than the capture's clock; 3 is whatever the switch is configured to.
_UNITS_NS = np.array([0, 100, 1, 0])
_PLATFORMS_WITH_SECONDS, _PLATFORM_WITH_UPPER_HALF = (0, 5, 6, 7), 3
_UPPER_BITS = 24  # of that half: more would not fit 63 bits in nanoseconds, and is hundreds of years
_SECOND_NS = 1_000_000_000
# A switch's clock that moves this far against the capture's within one block has been set anew.
_JUMP_NS = 250_000_000
MAX_SWITCHES = 1024


class Tunnels(Protocol):
    """What is known of the packets that may hold frames: where the GRE header is, and who sent it."""

    @property
    def at(self) -> I64Array: ...
    @property
    def addresses(self) -> NDArray[np.uint64]: ...


def unwrap(frames: Frames, rows: I64Array, outer: Tunnels, clocks: MirrorClocks) -> tuple[I64Array, Frames]:
    """Those of `rows`, which hold GRE, that are ERSPAN of Ethernet frames; and `frames` with what they hold instead.

    The inner frame's `t_ns` is that of the switch where it can be had, `interface` is one of each switch and session.
    """
    at, end = outer.at[rows], (frames.start + frames.captured)[rows]
    gre = load(frames.buffer, _GRE, np.where(at + 4 <= end, at, 0))
    flags, protocol = gre["flags"].astype(np.int64), gre["protocol"]
    options = sum((flags & bit != 0).astype(np.int64) for bit in (_CHECKSUM, _KEY, _SEQUENCE))
    at = at + 4 + 4 * options
    header = load(frames.buffer, _ERSPAN, np.where(at + _ERSPAN.itemsize <= end, at, 0))
    version = header["version_vlan"] >> 12
    is_1 = (protocol == _TYPES_1_AND_2) & (flags & _SEQUENCE == 0)
    is_2 = (protocol == _TYPES_1_AND_2) & ~is_1 & (version == 1)
    is_3 = (protocol == _TYPE_3) & (version == 2) & (header["flags"] >> 10 & 31 == 0)
    has_platform = is_3 & (header["flags"] & 1 == 1)
    inner = at + np.where(is_2, 8, 0) + np.where(is_3, 12, 0) + np.where(has_platform, 8, 0)
    held = (is_1 | is_2 | is_3) & (flags & (_ROUTING | _VERSION) == 0) & (inner + _ETHERNET_BYTES <= end)

    rows, header, inner, is_1, is_3, has_platform = (
        column[held] for column in (rows, header, inner, is_1, is_3, has_platform)
    )
    start, captured, original, t_ns, place, link_type = (column.copy() for column in frames.columns)
    before = inner - start[rows]
    start[rows] = inner
    captured[rows] -= before
    original[rows] -= before
    link_type[rows] = _ETHERNET
    switch = (outer.addresses[rows, 1] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    session = np.where(is_1, 0, header["session"] & 0x3FF).astype(np.int64)
    place[rows] += (switch << 10 | session) << 21
    stamp_ns, period_ns = _stamps(header, has_platform)
    stamped = is_3 & (period_ns > 0)
    t_ns[rows[stamped]] = clocks.times(
        t_ns[rows[stamped]], switch[stamped], stamp_ns[stamped], period_ns[stamped]
    )
    return rows, Frames(frames.buffer, start, captured, original, t_ns, place, link_type)


def _stamps(header: NDArray[np.void], has_platform: NDArray[np.bool_]) -> tuple[I64Array, I64Array]:
    """The switch's time in each type III header, and after how long it repeats: 0 when it is of no use."""
    granularity = header["flags"] >> 1 & 3
    unit_ns = _UNITS_NS[granularity]
    stamp, platform = header["stamp"].astype(np.int64), header["platform"] >> 26
    more = header["platform_stamp"].astype(np.int64)
    has_seconds = has_platform & np.isin(platform, _PLATFORMS_WITH_SECONDS) & (unit_ns == 1)
    has_upper = has_platform & (platform == _PLATFORM_WITH_UPPER_HALF)
    upper = np.where(has_upper, more & ((1 << _UPPER_BITS) - 1), 0)
    stamp_ns = np.where(has_seconds, more * _SECOND_NS + stamp, (upper << 32 | stamp) * unit_ns)
    period_ns = np.where(has_upper, 1 << 32 + _UPPER_BITS, 1 << 32) * unit_ns
    return stamp_ns, np.where(has_seconds, _SECOND_NS << 32, period_ns)


class MirrorClocks:
    """The clocks of switches, each followed from its first stamp, which is taken to be the capture's time of it.

    So times are the switch's, but for an offset: the delay of the first packet on its way to the capture. Stamps may
    wrap and repeat; the capture's own times tell how often, if it never waits half a period longer than before.
    """

    def __init__(self) -> None:
        self._lags: dict[tuple[int, int], tuple[int, int]] = {}

    def times(self, t_ns: I64Array, switch: I64Array, stamp_ns: I64Array, period_ns: I64Array) -> I64Array:
        """The wall times of stamps by `switch`, each arrived at `t_ns` by the capture's clock.

        Beyond MAX_SWITCHES of them, and while a clock jumps, they are the capture's.
        """
        times: I64Array = t_ns.copy()
        for key in np.unique(np.stack([switch, period_ns]), axis=1).T.tolist():
            if (key[0], key[1]) not in self._lags and len(self._lags) == MAX_SWITCHES:
                continue
            mine = (switch == key[0]) & (period_ns == key[1])
            times[mine] = self._of_one((key[0], key[1]), t_ns[mine], stamp_ns[mine])
        return times

    def _of_one(self, key: tuple[int, int], t_ns: I64Array, stamp_ns: I64Array) -> I64Array:
        zero_ns, lag_ns = self._lags.get(key, (int(t_ns[0] - stamp_ns[0]), 0))
        expected = t_ns + lag_ns
        # 32 bits of nanoseconds without seconds are either a counter, or those of a second.
        periods = (key[1], _SECOND_NS) if key[1] == 1 << 32 else (key[1],)
        apart = min((_apart(stamp_ns + zero_ns - expected, period) for period in periods), key=_largest)
        if _largest(apart) > _JUMP_NS:
            self._lags.pop(key, None)
            return t_ns
        times: I64Array = expected + apart
        self._lags[key] = zero_ns, int(times[-1] - t_ns[-1])
        return times


def _apart(difference_ns: I64Array, period_ns: int) -> I64Array:
    """The difference of the smallest size that is equal to it but for whole periods."""
    apart: I64Array = (difference_ns + period_ns // 2) % period_ns - period_ns // 2
    return apart


def _largest(values: I64Array) -> int:
    return int(np.abs(values).max())
