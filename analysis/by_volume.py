"""Which communicator's calls explain the volumes that a queue pair carried, burst by burst."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.schema import F64, I32, STR, U64

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]

# How far a burst may be from the volume of a call, or of so many successive ones.
TOLERANCE, SUCCESSIVE = 0.004, 4
# Silences of so many bins, or more, are tried as what separates calls: within a call there are shorter ones.
SILENCES = (2, 8, 32, 128)
# NCCL has at most so many channels (MAXCHANNELS in src/include/device.h is 64; half of them per direction of a NIC).
MAX_CHANNELS = 32
# Beginning and end of a recording cut calls: by so much may what was carried differ from what was called.
PLAUSIBLE = 0.4
# Below this many bytes a call is a few lines of NCCL's LL protocol, whose padding hides its size.
TINY_BYTES = 16384
# Headers of a RoCEv2 packet, and what MTUs there are: a source that counts wire bytes has them in its bursts.
HEADER_BYTES, MTUS = 62, (4096, 2048, 1024)
# Calls that are looked at; a job repeats itself.
MAX_CALLS, MAX_BURSTS = 2048, 4096
# In wider bins than this, what looks like one burst is several calls, and the few there are fit anything.
MAX_BIN_NS = 2_000_000
TWO_SIDED = ("Send", "Recv")

CANDIDATES = pl.Schema(
    {"flow": U64, "node": STR, "comm_id": STR, "use": STR, "rank": I32, "nranks": I32, "peer_rank": I32}
)


def score(
    candidates: pl.DataFrame, directions: pl.DataFrame, ops: pl.DataFrame, rows: pl.DataFrame, wire: bool
) -> pl.DataFrame:
    """`candidates` (CANDIDATES and more) with `fit`, the share of the flow's bytes in bursts that calls explain.

    `directions`: flow and the `direction` of its data. `rows`: samples as attribute.samples gives them. A burst is
    what lies between two silences, and is explained when it is as large as one of the candidate's calls, or as some
    successive ones, by NCCL's published volumes of rings, trees and direct transfers over any number of channels.
    `apart`: how far all its bytes are from those of all calls, as a share of them; infinite where the calls cannot have
    carried them, null where none was seen. `carried` and `called` are these
    bytes, the latter of all channels and null for what is replayed. All are null where nothing was seen of the flow's
    data. `wire`: bytes include headers. Assumes that the communicator has a queue pair of its own for each channel and
    peer; a shared one fits none.
    """
    chosen = directions.join(candidates.select("flow").unique(), on="flow", how="semi")
    curves = {
        flow: (frame["t_ns"].to_numpy(), frame["net"].to_numpy().astype(np.int64), int(frame["bin_ns"][0]))
        for (flow,), frame in rows.join(chosen, on=["flow", "direction"], how="semi")
        .with_columns(net=pl.col("bytes").cast(pl.Int64) - pl.col("retx_bytes").fill_null(0).cast(pl.Int64))
        .filter(pl.col("net") > 0)
        .partition_by("flow", as_dict=True, maintain_order=True)
        .items()
    }
    bursts = {flow: _bursts(*curve) for flow, curve in curves.items()}
    overheads = [1 + HEADER_BYTES / mtu for mtu in MTUS] if wire else [1.0]
    calls = _Calls(ops)
    way = dict(directions.select("flow", "direction").iter_rows())
    found: list[tuple[float | None, ...]] = []
    for row in candidates.iter_rows(named=True):
        if row["flow"] in bursts:
            sequences, channels, replayed = calls.volumes(row, way[row["flow"]])
            called = float(sequences[0].sum()) if sequences and not replayed else None
            found.append((*_fit(bursts[row["flow"]], sequences, channels, replayed, overheads), called))
        else:
            found.append((None, None, None))
    scores = pl.DataFrame(found, schema={"fit": F64, "apart": F64, "called": F64}, orient="row")
    carried = {flow: float(of_flow[0].sum()) for flow, of_flow in bursts.items()}
    return candidates.with_columns(
        *scores, carried=pl.col("flow").replace_strict(carried, default=None, return_dtype=F64)
    )


class _Calls:
    """What the calls of a candidate put on one queue pair, were there one channel; remembered."""

    def __init__(self, ops: pl.DataFrame) -> None:
        captured = pl.col("origin").fill_null("call") == "capture"
        known = ops.filter(pl.col("comm_id").is_not_null(), pl.col("bytes") > 0).with_columns(
            captured=captured
        )
        # What was captured is replayed nobody knows how often.
        self._of_rank = known.sort("call_ns").partition_by("node", "comm_id", "rank", as_dict=True)
        self._known: dict[tuple[object, ...], tuple[list[Floats], list[int], bool]] = {}

    def volumes(self, candidate: dict[str, object], direction: str) -> tuple[list[Floats], list[int], bool]:
        """Sequences of volumes by algorithm, numbers of channels to try, and whether they repeat."""
        node, comm, rank, use, peer = (
            candidate[name] for name in ("node", "comm_id", "rank", "use", "peer_rank")
        )
        # Of what a rank receives its own Recv calls tell.
        kind = "Recv" if use == "pairs" and direction == "rx" else "Send"
        key = (node, comm, rank, use, kind, peer if use == "pairs" else None)
        if key not in self._known:
            self._known[key] = self._derive(key, int(str(candidate["nranks"])))
        return self._known[key]

    def _derive(self, key: tuple[object, ...], nranks: int) -> tuple[list[Floats], list[int], bool]:
        node, comm, rank, use, kind, peer = key
        calls = self._of_rank.get((node, comm, rank))
        if calls is None:
            return [], [], False
        replayed = bool(calls["captured"].any())
        if replayed:
            calls = calls.filter("captured")
        if use == "pairs":
            mine = calls.filter(pl.col("kind") == kind)
            if peer is not None:
                mine = mine.filter(pl.col("peer") == peer)
            return [_sizes(mine)], [1, 2, 4], replayed
        if use == "alltoall":
            mine = calls.filter(pl.col("kind").is_in(["AlltoAll", "Gather", "Scatter"]))
            return [_sizes(mine) / nranks], [1, 2, 4], replayed
        mine = calls.filter(~pl.col("kind").is_in([*TWO_SIDED, "AlltoAll", "Gather", "Scatter"]))
        share = (nranks - 1) / nranks
        name = mine["kind"].to_numpy()
        ring = np.where(
            name == "AllReduce", 2 * share, np.where(np.isin(name, ["Broadcast", "Reduce"]), 1.0, share)
        )
        tree = np.where(name == "AllReduce", 1.0, ring)
        sequences = [_sizes(mine) * ring]
        if (tree != ring).any():
            sequences.append(_sizes(mine) * tree)
        return sequences, list(range(1, MAX_CHANNELS + 1)), replayed


def _sizes(calls: pl.DataFrame) -> Floats:
    return calls["bytes"].to_numpy().astype(np.float64)


def _bursts(t_ns: Longs, net: Longs, bin_ns: int) -> list[Longs]:
    """Bytes between silences, for each length of SILENCES; in bins that are too wide, only what there is in all."""
    silence = np.diff(t_ns) - bin_ns
    found = []
    if bin_ns > MAX_BIN_NS:
        return [np.array([net.sum()])]
    for bins in SILENCES:
        ends = np.flatnonzero(silence >= bins * bin_ns)
        cut = np.r_[0, np.cumsum(net)][np.r_[0, ends + 1, len(net)]]
        found.append(np.diff(cut)[:MAX_BURSTS])
    return found


def _fit(
    bursts: list[Longs], sequences: list[Floats], channels: list[int], replayed: bool, overheads: list[float]
) -> tuple[float, float | None]:
    """The share of the bytes that is explained, and how far all are from all volumes (0 of what is replayed)."""
    carried = float(bursts[0].sum())
    if not any(map(len, sequences)):
        return 0.0, None
    best, apart = 0.0, np.inf
    for volumes in sequences:
        if not len(volumes):
            continue
        if volumes.max() < TINY_BYTES:
            # Lines of LL, at least one of each rank's part.
            possible = carried <= 4 * TINY_BYTES * len(volumes) and bursts[0].max() < 4 * TINY_BYTES
            best = max(best, float(possible))
            apart = min(apart, 0.0 if possible else np.inf)
            continue
        sums = _sums(volumes[:MAX_CALLS])
        for count in channels:
            away = 0.0 if replayed else abs(carried - float(volumes.sum()) / count) / carried
            apart = min(apart, away)
            # At both ends a call may be cut, or its call be older than the recording.
            if len(bursts) > 1 and away <= PLAUSIBLE + 2 * volumes.max() / count / carried:
                shares = (
                    _explained(burst, sums * overhead / count) / carried
                    for burst in bursts
                    for overhead in overheads
                )
                best = max(best, *shares)
    return best, apart


def _sums(volumes: Floats) -> Floats:
    """Volumes of one to SUCCESSIVE successive calls, sorted, without those within TOLERANCE of another."""
    total = np.r_[0.0, np.cumsum(volumes)]
    every = np.sort(
        np.concatenate([total[n:] - total[:-n] for n in range(1, SUCCESSIVE + 1) if n < len(total)])
    )
    every = every[every >= TINY_BYTES / 4]
    return every[np.r_[True, np.diff(every) > 1e-6 * every[1:]]] if len(every) else every


def _explained(burst: Longs, volumes: Floats) -> float:
    """The bytes of the bursts that are as large as one of `volumes`."""
    if not len(volumes):
        return 0.0
    after = np.clip(np.searchsorted(volumes, burst), 1, len(volumes) - 1) if len(volumes) > 1 else None
    near = (
        np.abs(burst - volumes[0])
        if after is None
        else np.minimum(np.abs(volumes[after] - burst), np.abs(volumes[after - 1] - burst))
    )
    return float(burst[near <= TOLERANCE * burst].sum())
