"""Bytes that a card's observer counted, from what it hands out: the relay's dump, its trace, or bare events."""

from __future__ import annotations

import os
import select
import time
from typing import Literal, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.errors import HostError
from pulse_bpf.nic import Source, Tables
from pulse_bpf.nic.pcc.dump import OVERLOAD, Batch, CardClock, DumpDecoder
from pulse_bpf.nic.pcc.events import EVENT, TX, UNIT_BYTES, EventDecoder
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.schema import U8, U32, conform

SOURCE_NAME = "pcc"
READ_BYTES = 16 * 2**20
# A line of the trace: doca_relay.c names the format, doca_device.c its five values of two words each.
_TRACE = "pulse_pcc" + r" (?:0x)?([0-9a-f]{1,16})" * 5


class Stream(Protocol):
    """A file, pipe or socket open for reading bytes."""

    def fileno(self) -> int: ...


class PccReader:
    """What a BlueField-3 sent per queue pair, as the Reader protocol says.

    `form` says what `stream` carries: "dump", what nic/pcc/doca_relay.c writes; "events", 44-byte events, from a
    recording or a socket; "trace", the DOCA trace of an observer built with PCC_TRACE. A bin is 2^bin_shift ns of
    the card's clock; frames of a dump with other bins are undecoded. For events and traces `cumulative` says how
    sent_32bytes is read (see decide_reading), and `wall_ns` when the first event was; without it, that is
    taken from when events arrive here. Assumes that sent_32bytes counts what is on the wire, which no card has
    confirmed. Input that cannot be decoded is counted and skipped.
    """

    def __init__(
        self,
        stream: Stream,
        form: Literal["dump", "events", "trace"],
        node: str,
        nic: str,
        qps: QpTable,
        bin_shift: int = 15,
        cumulative: bool = False,
        wall_ns: int | None = None,
    ) -> None:
        self._stream, self._form = stream, form
        self._node, self._nic, self._qps = node, nic, qps
        self._bin_ns = 1 << bin_shift
        self._wall_ns = wall_ns
        self._dump = DumpDecoder(self._bin_ns)
        self._events = EventDecoder(bin_shift, cumulative)
        self._clock = self._dump.clock if form == "dump" else CardClock(self._bin_ns)
        self._buffer = bytearray()
        self._undecoded_lines = 0
        self._ports: set[int] = set()
        self._first_ns = self._last_ns = 0
        self._running = False
        self.ended = False
        self.notes: list[str] = []

    @property
    def source(self) -> Source:
        return Source(SOURCE_NAME, f"BlueField-3 PCC, {self._form}", True, ("tx",), self._bin_ns, "wire")

    def start(self) -> None:
        """Begins to read; HostError when the stream is closed."""
        try:
            os.fstat(self._stream.fileno())
        except (OSError, ValueError) as error:
            raise HostError("no events from the card", f"its {self._form} cannot be read: {error}") from error
        self._first_ns = self._last_ns = 0 if self._wall_ns is None else self._wall_ns
        self._running = True

    def drain(self) -> None:
        """Takes what is there without waiting, READ_BYTES at most; sets `ended` at the end of the stream."""
        descriptor, end = self._stream.fileno(), len(self._buffer) + READ_BYTES
        while not self.ended and len(self._buffer) < end and select.select([descriptor], [], [], 0)[0]:
            try:
                data = os.read(descriptor, 2**20)
            except OSError as error:
                data = b""
                self.notes.append(f"the {self._form} of {self._nic} broke off: {error.strerror}")
            self.ended = not data
            self._buffer += data

    def read(self) -> Tables:
        """Samples sorted by (flow, direction, t_ns), and events sorted by t_ns.

        Events are cnp, nak and rnr of the queue pair whose packets met them, in a dump with the time of a group of
        128 bins, and overload, of no queue pair: how often the card said that it sheds events, in which case
        bytes are missing. One bin may come in several rows, in different batches, which add up.
        """
        self.drain()
        return self._tables(self._dump.decode(self._buffer) if self._form == "dump" else self._decode())

    def stop(self) -> Tables:
        """The rest of what has arrived; nothing is armed here, the observer ends with its relay."""
        if not self._running:
            return {}
        self._running = False
        return self.read()

    def period_ns(self) -> None:
        """None: a bin is as wide as it says."""

    def coverage(self) -> pl.DataFrame:
        """One row per port that has sent. `lost` counts what the card had no memory for (TX events, or bins of them)
        and epochs that came too late or not at all: an upper bound, since ports are not told apart."""
        rows = [
            (self._node, SOURCE_NAME, self._nic, port, "tx", self._first_ns, self._last_ns, self._dump.lost())
            for port in sorted(self._ports)
        ]
        columns = ("node", "source", "nic", "port", "direction", "first_ns", "last_ns", "lost")
        return conform(pl.DataFrame(rows, schema=columns, orient="row"), "coverage")

    def counters(self) -> dict[str, int]:
        """Those of pcc_counters (nic/pcc/core.h), and what of the stream could not be decoded: bytes of a dump,
        lines of a trace."""
        counted = self._dump.counters() if self._form == "dump" else self._events.counters
        return {**counted, "undecoded_input": self._dump.undecoded + self._undecoded_lines}

    def _decode(self) -> Batch:
        """What the events in the buffer say."""
        overloaded = self._events.counters["overloaded"]
        records = self._records() if self._form == "events" else self._traced()
        bins, feedback = self._events.decode(records)
        overloaded = self._events.counters["overloaded"] - overloaded
        last_ns = self._events.last_ns
        if last_ns is None:
            return Batch(bins, feedback, pl.DataFrame(schema=OVERLOAD))
        if self._wall_ns is None:
            self._clock.observe(time.time_ns(), last_ns)
        elif self._clock.offset_ns is None:
            self._clock.observe(self._wall_ns, self._events.first_ns)
        overload = [(last_ns, overloaded)] if overloaded else []
        return Batch(bins, feedback, pl.DataFrame(overload, schema=OVERLOAD, orient="row"))

    def _records(self) -> NDArray[np.void]:
        count = len(self._buffer) // EVENT.itemsize
        records = np.frombuffer(bytes(self._buffer[: count * EVENT.itemsize]), EVENT)
        del self._buffer[: count * EVENT.itemsize]
        return records

    def _traced(self) -> NDArray[np.void]:
        """The events in whole lines of the trace."""
        end = self._buffer.rfind(b"\n") + 1
        lines = pl.Series("line", self._buffer[:end].decode("ascii", "replace").splitlines(), pl.String)
        del self._buffer[:end]
        values = lines.str.extract_groups(_TRACE).struct.unnest()
        columns = [values.to_series(n).drop_nulls().str.zfill(16) for n in range(values.width)]
        self._undecoded_lines += len(lines) - len(columns[0])
        high, low = (
            [
                column.str.slice(at, 8).str.to_integer(base=16, dtype=pl.UInt32).to_numpy()
                for column in columns
            ]
            for at in (0, 8)
        )
        records = np.zeros(len(columns[0]), EVENT)
        kinds = high[4] << 16 & 0xFF0000 | low[3] << 8 & 0xFF000000 | low[3] & 0xFFFF
        records["attributes"], records["flow_tag"], records["serial"] = kinds, low[0], low[4]
        records["timestamp_ns"], records["first_timestamp_ns"] = low[1], high[1]
        is_sent = kinds & 0xFF == TX
        records["counters"] = low[2]
        records["extra"] = np.where(is_sent, high[0] & 0xFFFFFF, low[2])
        return records

    def _tables(self, batch: Batch) -> Tables:
        offset_ns = self._clock.offset_ns or 0
        wall_ns = (pl.col("start_ns") + offset_ns).alias("t_ns")
        bins = batch.bins.with_columns(wall_ns, *self._identity()).with_columns(
            last_ns=pl.col("t_ns") + self._bin_ns - 1
        )
        if len(bins):
            self._ports.update(bins["port"].unique())
            earliest, latest = int(bins["t_ns"].min()), int(bins["last_ns"].max())  # type: ignore[arg-type]
            self._first_ns = min(self._first_ns or earliest, earliest)
            self._last_ns = max(self._last_ns, latest, self._dump.last_wall_ns)
        summed = (
            self._qps.flows(bins)
            .group_by("node", "nic", "port", "qpn", "flow", "t_ns")
            .agg(pl.col("units").sum())
        )
        samples = summed.with_columns(
            source=pl.lit(SOURCE_NAME),
            direction=pl.lit("tx"),
            bin_ns=pl.lit(self._bin_ns),
            bytes=pl.col("units") * UNIT_BYTES,
        )
        feedback = batch.feedback.filter(pl.col("kind") != "rtt").with_columns(
            pl.col("t_ns") + offset_ns, *self._identity()
        )
        overload = batch.overload.with_columns(
            pl.col("t_ns") + offset_ns,
            node=pl.lit(self._node),
            nic=pl.lit(self._nic),
            kind=pl.lit("overload"),
        )
        events = pl.concat([conform(feedback, "events"), conform(overload, "events")])
        return {
            "samples": conform(samples, "samples").sort("flow", "qpn", "direction", "t_ns"),
            "events": events.sort("t_ns", "qpn", "kind"),
        }

    def _identity(self) -> list[pl.Expr]:
        """Whose a row is. The card numbers ports from 0, as its samples do; the recording from 1."""
        queue_pair = pl.col("queue_pair")
        return [
            pl.lit(self._node).alias("node"),
            pl.lit(self._nic).alias("nic"),
            (queue_pair // 2**24 + 1).cast(U8).alias("port"),
            (queue_pair % 2**24).cast(U32).alias("qpn"),
        ]
