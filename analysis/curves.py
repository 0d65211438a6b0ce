"""Rows of samples as rate curves of flow groups: whose row it is, and all queue pairs of a group together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled

Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]

# Columns of the totals of a stream.
TOTALS = ("rows", "bytes", "retx_bytes", "ctl_packets", "first_ns", "last_ns", "bin_ns", "first_byte_ns")
# Rows are added up by the number of their bin where there are at most so many bins for one.
BINS_OF_ROWS = 2
ROWS, BYTES, RETX, CTL, FIRST_NS, LAST_NS, BIN_NS, FIRST_BYTE_NS = range(8)


class Curves(NamedTuple):
    """Of each group the rows [begin, end), in the order of time and one for a bin; `net` is bytes without repeats."""

    begin: Longs
    end: Longs
    t_ns: Longs
    net: Longs
    retx: Longs
    ctl: Longs


def no_curves(groups: int) -> Curves:
    """Curves of so many groups without a row."""
    nothing = np.zeros(0, np.int64)
    return Curves(np.zeros(groups, np.int64), np.zeros(groups, np.int64), nothing, nothing, nothing, nothing)


@compiled
def table_of(flows: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Longs]:
    """A hash table (keys, index or -1) of distinct `flows`, which are hashes themselves; never more than half full."""
    size = 64
    while size < 4 * len(flows):
        size *= 2
    keys, index = np.zeros(size, np.uint64), np.full(size, -1, np.int64)
    for number in range(len(flows)):
        at = np.int64(flows[number] & np.uint64(size - 1))
        while index[at] >= 0:
            at = (at + 1) & (size - 1)
        keys[at], index[at] = flows[number], number
    return keys, index


@compiled
def changes(flow: NDArray[np.uint64]) -> Longs:
    """The rows whose flow is not that of the row before."""
    count = 0
    for row in range(len(flow)):
        count += row == 0 or flow[row] != flow[row - 1]
    rows = np.empty(count, np.int64)
    count = 0
    for row in range(len(flow)):
        if row == 0 or flow[row] != flow[row - 1]:
            rows[count] = row
            count += 1
    return rows


@compiled
def runs(
    flow: NDArray[np.uint64], tx: NDArray[np.uint8], keys: NDArray[np.uint64], index: Longs
) -> tuple[Longs, Longs]:
    """The runs of rows of one flow and direction: stream of each, and where it begins, with the number of rows last.

    A stream is twice the number of its flow in the table, and 1 more where sent; -1 of flows that are not in it.
    """
    count = len(flow)
    streams, begin = np.empty(64, np.int64), np.empty(65, np.int64)
    number = 0
    mask = len(keys) - 1
    for row in range(count):
        if row and flow[row] == flow[row - 1] and tx[row] == tx[row - 1]:
            continue
        if number == len(streams):
            streams, begin = np.append(streams, streams), np.append(begin, begin)
        at = np.int64(flow[row] & np.uint64(mask))
        while index[at] >= 0 and keys[at] != flow[row]:
            at = (at + 1) & mask
        streams[number] = 2 * index[at] + tx[row] if index[at] >= 0 else -1
        begin[number] = row
        number += 1
    begin[number] = count
    return streams[:number], begin[: number + 1]


@compiled
def joined(
    curves: Curves,
    begun: NDArray[np.bool_],
    totals: Longs,
    group_of: Longs,
    streams: Longs,
    run: Longs,
    t_ns: Longs,
    bin_ns: NDArray[np.uint32],
    sent: Longs,
    retx: Longs,
    ctl: NDArray[np.uint32],
    room: Longs,
) -> tuple[Curves, Longs]:
    """`curves` with the rows of a window added to those of the group (or -1) of their stream, and to its `totals`.

    `streams` and `run` are as `runs` gives them, `totals` is [streams, TOTALS]. A group has `begun` with its first
    byte; rows before that are left out. The columns are in `room`, [4, rows], or in a larger one where it is too small,
    which is also returned: memory that is used again costs less than new one.
    """
    groups = len(curves.begin)
    size = curves.end - curves.begin
    moves = begun.copy()
    for number in range(len(streams)):
        group = group_of[streams[number]] if streams[number] >= 0 else -1
        if group >= 0 and not moves[group]:
            for row in range(run[number], run[number + 1]):
                if sent[row]:
                    moves[group] = True
                    break
    for number in range(len(streams)):
        if streams[number] >= 0 and group_of[streams[number]] >= 0 and moves[group_of[streams[number]]]:
            size[group_of[streams[number]]] += run[number + 1] - run[number]
    end = np.cumsum(size)
    begin = end - size
    count = end[-1] if groups else 0
    if count > room.shape[1]:
        room = np.empty((4, count + count // 8), np.int64)
    new = Curves(begin, begin.copy(), room[0][:count], room[1][:count], room[2][:count], room[3][:count])
    fill = new.end
    for group in range(groups):
        rows = curves.end[group] - curves.begin[group]
        here, there = slice(fill[group], fill[group] + rows), slice(curves.begin[group], curves.end[group])
        new.t_ns[here], new.net[here] = curves.t_ns[there], curves.net[there]
        new.retx[here], new.ctl[here] = curves.retx[there], curves.ctl[there]
        fill[group] += rows
    for number in range(len(streams)):
        if streams[number] < 0:
            continue
        group = group_of[streams[number]]
        first, last = run[number], run[number + 1]
        sent_here, retx_here, ctl_here = sent[first:last], retx[first:last], ctl[first:last]
        bytes_of, retx_of, ctl_of = np.int64(0), np.int64(0), np.int64(0)
        # Column by column, in loops so simple that they take several rows at once.
        for row in range(last - first):
            bytes_of += sent_here[row]
        for row in range(last - first):
            retx_of += retx_here[row]
        for row in range(last - first):
            ctl_of += np.int64(ctl_here[row])
        if group >= 0 and moves[group]:
            at = fill[group]
            fill[group] = at + last - first
            column, t_here = new.t_ns[at : fill[group]], t_ns[first:last]
            for row in range(last - first):
                column[row] = t_here[row]
            column = new.net[at : fill[group]]
            for row in range(last - first):
                column[row] = sent_here[row] - retx_here[row]
            column = new.retx[at : fill[group]]
            for row in range(last - first):
                column[row] = retx_here[row]
            column = new.ctl[at : fill[group]]
            for row in range(last - first):
                column[row] = np.int64(ctl_here[row])
        of = totals[streams[number]]
        before = of[BYTES]
        if of[ROWS] == 0:
            of[FIRST_NS] = t_ns[first]
        of[ROWS] += last - first
        of[BYTES] += bytes_of
        of[RETX] += retx_of
        of[CTL] += ctl_of
        of[FIRST_NS] = min(of[FIRST_NS], t_ns[first])
        of[LAST_NS] = max(of[LAST_NS], t_ns[last - 1])
        of[BIN_NS] = max(of[BIN_NS], np.int64(bin_ns[first]))
        if bytes_of:
            row = first
            while sent[row] == 0:
                row += 1
            of[FIRST_BYTE_NS] = min(of[FIRST_BYTE_NS], t_ns[row]) if before else t_ns[row]
    width_ns = np.zeros(groups, np.int64)
    for number in range(len(streams)):
        if streams[number] >= 0 and group_of[streams[number]] >= 0:
            width_ns[group_of[streams[number]]] = np.int64(bin_ns[run[number]])
    order = np.empty((2, max(0, size.max()) if groups else 0), np.int64)
    for group in range(groups):
        new.end[group] = in_time_order(
            new.t_ns, new.net, new.retx, new.ctl, begin[group], new.end[group], width_ns[group], order
        )
        if not begun[group]:
            while begin[group] < new.end[group] and new.net[begin[group]] + new.retx[begin[group]] == 0:
                begin[group] += 1
            begun[group] = begin[group] < new.end[group]
    return new, room


@compiled
def _by_bin(t_ns: Longs, net: Longs, retx: Longs, ctl: Longs, begin: int, end: int, bin_ns: int) -> int:
    """As `in_time_order`; -1, and nothing done, where there are too many bins, or one of another phase."""
    first_ns, last_ns = t_ns[begin], t_ns[begin]
    for row in range(begin, end):
        first_ns, last_ns = min(first_ns, t_ns[row]), max(last_ns, t_ns[row])
    bins = (last_ns - first_ns) // bin_ns + 1 if bin_ns > 0 else np.int64(0)
    if bins <= 0 or bins > BINS_OF_ROWS * (end - begin):
        return -1
    sums, there = np.zeros((bins, 3), np.int64), np.zeros(bins, np.bool_)
    number, number_ns = np.int64(0), first_ns
    for row in range(begin, end):
        if t_ns[row] == number_ns + bin_ns:
            number += 1
        else:
            number = (t_ns[row] - first_ns) // bin_ns
        number_ns = first_ns + number * bin_ns
        if number_ns != t_ns[row]:
            return -1
        there[number] = True
        sums[number, 0] += net[row]
        sums[number, 1] += retx[row]
        sums[number, 2] += ctl[row]
    at = begin
    for number in range(bins):
        if there[number]:
            t_ns[at] = first_ns + number * bin_ns
            net[at], retx[at], ctl[at] = sums[number, 0], sums[number, 1], sums[number, 2]
            at += 1
    return at


@compiled
def in_time_order(
    t_ns: Longs, net: Longs, retx: Longs, ctl: Longs, begin: int, end: int, bin_ns: int, scratch: Longs
) -> int:
    """Sorts rows [begin, end) by time and adds up those of one bin; returns the new end.

    Adds rows up by the number of their bin, of `bin_ns`, where most bins have some. Where bins are few, or of several
    phases, merges the runs that are in order already, one per queue pair. `scratch` is [2, rows].
    """
    row = begin + 1
    while row < end and t_ns[row] > t_ns[row - 1]:
        row += 1
    if row >= end:
        return end
    stop = _by_bin(t_ns, net, retx, ctl, begin, end, bin_ns)
    if stop >= 0:
        return stop
    count = end - begin
    bounds = [np.int64(0)]
    for row in range(1, count):
        if t_ns[begin + row] < t_ns[begin + row - 1]:
            bounds.append(np.int64(row))
    bounds.append(count)
    one, other = 0, 1
    for row in range(count):
        scratch[one, row] = row
    while len(bounds) > 2:
        fewer = [np.int64(0)]
        for run in range(0, len(bounds) - 1, 2):
            left, middle = bounds[run], bounds[run + 1]
            right = bounds[run + 2] if run + 2 < len(bounds) else middle
            first, second = left, middle
            for at in range(left, right):
                if second >= right or (
                    first < middle and t_ns[begin + scratch[one, first]] <= t_ns[begin + scratch[one, second]]
                ):
                    scratch[other, at] = scratch[one, first]
                    first += 1
                else:
                    scratch[other, at] = scratch[one, second]
                    second += 1
            fewer.append(right)
        bounds = fewer
        one, other = other, one
    order = scratch[one, :count]
    copy = (
        t_ns[begin:end][order],
        net[begin:end][order],
        retx[begin:end][order],
        ctl[begin:end][order],
    )
    at = begin - 1
    for row in range(count):
        if at >= begin and t_ns[at] == copy[0][row]:
            net[at] += copy[1][row]
            retx[at] += copy[2][row]
            ctl[at] += copy[3][row]
        else:
            at += 1
            t_ns[at], net[at], retx[at], ctl[at] = copy[0][row], copy[1][row], copy[2][row], copy[3][row]
    return at + 1


@compiled
def left(curves: Curves, needed: Longs) -> Curves:
    """`curves` without the rows before `needed`, in memory of its own."""
    size = curves.end - needed
    end = np.cumsum(size)
    count = end[-1] if len(end) else 0
    new = Curves(
        end - size,
        end,
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.int64),
    )
    for group in range(len(end)):
        here, there = slice(new.begin[group], new.end[group]), slice(needed[group], curves.end[group])
        new.t_ns[here] = curves.t_ns[there]
        new.net[here] = curves.net[there]
        new.retx[here] = curves.retx[there]
        new.ctl[here] = curves.ctl[there]
    return new
