"""Diagnostic counters of a ConnectX card through the kernel's fwctl device, without any NVIDIA library.

Source of the layouts: mstflint (tools_layouts/icmd_hca_layouts.h), the mlx5ctl tool and the kernel's mlx5_ifc.h. All
words are big-endian. The list of 16-bit counters is another than DOCA's 64-bit ids. Nothing here was run on a card.
"""

from __future__ import annotations

import fcntl
import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.errors import HostError
from pulse_bpf.nic import Source, Tables
from pulse_bpf.nic.diag_samples import TAINT, CardClock, CardSamples, DataId, I64s
from pulse_bpf.nic.fwctl_device import (
    QUERY_COUNTERS,
    QUERY_HCA_CAP,
    QUERY_PARAMS,
    READ,
    SET_PARAMS,
    WRITE,
    FwctlDevice,
    Ioctl,
)
from pulse_bpf.schema import empty

SOURCE_NAME = "fwctl-diag"
# The counters whose numbers and units are public; what a card has besides is to be given in a file.
PUBLIC_IDS = (
    DataId(0x0401, "datalink_back_pressure_clocks"),
    DataId(0x0402, "stalled_pcie_write_clocks"),
    DataId(0x0403, "stalled_pcie_read_clocks"),
    DataId(0x0406, "inbound_pcie_data_128_bytes"),
    DataId(0x1001, "rx_packets"),
    DataId(0x2006, "tx_packets"),
    DataId(0x2001, "send_queues_stopped_clocks"),
)

_GENERAL, _DEBUG = 0, 13
_CAPABILITY_BYTES = 4096
_REPETITIVE, _ENABLE = 1 << 30, 1 << 26
_MAX_LOG_PERIOD = 35
# One query must fit the kernel's limit of 2 MiB, and the field for the number of samples has 16 bits.
_MAX_ENTRIES = 65536
_MAX_LOG_SAMPLES = 15
_LONGEST_DRAIN_NS = 1_000_000_000
# QUERY_DIAGNOSTIC_COUNTERS: a header of 16 bytes, then these.
ENTRY = np.dtype([("counter", ">u2"), ("sample", ">u2"), ("time", ">u4"), ("value", ">u8")])
_HEADER_BYTES = 16


@dataclass(frozen=True)
class Capability:
    """What a card's diagnostic counters can do: the clock's frequency, the ring, the shortest period, the counters."""

    frequency_khz: int
    log_max_samples: int
    log_min_period: int
    counters: frozenset[int]


class FwctlReader:
    """Samples the counters `ids` of the card behind `device`, as the Reader protocol says; opt-in, because it taints
    the kernel.

    `device` is found by find_device; `ioctl` is called as fcntl.ioctl is. The period is a power of two of the card's
    clock, at least `period_ns`; the real one is in `notes` and Source.bin_ns. The ring belongs to the card, not to a
    process: a reader that finds it in use leaves it alone unless `force_ownership`, and one that is killed leaves the
    card sampling into it. Nothing public says where in the ring the newest entry is: all are read, and put in order by
    their own time. A time has 32 bits: that the ring holds less than half a turn of them is seen to at the start.
    """

    def __init__(
        self,
        node: str,
        nic: str,
        wall_offset_ns: int,
        device: Path,
        ids: Sequence[DataId] = PUBLIC_IDS,
        period_ns: int = 100_000,
        force_ownership: bool = False,
        ioctl: Ioctl = fcntl.ioctl,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._node = node
        self._nic = nic
        self._wall_offset_ns = wall_offset_ns
        self._device = device
        self._ids = list(ids)
        self._period_ns = period_ns
        self._force_ownership = force_ownership
        self._ioctl = ioctl
        self._monotonic_ns = monotonic_ns
        self._opened: FwctlDevice | None = None
        self._armed = False
        self._failed = False
        self._due_ns = 0
        self._samples: CardSamples | None = None
        self._ring = 0
        self._frequency_khz = 0
        # The newest entry so far: its time in clocks since the first turn of the 32 bits, and when it was queried.
        self._newest: tuple[int, int] | None = None
        self.notes: list[str] = []
        """What is worth telling the user once."""

    @property
    def source(self) -> Source:
        return Source(SOURCE_NAME, f"timer of the card {self._nic}", False, (), self._period_ns, "wire")

    def start(self) -> None:
        """Sets the card up and begins to sample; HostError, with nothing left set up, naming what failed."""
        self._opened = FwctlDevice(self._nic, self._device, self._ioctl)
        try:
            capability = self._capability()
            self._choose(capability)
            self._set_up(capability)
        except BaseException:
            self._close()
            raise
        self.notes.append(TAINT)

    def drain(self) -> None:
        """Reads the ring whenever a quarter of it is new.

        A query that fails ends the source: `notes` says why, coverage ends there.
        """
        if self._monotonic_ns() >= self._due_ns:
            self._query()

    def read(self) -> Tables:
        """port_samples, port_counters and clocks since the last call."""
        self.drain()
        return {} if self._samples is None else self._samples.take()

    def stop(self) -> Tables:
        """Takes what is left and ends the card's sampling."""
        if self._opened is None:
            return {}
        self._query()
        tables = self.read()
        self._close()
        if self._samples is not None:
            self._samples.check_period()
        return tables

    def coverage(self) -> pl.DataFrame:
        """A row per port and direction; `lost` counts samples by the gaps in their ids."""
        return empty("coverage") if self._samples is None else self._samples.coverage()

    def period_ns(self) -> tuple[int, int] | None:
        """Median and 99th percentile of the time between two samples, by the card's clock."""
        return None if self._samples is None else self._samples.period_ns()

    def _query(self) -> None:
        if self._samples is None or self._failed:
            return
        self._due_ns = self._monotonic_ns() + self._period_ns * self._ring // 4
        before_ns = self._wall_ns()
        try:
            reply = self._command(
                READ,
                QUERY_COUNTERS,
                struct.pack(">HH4x", self._ring, 0),
                room=_HEADER_BYTES + ENTRY.itemsize * self._ring * len(self._ids),
                at_least=_HEADER_BYTES,
            )
        except HostError as error:
            self._failed = True
            self.notes.append(f"{self._nic} is sampled no longer: {error}")
            return
        after_ns = self._wall_ns()
        entries, unasked = decode(reply, [data_id.number for data_id in self._ids])
        self._samples.malformed += unasked
        if len(entries):
            clocks = self._unwrap(entries["time"].astype(np.int64), after_ns)
            self._samples.add(self._by_counter(entries, clocks), before_ns, after_ns)

    def _command(
        self, scope: int, opcode: int, body: bytes, op_mod: int = 0, *, room: int, at_least: int
    ) -> bytes:
        assert self._opened is not None
        return self._opened.command(scope, opcode, body, op_mod, room=room, at_least=at_least)

    def _capability(self) -> Capability:
        size = _HEADER_BYTES + _CAPABILITY_BYTES
        replies = [
            self._command(READ, QUERY_HCA_CAP, bytes(8), group << 1 | 1, room=size, at_least=size)
            for group in (_GENERAL, _DEBUG)
        ]
        capability = decode_capability(*replies)
        if capability is None:
            raise HostError(
                f"{self._nic} cannot sample its counters", "its firmware has no diagnostic counters"
            )
        return capability

    def _choose(self, capability: Capability) -> None:
        """Leaves out, and names, counters that the card lacks."""
        lacking = [data_id for data_id in self._ids if data_id.number not in capability.counters]
        names = ", ".join(f"{data_id.name} ({data_id.number:#x})" for data_id in lacking)
        self._ids = [data_id for data_id in self._ids if data_id not in lacking]
        if not self._ids:
            raise HostError(f"{self._nic} has none of the counters asked for", names)
        if lacking:
            self.notes.append(f"{self._nic} does not sample {names}")

    def _set_up(self, capability: Capability) -> None:
        current = self._parameters()
        if current[2] & _ENABLE and not self._force_ownership:
            raise HostError(
                f"the diagnostic counters of {self._nic} are in use",
                "another tool samples them, or a recording that was killed left them so",
            )
        self._frequency_khz = capability.frequency_khz
        clocks = self._period_ns * capability.frequency_khz / 1e6
        log_period = max(capability.log_min_period, math.ceil(math.log2(max(clocks, 1))))
        period_ns = round((1 << log_period) * 1e6 / capability.frequency_khz)
        log_samples = min(
            math.ceil(math.log2(max(2 * _LONGEST_DRAIN_NS / period_ns, 2))),
            # The card's limit, and ours, are for the entries of all counters together.
            capability.log_max_samples - math.ceil(math.log2(len(self._ids))),
            int(math.log2(_MAX_ENTRIES // len(self._ids))),
            _MAX_LOG_SAMPLES,
            # Half a turn of the clock's 32 bits is how far entries can be put in order.
            30 - log_period,
        )
        if log_period > _MAX_LOG_PERIOD or log_samples < 1:
            raise HostError(f"{self._nic} cannot sample {len(self._ids)} counters every {self._period_ns} ns")
        self._armed = True
        self._set(log_samples, _REPETITIVE | _ENABLE | log_period)
        count, log_real, flags = self._parameters()
        if (count, log_real, flags & 0xFF) != (len(self._ids), log_samples, log_period):
            raise HostError(
                f"{self._nic} did not take the parameters of its counters",
                f"it states {count} counters, 2^{log_real} samples, a period of 2^{flags & 0xFF} clocks",
            )
        if period_ns != self._period_ns:
            self.notes.append(
                f"{self._nic} samples every {period_ns} ns; {self._period_ns} ns were asked for"
            )
        if period_ns << log_samples < _LONGEST_DRAIN_NS:
            self.notes.append(f"the ring of {self._nic} is short for this period: samples may be lost")
        self._period_ns, self._ring = period_ns, 1 << log_samples
        clock = CardClock(self._node, "hca", self.notes)
        self._samples = CardSamples(
            SOURCE_NAME, self._node, self._nic, self._ids, clock, 16, 64, period_ns, self.notes
        )

    def _set(self, log_samples: int, flags: int) -> None:
        ids = b"".join(struct.pack(">HH", 0, data_id.number) for data_id in self._ids)
        context = struct.pack(">HxBI16x", len(self._ids), log_samples, flags) + ids
        self._command(WRITE, SET_PARAMS, context, room=_HEADER_BYTES, at_least=8)

    def _parameters(self) -> tuple[int, int, int]:
        """Number of counters, log2 of the samples and flags, as the card has them now."""
        # As long as the longest list can be: the firmware writes as many ids as are set.
        reply = self._command(READ, QUERY_PARAMS, bytes(8), room=32 + 4 * 1024, at_least=16)
        count, log_samples, flags = struct.unpack_from(">HxBI", reply, 8)
        return count, log_samples, flags

    def _unwrap(self, times: I64s, after_ns: int) -> I64s:
        """Times of 32 bits as clocks since the first turn, the newest found where the entries leave the longest gap."""
        behind = behind_newest(times)
        newest = int(times[int(np.argmin(behind))])
        if self._newest is not None:
            last, last_ns = self._newest
            advance = (newest - last) % 2**32
            elapsed = (after_ns - last_ns) * self._frequency_khz / 1e6
            newest = last + advance + 2**32 * round((elapsed - advance) / 2**32)
        self._newest = newest, after_ns
        return np.asarray(newest - behind, np.int64)

    def _by_counter(
        self, entries: NDArray[np.void], clocks: I64s
    ) -> list[tuple[I64s, I64s, NDArray[np.uint64]]]:
        whole_ms, rest = np.divmod(clocks, self._frequency_khz)
        t_ns = whole_ms * 1_000_000 + rest * 1_000_000 // self._frequency_khz
        order = np.argsort(t_ns, kind="stable")
        entries, t_ns = entries[order], t_ns[order]
        each = []
        for data_id in self._ids:
            own = entries["counter"] == data_id.number
            rows = entries[own]
            each.append((rows["sample"].astype(np.int64), t_ns[own], rows["value"].astype(np.uint64)))
        return each

    def _close(self) -> None:
        assert self._opened is not None
        if self._armed:
            self._armed = False
            try:
                self._set(0, 0)
            except HostError as error:
                self.notes.append(f"{self._nic} may go on sampling: {error}")
        self._opened.close()
        self._opened = None

    def _wall_ns(self) -> int:
        return self._monotonic_ns() + self._wall_offset_ns


def decode_capability(general: bytes, debug: bytes) -> Capability | None:
    """The diagnostic part of QUERY_HCA_CAP's general and debug groups; None when the card has no such counters."""
    if len(general) < _HEADER_BYTES + 0xA0 or len(debug) < _HEADER_BYTES + 0x40:
        return None
    word = struct.Struct(">I").unpack_from
    has_debug = word(general, _HEADER_BYTES + 0x30)[0] >> 28 & 1
    count = word(general, _HEADER_BYTES + 0x50)[0] >> 16
    frequency_khz = word(general, _HEADER_BYTES + 0x9C)[0]
    (samples,) = word(debug, _HEADER_BYTES)
    (periods,) = word(debug, _HEADER_BYTES + 4)
    if not (has_debug and count and frequency_khz and periods >> 30 & 1):
        return None
    room = (len(debug) - _HEADER_BYTES - 0x40) // 4
    counters = np.frombuffer(debug, ">u4", min(count, room), _HEADER_BYTES + 0x40) & 0xFFFF
    return Capability(frequency_khz, samples & 0xFF, periods & 0xFF, frozenset(counters.tolist()))


def decode(reply: bytes, numbers: Sequence[int]) -> tuple[NDArray[np.void], int]:
    """The entries (dtype ENTRY) of QUERY_DIAGNOSTIC_COUNTERS for the counters `numbers`, and how many were for others.

    An entry of counter 0 is one that the card has not written yet. A tail that is no whole entry is left out.
    """
    count = max(len(reply) - _HEADER_BYTES, 0) // ENTRY.itemsize
    entries = np.frombuffer(reply, ENTRY, count, _HEADER_BYTES if count else 0)
    entries = entries[entries["counter"] != 0]
    asked = np.isin(entries["counter"], list(numbers))
    return entries[asked], int((~asked).sum())


def behind_newest(times: I64s) -> I64s:
    """How far each of `times` (32 bits, going around, at least one) is behind the newest, int64.

    A ring holds less than half a turn: the newest is what the longest stretch without times comes after.
    """
    ascending = np.unique(times)
    gaps = np.diff(ascending, append=ascending[0] + 2**32)
    newest = ascending[int(np.argmax(gaps))]
    return np.asarray((newest - times) % 2**32, np.int64)
