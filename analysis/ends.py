"""Where operators end in the bytes of one flow group: in silences near, and where bytes are missing."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Floats, Longs

# An operator is complete when all but this share of its bytes were seen: more would hide its last message.
VOLUME_TOLERANCE = 0.004
# Volumes are rounded to lines of this size at least, and what is smaller than so many is not told by its volume.
ROUNDED, LINES = 128.0, 64 * 1024
# Silences are taken for ends of operators only where fewer than this share of all places are near one.
CHANCE = 0.1
UNDECIDED, NOWHERE = -1.0, -2.0
# Where volumes are rough, an operator ends in the longest silence no farther from its own bytes than this share of
# them, or, of up to so many that follow each other without one, at its part of theirs. Silences of fewer bins are
# inside of operators.
INEXACT, RUN, LONG_BINS = 0.25, 4, 8
# A step is put together again after a hole of so many bins at least, and when it is no longer than this.
HOLE_BINS, LONGEST_STEP_NS = 3, 1_000_000_000


@compiled
def drawn(
    silences: Longs, count: int, quiet: float, start: float, size: float, short: float = VOLUME_TOLERANCE
) -> tuple[float, bool]:
    """The end of an operator of `size` bytes from `start`, drawn to the nearest silence if near, and whether it is.

    Of several silences within some lines of each other it is the first: what follows is the next, small operator.
    Of the `silences` the first `count` count; `quiet` is the last one before them. So much of it may lie after its
    end: `short`, a share.
    """
    end = start + size
    reach = max(VOLUME_TOLERANCE * size, ROUNDED)
    back = max(short * size, ROUNDED)
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if silences[middle] < end:
            low = middle + 1
        else:
            high = middle
    near = float(silences[low - 1]) if low > 0 else quiet
    if low < count and (silences[low] - end < end - near or end - near > back):
        near = float(silences[low])
    if size > LINES:
        while low > 0 and silences[low - 1] >= near - ROUNDED and silences[low - 1] > start:
            low -= 1
        if low < count and near - ROUNDED <= silences[low] < near:
            near = float(silences[low])
    if -back <= near - end <= reach and near > start:
        return near, True
    return end, False


@compiled
def resumed(
    silences: Longs,
    count: int,
    quiet: float,
    start: float,
    sizes: Floats,
    factor: float,
    total: float,
    final: bool,
) -> float:
    """Where an operator ended of which bytes are missing: the silence from which the two after it end in silences too.

    `sizes` are those of the three, up to the `factor`. NOWHERE where there is none, or where silences are so many that
    some would fit anyhow. UNDECIDED until all their bytes are there.
    """
    until = start + sizes.sum() * factor
    reach = max(VOLUME_TOLERANCE * (until - start), ROUNDED)
    if total <= until + reach and not final:
        return UNDECIDED
    first, last = np.searchsorted(silences[:count], np.array([start + 1.0, until]))
    if (last - first) * 2 * reach > CHANCE * (until - start):
        return NOWHERE
    for number in range(last - 1, first - 1, -1):
        at = float(silences[number])
        if at >= start + sizes[0] * factor:
            continue
        following, hit = drawn(silences, count, quiet, at, sizes[1] * factor)
        if hit and drawn(silences, count, quiet, following, sizes[2] * factor)[1]:
            return at
    return NOWHERE


@compiled
def about(
    silences: Longs,
    lengths_ns: Longs,
    count: int,
    least_ns: int,
    start: float,
    sizes: Floats,
    low: Floats,
    total: float,
    final: bool,
) -> tuple[float, int, float]:
    """Where the first operator of `sizes` from `start` ends, and how many follow each other up to which silence.

    Of the `silences` the first `count` count, of `least_ns` or more; none of the operators begins before `low`. Of
    several numbers of operators that may end in one silence it is that whose bytes are nearest. NOWHERE where no
    silence is near, UNDECIDED until all bytes in which one may be are there.
    """
    size = 0.0
    for number in range(min(len(sizes), RUN)):
        size += sizes[number]
        first, last = start + (1 - INEXACT) * size, start + (1 + INEXACT) * size
        if total <= last and not final:
            return UNDECIDED, 0, 0.0
        at, longest = -1, least_ns - 1
        for row in range(np.searchsorted(silences[:count], np.int64(first)), count):
            if silences[row] > last:
                break
            if lengths_ns[row] > longest and silences[row] > start:
                at, longest = row, lengths_ns[row]
        if at >= 0:
            end, together = float(silences[at]), number + 1
            while together < min(len(sizes), RUN) and low[together] < end:
                more = size + sizes[together]
                if abs(end - start - more) * size >= abs(end - start - size) * more:
                    break
                size, together = more, together + 1
            return start + (end - start) * sizes[0] / size, together, end
    return NOWHERE, 0, 0.0


@compiled
def ended(t_ns: Longs, before_ns: int) -> int:
    """How many of the rows have t_ns of at most `before_ns`."""
    low, high = 0, len(t_ns)
    while low < high:
        middle = (low + high) // 2
        if t_ns[middle] <= before_ns:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def quiet_at(t_ns: Longs, before_ns: int, call_ns: int, bin_ns: int) -> int:
    """How many rows there are up to the silence in which a call is made, -1 where traffic flows on.

    The bin in which it is made may hold the last bytes before it. The row before the first is at `before_ns`.
    """
    row = ended(t_ns, call_ns - bin_ns)
    if row == len(t_ns) or t_ns[row] - (t_ns[row - 1] if row else before_ns) > bin_ns:
        return row
    if row + 1 == len(t_ns) or t_ns[row + 1] - t_ns[row] > bin_ns:
        return row + 1
    return -1


@compiled
def seen_of(
    t_ns: Longs,
    cum: Longs,
    bin_ns: int,
    silences: Longs,
    quiet: float,
    start: float,
    low: Floats,
    expected: Floats,
    seen: Floats,
    call_ns: int,
    next_call_ns: int,
) -> None:
    """Fills in how much of the bytes `expected` of each operator of a step was `seen` from `start` on.

    All of them ended before the call at `next_call_ns` of the next step, and this one's first call is at `call_ns`, so
    what is missing in all is known, and operators follow each other from both ends up to a hole, which is some gap in
    time. Of all gaps it is that with which most operators end in one of the `silences`, or `quiet`, and begin after
    their calls, at `low`; of equal ones the longest.
    """
    seen[:] = expected
    last = len(cum)
    if last == 0:
        return
    missing = expected.sum() - (cum[-1] - start)
    if missing <= VOLUME_TOLERANCE * expected.max():
        return
    first = np.searchsorted(cum, np.int64(start), "right")
    peak = 0.0
    for row in range(first + 1, last):
        peak = max(peak, float(cum[row] - cum[row - 1]))
    best, most, longest = -1.0, -np.inf, 0
    trial = np.empty(len(expected))
    count = np.searchsorted(silences, cum[-1], "right")
    for row in range(first, last + 1):
        begin_ns = t_ns[row - 1] + bin_ns if row > first else call_ns
        end_ns = t_ns[row] if row < last else next_call_ns
        gap_ns = end_ns - begin_ns
        if gap_ns < HOLE_BINS * bin_ns or gap_ns // bin_ns * peak < missing:
            continue
        at = float(cum[row - 1]) if row > first else start
        _with_hole(expected, at - start, missing, trial)
        score = _fitting(silences, count, quiet, start, low, trial)
        if score > most or (score == most and gap_ns > longest):
            best, most, longest = at, score, gap_ns
    if best >= 0:
        _with_hole(expected, best - start, missing, seen)


@compiled
def _with_hole(expected: Floats, hole: float, missing: float, seen: Floats) -> None:
    """What is `seen` of operators that follow each other, when `missing` bytes are lost after `hole` bytes."""
    volume, before = 0.0, 0.0
    for index in range(len(expected)):
        volume += expected[index]
        after = volume if volume <= hole else max(hole, volume - missing)
        seen[index] = after - before
        before = after


@compiled
def _fitting(silences: Longs, count: int, quiet: float, start: float, low: Floats, sizes: Floats) -> float:
    """How many operators of `sizes` from `start` end in silences, less those that begin before their call."""
    at, score = start, 0.0
    for index in range(len(sizes)):
        if sizes[index] < 1.0:
            continue
        if at + VOLUME_TOLERANCE * sizes[index] < low[index]:
            score -= 1.0
        at, hit = drawn(silences, count, quiet, at, sizes[index])
        score += hit
    return score
