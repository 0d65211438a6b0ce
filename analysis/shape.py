"""Rates, silences and times of one operator's bins, in compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]

# A bin counts as active above this share of the flow's 95th percentile: less is a trickle of control data.
ACTIVE_SHARE = 0.2
# A silence is a stall when it is this much of the operator, and long enough in bins not to be one packet's.
STALL_SHARE, STALL_BINS = 0.1, 8
# Windows of an operator, end to end, below which there is no bursting rate; and in how many windows each byte is.
MIN_WINDOWS, OVERLAP = 3, 4

# What is not known, among whole numbers.
NOTHING = np.iinfo(np.int64).min
WHOLE = (
    "bytes",
    "retx_bytes",
    "ctl_packets",
    "cut_short",
    "start_ns",
    "last_byte_ns",
    "active_ns",
    "gap_unknown_ns",
    "first_gap_ns",
    "stalls",
    "stall_ns",
    "first_stall_ns",
    "first_stall_len_ns",
    "first_stall_bytes",
    "byte_mean_ns",
    "credits_before",
    "credits_during",
    "credit_mean_ns",
)
REAL = ("active_gbps", "peak_gbps", "max_gbps", "p95_gbps", "wmed_gbps", "bin_cv", "burst_gbps")


@compiled
def shape(
    t_ns: Longs, net: Longs, bin_ns: int, window_bytes: float, whole: Longs, real: Floats, scratch: Longs
) -> None:
    """Fills the columns WHOLE, but for the first four and credits, and REAL of bins that begin at `t_ns` with `net` > 0
    bytes.

    Times are 1.0-based on nothing but the bins: `active_ns` counts bins of at least ACTIVE_SHARE of the 95th
    percentile, silences are whole bins without a byte. `bin_cv` is of the interior, as the first and last bin are cut
    by when the operator happened to begin and end. `scratch` is as long as the bins at least.
    """
    whole[4:] = NOTHING
    real[:] = np.nan
    count = len(t_ns)
    if count == 0:
        return
    gbps = 8.0 / bin_ns
    most, second, volume, inner, squares, moment = 0, 0, 0, 0.0, 0.0, 0.0
    for row in range(count):
        size = net[row]
        scratch[row] = size
        volume += size
        moment += float(size) * float(t_ns[row] - t_ns[0])
        if size > most:
            most, second = size, most
        elif size > second:
            second = size
        if 0 < row < count - 1:
            inner += size
            squares += float(size) * float(size)
    span = t_ns[count - 1] + bin_ns - t_ns[0]
    gaps, stalls, stalled, before = 0, 0, 0, 0
    for row in range(1, count):
        before += net[row - 1]
        gap = t_ns[row] - t_ns[row - 1] - bin_ns
        if gap <= 0:
            continue
        gaps += gap
        if whole[8] == NOTHING:
            whole[8] = t_ns[row] - gap
        if gap >= STALL_SHARE * span and gap >= STALL_BINS * bin_ns:
            stalls += 1
            stalled += gap
            if whole[11] == NOTHING:
                whole[11], whole[12], whole[13] = t_ns[row] - gap, gap, before
    high = selected(scratch, count, int((count - 1) * 0.95 + 0.5))
    active, active_bytes = 0, 0
    for row in range(count):
        if net[row] >= ACTIVE_SHARE * high:
            active += 1
            active_bytes += net[row]
    whole[4], whole[5] = t_ns[0], t_ns[count - 1] + bin_ns
    whole[6], whole[7], whole[9], whole[10] = active * bin_ns, gaps, stalls, stalled
    whole[14] = t_ns[0] + np.int64(moment / max(volume, 1))
    real[0] = active_bytes * gbps / active
    real[1] = (second if second else most) * gbps
    real[2], real[3] = most * gbps, high * gbps
    real[4] = weighted(scratch, count, 0.5 * volume) * gbps
    inner_bins = span / bin_ns - 2
    if inner_bins >= 2:
        mean = inner / inner_bins
        real[5] = np.sqrt(max(squares / inner_bins - mean * mean, 0.0)) / mean if inner else np.nan
    real[6] = _burst(t_ns, net, bin_ns, volume, window_bytes)


@compiled
def _burst(t_ns: Longs, net: Longs, bin_ns: int, volume: int, window_bytes: float) -> float:
    """The upper quartile of the rates over windows of equal volume, each byte in OVERLAP of them.

    A window is timed from its first byte to its last, bytes spread evenly in a bin. Unlike the rate in a fixed
    bin it does not jump with single packets when a bin holds few. Windows overlap so that how they fall on the
    slices of a collective does not matter: a quarter of them lie inside slices of 4/3 their size. NaN below
    MIN_WINDOWS: such an operator is too small for these bins.
    """
    fitting = int(volume / window_bytes) if window_bytes > 0 else 0
    if fitting < MIN_WINDOWS:
        return np.nan
    count = OVERLAP * (fitting - 1) + 1
    size = volume / fitting
    durations_ns = np.empty(count)
    first, last, first_end, last_end = 0, 0, net[0], net[0]
    final = len(net) - 1
    for number in range(count):
        low = number * size / OVERLAP
        high = low + size
        while first < final and first_end <= low + 1e-6:
            first += 1
            first_end += net[first]
        while last < final and last_end < high - 1e-6:
            last += 1
            last_end += net[last]
        begins = min(max((low - (first_end - net[first])) / net[first], 0.0), 1.0)
        ends = min(max((high - (last_end - net[last])) / net[last], 0.0), 1.0)
        durations_ns[number] = (t_ns[last] - t_ns[first]) + (ends - begins) * bin_ns
    # The quartile of the rates: the shorter it took, the higher a rate.
    place = 0.75 * (count - 1)
    below = int(place)
    at = count - 1 - below
    low_rate = size * 8 / max(selected(durations_ns, count, at), 1.0)
    if at == 0:
        return low_rate
    above = size * 8 / max(durations_ns[:at].max(), 1.0)
    return float(low_rate + (place - below) * (above - low_rate))


@compiled
def selected(values: NDArray[np.generic], count: int, place: int) -> float:
    """What is at `place` of the first `count` values in order; reorders them so that none after it is smaller."""
    low, high = 0, count - 1
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while values[right] > pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if place <= right:
            high = right
        elif place >= left:
            low = left
        else:
            break
    return float(values[place])


@compiled
def weighted(values: Longs, count: int, share: float) -> int:
    """The largest of the first `count` values such that those of at least it sum up to `share`; reorders them."""
    low, high, above = 0, count - 1, 0
    while low < high:
        pivot = values[(low + high) // 2]
        left, right, upper = low, high, 0
        while left <= right:
            while values[left] > pivot:
                left += 1
            while values[right] < pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        for place in range(low, right + 1):
            upper += values[place]
        if above + upper >= share:
            high = right
            continue
        for place in range(right + 1, left):
            upper += values[place]
        if above + upper >= share:
            return int(pivot)
        above += upper
        low = left
    return int(values[low]) if count else 0
