"""What operators carry, learned from where they end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Flags, Floats, Longs
from pulse_bpf.analysis.ends import LINES, ROUNDED
from pulse_bpf.analysis.tracks import Curve, Track, best_track

# Multiples of the expected volume that algorithms, protocols, headers and shares of channels can make.
LEAST_FACTOR, MOST_FACTOR = 0.02, 20.0
# Rounds of learning volumes from where operators end.
ROUNDS = 3
# What operators of a few bytes move is believed beyond so many standard errors.
SURE_ERRORS = 3.0


def refined(
    curve: Curve,
    best: tuple[float, Track],
    volume: Floats,
    kind: NDArray[Any],
    expected: Floats,
    exact: Flags,
) -> tuple[tuple[float, Track], Floats]:
    """The track, and the bytes of each operator, learned from where operators end; those that are `exact` stay."""
    for _ in range(ROUNDS):
        learned = _refine(curve, best[1], volume, kind, expected, exact)
        again = best_track(curve, learned, np.ones(1), float(best[1].starts[0]))
        if again[1].score < best[1].score:
            break
        settled = np.allclose(learned, expected, rtol=1e-9)
        expected, best = learned, again
        if settled:
            break
    return best, expected


@compiled
def _refine(
    curve: Curve, track: Track, volume: Floats, kind: Longs, expected: Floats, exact: Flags
) -> Floats:
    """The bytes of each operator such that silences lie where operators end: least squares over the kinds.

    Those that are `exact` stay, and kinds that nothing is learned of. Intervals that fit badly, which hold lost bytes,
    are left out of a second pass.
    """
    count = len(volume)
    numbers = np.unique(kind)
    which = np.searchsorted(numbers, kind)
    rows, sizes = np.zeros((len(numbers), count)), np.empty(count)
    number, marks, mark, broken = 0, 0, 0.0, True
    for index in range(count):
        if track.jumped[index] > 0 and not curve.waited[index]:
            broken = True
        rows[which[index], number] += expected[index]
        end, ended = track.ends[index], track.snapped[index]
        if index + 1 < count and curve.waited[index + 1]:
            # A host that waited made its call when all before it had ended.
            end, ended = curve.low[index + 1], True
        if not ended:
            continue
        whole = rows[:, number].sum()
        sizes[number] = end - mark
        if not broken and abs(sizes[number] - whole) <= max(0.1 * whole, ROUNDED):
            number += 1
        if number < count:
            rows[:, number] = 0.0
        mark, marks, broken = end, marks + 1, False
    if number == 0 or marks < 3:
        return expected
    free = np.ones(len(numbers), np.bool_)
    free[which[exact]] = False
    sizes = sizes[:number] - rows[~free, :number].sum(0)
    rows = rows[free, :number]
    if rows.size == 0 or rows.max() == 0:
        return expected
    scale, error = np.ones(len(numbers)), np.zeros(len(numbers))
    kept = np.ones(number, np.bool_)
    for _ in range(2):
        scale[free] = _least_squares(rows[:, kept], sizes[kept], 1e-9 * rows.max())
        off = _misfit(rows, sizes, scale[free])
        kept = off <= max(np.median(off) * 4, 1.0)
    error[free] = np.sqrt((off[kept] ** 2).mean() / np.maximum((rows[:, kept] ** 2).sum(1), 1e-9))
    refined = np.empty(count)
    for index in range(count):
        factor = scale[which[index]]
        if exact[index]:
            refined[index] = expected[index]
            continue
        size = expected[index] * factor
        # A few bytes may be many times what is called; too few are lost in the others' rounding.
        known = factor >= LEAST_FACTOR and (factor <= MOST_FACTOR or size <= ROUNDED)
        sure = SURE_ERRORS * error[which[index]]
        known &= size > LINES or factor > sure
        if known and abs(factor - 1.0) <= sure:
            size = expected[index]
        refined[index] = round(size, 3) if known else 0.0
    return refined


@compiled
def _misfit(rows: Floats, sizes: Floats, scale: Floats) -> Floats:
    """How far each size is from the sum of its rows (one per unknown), times `scale`."""
    off = -sizes
    for kind in range(len(scale)):
        off += rows[kind] * scale[kind]
    return np.abs(off)


@compiled
def _least_squares(rows: Floats, sizes: Floats, weight: float) -> Floats:
    """The scale of each kind, near 1 by a little `weight`, by which the `rows` [kind, interval] come next to `sizes`.

    Modified Gram-Schmidt, as the compiler has no solver of its own.
    """
    kinds, count = rows.shape
    left = np.zeros((kinds, count + kinds))
    right = np.full(count + kinds, weight)
    left[:, :count], right[:count] = rows, sizes
    upper, scale = np.zeros((kinds, kinds)), np.zeros(kinds)
    for kind in range(kinds):
        left[kind, count + kind] = weight
    for kind in range(kinds):
        norm = np.sqrt((left[kind] * left[kind]).sum())
        upper[kind, kind] = norm
        left[kind] /= norm
        for other in range(kind + 1, kinds):
            upper[kind, other] = (left[kind] * left[other]).sum()
            left[other] -= upper[kind, other] * left[kind]
        scale[kind] = (left[kind] * right).sum()
        right -= scale[kind] * left[kind]
    for kind in range(kinds - 1, -1, -1):
        for other in range(kind + 1, kinds):
            scale[kind] -= upper[kind, other] * scale[other]
        scale[kind] /= upper[kind, kind]
    return scale
