"""What the card hands out, as columns: 44-byte events, and the epochs of bins of nic/pcc/core.h."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.errors import DataError
from pulse_bpf.schema import I64, STR, U32, U64

UNIT_BYTES = 32
# Mirrors of nic/pcc/core.h.
EPOCH_BINS, SPREAD_BINS = 128, 16
MAGIC, FRAME_MAGIC = 0x31434350, 0x46434350
TYPES, CNP, TX, NACK, RTT, NACK_RNR = 32, 2, 3, 5, 6, 1
OVERLOADED = 2 << 24

# DOCA PCC's event on BlueField-3; its words are big-endian in memory (doca_pcc_dev_data_structure_le_bf3.h).
EVENT = np.dtype(
    [
        ("reserved", "V12"),
        ("attributes", ">u4"),
        ("flow_tag", ">u4"),
        ("serial", ">u4"),
        ("timestamp_ns", ">u4"),
        ("first_timestamp_ns", ">u4"),
        ("counters", ">u4"),
        ("extra", ">u4"),
        ("reserved_end", "V4"),
    ]
)
EPOCH = np.dtype(
    [
        ("flow_tag", "<u4"),
        ("queue_pair", "<u4"),
        ("start_ns", "<u4"),
        ("cnps", "<u2"),
        ("naks", "u1"),
        ("rnrs", "u1"),
        ("units", "<u2", EPOCH_BINS),
    ]
)
COUNTED = (
    "undecoded",
    "overloaded",
    "unowned",
    "baseless",
    "unspread",
    "shared_tags",
    "clipped",
    "lost_flows",
    "lost_epochs",
    "lost_units",
)
RESPONSE = np.dtype(
    [
        *((name, "<u4") for name in ("magic", "worker", "bin_ns", "first", "epochs", "waiting", "last_ns")),
        ("cumulative", "<u4"),
        ("events", "<u8", TYPES),
        *((name, "<u8") for name in COUNTED),
    ]
)
# Mirror of nic/pcc/relay.h.
FRAME = np.dtype(
    [("magic", "<u4"), ("bytes", "<u4"), ("wall_ns", "<u8"), ("took_ns", "<u4"), ("reserved", "<u4")]
)

BINS = pl.Schema({"flow_tag": U32, "queue_pair": U32, "start_ns": I64, "units": U64})
FEEDBACK = pl.Schema({"flow_tag": U32, "queue_pair": U32, "t_ns": I64, "kind": STR, "value": U64})
MAX_FLOWS = 1 << 20


def decide_reading(sent_bytes: int, summed_bytes: int, cumulative_bytes: int) -> bool:
    """Whether sent_32bytes is cumulative, from one queue pair's known transfer counted in both readings.

    The documentation leaves it open. Assumes a transfer of many bursts: the wrong reading is then off by far
    more than headers, which may or may not be counted (at most 25 %), and the first burst, of which a
    cumulative counter tells nothing (at most 2 MiB). DataError when neither reading fits, or both do.
    """
    fits = [
        sent_bytes - 2 * 2**20 <= counted <= sent_bytes + sent_bytes // 4
        for counted in (summed_bytes, cumulative_bytes)
    ]
    if fits[0] == fits[1]:
        raise DataError(
            "the calibration does not tell how to read sent_32bytes",
            f"{sent_bytes} bytes were sent; read as sums they are {summed_bytes}, as totals {cumulative_bytes}",
            "Repeat it with one queue pair, at least 1 GiB, and no other traffic on it",
        )
    return fits[1]


def extend_ns(stamps: NDArray[Any], near_ns: NDArray[Any] | int) -> NDArray[np.int64]:
    """32-bit `stamps` as the 64-bit times nearest to `near_ns` (int64 ns, wrapping never)."""
    near = np.asarray(near_ns, np.int64)
    behind = (near.astype(np.uint32) - stamps.astype(np.uint32)).astype(np.int32)
    return near - behind


@dataclass
class EventDecoder:
    """Counts events as core.c does, without its limits of memory: nothing is lost, a batch at a time.

    Times are 64-bit ns of the card's clock, from the first event's timestamp on, so that their low 32 bits are the
    card's. Assumes that two successive events are less than 2.1 s apart: a longer silence cannot be told from
    a shorter one. `counters` are those of pcc_counters. Remembers the latest MAX_FLOWS flows.
    """

    bin_shift: int
    cumulative: bool
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    first_ns: int = 0
    last_ns: int | None = None
    _keys: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    _last_counters: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))

    def decode(self, raw: NDArray[np.void]) -> tuple[pl.DataFrame, pl.DataFrame]:
        """BINS, and FEEDBACK in the order of events, of EVENT records in their order.

        `queue_pair` is the QPN in 24 bits and the port above. FEEDBACK has kinds cnp, nak, rnr with how many, and rtt
        with the round trip in ns. These carry no QPN: they belong to the queue pair that last sent under their flow
        tag. A burst shorter than a bin is counted in the one in which it ended, a longer one spread evenly.
        """
        words = {
            name: raw[name].astype(np.uint32) for name in raw.dtype.names or () if "reserved" not in name
        }
        kind = words["attributes"] & 0xFF
        known = kind < TYPES
        self.counters["undecoded"] += int(np.count_nonzero(~known))
        words = {name: values[known] for name, values in words.items()}
        kind = kind[known]
        t_ns = self._extend(words["timestamp_ns"])

        pair = (words["extra"] & 0xFFFFFF) | ((words["attributes"] & 0x7F0000) << 8)
        sent = (kind == TX) & (pair & 0xFFFFFF != 0) & (words["attributes"] & 0x800000 == 0)
        self.counters["undecoded"] += int(np.count_nonzero((kind == TX) & ~sent))
        self.counters["overloaded"] += int(np.count_nonzero(words["attributes"][sent] & OVERLOADED))
        keys = words["flow_tag"].astype(np.uint64) | (pair.astype(np.uint64) << np.uint64(32))

        told = (kind == CNP) | (kind == NACK) | (kind == RTT)
        owners = self._owners(keys, sent, told)
        units = self._units(keys[sent], words["counters"][sent])
        bins = self._bins(keys[sent], t_ns[sent], words["first_timestamp_ns"][sent], units)
        return bins, self._feedback(owners, t_ns[told], {name: w[told] for name, w in words.items()})

    def _extend(self, stamps: NDArray[np.uint32]) -> NDArray[np.int64]:
        if not len(stamps):
            return np.zeros(0, np.int64)
        if self.last_ns is None:
            self.first_ns = int(stamps[0])
        first = self.first_ns if self.last_ns is None else self.last_ns
        steps = np.diff(stamps, prepend=np.uint32(first & 0xFFFFFFFF)).astype(np.int32)
        t_ns = first + np.cumsum(steps, dtype=np.int64)
        self.last_ns = int(t_ns[-1])
        return t_ns

    def _owners(
        self, keys: NDArray[np.uint64], sent: NDArray[np.bool_], told: NDArray[np.bool_]
    ) -> NDArray[np.uint64]:
        """For each `told` event the key of the TX event before it under its tag, in any batch; 0 for none."""
        named = np.concatenate([np.ones(len(self._keys), bool), sent])
        wanted = np.concatenate([np.zeros(len(self._keys), bool), told])
        every = np.concatenate([self._keys, keys])
        rows = np.flatnonzero(named | wanted)
        tags = every[rows].astype(np.uint32)
        order = np.argsort(tags, kind="stable")
        rows, tags = rows[order], tags[order]
        position = np.arange(len(rows))
        latest = np.maximum.accumulate(np.where(named[rows], position, -1)) if len(rows) else position
        owned = (latest >= 0) & (tags[latest] == tags)
        owner = np.zeros(len(every), np.uint64)
        owner[rows] = np.where(owned, every[rows[latest]], np.uint64(0))
        found: NDArray[np.uint64] = owner[wanted]
        return found

    def _units(self, keys: NDArray[np.uint64], counters: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """What each TX event adds; remembers the latest counters of each flow."""
        every = np.concatenate([self._keys, keys])
        values = np.concatenate([self._last_counters, counters])
        order = np.argsort(every, kind="stable")
        same = np.zeros(len(order), bool)
        same[1:] = every[order[1:]] == every[order[:-1]]
        base = values.copy()
        base[order[1:]] = np.where(same[1:], values[order[:-1]], values[order[1:]])
        is_new = np.zeros(len(order), bool)
        is_new[order] = ~same
        is_new = is_new[len(self._keys) :]
        if self.cumulative:
            self.counters["baseless"] += int(np.count_nonzero(is_new))
        latest = np.ones(len(order), bool)
        latest[:-1] = ~same[1:]
        kept = np.sort(order[latest])[-MAX_FLOWS:]
        self._count_shared_tags(keys[is_new])
        base = base[len(self._keys) :] if self.cumulative else np.zeros(len(keys), np.uint32)
        self._keys, self._last_counters = every[kept], values[kept]
        units: NDArray[np.uint32] = (counters - base) & 0xFFFF
        return units

    def _count_shared_tags(self, new_keys: NDArray[np.uint64]) -> None:
        tags = np.concatenate([np.unique(self._keys.astype(np.uint32)), new_keys.astype(np.uint32)])
        self.counters["shared_tags"] += len(tags) - len(np.unique(tags))

    def _bins(
        self,
        keys: NDArray[np.uint64],
        t_ns: NDArray[np.int64],
        first_ns: NDArray[np.uint32],
        units: NDArray[np.uint32],
    ) -> pl.DataFrame:
        shift, bin_ns = self.bin_shift, 1 << self.bin_shift
        last_ns = t_ns.astype(np.uint32)
        length = ((last_ns - first_ns) >> (shift - 3)).astype(np.uint64) + np.uint64(1)
        span = ((last_ns >> shift) - (first_ns >> shift)) & (0xFFFFFFFF >> shift)
        is_long = last_ns - first_ns >= bin_ns
        is_spread = is_long & (length <= 8 * (SPREAD_BINS + 1)) & (span <= SPREAD_BINS)
        self.counters["unspread"] += int(np.count_nonzero(is_long & ~is_spread))

        spread = np.flatnonzero(is_spread)
        span = span[spread].astype(np.int64)
        per_eighth = units[spread].astype(np.uint64) * (np.uint64(65536) // length[spread])
        first_eighths = (bin_ns - (first_ns[spread] & (bin_ns - 1))) >> (shift - 3)
        at_first = (per_eighth * first_eighths.astype(np.uint64)) >> np.uint64(16)
        inside = (per_eighth * np.uint64(8)) >> np.uint64(16)

        rest = units.astype(np.uint64)
        rest[spread] -= at_first + inside * (span - 1).astype(np.uint64)
        end_bin = t_ns & -bin_ns
        # One row for each burst's last bin, one for the first of a spread one, and one for each between.
        between = np.repeat(spread, span - 1)
        back = np.arange(len(between)) - np.repeat(np.cumsum(span - 1) - (span - 1), span - 1)
        starts = [end_bin, end_bin[spread] - span * bin_ns, end_bin[between] - (back + 1) * bin_ns]
        amounts = [rest, at_first, np.repeat(inside, span - 1)]
        rows = np.concatenate([keys, keys[spread], keys[between]])
        return _summed(rows, np.concatenate(starts), np.concatenate(amounts))

    def _feedback(
        self, owners: NDArray[np.uint64], t_ns: NDArray[np.int64], words: dict[str, NDArray[np.uint32]]
    ) -> pl.DataFrame:
        attributes = words["attributes"]
        kind = attributes & 0xFF
        is_rnr = (attributes >> 8) & 0xFF == NACK_RNR
        names = np.select([kind == CNP, kind == RTT, is_rnr], ["cnp", "rtt", "rnr"], "nak")
        # The word at which a TX event says when its burst began says when an RTT probe was sent.
        round_trip_ns = words["timestamp_ns"] - words["first_timestamp_ns"]
        value = np.where(kind == RTT, round_trip_ns, np.maximum(words["extra"] & 0xFFFF, 1))
        self.counters["unowned"] += int(np.count_nonzero((owners == 0) & (kind != RTT)))
        used = owners != 0
        columns = {
            "flow_tag": owners.astype(np.uint32),
            "queue_pair": (owners >> np.uint64(32)).astype(np.uint32),
            "t_ns": t_ns,
            "kind": names,
            "value": value.astype(np.uint64),
        }
        return pl.DataFrame({name: values[used] for name, values in columns.items()}, schema=FEEDBACK)


def epoch_tables(
    epochs: NDArray[np.void], near_ns: NDArray[np.int64], bin_ns: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """BINS and FEEDBACK of EPOCH records, each less than 2.1 s from its `near_ns` on the card's clock.

    CNPs and NACKs are counted per epoch: their time is that of its start, EPOCH_BINS bins too early at most.
    """
    keys = epochs["flow_tag"].astype(np.uint64) | (epochs["queue_pair"].astype(np.uint64) << np.uint64(32))
    keys &= np.uint64(0x7FFFFFFFFFFFFFFF)
    start_ns = extend_ns(epochs["start_ns"], near_ns)
    row, bin_ = np.nonzero(epochs["units"])
    bins = _summed(keys[row], start_ns[row] + bin_ * bin_ns, epochs["units"][row, bin_].astype(np.uint64))
    parts = []
    for kind, name in (("cnp", "cnps"), ("nak", "naks"), ("rnr", "rnrs")):
        used = epochs[name] > 0
        parts.append(
            pl.DataFrame(
                {
                    "flow_tag": keys[used].astype(np.uint32),
                    "queue_pair": (keys[used] >> np.uint64(32)).astype(np.uint32),
                    "t_ns": start_ns[used],
                    "kind": [kind] * int(used.sum()),
                    "value": epochs[name][used].astype(np.uint64),
                },
                schema=FEEDBACK,
            )
        )
    return bins, pl.concat(parts)


def _summed(keys: NDArray[np.uint64], start_ns: NDArray[np.int64], units: NDArray[np.uint64]) -> pl.DataFrame:
    rows = pl.DataFrame({"key": keys, "start_ns": start_ns, "units": units}).filter(pl.col("units") > 0)
    summed = rows.group_by("key", "start_ns").agg(pl.col("units").sum())
    return summed.select(
        (pl.col("key") % 2**32).cast(U32).alias("flow_tag"),
        (pl.col("key") // 2**32).cast(U32).alias("queue_pair"),
        "start_ns",
        "units",
    )
