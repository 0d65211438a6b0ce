"""Operators of which no volume tells where they end, but the silences that come after about so many bytes."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Floats, Longs
from pulse_bpf.analysis.ends import INEXACT, LINES, LONG_BINS, ROUNDED, VOLUME_TOLERANCE, about
from pulse_bpf.analysis.tracks import Curve, Track, astray
from pulse_bpf.analysis.walk_state import NEVER

# The least that an operator moves is the data of one line of NCCL's LL protocol.
LINE_BYTES = 8
# Where volumes are exact, no more than this share of an operator is missing at its end.
EXACT = 2e-4
# Volumes are rough where so many operators or more end in silences when they are taken for that, and at most this share
# of these does so by exact ones.
LEAST_ENDS, MOST_EXACT = 4, 0.6
# Of so many operators it is told, and of so many first silences each is tried as where the first of them begins.
CALLS, BEGINS = 256, 32


def rough(
    curve: Curve, track: Track, t_ns: Longs, bin_ns: int, total: Longs, expected: Floats, volume: Floats
) -> tuple[Floats, float] | None:
    """The bytes that operators carry on the average, and where `at` the first begins, where what each carries differs
    from that; None where it is what is expected.

    That is so of a source that counts repeats like anything else, and of queue pairs that have a part of what their
    port moved. Either the bytes `expected` or the `volume` are in proportion. `track` is the best by exact volumes.
    """
    gap_ns = np.append(np.diff(t_ns), NEVER)
    long = gap_ns >= LONG_BINS * bin_ns
    silences, lengths_ns = total[long], gap_ns[long]
    first = slice(CALLS)
    in_silence = np.isin(track.ends[first][expected[first] > LINES], silences).sum()
    exact = max(exact_hits(track, expected, CALLS), int(in_silence))
    off, whole = astray(curve, track), expected.max()
    # What ends by its volume where the host has waited for it, each time, has just that volume, wherever silences are.
    if len(silences) < LEAST_ENDS or exact > MOST_EXACT * len(silences) or off <= VOLUME_TOLERANCE * whole:
        return None
    begins = silences[silences >= curve.low[0]][:BEGINS] if off > INEXACT * whole else silences[:0]
    trials = [
        (
            *_fitted(
                silences,
                lengths_ns,
                curve.low[first],
                curve.total,
                base[first],
                float(track.starts[0]),
                begins,
            ),
            base,
        )
        for base in (expected, volume)
    ]
    _, start, multiple, ends, base = max(trials, key=lambda trial: trial[0])
    if ends < LEAST_ENDS or exact > MOST_EXACT * ends:
        return None
    each = base * multiple
    return np.where(each < LINE_BYTES, 0.0, each), start


def exact_hits(track: Track, expected: Floats, calls: int | None = None) -> int:
    """How many operators, of the first `calls`, end in a silence with all their bytes and no more."""
    off = np.abs(track.ends - track.starts - expected)
    return int((track.snapped & (off <= np.maximum(EXACT * expected, ROUNDED)))[:calls].sum())


@compiled
def _fitted(
    silences: Longs,
    lengths_ns: Longs,
    low: Floats,
    total: float,
    expected: Floats,
    start: float,
    begins: Longs,
) -> tuple[float, float, float, int]:
    """How the bytes `expected` fit: a score, a start and a multiple of them, with which operators end in `silences`,
    and how many do so alone.

    `low` as in tracks.Curve. The start is the one given, that of the first call, or one that `begins`.
    """
    best, best_start, best_factor, most = -np.inf, start, 1.0, 0
    for begin in np.append(np.array([low[0], start]), begins.astype(np.float64)):
        factor = 1.0
        for _ in range(2):
            score, carried, called, ends = _score(silences, lengths_ns, low, total, expected * factor, begin)
            if score > best + 1e-9:
                best, best_start, best_factor, most = score, begin, factor, ends
            if called > 0:
                factor *= carried / called
    return best, best_start, best_factor, most


@compiled
def _score(
    silences: Longs, lengths_ns: Longs, low: Floats, total: float, expected: Floats, start: float
) -> tuple[float, float, float, int]:
    """How well operators laid from `start` end in silences: 1 for each that does so with its bytes, less the share by
    which these are off, less the share of the bytes before them.

    Also the bytes of those that do and what was expected of them, and how many end there alone.
    """
    score, carried, called, ends, at = 0.0, 0.0, 0.0, 0, start
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
            ends += together == 1 and size > LINES
            left = together
        left = max(left - 1, 0)
        at = end if end >= 0 else at + expected[index]
    return score / max(count, 1) - (start - low[0]) / max(total - low[0], 1.0), carried, called, ends
