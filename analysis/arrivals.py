"""Moments at which the same bytes left one node and reached another, from the samples of both ends of queue pairs."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.schema import I64, STR

Longs = NDArray[np.int64]

ARRIVALS = pl.Schema({"node": STR, "peer_node": STR, "sent_ns": I64, "received_ns": I64})
# Silences of at least so many bins are compared, the longest of each end; so many of them have to agree, and this
# share of the end that has fewer.
SILENT_BINS, SILENCES = 2, 128
AGREEING, AGREEING_SHARE = 4, 0.25
# No other shift may have more than this share of the silences that the best one has.
UNLIKE = 0.8
# What is more than this off what most say of two nodes was taken for another burst of a job that repeats itself.
ASTRAY_NS = 500_000


def arrivals(rows: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """ARRIVALS of the first byte after silences, as clock_offsets.solve takes them.

    `rows` as attribute.samples gives them; `known` are queue pairs as pairing.with_peers gives them. Data and
    clear-to-send writes count, so that a connection shows both ways. A byte is sent at the earliest when its bin
    begins, and received at the latest when its bin ends: what follows from that are bounds. Which bytes are the
    same is found by the count at which silences begin: the shift between both ends' counts that most silences
    agree on. This assumes that most of both ends' samples are there, and fails, by finding too few silences, where not.
    Empty where only one end was recorded.
    """
    pairs = known.filter(pl.col("peer_flow").is_not_null()).select("flow", "peer_flow", "node", "peer_node")
    counted = rows.filter(pl.col("flow").is_in(pairs["flow"].implode())).with_columns(
        data=pl.col("bytes").cast(I64) - pl.col("retx_bytes").fill_null(0).cast(I64),
        control=pl.col("ctl_packets").fill_null(0).cast(I64),
    )
    found = [pl.DataFrame(schema=ARRIVALS)]
    for counter in ("data", "control"):
        curves = {
            key: (part["t_ns"].to_numpy(), np.cumsum(part[counter].to_numpy()), int(part["bin_ns"][0]))
            for key, part in counted.filter(pl.col(counter) > 0)
            .partition_by("flow", "direction", as_dict=True, maintain_order=True)
            .items()
        }
        for flow, peer_flow, node, peer_node in pairs.iter_rows():
            sender, receiver = curves.get((flow, "tx")), curves.get((peer_flow, "rx"))
            if sender is None or receiver is None:
                continue
            sent, received = _same(*sender, *receiver)
            moments = pl.DataFrame({"sent_ns": sent, "received_ns": received})
            found.append(
                moments.select(
                    pl.lit(node).alias("node"),
                    pl.lit(peer_node).alias("peer_node"),
                    "sent_ns",
                    "received_ns",
                )
            )
    return _believed(pl.concat(found))


def _believed(moments: pl.DataFrame) -> pl.DataFrame:
    """Those of `moments` that take about as long as most between the same nodes within the same second."""
    where = ["node", "peer_node", "second"]
    took = pl.col("received_ns") - pl.col("sent_ns")
    timed = moments.with_columns(second=pl.col("sent_ns") // 1_000_000_000, slot=took // ASTRAY_NS)
    most = (
        timed.group_by(*where, "slot")
        .agg(pl.len(), took.median().alias("usual_ns"))
        .sort(*where, "len", "slot", descending=[False, False, False, True, False])
        .unique(where, keep="first", maintain_order=True)
    )
    return (
        timed.join(most.select(*where, "usual_ns"), on=where)
        .filter((took - pl.col("usual_ns")).abs() <= ASTRAY_NS)
        .select(ARRIVALS.names())
    )


def _same(
    sent_ns: Longs, sent: Longs, sent_bin_ns: int, received_ns: Longs, received: Longs, received_bin_ns: int
) -> tuple[Longs, Longs]:
    """Earliest sending and latest reception of what followed the silences of both ends, by times and counts so far."""
    mine, theirs = _silences(sent_ns, sent_bin_ns), _silences(received_ns, received_bin_ns)
    shifts, times = np.unique((sent[mine][:, None] - received[theirs][None, :]).ravel(), return_counts=True)
    enough = max(AGREEING, AGREEING_SHARE * min(len(mine), len(theirs)))
    if not len(times) or times.max() < enough:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    best = int(np.argmax(times))
    # A job repeats itself: shifted by an iteration, many silences agree, too.
    if (np.delete(times, best) > UNLIKE * times[best]).any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    shift = int(shifts[best])
    _, here, there = np.intersect1d(sent[mine] - shift, received[theirs], return_indices=True)
    return sent_ns[mine[here] + 1], received_ns[theirs[there] + 1] + received_bin_ns


def _silences(t_ns: Longs, bin_ns: int) -> Longs:
    """The indices of the bins before the longest silences, in order."""
    length = np.diff(t_ns) - bin_ns
    silent = np.flatnonzero(length >= SILENT_BINS * bin_ns)
    longest = silent[np.argsort(-length[silent], kind="stable")[:SILENCES]]
    return np.asarray(np.sort(longest), np.int64)
