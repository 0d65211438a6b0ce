"""The relay's stream: the card's answers, each in a frame with the wall time at which it came."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.nic.pcc.events import (
    COUNTED,
    EPOCH,
    FRAME,
    FRAME_MAGIC,
    MAGIC,
    RESPONSE,
    TX,
    epoch_tables,
    extend_ns,
)
from pulse_bpf.schema import I64, U64

MAX_FRAME_BYTES = 2**20
MAX_EPOCHS = 2**24  # of a worker, as in core.c
# Times are 32 bits, 4.295 s: what was counted longer ago than this cannot be placed.
PLACEABLE_NS = 3_000_000_000
OVERLOAD = pl.Schema({"t_ns": I64, "value": U64})

_START = FRAME_MAGIC.to_bytes(4, "little")


class CardClock:
    """The card's clock against the wall: the tightest of the latest pairs, moved by whole bins only.

    A pair (wall time at which a timestamp was here, the timestamp) bounds the difference from above, by the time
    that it took to get here. Whole bins keep the phase of the samples while the clocks drift apart.
    """

    def __init__(self, bin_ns: int) -> None:
        self._bin_ns = bin_ns
        self._bounds: deque[int] = deque(maxlen=16)
        self.offset_ns: int | None = None

    def observe(self, wall_ns: int, card_ns: int) -> None:
        bound = wall_ns - card_ns
        if self.offset_ns is None:
            self.offset_ns = bound
        if abs(bound - self.offset_ns) < 1_000_000_000:  # else the timestamp is wrong
            self._bounds.append(bound)
            self.offset_ns += int((min(self._bounds) - self.offset_ns) / self._bin_ns) * self._bin_ns


@dataclass
class Batch:
    """BINS, FEEDBACK and OVERLOAD with times on the card's clock."""

    bins: pl.DataFrame
    feedback: pl.DataFrame
    overload: pl.DataFrame


@dataclass
class _Worker:
    """One of the card's threads: how far it has been read, the round that it is in, and its counters as of then."""

    position: int
    round_ns: int
    ended_round: bool = True
    is_placeable: bool = True
    sent: int = 0
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))


class DumpDecoder:
    """Takes frames apart; what is no frame is counted in `undecoded` bytes and skipped.

    Assumes that an epoch that comes with one round of requests was begun after the round before, so that its time
    is known to within a wrap of 4.295 s; after a pause longer than PLACEABLE_NS it is not, and is lost.
    """

    def __init__(self, bin_ns: int) -> None:
        self._bin_ns = bin_ns
        self._workers: dict[int, _Worker] = {}
        self._missed_epochs = 0
        self.clock = CardClock(bin_ns)
        self.undecoded = 0
        self.last_wall_ns = 0

    def lost(self) -> int:
        """TX events and bins that the card had no memory for, and epochs that never came or cannot be placed."""
        counters = [worker.counters for worker in self._workers.values()]
        return self._missed_epochs + sum(c["lost_flows"] + c["lost_epochs"] for c in counters)

    def counters(self) -> dict[str, int]:
        """Those of pcc_counters, of all workers together."""
        return {name: sum(w.counters[name] for w in self._workers.values()) for name in COUNTED}

    def decode(self, buffer: bytearray) -> Batch:
        """Removes all whole frames from `buffer` and returns what they say."""
        epochs, near_ns, overload, start = [], [], [], 0
        while len(buffer) - start >= FRAME.itemsize:
            (frame,) = np.frombuffer(bytes(buffer[start : start + FRAME.itemsize]), FRAME)
            size = int(frame["bytes"])
            if frame["magic"] != FRAME_MAGIC or not RESPONSE.itemsize <= size <= MAX_FRAME_BYTES:
                start = self._skip(buffer, start)
                continue
            end = start + FRAME.itemsize + size
            if end > len(buffer):
                break
            body = bytes(buffer[start + FRAME.itemsize : end])
            (answer,) = np.frombuffer(body, RESPONSE, 1)
            if not self._is_whole(answer, size) or frame["wall_ns"] >= 2**62:
                start = self._skip(buffer, start)
                continue
            start = end
            wall_ns = int(frame["wall_ns"])
            records = np.frombuffer(body, EPOCH, int(answer["epochs"]), RESPONSE.itemsize)
            records, shed = self._account(answer, records, wall_ns)
            at_ns = wall_ns - (self.clock.offset_ns or 0)
            epochs.append(records)
            # Half a second back: the middle of what a poll of one second brings.
            near_ns.append(np.full(len(records), at_ns - 500_000_000))
            if shed > 0:
                overload.append((at_ns, shed))
        del buffer[:start]
        bins, feedback = epoch_tables(
            np.concatenate([np.zeros(0, EPOCH), *epochs]),
            np.concatenate([np.zeros(0, np.int64), *near_ns]),
            self._bin_ns,
        )
        return Batch(bins, feedback, pl.DataFrame(overload, schema=OVERLOAD, orient="row"))

    def _is_whole(self, answer: np.void, size: int) -> bool:
        return bool(
            answer["magic"] == MAGIC
            and answer["bin_ns"] == self._bin_ns
            and size == RESPONSE.itemsize + int(answer["epochs"]) * EPOCH.itemsize
        )

    def _skip(self, buffer: bytearray, start: int) -> int:
        """The next place where a frame could start."""
        found = buffer.find(_START, start + 1)
        after = found if found >= 0 else max(start + 1, len(buffer) - len(_START) + 1)
        self.undecoded += after - start
        return after

    def _account(
        self, answer: np.void, records: NDArray[np.void], wall_ns: int
    ) -> tuple[NDArray[np.void], int]:
        """The epochs that can be placed, and how many events were flagged overloaded since the last answer."""
        first = int(answer["first"])
        worker = self._workers.setdefault(int(answer["worker"]), _Worker(first, wall_ns))
        if worker.ended_round:
            worker.is_placeable = wall_ns - worker.round_ns <= PLACEABLE_NS
            worker.round_ns = wall_ns
        worker.ended_round = not answer["waiting"]
        missed = (first - worker.position) & 0xFFFFFFFF
        if missed < MAX_EPOCHS:
            self._missed_epochs += missed
        worker.position = (first + len(records)) & 0xFFFFFFFF
        if not worker.is_placeable:
            self._missed_epochs += len(records)
            records = records[:0]

        sent = int(answer["events"][TX])
        if sent != worker.sent:  # else the latest timestamp is of long ago
            expected_ns = 0 if self.clock.offset_ns is None else wall_ns - self.clock.offset_ns
            self.clock.observe(wall_ns, int(extend_ns(answer["last_ns"], expected_ns)))
        counters = {name: int(answer[name]) for name in COUNTED}
        shed = counters["overloaded"] - worker.counters["overloaded"]
        worker.sent, worker.counters = sent, counters
        self.last_wall_ns = max(self.last_wall_ns, wall_ns)
        return records, shed
