"""What flows carried between silences, and how much of it some calls explain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Floats, Longs, changes
from pulse_bpf.analysis.samples import Samples
from pulse_bpf.errors import DataError
from pulse_bpf.schema import BOOL, I64, U64

# Whose traffic a flow carries shows in its first bytes: of so much time from the recording's begin, or, of a flow that
# is silent then, from a later multiple of it.
WARMUP_NS = 2_000_000_000
# Silences of so many bins, or more, are tried as what separates calls: within a call there are shorter ones.
SILENCES = (2, 8, 32, 128)
MAX_BURSTS = 4096
# In wider bins than this, what looks like one burst is several calls, and the few there are fit anything.
MAX_BIN_NS = 2_000_000
# How far a burst may be from the volume of a call, or of so many successive ones.
TOLERANCE, SUCCESSIVE = 0.004, 4
# Beginning and end of a recording cut calls: by so much may what was carried differ from what was called.
PLAUSIBLE = 0.4
# A clear-to-send on the wire, and what a source may round what a queue pair moves in a bin up to.
CONTROL_BYTES, UNIT_BYTES = 142, 32
# Below this many bytes a call is a few lines of NCCL's LL protocol, whose padding hides its size.
TINY_BYTES = 16384

_SILENCES = np.array(SILENCES, np.int64)


class Bursts(NamedTuple):
    """Of each stream, 2 x flow in `flows` + 1 where sent: bytes without repeats (`total`), in which multiple of
    WARMUP_NS from `start_ns` they are (`slot`, -1 without any), the bin's width, and whether they may be nothing but
    clear-to-sends with headers (`control`).

    `sizes` holds the bytes between silences, sorted, of stream s and the SILENCES[i]-th length from
    offsets[len(SILENCES) * s + i] on.
    """

    flows: NDArray[np.uint64]
    start_ns: int
    slot: Longs
    total: Longs
    bin_ns: Longs
    control: NDArray[np.bool_]
    sizes: Longs
    offsets: Longs

    def totals(self) -> pl.DataFrame:
        """flow, tx, rx: bytes."""
        return pl.DataFrame({"flow": self.flows, "tx": self.total[1::2], "rx": self.total[::2]})

    def controls(self) -> pl.DataFrame:
        """flow, tx, rx: whether there were bytes, each bin's as many as some clear-to-sends have."""
        seen = self.control & (self.total > 0)
        return pl.DataFrame({"flow": self.flows, "tx": seen[1::2], "rx": seen[::2]})

    def table(self) -> pl.DataFrame:
        """The same as a table (CARRIED), one row a stream, which `from_table` takes back."""
        silences = len(SILENCES)
        lengths = np.diff(self.offsets)
        ends = self.offsets[silences::silences]
        return pl.DataFrame(
            {
                "flow": np.repeat(self.flows, 2),
                "tx": np.arange(len(self.slot)) % 2 == 1,
                "slot": self.slot,
                "total": self.total,
                "bin_ns": self.bin_ns,
                "control": self.control,
                "sizes": [self.sizes[self.offsets[i * silences] : end] for i, end in enumerate(ends)],
                "lengths": list(lengths.reshape(-1, silences)),
            },
            schema=CARRIED,
        )


# What the streams of some nodes carried, as it travels: `lengths` says how many of the `sizes` each of SILENCES has.
_CARRIED: dict[str, pl.DataType | type[pl.DataType]] = {
    "flow": U64,
    "tx": BOOL,
    "slot": I64,
    "total": I64,
    "bin_ns": I64,
    "control": BOOL,
    "sizes": pl.List(I64),
    "lengths": pl.List(I64),
}
CARRIED = pl.Schema(_CARRIED)


def from_table(table: pl.DataFrame, start_ns: int) -> Bursts:
    """The bursts in the rows of `table` (CARRIED) of any number of nodes, all counted from `start_ns` on.

    DataError where it is no such table.
    """
    table = table.sort("flow", "tx")
    streams = np.arange(table.height)
    flows = table["flow"].to_numpy()
    lengths = table["lengths"].explode(empty_as_null=False).to_numpy()
    sizes = table["sizes"].explode(empty_as_null=False).to_numpy()
    if (
        table.select(pl.any_horizontal(pl.all().is_null().any())).item()
        or not np.array_equal(table["tx"].to_numpy(), streams % 2 == 1)
        or not np.array_equal(flows[::2], np.unique(flows))
        or not np.array_equal(flows[::2], flows[1::2])
        or table.filter(pl.col("lengths").list.len() != len(SILENCES)).height
        or (lengths < 0).any()
        or table.filter(pl.col("lengths").list.sum() != pl.col("sizes").list.len()).height
    ):
        raise DataError("what the flows carried first is damaged")
    return Bursts(
        flows[::2].copy(),
        start_ns,
        table["slot"].to_numpy(),
        table["total"].to_numpy(),
        table["bin_ns"].to_numpy(),
        table["control"].to_numpy(),
        sizes.astype(np.int64),
        np.r_[0, np.cumsum(lengths)].astype(np.int64),
    )


def bursts(samples: Samples, flows: pl.Series, start_ns: int | None = None) -> Bursts:
    """What each of the distinct `flows` carried first, counted from `start_ns`, or else from the first sample on.

    Once WARMUP_NS of a node were read, parts without a flow that was silent so far are passed over.
    """
    start_ns = samples.start_ns if start_ns is None else start_ns
    order = np.sort(flows.to_numpy())
    streams = 2 * len(order)
    slot, last_ns, total, bin_ns = (np.full(streams, value, np.int64) for value in (-1, 0, 0, 0))
    since = np.zeros((streams, len(SILENCES)), np.int64)
    counts = np.zeros((streams, len(SILENCES)), np.int64)
    control = np.ones(streams, np.bool_)
    found = [np.zeros((2, 0), np.int64)]
    silent = set(order.tolist())
    for batch in samples.batches(start_ns + WARMUP_NS, silent) if streams else ():
        flow = batch.rows["flow"].to_numpy()
        begins = changes(flow)
        at = np.searchsorted(order, flow[begins])
        at[order[np.minimum(at, len(order) - 1)] != flow[begins]] = -1
        silent.difference_update(order[np.unique(at[at >= 0])].tolist())
        found.append(
            _add(
                np.r_[begins, len(flow)],
                at,
                batch.rows["tx"].to_numpy(),
                batch.rows["t_ns"].to_numpy(),
                batch.rows["bin_ns"].to_numpy(),
                (batch.rows["bytes"].to_numpy() - batch.rows["retx_bytes"].to_numpy()).view(np.int64),
                start_ns,
                slot,
                last_ns,
                total,
                bin_ns,
                since,
                counts,
                control,
            )
        )
    running = total[:, None] - since
    rest = np.flatnonzero(running)
    found.append(np.array([rest, running.ravel()[rest]]))
    which, sizes = np.concatenate(found, axis=1)
    ordered = np.lexsort((sizes, which))
    offsets = np.searchsorted(which[ordered], np.arange(running.size + 1))
    return Bursts(order, start_ns, slot, total, bin_ns, control, sizes[ordered], offsets)


@compiled
def _add(
    begins: Longs,
    flow: Longs,
    tx: NDArray[np.uint8],
    t_ns: Longs,
    width_ns: NDArray[np.uint32],
    net: Longs,
    start_ns: int,
    slot: Longs,
    last_ns: Longs,
    total: Longs,
    bin_ns: Longs,
    since: Longs,
    counts: Longs,
    control: NDArray[np.bool_],
) -> Longs:
    """The (stream and silence, size) of bursts that end; `flow` of the rows between two of `begins`, -1 for none.

    `since`: what the stream had carried when each burst began.
    """
    ended = np.empty((2, 1024), np.int64)
    many = 0
    for run in range(len(flow)):
        if flow[run] < 0:
            continue
        for row in range(begins[run], begins[run + 1]):
            if net[row] <= 0:
                continue
            stream = 2 * flow[run] + tx[row]
            now = (t_ns[row] - start_ns) // WARMUP_NS
            if slot[stream] < 0:
                slot[stream] = now
                bin_ns[stream] = width_ns[row]
            elif slot[stream] != now:
                continue
            else:
                silence = t_ns[row] - last_ns[stream]
                for level in range(len(_SILENCES)):
                    if silence < _SILENCES[level] * bin_ns[stream]:
                        break
                    if counts[stream, level] < MAX_BURSTS:
                        if many == ended.shape[1]:
                            grown = np.empty((2, 2 * many), np.int64)
                            grown[:, :many] = ended
                            ended = grown
                        ended[0, many] = stream * len(_SILENCES) + level
                        ended[1, many] = total[stream] - since[stream, level]
                        many += 1
                    counts[stream, level] += 1
                    since[stream, level] = total[stream]
            last_ns[stream] = t_ns[row] + width_ns[row]
            total[stream] += net[row]
            over = net[row] % CONTROL_BYTES
            control[stream] &= over == 0 or (over < UNIT_BYTES and net[row] % UNIT_BYTES == 0)
    return np.asarray(ended[:, :many])


class Volumes(NamedTuple):
    """Sequences of volumes, were there one channel: the volume of all their calls and of the largest, how many there
    are, and from offsets[i] on the `sums` of the i-th: of one to SUCCESSIVE successive calls, sorted."""

    whole: Floats
    largest: Floats
    calls: Longs
    sums: Floats
    offsets: Longs


def volumes(sequences: list[Floats], most: int) -> Volumes:
    """`sums` of no more than the first `most` calls, as a job repeats itself."""
    sums = [_sums(sequence[:most]) for sequence in sequences]
    return Volumes(
        np.array([sequence.sum() for sequence in sequences]),
        np.array([sequence.max(initial=0.0) for sequence in sequences]),
        np.array([len(sequence) for sequence in sequences], np.int64),
        np.concatenate([np.zeros(0), *sums]),
        np.r_[0, np.cumsum([len(part) for part in sums])].astype(np.int64),
    )


def _sums(sequence: Floats) -> Floats:
    """Volumes of one to SUCCESSIVE successive calls, sorted, without those that are as good as another."""
    total = np.r_[0.0, np.cumsum(sequence)]
    every = np.sort(
        np.concatenate(
            [np.zeros(0)] + [total[n:] - total[:-n] for n in range(1, SUCCESSIVE + 1) if n < len(total)]
        )
    )
    every = every[every >= TINY_BYTES / 4]
    return np.asarray(every[np.diff(every, prepend=-1.0) > 1e-6 * every])


@compiled
def fit(
    total: Longs,
    bin_ns: Longs,
    sizes: Longs,
    offsets: Longs,
    whole: Floats,
    largest: Floats,
    calls: Longs,
    sums: Floats,
    sum_offsets: Longs,
    stream: Longs,
    sequences: Longs,
    channels: Longs,
    replayed: NDArray[np.bool_],
    overheads: Floats,
) -> tuple[Floats, Floats]:
    """Of each candidate the share of the bytes of its `stream` in bursts that calls explain, and how far all its bytes
    are from the volumes of all calls, as a share of them: 0 of what is replayed, infinite where they cannot be its, NaN
    without calls.

    The first arrays are those of Bursts and Volumes. A candidate has two `sequences` (-1: none), and 2**i channels for
    each bit i set in a negative of `channels`, or any number up to it. `overheads`: bytes carried for each byte called,
    one of them.
    """
    best, apart = np.zeros(len(stream)), np.full(len(stream), np.nan)
    levels = len(_SILENCES)
    for number in range(len(stream)):
        here = stream[number]
        carried = float(total[here])
        first = here * levels
        biggest = sizes[offsets[first + 1] - 1]
        for sequence in sequences[number]:
            if sequence < 0 or calls[sequence] == 0:
                continue
            if largest[sequence] < TINY_BYTES:
                # Lines of LL, at least one of each rank's part.
                possible = carried <= 4 * TINY_BYTES * calls[sequence] and biggest < 4 * TINY_BYTES
                best[number] = max(best[number], 1.0 if possible else 0.0)
                apart[number] = np.fmin(apart[number], 0.0 if possible else np.inf)
                continue
            count = 1
            while count <= abs(channels[number]):
                away = 0.0
                if not replayed[number]:
                    away = (np.abs(carried - overheads * whole[sequence] / count) / carried).min()
                apart[number] = np.fmin(apart[number], away)
                # At both ends a call may be cut, or its call be older than the recording.
                cut = 2 * largest[sequence] / count / carried
                if bin_ns[here] <= MAX_BIN_NS and away <= PLAUSIBLE + cut:
                    for level in range(levels):
                        begin, end = offsets[first + level], offsets[first + level + 1]
                        for overhead in overheads:
                            share = _explained(
                                sizes[begin:end],
                                sums[sum_offsets[sequence] : sum_offsets[sequence + 1]],
                                overhead / count,
                            )
                            best[number] = max(best[number], share / carried)
                count = 2 * count if channels[number] < 0 else count + 1
    return best, apart


@compiled
def _explained(sizes: Longs, sums: Floats, factor: float) -> float:
    """The bytes of the bursts of `sizes` that are as large as one of `sums` times `factor`; both are sorted."""
    explained, at = 0.0, 0
    for size in sizes:
        while at < len(sums) and sums[at] * factor < size - TOLERANCE * size:
            at += 1
        if at == len(sums):
            break
        if sums[at] * factor <= size + TOLERANCE * size:
            explained += size
    return explained
