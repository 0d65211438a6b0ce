"""Which communicator's calls explain the volumes that a queue pair carried, burst by burst."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from pulse_bpf.analysis.bursts import WARMUP_NS, Bursts, fit, volumes
from pulse_bpf.analysis.calls import CAPTURED, Calls
from pulse_bpf.analysis.curves import Floats
from pulse_bpf.analysis.pairing import FOREVER
from pulse_bpf.schema import F64, I32, STR, U64

# NCCL has at most so many channels (MAXCHANNELS in src/include/device.h is 64; half of them per direction of a NIC).
MAX_CHANNELS = 32
# Queue pairs that share what goes from one rank to another, each 1, 2 or 4 in number: see bursts.fit.
SHARING = -4
# Headers of a RoCEv2 packet, and what MTUs there are: a source that counts wire bytes has them in its bursts.
HEADER_BYTES, MTUS = 62, (4096, 2048, 1024)
# Calls that are looked at; a job repeats itself.
MAX_CALLS = 2048
TWO_SIDED = ("Send", "Recv")
TO_ALL = ("AlltoAll", "Gather", "Scatter")

CANDIDATES = pl.Schema(
    {"flow": U64, "node": STR, "comm_id": STR, "use": STR, "rank": I32, "nranks": I32, "peer_rank": I32}
)


def score(
    candidates: pl.DataFrame, directions: pl.DataFrame, calls: Calls, bursts: Bursts, wire: bool
) -> pl.DataFrame:
    """`candidates` (CANDIDATES and more) with `fit`, the share of the flow's bytes in bursts that calls explain.

    `directions`: flow and the `direction` of its data. A burst is
    what lies between two silences, and is explained when it is as large as one of the candidate's calls, or as some
    successive ones, by NCCL's published volumes of rings, trees and direct transfers over any number of channels.
    `apart`: how far all its bytes are from those of all calls, as a share of them; infinite where the calls cannot have
    carried them. `carried` and `called` are these bytes, the latter of all channels and null for what is replayed. All
    are null where nothing was seen of the flow's data. `wire`: bytes include headers. Assumes that the communicator
    has a queue pair of its own for each channel and peer; a shared one fits none.
    """
    way = dict(directions.select("flow", "direction").iter_rows())
    sequences_of = _Sequences(calls, bursts)
    streams, sequences, channels, replayed, known = [], [], [], [], []
    at = np.searchsorted(bursts.flows, candidates["flow"].to_numpy())
    for row, number in zip(candidates.iter_rows(named=True), at.tolist(), strict=True):
        direction = way.get(row["flow"])
        stream = 2 * number + (direction == "tx")
        known.append(direction is not None and bursts.slot[stream] >= 0)
        if known[-1]:
            found = sequences_of.of(row, str(direction), int(bursts.slot[stream]))
            streams.append(stream)
            sequences.append(found.sequences)
            channels.append(found.channels)
            replayed.append(found.replayed)
    derived = volumes(sequences_of.sequences, MAX_CALLS)
    first = np.array(sequences, np.int64).reshape(-1, 2)
    best, apart = fit(
        bursts.total,
        bursts.bin_ns,
        bursts.sizes,
        bursts.offsets,
        *derived,
        np.array(streams, np.int64),
        first,
        np.array(channels, np.int64),
        np.array(replayed, np.bool_),
        np.array([1 + HEADER_BYTES / mtu for mtu in MTUS] if wire else [1.0]),
    )
    called = np.where(np.array(replayed, np.bool_) | (first[:, 0] < 0), np.nan, derived.whole[first[:, 0]])
    scores = {
        "fit": best,
        "apart": apart,
        "called": called,
        "carried": bursts.total[np.array(streams, np.int64)],
    }
    where = np.flatnonzero(known)
    columns = []
    for name, values in scores.items():
        column = np.full(len(known), np.nan)
        column[where] = values
        columns.append(pl.Series(name, column, F64).fill_nan(None))
    return candidates.with_columns(columns)


class _Found(NamedTuple):
    sequences: tuple[int, int]
    channels: int
    replayed: bool


class _Sequences:
    """What the calls of a candidate put on one queue pair, were there one channel; remembered in `sequences`."""

    def __init__(self, calls: Calls, bursts: Bursts) -> None:
        rank = ["node", "comm_id", "rank"]
        self._ranks = set(calls.kinds.filter("carries").select(rank).unique().iter_rows())
        # Of a long recording only what was called while a queue pair carried its first bytes.
        slots = np.unique(bursts.slot[bursts.slot >= 0])
        begins = [-FOREVER if slot == 0 else bursts.start_ns + int(slot) * WARMUP_NS for slot in slots]
        ends = [bursts.start_ns + (int(slot) + 1) * WARMUP_NS for slot in slots]
        columns = [*rank, "kind", "peer", "bytes", "call_ns"]
        slot = ((pl.col("call_ns") - bursts.start_ns) // WARMUP_NS).clip(0)
        known = (
            calls.begun(list(zip(begins, ends, strict=True)), [*columns, "origin"])
            .filter(pl.col("comm_id").is_not_null(), pl.col("bytes") > 0)
            .select(*columns, captured=CAPTURED, slot=slot)
            .filter(pl.col("captured") | pl.col("slot").is_in(slots))
            .sort("call_ns")
        )
        self._none = known.clear()
        self._of_rank = known.partition_by(rank, as_dict=True)
        self._known: dict[tuple[object, ...], _Found] = {}
        self.sequences: list[Floats] = [np.zeros(0)]

    def of(self, candidate: dict[str, object], direction: str, slot: int) -> _Found:
        """Its sequences of volumes by algorithm, which numbers of channels to try, and whether calls repeat."""
        node, comm, rank, use, peer = (
            candidate[name] for name in ("node", "comm_id", "rank", "use", "peer_rank")
        )
        # Of what a rank receives its own Recv calls tell.
        kind = "Recv" if use == "pairs" and direction == "rx" else "Send"
        key = (node, comm, rank, use, kind, peer if use == "pairs" else None, slot)
        if key not in self._known:
            self._known[key] = self._derive(key, int(str(candidate["nranks"])))
        return self._known[key]

    def _derive(self, key: tuple[object, ...], nranks: int) -> _Found:
        node, comm, rank, use, kind, peer, slot = key
        if (node, comm, rank) not in self._ranks:
            return _Found((-1, -1), 1, False)
        calls = self._of_rank.get((node, comm, rank), self._none)
        # What was captured is replayed nobody knows how often.
        replayed = bool(calls["captured"].any())
        calls = calls.filter("captured") if replayed else calls.filter(pl.col("slot") == slot)
        if use == "pairs":
            mine = calls.filter(pl.col("kind") == kind)
            if peer is not None:
                mine = mine.filter(pl.col("peer") == peer)
            return _Found((self._number(_sizes(mine)), -1), SHARING, replayed)
        if use == "alltoall":
            mine = calls.filter(pl.col("kind").is_in(TO_ALL))
            return _Found((self._number(_sizes(mine) / nranks), -1), SHARING, replayed)
        mine = calls.filter(~pl.col("kind").is_in([*TWO_SIDED, *TO_ALL]))
        share = (nranks - 1) / nranks
        name = mine["kind"].to_numpy()
        ring = np.where(
            name == "AllReduce", 2 * share, np.where(np.isin(name, ["Broadcast", "Reduce"]), 1.0, share)
        )
        tree = np.where(name == "AllReduce", 1.0, ring)
        by_tree = self._number(_sizes(mine) * tree) if (tree != ring).any() else -1
        return _Found((self._number(_sizes(mine) * ring), by_tree), MAX_CHANNELS, replayed)

    def _number(self, sequence: Floats) -> int:
        self.sequences.append(sequence)
        return len(self.sequences) - 1


def _sizes(calls: pl.DataFrame) -> Floats:
    return calls["bytes"].to_numpy().astype(np.float64)
