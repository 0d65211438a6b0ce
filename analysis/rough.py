"""Operators of which no volume tells where they end, but the silences that come after about so many bytes."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Floats, Longs
from pulse_bpf.analysis.ends import LINES, NOWHERE, UNDECIDED, VOLUME_TOLERANCE

# An operator ends in the longest silence no farther from its own bytes than this share of them, or, of up to so many
# that follow each other without one, at its part of theirs. Silences of fewer bins are inside of operators.
INEXACT, RUN, LONG_BINS = 0.25, 4, 8
# Of the first silences, so many are tried as where the first operator begins.
BEGINS = 32
# Volumes are rough where so many operators or more end in silences when they are taken for that, and at most this share
# of these does so by exact ones. They are exact where more than this share of what lies between silences is.
LEAST_ENDS, MOST_EXACT, MOST_TRUE = 4, 0.6, 0.5


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
def fitted(
    silences: Longs, lengths_ns: Longs, low: Floats, total: float, expected: Floats, start: float
) -> tuple[float, float, float, int, int]:
    """How the bytes `expected` fit: a score, a start and a multiple of them, with which operators end in `silences`;
    how many do so alone, and how many of these with all their bytes and no more.

    `low` as in tracks.Curve. The start is the one given, that of the first call, or one of the first silences after it.
    """
    begins = silences[silences >= low[0]][:BEGINS].astype(np.float64)
    best, best_start, best_factor, most, true = -np.inf, start, 1.0, 0, 0
    for begin in np.append(np.array([low[0], start]), begins):
        factor = 1.0
        for _ in range(2):
            score, carried, called, ends, exact = _score(
                silences, lengths_ns, low, total, expected * factor, begin
            )
            if score > best + 1e-9:
                best, best_start, best_factor, most, true = score, begin, factor, ends, exact
            if called > 0:
                factor *= carried / called
    return best, best_start, best_factor, most, true


@compiled
def _score(
    silences: Longs, lengths_ns: Longs, low: Floats, total: float, expected: Floats, start: float
) -> tuple[float, float, float, int, int]:
    """How well operators laid from `start` end in silences: 1 for each that does so with its bytes, less the share by
    which these are off, less the share of the bytes before them.

    Also the bytes of those that do and what was expected of them, how many end there alone, and how many of these have
    all their bytes and no more.
    """
    score, carried, called, ends, exact, at = 0.0, 0.0, 0.0, 0, 0, start
    left, count = 0, 0
    for index in range(len(expected)):
        at = max(at, low[index])
        if at >= total:
            break
        count += 1
        end, together, silence = about(
            silences, lengths_ns, len(silences), 0, at, expected[index:], low[index:], total, True
        )
        if left == 0 and together > 0:
            size = expected[index : index + together].sum()
            whole = silence - at
            score += together * (1 - abs(whole / size - 1) / INEXACT)
            carried += whole
            called += size
            if together == 1 and size > LINES:
                ends += 1
                exact += abs(whole - size) <= VOLUME_TOLERANCE * size
            left = together
        left = max(left - 1, 0)
        at = end if end >= 0 else at + expected[index]
    return score / max(count, 1) - (start - low[0]) / max(total - low[0], 1.0), carried, called, ends, exact
