"""Samples that a card took by its own timer: from what it hands out to the recording's tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.errors import UsageError
from pulse_bpf.nic import Tables
from pulse_bpf.nic.periods import Periods
from pulse_bpf.schema import CLOCKS, PORT_COUNTERS, PORT_SAMPLES, conform, empty

TAINT = "setting up the card's diagnostic counters taints the kernel until it is booted again"
# A card's real-time clock that is this far from the system's is not set, or keeps another time (TAI).
_REAL_TIME_TOLERANCE_NS = 100_000_000
# No sample is later than the query that returned it. The card's clock may run a little faster than the system's.
_FUTURE_NS = 1_000_000_000
_MAX_BIN_NS = 2**32 - 1

I64s = NDArray[np.int64]
U64s = NDArray[np.uint64]


@dataclass(frozen=True)
class DataId:
    """A counter of the card by its number, and what it counts.

    `port` 0: the whole device. With a `direction`, `unit` "bytes" or "packets" makes it traffic of the port, in
    port_samples; everything else goes into port_counters under `name`, in the card's own unit.
    """

    number: int
    name: str
    port: int = 0
    direction: Literal["rx", "tx"] | None = None
    unit: str = ""


def read_ids(path: Path) -> tuple[DataId, ...]:
    """The counters listed in the JSON file `path`: [{"id": "0x1001", "name", "port"?, "direction"?, "unit"?}].

    The ids are those that the vendor's tool shows for a card. UsageError names the entry that is wrong.
    """
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the list of counters {path}", str(error)) from error
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path} holds no list of counters")
    return tuple(_parse_id(path, index, entry) for index, entry in enumerate(entries))


def _parse_id(path: Path, index: int, entry: object) -> DataId:
    why = 'it needs an "id" such as "0x1020000100000000" and a "name", and may have port, direction and unit'
    if isinstance(entry, dict) and set(entry) <= {"id", "name", "port", "direction", "unit"}:
        text, name, port = entry.get("id"), entry.get("name"), entry.get("port", 0)
        direction, unit = entry.get("direction"), entry.get("unit", "")
        try:
            number = int(text, 0) if isinstance(text, str) else -1
        except ValueError:
            number = -1
        fits = 0 < number < 2**64 and isinstance(name, str) and name and type(port) is int and 0 <= port < 256
        if fits and direction in ("rx", "tx", None) and isinstance(unit, str):
            return DataId(number, str(name), port, direction, unit)
    raise UsageError(f"entry {index} of {path} is no counter", why)


class CardClock:
    """Turns times of a card's clock into wall time.

    Nothing reads this clock beside the samples: the newest sample of an emptied buffer was taken at most one period
    before the query, which bounds the offset from both sides. The first such bracket gives the offset of the whole
    recording, so that all bins keep one phase; each later one is a row of `clocks`. A real-time clock that agrees with
    the system's is taken as it is.
    """

    def __init__(self, node: str, domain: Literal["hca", "rtc"], notes: list[str]) -> None:
        self._node = node
        self._domain = domain
        self._notes = notes
        self.offset_ns: int | None = None

    def observe(self, newest_ns: int, before_ns: int, after_ns: int, period_ns: int) -> pl.DataFrame:
        """The `clocks` row of a query between the wall times `before_ns` and `after_ns` with `newest_ns` the card's
        time of its newest sample."""
        wall_ns = (before_ns - period_ns + after_ns) // 2
        error_ns = (after_ns - before_ns + period_ns + 1) // 2
        if self.offset_ns is None:
            self.offset_ns = wall_ns - newest_ns
            agrees = abs(self.offset_ns) <= error_ns + _REAL_TIME_TOLERANCE_NS
            if self._domain == "rtc" and agrees:
                self.offset_ns = 0
            elif self._domain == "rtc":
                self._notes.append(
                    f"the card's real-time clock is {self.offset_ns / 1e9:.3f} s behind the system's, so its times are "
                    f"anchored to the system's within {error_ns / 1e6:.1f} ms"
                )
        row = (self._node, self._domain, newest_ns, wall_ns, error_ns)
        return pl.DataFrame([row], schema=CLOCKS, orient="row")


class Series:
    """One counter's samples from batch to batch: repeated ones dropped, gaps counted, wraps undone."""

    def __init__(self, data_id: DataId, id_bits: int, value_bits: int) -> None:
        self.data_id = data_id
        self._id_bits = id_bits
        self._value_bits = value_bits
        # Sample id, time, value as read, number and what wraps have added, of the latest sample.
        self._last: tuple[int, int, int, int, int] | None = None
        self.lost = 0
        self.resets = 0

    def extend(self, ids: I64s, t_ns: I64s, values: U64s, period_ns: int) -> pl.DataFrame:
        """The samples that are later than all before: number, since_ns, t_ns, value and count (schema SAMPLES).

        `number` counts samples, lost ones included; `since_ns` is the time of the sample before and `count` what was
        counted since, null for the very first sample and after a reset. A 32-bit value that went back has wrapped if it
        counted less than half of its range since; a 64-bit one was reset.
        """
        is_first = self._last is None
        if self._last is not None:
            ids, t_ns = np.insert(ids, 0, self._last[0]), np.insert(t_ns, 0, self._last[1])
            values = np.insert(values, 0, np.uint64(self._last[2]))
        if not len(ids):
            return pl.DataFrame(schema=SAMPLES)
        later = np.insert(t_ns[1:] > np.maximum.accumulate(t_ns)[:-1], 0, True)
        ids, t_ns, values = ids[later], t_ns[later], values[later]
        if self._id_bits == 32 and ids.max() < 2**16 and (np.diff(ids) < 0).any():
            # The field has 32 bits; what the card counts in has 16.
            self._id_bits = 16
        steps = _steps(ids, t_ns, period_ns, self._id_bits)
        self.lost += int((steps - 1).sum())
        counts, went_back = np.diff(values), values[1:] < values[:-1]
        wrapped = np.zeros(len(counts), bool)
        if self._value_bits == 32:
            counts = counts & np.uint64(2**32 - 1)
            wrapped = went_back & (counts < 2**31)
        reset = went_back & ~wrapped
        self.resets += int(reset.sum())
        number, carry = self._last[3:] if self._last else (int(ids[0]), 0)
        numbers = number + np.insert(np.cumsum(steps), 0, 0)
        carries = carry + 2**32 * np.insert(np.cumsum(wrapped), 0, 0)
        self._last = int(ids[-1]), int(t_ns[-1]), int(values[-1]), int(numbers[-1]), int(carries[-1])
        frame = pl.DataFrame(
            {
                "number": numbers,
                "since_ns": np.insert(t_ns[:-1], 0, 0),
                "t_ns": t_ns,
                "value": values + carries.astype(np.uint64),
                "count": np.insert(counts, 0, 0),
                "unknown": np.insert(reset, 0, True),
            }
        ).with_columns(pl.when("unknown").then(None).otherwise("count").alias("count"))
        return frame.select(SAMPLES.names()).slice(0 if is_first else 1)


SAMPLES = pl.Schema(
    {"number": pl.Int64, "since_ns": pl.Int64, "t_ns": pl.Int64, "value": pl.UInt64, "count": pl.UInt64}
)


def _steps(ids: I64s, t_ns: I64s, period_ns: int, bits: int) -> I64s:
    """By how many samples each is later than the one before, at least 1: by the ids, which are `bits` wide, and where
    those went around meanwhile, by the times."""
    turn = 1 << bits
    steps = np.diff(ids) % turn
    elapsed_periods = np.diff(t_ns) / max(period_ns, 1)
    turns = np.round((elapsed_periods - steps) / turn)
    return np.asarray(np.maximum(steps + turn * np.maximum(turns, 0), 1), np.int64)


class CardSamples:
    """Collects the samples of one card's counters, and makes port_samples, port_counters and clocks of them."""

    def __init__(
        self,
        source: str,
        node: str,
        nic: str,
        data_ids: Sequence[DataId],
        clock: CardClock,
        id_bits: int,
        value_bits: int,
        period_ns: int,
        notes: list[str],
    ) -> None:
        self._notes = notes
        self._latest: tuple[int, int] | None = None
        self._keys = {"node": pl.lit(node), "nic": pl.lit(nic), "source": pl.lit(source)}
        self._series = [Series(data_id, id_bits, value_bits) for data_id in data_ids]
        self._clock = clock
        self._period_ns = period_ns
        self._frames: list[list[pl.DataFrame]] = [[] for _ in data_ids]
        self._clock_rows = [pl.DataFrame(schema=CLOCKS)]
        self._periods = Periods()
        self._first_ns: int | None = None
        self._last_ns = 0
        self.malformed = 0

    def add(self, samples: Sequence[tuple[I64s, I64s, U64s]], before_ns: int, after_ns: int) -> None:
        """Takes what a query between the wall times `before_ns` and `after_ns` returned: per counter the sample ids,
        times of the card in ns and values, in the order they were taken. Samples from the future are malformed."""
        limit_ns = np.iinfo(np.int64).max
        if self._latest is not None:
            limit_ns = self._latest[0] + 2 * (after_ns - self._latest[1]) + _FUTURE_NS
        kept = []
        for ids, t_ns, values in samples:
            possible = t_ns <= limit_ns
            self.malformed += int((~possible).sum())
            kept.append((ids[possible], t_ns[possible], values[possible]))
        newest_ns = max((int(t_ns.max()) for _, t_ns, _ in kept if len(t_ns)), default=None)
        if newest_ns is None:
            return
        self._latest = newest_ns, after_ns
        self._clock_rows.append(self._clock.observe(newest_ns, before_ns, after_ns, self._period_ns))
        offset_ns = self._clock.offset_ns or 0
        for number, (ids, t_ns, values) in enumerate(kept):
            frame = self._series[number].extend(ids, t_ns + offset_ns, values, self._period_ns)
            self._frames[number].append(frame)
            if number == 0:
                self._periods.add(
                    (frame["t_ns"] - frame["since_ns"]).filter(frame["since_ns"] > 0).to_numpy()
                )
            if frame.height:
                first_ns = int(frame["t_ns"][0])
                self._first_ns = first_ns if self._first_ns is None else min(self._first_ns, first_ns)
                self._last_ns = max(self._last_ns, int(frame["t_ns"][-1]))

    def take(self) -> Tables:
        """The rows since the last call: port_samples and port_counters sorted by t_ns, and clocks.

        A counter's row exists for its first sample and where it is another than before. A bin of port_samples is what
        lies between two samples, longer where some were lost.
        """
        frames = [pl.concat(parts) if parts else pl.DataFrame(schema=SAMPLES) for parts in self._frames]
        self._frames = [[] for _ in self._series]
        traffic = {
            (series.data_id.port, series.data_id.direction, series.data_id.unit): frame
            for series, frame in zip(self._series, frames, strict=True)
            if series.data_id.direction
        }
        samples = [pl.DataFrame(schema=PORT_SAMPLES)]
        counters = [pl.DataFrame(schema=PORT_COUNTERS)]
        for series, frame in zip(self._series, frames, strict=True):
            data_id = series.data_id
            port, direction, unit = data_id.port, data_id.direction, data_id.unit
            if direction and unit == "bytes":
                packets = traffic.get((port, direction, "packets"), pl.DataFrame(schema=SAMPLES))
                samples.append(conform(self._traffic(frame, packets, port, direction), "port_samples"))
            elif unit != "packets" or (port, direction, "bytes") not in traffic:
                rows = frame.filter(pl.col("count").is_null() | (pl.col("count") > 0)).with_columns(
                    port=pl.lit(port),
                    counter=pl.lit(data_id.name),
                    cumulative=pl.lit(True),
                    **self._keys,
                )
                counters.append(conform(rows, "port_counters"))
        clocks, self._clock_rows = pl.concat(self._clock_rows), [pl.DataFrame(schema=CLOCKS)]
        return {
            "port_samples": pl.concat(samples).sort("t_ns", maintain_order=True),
            "port_counters": pl.concat(counters).sort("t_ns", maintain_order=True),
            "clocks": clocks.tail(1),
        }

    def check_period(self) -> None:
        """Says so when the samples are not as far apart as the card was told to take them."""
        measured = self._periods.p50_p99_ns()
        if measured and not 0.9 < measured[0] / self._period_ns < 1.1:
            self._notes.append(
                f"the card's samples are {measured[0]} ns apart where {self._period_ns} ns were set: either it was "
                "slower, or its clock does not count nanoseconds and all times of this source are wrong"
            )

    def coverage(self) -> pl.DataFrame:
        """A row per port and direction, from the first sample to the last; `lost` counts samples that were skipped, and
        those whose count a reset made unknowable."""
        if self._first_ns is None:
            return empty("coverage")
        lost = max(series.lost + series.resets for series in self._series)
        ways = sorted({(s.data_id.port, s.data_id.direction or "") for s in self._series})
        rows = pl.DataFrame(ways, schema=["port", "direction"], orient="row").with_columns(
            direction=pl.col("direction").replace("", None),
            first_ns=pl.lit(self._first_ns),
            last_ns=pl.lit(self._last_ns),
            lost=pl.lit(lost),
            **self._keys,
        )
        return conform(rows, "coverage")

    def period_ns(self) -> tuple[int, int] | None:
        """Median and 99th percentile of the time between two samples."""
        return self._periods.p50_p99_ns()

    def _traffic(self, sizes: pl.DataFrame, packets: pl.DataFrame, port: int, direction: str) -> pl.DataFrame:
        bin_ns = pl.col("t_ns") - pl.col("since_ns")
        counted = pl.when(pl.col("count_right") < 2**32).then("count_right")
        return (
            sizes.join(packets.select("number", "count"), on="number", how="left", maintain_order="left")
            .filter((pl.col("count") > 0) & (bin_ns <= _MAX_BIN_NS))
            .with_columns(
                port=pl.lit(port),
                direction=pl.lit(direction),
                bin_ns=bin_ns,
                t_ns=pl.col("since_ns"),
                bytes=pl.col("count"),
                packets=counted,
                **self._keys,
            )
        )
