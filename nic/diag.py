"""DOCA Telemetry Diag: counters of a port that the card samples by its own timer, by way of NVIDIA's library.

Source of signatures, enumerations and layouts: doca_telemetry_diag.h, doca_dev.h and doca_error.h of DOCA 3. All of it
is marked experimental there, so each symbol is looked for before anything is called. Nothing here was run on a card.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.errors import HostError
from pulse_bpf.nic import Source, Tables
from pulse_bpf.nic.diag_samples import TAINT, CardClock, CardSamples, DataId, I64s, U64s
from pulse_bpf.schema import empty

SOURCE_NAME = "doca-diag"
LIBRARY = "libdoca_telemetry_diag.so.2"
# The ids that NVIDIA's own sample prints; others are to be asked of doca_telemetry_utils and given in a file.
PUBLIC_IDS = (
    DataId(0x1020000100000000, "port0_rx_bytes", 1, "rx", "bytes"),
    DataId(0x1020000300000000, "port0_rx_packets", 1, "rx", "packets"),
    DataId(0x1140000100000000, "port0_tx_bytes", 1, "tx", "bytes"),
    DataId(0x1140000300000000, "port0_tx_packets", 1, "tx", "packets"),
    DataId(0x1180000100000000, "icmc_request"),
    DataId(0x1180000200000000, "icmc_hit"),
    DataId(0x1180000300000000, "icmc_miss"),
)

_SKIPPED = 30
_NO_SYNC, _REPETITIVE, _FRC, _RTC = 0, 1, 0, 1
_IBDEV_NAME_BYTES = 64
# The card's ring holds what it samples in twice this time, the longest between two drains that loses nothing.
_LONGEST_DRAIN_NS = 1_000_000_000
_SAMPLES_PER_QUERY = 4096
_QUERIES_PER_DRAIN = 64

_PREFIX = "doca_telemetry_diag_"
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "doca_devinfo_create_list": (POINTER(POINTER(c_void_p)), POINTER(c_uint32)),
    "doca_devinfo_destroy_list": (c_void_p,),
    "doca_devinfo_get_ibdev_name": (c_void_p, c_char_p, c_uint32),
    "doca_dev_open": (c_void_p, POINTER(c_void_p)),
    "doca_dev_close": (c_void_p,),
    _PREFIX + "cap_is_supported": (c_void_p,),
    _PREFIX + "cap_get_log_max_num_samples": (c_void_p, POINTER(c_uint8)),
    _PREFIX + "cap_is_data_timestamp_source_supported": (c_void_p, c_int, POINTER(c_uint8)),
    _PREFIX + "create": (c_void_p, c_uint8, POINTER(c_void_p)),
    _PREFIX + "destroy": (c_void_p,),
    _PREFIX + "set_output_format": (c_void_p, c_int),
    _PREFIX + "set_sample_period": (c_void_p, c_uint64),
    _PREFIX + "get_sample_period": (c_void_p, POINTER(c_uint64)),
    _PREFIX + "set_log_max_num_samples": (c_void_p, c_uint8),
    _PREFIX + "set_max_num_data_ids": (c_void_p, c_uint32),
    _PREFIX + "set_sync_mode": (c_void_p, c_int),
    _PREFIX + "set_sample_mode": (c_void_p, c_int),
    _PREFIX + "set_data_clear": (c_void_p, c_uint8),
    _PREFIX + "set_data_timestamp_source": (c_void_p, c_int),
    _PREFIX + "apply_config": (c_void_p,),
    _PREFIX + "check_data_id": (c_void_p, c_uint64),
    _PREFIX + "apply_counters_list_by_id": (c_void_p, POINTER(c_uint64), c_uint32, POINTER(c_uint64)),
    _PREFIX + "start": (c_void_p,),
    _PREFIX + "stop": (c_void_p,),
    _PREFIX + "get_sample_size": (c_void_p, POINTER(c_uint32)),
    _PREFIX + "query_counters": (c_void_p, c_void_p, c_uint32, POINTER(c_uint32)),
}


class DiagReader:
    """Samples the counters `ids` of the card `nic`, as the Reader protocol says; opt-in, because it taints the kernel.

    `library` is the path or name of libdoca_telemetry_diag, which brings libdoca_common with it. `output_format` 0 has
    a time for each value, 1 one for all values of a sample, 2 the same with 32-bit values. `timestamps` "rtc" is the
    card's real-time clock, where it has one; "frc" its free-running one, which counts ns and is anchored to wall time
    by the queries themselves. The card may sample more slowly than `period_ns`: what it says is in `notes` and in
    Source.bin_ns. Only one owner can use these counters; `force_ownership` takes them over, from a reader that was
    killed for instance. Values see the port or the device, never a queue pair.
    """

    def __init__(
        self,
        node: str,
        nic: str,
        wall_offset_ns: int,
        ids: Sequence[DataId] = PUBLIC_IDS,
        period_ns: int = 100_000,
        library: str = LIBRARY,
        output_format: Literal[0, 1, 2] = 1,
        timestamps: Literal["rtc", "frc"] = "rtc",
        force_ownership: bool = False,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._node = node
        self._nic = nic
        self._wall_offset_ns = wall_offset_ns
        self._ids = list(ids)
        self._period_ns = period_ns
        self._library = library
        self._format: Literal[0, 1, 2] = output_format
        self._real_time = timestamps == "rtc"
        self._force_ownership = force_ownership
        self._monotonic_ns = monotonic_ns
        self._undo: list[tuple[str, c_void_p]] = []
        self._lib: Any = None
        self._diag = c_void_p()
        self._samples: CardSamples | None = None
        self._buffer = np.zeros(0, np.uint8)
        self._sample_bytes = 0
        self._failed = False
        self.skips = 0
        """How often the card said that it dropped samples since the query before."""
        self.notes: list[str] = []
        """What is worth telling the user once."""

    @property
    def source(self) -> Source:
        return Source(
            SOURCE_NAME, f"timer of the card {self._nic}", False, ("rx", "tx"), self._period_ns, "wire"
        )

    def start(self) -> None:
        """Sets the card up and begins to sample; HostError, with nothing left set up, naming the call that failed."""
        self._lib = _load(self._library)
        try:
            self._set_up()
        except BaseException:
            self._tear_down()
            raise

    def drain(self) -> None:
        """Empties the card's ring. A query that fails ends the source: `notes` says why, coverage ends there."""
        if self._samples is None or self._failed:
            return
        capacity = len(self._buffer) // self._sample_bytes
        parts = []
        # More queries than any ring takes are not made: a card that is always full would hold the recording up.
        for _ in range(_QUERIES_PER_DRAIN):
            before_ns = self._wall_ns()
            returned = c_uint32()
            status = self._function("query_counters")(
                self._diag, self._buffer.ctypes.data, capacity, byref(returned)
            )
            if status not in (0, _SKIPPED):
                self._failed = True
                self.notes.append(
                    f"{self._nic} is sampled no longer: query_counters failed with {self._name(status)}"
                )
                break
            self.skips += status == _SKIPPED
            count = min(returned.value, capacity)
            parts.append(self._buffer[: count * self._sample_bytes].tobytes())
            if count < capacity:
                break
        ids, t_ns, values, malformed = decode(b"".join(parts), self._format, self._numbers(), self._real_time)
        self._samples.malformed += malformed
        each = [(ids, t_ns[:, column], values[:, column]) for column in range(len(self._ids))]
        # The newest sample is of the last query, and what anchors the card's clock.
        self._samples.add(each, before_ns, self._wall_ns())

    def read(self) -> Tables:
        """port_samples, port_counters and clocks since the last call."""
        self.drain()
        return {} if self._samples is None else self._samples.take()

    def stop(self) -> Tables:
        """Takes what is left, stops the card's sampling and gives the counters back."""
        if not self._undo:
            return {}
        tables = self.read()
        self._tear_down()
        if self._samples is not None:
            self._samples.check_period()
        return tables

    def coverage(self) -> pl.DataFrame:
        """A row per port and direction; `lost` counts samples by the gaps in their ids."""
        return empty("coverage") if self._samples is None else self._samples.coverage()

    def period_ns(self) -> tuple[int, int] | None:
        """Median and 99th percentile of the time between two samples, by the card's clock."""
        return None if self._samples is None else self._samples.period_ns()

    def _set_up(self) -> None:
        info = self._open_device()
        support = self._function("cap_is_supported")(info)
        if support:
            reasons = {3: "the card or its firmware cannot", 16: "it has no fwctl device", 20: "needs root"}
            raise HostError(
                f"{self._nic} cannot sample its counters",
                reasons.get(support, self._name(support)),
                "It takes a ConnectX-7, BlueField-3 or later, and /dev/fwctl (kernel 6.15, or the package fwctl-dkms)",
            )
        log_samples = c_uint8()
        self._call("cap_get_log_max_num_samples", info, byref(log_samples))
        if self._real_time:
            supported = c_uint8()
            self._call("cap_is_data_timestamp_source_supported", info, _RTC, byref(supported))
            self._real_time = bool(supported.value)
        self._call("create", self._device, int(self._force_ownership), byref(self._diag))
        self._undo.append((_PREFIX + "destroy", self._diag))
        wanted = math.ceil(math.log2(2 * _LONGEST_DRAIN_NS / self._period_ns))
        self._call("set_output_format", self._diag, self._format)
        self._call("set_sample_period", self._diag, self._period_ns)
        self._call("set_log_max_num_samples", self._diag, max(1, min(wanted, log_samples.value)))
        self._call("set_max_num_data_ids", self._diag, len(self._ids))
        self._call("set_sync_mode", self._diag, _NO_SYNC)
        self._call("set_sample_mode", self._diag, _REPETITIVE)
        self._call("set_data_clear", self._diag, 0)
        self._call("set_data_timestamp_source", self._diag, _RTC if self._real_time else _FRC)
        self._call("apply_config", self._diag)
        self._apply_ids()
        self._read_period(wanted > log_samples.value)
        self._call("start", self._diag)
        self._undo.append((_PREFIX + "stop", self._diag))
        self._check_sample_size()
        self.notes.append(TAINT)
        clock = CardClock(self._node, "rtc" if self._real_time else "hca", self.notes)
        value_bits = 32 if self._format == 2 else 64
        self._samples = CardSamples(
            SOURCE_NAME, self._node, self._nic, self._ids, clock, 32, value_bits, self._period_ns, self.notes
        )

    def _open_device(self) -> c_void_p:
        """The devinfo of `nic`, opened; it lives as long as its list, which is given back at the end."""
        devices, count = POINTER(c_void_p)(), c_uint32()
        self._call("doca_devinfo_create_list", byref(devices), byref(count))
        self._undo.append(("doca_devinfo_destroy_list", ctypes.cast(devices, c_void_p)))
        names = []
        for index in range(count.value):
            info = c_void_p(devices[index])
            name = ctypes.create_string_buffer(_IBDEV_NAME_BYTES)
            if self._lib.doca_devinfo_get_ibdev_name(info, name, _IBDEV_NAME_BYTES) == 0:
                names.append(name.value.decode("utf-8", "replace"))
                if names[-1] == self._nic:
                    self._device = c_void_p()
                    self._call("doca_dev_open", info, byref(self._device))
                    self._undo.append(("doca_dev_close", self._device))
                    return info
        raise HostError(f"DOCA knows no device {self._nic}", f"it lists {', '.join(names) or 'none'}")

    def _apply_ids(self) -> None:
        """Applies the ids that the card has; those that it lacks are left out and named."""
        refused = [
            data_id
            for data_id in self._ids
            if self._function("check_data_id")(self._diag, c_uint64(data_id.number))
        ]
        if refused:
            names = ", ".join(f"{data_id.name} ({data_id.number:#x})" for data_id in refused)
            self._ids = [data_id for data_id in self._ids if data_id not in refused]
            if not self._ids:
                raise HostError(f"{self._nic} has none of the counters asked for", names)
            self.notes.append(f"{self._nic} does not sample {names}")
        numbers = (c_uint64 * len(self._ids))(*(data_id.number for data_id in self._ids))
        failed = c_uint64()
        status = self._function("apply_counters_list_by_id")(
            self._diag, numbers, len(self._ids), byref(failed)
        )
        if status:
            why = f"{self._name(status)}" + (f" because of {failed.value:#x}" if failed.value else "")
            raise HostError(f"{self._nic} does not sample these counters together", why)

    def _read_period(self, ring_is_short: bool) -> None:
        real_ns = c_uint64()
        self._call("get_sample_period", self._diag, byref(real_ns))
        if not real_ns.value:
            raise HostError(f"{self._nic} states no sample period", "get_sample_period returned 0")
        if real_ns.value != self._period_ns:
            self.notes.append(
                f"{self._nic} samples every {real_ns.value} ns; {self._period_ns} ns were asked for"
            )
        self._period_ns = real_ns.value
        if ring_is_short:
            self.notes.append(f"the ring of {self._nic} is short for this period: samples may be lost")

    def _check_sample_size(self) -> None:
        size = c_uint32()
        self._call("get_sample_size", self._diag, byref(size))
        self._sample_bytes = _sample_dtype(self._format, len(self._ids)).itemsize
        if size.value != self._sample_bytes:
            raise HostError(
                f"{self._nic} hands out samples of {size.value} bytes",
                f"format {self._format} with {len(self._ids)} counters has {self._sample_bytes}",
                "This DOCA has another layout; report its version",
            )
        self._buffer = np.zeros(self._sample_bytes * _SAMPLES_PER_QUERY, np.uint8)

    def _tear_down(self) -> None:
        while self._undo:
            name, argument = self._undo.pop()
            status = getattr(self._lib, name)(argument)
            if status:
                self.notes.append(f"{name} failed with {self._name(status)}")

    def _numbers(self) -> U64s:
        return np.array([data_id.number for data_id in self._ids], np.uint64)

    def _wall_ns(self) -> int:
        return self._monotonic_ns() + self._wall_offset_ns

    def _function(self, name: str) -> Any:
        return getattr(self._lib, name if name.startswith("doca_") else _PREFIX + name)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._function(name)(*arguments)
        if status:
            raise HostError(
                f"{self._nic} cannot sample its counters", f"{name} failed with {self._name(status)}"
            )

    def _name(self, status: int) -> str:
        if not hasattr(self._lib, "doca_error_get_name"):
            return f"DOCA error {status}"
        function = self._lib.doca_error_get_name
        function.argtypes, function.restype = (c_int,), c_char_p
        name = function(status)
        return name.decode("utf-8", "replace") if name else f"DOCA error {status}"


def _load(library: str) -> Any:
    """The library with the signature of each function set; HostError when it or one of them is missing."""
    try:
        lib = ctypes.CDLL(library)
    except OSError as error:
        raise HostError(f"{library} cannot be loaded", str(error), "It is part of NVIDIA's DOCA") from error
    missing = [name for name in _SIGNATURES if not hasattr(lib, name)]
    if missing:
        raise HostError(f"{library} lacks {', '.join(missing)}", "it is of another version than DOCA 3")
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, c_int
    return lib


def _sample_dtype(output_format: Literal[0, 1, 2], count: int) -> np.dtype[np.void]:
    """One sample of `count` counters, in the host's byte order (doca_telemetry_diag.h, data_sample_format_0 to 2)."""
    if output_format == 0:
        value = np.dtype([("number", "u8"), ("high", "u4"), ("low", "u4"), ("value", "u8")])
        return np.dtype([("id", "u4"), ("reserved", "u4"), ("values", value, (count,))])
    width = "u8" if output_format == 1 else "u4"
    head = [("id", "u4"), ("high", "u4"), ("low", "u4"), ("latest_low", "u4")]
    return np.dtype([*head, ("values", width, (count,))])


def decode(
    raw: bytes, output_format: Literal[0, 1, 2], numbers: U64s, real_time: bool
) -> tuple[I64s, I64s, U64s, int]:
    """Samples as query_counters returns them: ids (n), times in ns of the card's clock and values (both n x counters,
    in the order of `numbers`), and how many samples did not hold just those counters.

    A time is that of the value in format 0, else the middle of the sample's earliest and latest: values of one sample
    are not taken at once, and half the time between is the error. A tail of `raw` that is no whole sample is left out.
    """
    dtype = _sample_dtype(output_format, len(numbers))
    samples = np.frombuffer(raw, dtype, len(raw) // dtype.itemsize)
    malformed = 0
    if output_format == 0:
        order = np.argsort(samples["values"]["number"], axis=1)
        wanted = np.argsort(numbers)
        fits = (np.take_along_axis(samples["values"]["number"], order, 1) == numbers[wanted]).all(axis=1)
        malformed = int((~fits).sum())
        samples, order = samples[fits], order[fits]
        by_number = np.empty_like(order)
        by_number[:, wanted] = order
        values = np.take_along_axis(samples["values"], by_number, 1)
        t_ns = _time_ns(values["high"], values["low"], real_time)
        return samples["id"].astype(np.int64), t_ns, values["value"].astype(np.uint64), malformed
    # The latest time has no high word of its own: it is within one turn of the low word after the earliest.
    earliest_ns = _time_ns(samples["high"], samples["low"], real_time)
    later = samples["high"].astype(np.int64) + (samples["latest_low"] < samples["low"])
    latest_ns = _time_ns(later, samples["latest_low"], real_time)
    middle_ns = earliest_ns + (latest_ns - earliest_ns) // 2
    t_ns = np.broadcast_to(middle_ns[:, None], samples["values"].shape)
    return samples["id"].astype(np.int64), t_ns, samples["values"].astype(np.uint64), malformed


def _time_ns(high: NDArray[Any], low: NDArray[Any], real_time: bool) -> I64s:
    """A real-time stamp is seconds and nanoseconds, a free-running one 64 bits of nanoseconds."""
    unit = 1_000_000_000 if real_time else 2**32
    return np.asarray(high.astype(np.int64) * unit + low.astype(np.int64), np.int64)
