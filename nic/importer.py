"""From packet captures to the tables of a recording: what the live meter would have counted where they were made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from pulse_bpf.nic import Source, Tables
from pulse_bpf.nic.captured import MAX_INTERFACES, Frames
from pulse_bpf.nic.flows import ELSEWHERE, NO_ROOM, FlowTable
from pulse_bpf.nic.frames import (
    ACK,
    ATOMIC_ACK,
    CNP,
    READ_FIRST,
    READ_ONLY,
    WRITE_ONLY,
    FrameDecoder,
    Packets,
)
from pulse_bpf.nic.psn import PsnHistory
from pulse_bpf.schema import I64, conform

SOURCE_NAME = "capture"
# At most this long, a write without immediate is taken for NCCL's clear-to-send.
CTS_MAX_BYTES = 512
# A bin is complete when packets this much later have come: captures of several queues are not quite in order.
SLACK_NS = 50_000_000
# Rows of bins that wait: to be complete, and for the sender's queue pair to be known.
MAX_OPEN_ROWS, MAX_HELD_ROWS = 1 << 18, 1 << 20
# Captures made at once, which MAX_INTERFACES each leave room for in 21 bits.
_MAX_PLACES = 512
# A part of the recording is as long as that, in the capture's time.
_READ_NS = 1_000_000_000
# Captures that go on within this time cover what is between them.
_GAP_NS = 1_000_000_000

_COUNTS = ("bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets")
_EVENTS = ("nak", "rnr", "cnp")
_BIN = ("number", "t_ns")
_BINS = pl.Schema(dict.fromkeys((*_BIN, *_COUNTS, *_EVENTS), I64))
_PORT = ("node", "nic", "port")
_SAMPLE = ("flow", "direction", "t_ns")


class CaptureImporter:
    """Counts the frames of captures, in bins of `bin_ns` that begin at its multiples.

    A packet is received by its target's queue pair, and sent by its source's once that is known from the answers that
    come the other way; else it is in port_samples. `nics` as FlowTable takes it.
    """

    def __init__(self, bin_ns: int, nics: pl.DataFrame) -> None:
        self._flows = FlowTable(nics)
        self._dropped_frames = 0
        self._bin_ns = bin_ns
        self._decoder = FrameDecoder()
        self._history = PsnHistory()
        self._parts: list[pl.DataFrame] = []
        self._rows = 0
        self._held = pl.DataFrame(schema=_BINS).select(*_BIN, *_COUNTS)
        self._read_ns = 0
        self._ends_ns: list[int] = []
        self._current = 0
        self._spans: list[tuple[int, int]] = []
        self._lost_packets = self._elsewhere_packets = self._late_packets = 0

    @property
    def source(self) -> Source:
        vantage = "packet captures; a flow where it was seen first"
        return Source(SOURCE_NAME, vantage, True, ("rx", "tx"), self._bin_ns, "payload")

    def begin(self, first_ns: int) -> None:
        """Another capture, which starts at `first_ns`: it goes on with one that had ended by then, or it was made at
        the same time as all others and hence at another place."""
        ended = [number for number, end_ns in enumerate(self._ends_ns) if end_ns <= first_ns]
        if not ended:
            self._ends_ns.append(first_ns)
        self._current = ended[-1] if ended else len(self._ends_ns) - 1
        self._spans.append((first_ns, first_ns))

    def add(self, frames: Frames) -> Tables:
        """Counts frames of the capture that was begun last; what is complete by now, mostly nothing."""
        if not len(frames):
            return {}
        first_ns, last_ns = self._spans[-1]
        self._spans[-1] = min(first_ns, int(frames.t_ns.min())), max(last_ns, int(frames.t_ns.max()))
        self._ends_ns[self._current] = max(self._ends_ns[self._current], self._spans[-1][1])
        place = frames.interface + self._current % _MAX_PLACES * MAX_INTERFACES
        self._count(self._decoder.decode(replace(frames, interface=place)))
        if self._rows < MAX_OPEN_ROWS and self._spans[-1][1] - self._read_ns < _READ_NS:
            return {}
        self._read_ns = self._spans[-1][1]
        return self._read(self._read_ns - SLACK_NS)

    def end(self, dropped: int) -> Tables:
        """The rest of the capture that was begun last; its machine says it dropped that many frames."""
        self._dropped_frames += dropped
        self._read_ns = 0
        return self._read(None)

    def finish(self) -> Tables:
        """What waited for its sender's queue pair to be known, after the last capture."""
        return self._sent(0)

    def _coverage(self) -> pl.DataFrame:
        """A `coverage` row for each time that captures span and each port that sent or received in any of them.

        Every row's `lost` is that of all captures: frames their machines dropped, packets of too many flows,
        and those of flows that another capture showed first, after that had ended.
        """
        spans: list[tuple[int, int]] = []
        for first_ns, last_ns in sorted(self._spans):
            if spans and first_ns <= spans[-1][1] + _GAP_NS:
                spans[-1] = spans[-1][0], max(spans[-1][1], last_ns)
            else:
                spans.append((first_ns, last_ns))
        port = ["node", "nic", "port"]
        ports = pl.concat(
            table.select(*port, direction=pl.lit(direction)).unique()
            for table, direction in ((self._flows.receivers(), "rx"), (self._flows.senders(), "tx"))
        )
        times = pl.DataFrame(spans, schema=["first_ns", "last_ns"], orient="row")
        rows = ports.join(times, how="cross").with_columns(
            source=pl.lit(SOURCE_NAME),
            lost=pl.lit(self._lost_packets + self._late_packets + self._dropped_frames),
        )
        return conform(rows, "coverage").sort(*port, "direction", "first_ns")

    def tables(self) -> Tables:
        """The small tables of the recording, after the last capture."""
        flows = self._flows
        return {
            "nodes": flows.nodes(),
            "nics": flows.nics(),
            "qps": flows.qps(),
            "coverage": self._coverage(),
        }

    @property
    def span_ns(self) -> tuple[int, int]:
        """From the first frame of all captures to the last."""
        return min(first for first, _ in self._spans), max(last for _, last in self._spans)

    def counters(self) -> dict[str, int]:
        """Frames by what became of them: counted, or why not."""
        totals = self._decoder.totals
        return {
            "frames": sum(totals.values()),
            "packets": totals["counted"] - self._lost_packets - self._elsewhere_packets,
            "lost_packets": self._lost_packets,
            "elsewhere_packets": self._elsewhere_packets,
            "late_packets": self._late_packets,
            "dropped_frames": self._dropped_frames,
            **{f"{kind.replace(' ', '_')}_frames": n for kind, n in totals.items() if kind != "counted"},
        }

    def opcodes(self) -> dict[int, int]:
        """Frames to the RoCE port by BTH opcode."""
        counts = self._decoder.opcodes
        return {opcode: int(counts[opcode]) for opcode in np.flatnonzero(counts).tolist()}

    def _count(self, packets: Packets) -> None:
        number = self._flows.number(packets)
        self._lost_packets += int((number == NO_ROOM).sum())
        elsewhere = number == ELSEWHERE
        self._elsewhere_packets += int(elsewhere.sum())
        others_ns = [end_ns for place, end_ns in enumerate(self._ends_ns) if place != self._current]
        if others_ns:
            # Nobody else can have counted them.
            self._late_packets += int((elsewhere & (packets.t_ns > max(others_ns) + SLACK_NS)).sum())
        if not (number >= 0).all():
            packets, number = packets.where(number >= 0), number[number >= 0]
        opcode = packets.opcode
        is_cnp, is_ack = opcode == CNP, (opcode == ACK) | (opcode == ATOMIC_ACK)
        is_answer = (opcode >= READ_FIRST) & (opcode <= READ_ONLY)
        carries = ~(is_cnp | is_ack)
        repeated = np.zeros(len(packets), np.bool_)
        # Requests and READ responses of one flow are numbered in the spaces of opposite directions.
        space = 2 * number + is_answer
        repeated[carries] = self._history.repeats(space[carries], packets.psn[carries])
        is_first_answer = (opcode == READ_FIRST) | (opcode == READ_ONLY)
        self._flows.pairs.observe(
            number, packets.psn, carries & ~is_answer & ~repeated, is_ack | is_first_answer
        )
        is_control = (opcode == WRITE_ONLY) & (packets.direct <= CTS_MAX_BYTES)
        payload = np.where(carries & ~is_control, packets.payload, 0)
        refusal = np.where(opcode == ACK, packets.syndrome >> 5 & 3, 0)
        rows = pl.DataFrame(
            {
                "number": number,
                "t_ns": packets.t_ns // self._bin_ns * self._bin_ns,
                "bytes": payload,
                "retx_bytes": np.where(repeated, payload, 0),
                "ctl_packets": is_control,
                "ack_packets": is_ack,
                "nak": refusal == 3,
                "rnr": refusal == 1,
                "cnp": is_cnp,
            }
        )
        sums = [pl.col(name).sum().cast(I64) for name in (*_COUNTS, *_EVENTS) if name != "packets"]
        part = rows.group_by(_BIN).agg(*sums, pl.len().cast(I64).alias("packets")).select(_BINS.names())
        self._parts.append(part)
        self._rows += part.height

    def _read(self, until_ns: int | None) -> Tables:
        """The bins that end by `until_ns`, all of them if None or if too many are left."""
        bins = pl.concat(self._parts) if self._parts else pl.DataFrame(schema=_BINS)
        bins = bins.group_by(_BIN).agg(pl.col(*_COUNTS, *_EVENTS).sum()).select(_BINS.names())
        is_over = pl.lit(True) if until_ns is None else pl.col("t_ns") + self._bin_ns <= until_ns
        left = bins.filter(~is_over)
        if left.height > MAX_OPEN_ROWS // 2:
            is_over, left = pl.lit(True), left.clear()
        self._parts, self._rows = [left], left.height
        bins = bins.filter(is_over)
        self._held = pl.concat([self._held, bins.select(*_BIN, *_COUNTS)])
        received = bins.join(self._flows.receivers(), on="number")
        events = received.unpivot(_EVENTS, index=[*_PORT, "qpn", "t_ns"], variable_name="kind")
        tables = self._sent(MAX_HELD_ROWS)
        tables["samples"] = pl.concat([self._samples(received, "rx"), tables["samples"]]).sort(_SAMPLE)
        events = events.group_by(pl.exclude("value")).agg(pl.col("value").sum()).filter(pl.col("value") > 0)
        tables["events"] = conform(events, "events").sort("t_ns", "nic", "qpn", "kind")
        return tables

    def _sent(self, held_rows: int) -> Tables:
        """The bins held whose sender is known, and the oldest others beyond `held_rows` as those of a port."""
        held = self._held.join(self._flows.senders(), on="number")
        is_known = pl.col("flow").is_not_null()
        unknown = held.filter(~is_known).sort("t_ns")
        excess = max(unknown.height - held_rows, 0)
        self._held = unknown[excess:].select(self._held.columns)
        of_port = unknown[:excess].group_by(*_PORT, "t_ns").agg(pl.col("bytes", "packets").sum())
        of_port = of_port.with_columns(
            source=pl.lit(SOURCE_NAME), direction=pl.lit("tx"), bin_ns=pl.lit(self._bin_ns)
        )
        return {
            "samples": self._samples(held.filter(is_known), "tx").sort(_SAMPLE),
            "port_samples": conform(of_port, "port_samples").sort(*_PORT, "t_ns"),
        }

    def _samples(self, bins: pl.DataFrame, direction: str) -> pl.DataFrame:
        return conform(
            bins.with_columns(
                source=pl.lit(SOURCE_NAME), direction=pl.lit(direction), bin_ns=pl.lit(self._bin_ns)
            ),
            "samples",
        )
