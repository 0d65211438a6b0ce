"""Where operators begin and end in the bytes of one flow group."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Flags, Floats, Longs
from pulse_bpf.analysis.ends import LINES, ROUNDED, VOLUME_TOLERANCE, quiet_at
from pulse_bpf.analysis.refine import LEAST_FACTOR, MOST_FACTOR, refined
from pulse_bpf.analysis.rough import EXACT, LINE_BYTES, exact_hits, rough
from pulse_bpf.analysis.tracks import PROTOCOLS, Curve, Track, astray, best_track
from pulse_bpf.analysis.walk import PACED_TOLERANCE
from pulse_bpf.analysis.walk_state import NEVER

# Volumes are exact, and silences before an operator's end are inside of it: when as many operators end exactly in
# silences, and of those that do so nearly this share, at least; or when what is called between two waits of the host is
# exactly what is carried.
EXACT_SHARE = 0.25
# A direct transfer of which the volume is certain moves up to so many times that. NCCL sends only what is small by
# another protocol than Simple (addP2pToPlan in src/enqueue.cc: up to NCCL_P2P_LL_THRESHOLD, 16 KiB, for each of 64
# channels at most). Assumes that nobody raised that: what LL doubles beyond it would be cut wrongly.
LEAST_CERTAIN, MOST_CERTAIN, MOST_SIMPLE, SIMPLE_BYTES = 0.9, 2.2, 1.5, 1 << 20
# Operators of less than this share of another kind's bytes are seen only where silences tell them apart.
TINY = 1e-4
# How many multiples are tried, and of how many kinds other ones.
MAX_FACTORS, MAX_KINDS = 12, 6
# Of so many sizes operators up to one are tried by another protocol than those beyond, which must fit so much better.
MAX_CUTS, MIXED_MARGIN = 3, 0.05
# By another protocol of one kind, so many more operators of all end in silences exactly, as a share of these.
MORE_EXACT = 0.05
# Silences of so many bins are no part of an operator of a few bytes, and of operators of one size, so many lie between
# such silences alone, each with no other call before its end.
APART_BINS, MOSTLY_ALONE = 8, 0.5
# Bins that what is carried between two calls fills at least where it is compared with their volumes.
LEAST_BINS = 8
# Of the calls after a pause, so many tell of a host that waited.
MOSTLY = 0.9
# Pauses between calls of this share of the longest one are those in which a host waits.
PAUSE_SHARE = 0.25


class Learned(NamedTuple):
    """How to cut one flow group: the bytes `expected` of each operator, and where `at` in the bytes the first begins.

    `paced`: the process waits for each operator before the next call, so the bytes between two calls are the first
    one's. Otherwise calls run ahead, and operators follow each other by volume. `alone`: the process paces its
    operators and nobody else's call may bring their bytes. Where a process pauses for `step_ns` before a call, all
    operators before it are done. `short` is what may be missing of an operator that ends in a silence, as a share.
    `inexact`: what operators carry differs from what is expected, and silences tell where they end: of a source that
    counts repeats like anything else, or of queue pairs that share what their port moved.
    """

    expected: Floats
    at: float
    paced: bool
    alone: bool
    step_ns: float
    short: float
    inexact: bool


def learn(
    t_ns: Longs,
    total: Longs,
    bin_ns: int,
    first_ns: Longs,
    last_ns: Longs,
    volume: Floats,
    kind: NDArray[Any],
    certain: Flags,
    lossy: bool,
) -> Learned:
    """How to cut bins that begin at `t_ns`, with `total` bytes up to their ends, into operators.

    `volume` is what each should carry, up to a factor common to all of one `kind`, which is learned; it is that of a
    protocol where the volume is `certain`. Of the processes whose bytes these may be, the first makes the call at
    `first_ns`, the last at `last_ns`. There is at least one bin and one operator. `lossy`: bytes may be missing.

    Bytes in bins that ended before an operator's call are not its own: this is what brings the cut back in step
    after a partial operator or lost samples. Where calls run ahead, the factors and the place of the first are those
    with which most operators end in a silence.
    """
    before = np.r_[0, total]
    low = before[np.searchsorted(t_ns + bin_ns, first_ns, "right")]
    sizes = np.sort(np.diff(before))
    # Half of all bytes are in bins of at least this size.
    bin_bytes = float(sizes[np.searchsorted(np.cumsum(sizes), total[-1] / 2)])
    factor, paced = _learn(low, volume, kind, certain, bin_bytes)
    expected = volume * factor
    if paced and (first_ns == last_ns).all():
        return Learned(expected, float(low[0]), True, True, np.inf, VOLUME_TOLERANCE, False)
    silences = total[:-1][np.diff(t_ns) > bin_ns]
    waited = _waited(first_ns, bin_ns)
    anchored = np.zeros_like(waited)
    if lossy and not paced:
        # Bytes may be missing before such a call, but none is on its way.
        calls_ns = first_ns[waited]
        rows = np.array([quiet_at(t_ns, -NEVER, call_ns, bin_ns) for call_ns in calls_ns.tolist()], np.int64)
        if (rows >= 0).sum() >= MOSTLY * len(rows):
            anchored[np.flatnonzero(waited)[rows >= 0]] = True
            low[anchored] = before[rows[rows >= 0]]
    apart = np.r_[total[:-1][np.diff(t_ns) > APART_BINS * bin_ns], total[-1]]
    curve = Curve(
        low.astype(float), silences, float(total[-1]), waited, bin_bytes, lossy, anchored, VOLUME_TOLERANCE
    )
    expected, track = _fit(curve, expected, kind, certain, apart)
    step_ns = np.inf
    if anchored.any():
        steps = np.flatnonzero(anchored)
        called = np.diff(np.r_[0, np.cumsum(expected)][steps])
        carried = np.diff(low[steps])
        if (carried <= called + VOLUME_TOLERANCE * called + 2 * bin_bytes).sum() >= MOSTLY * len(called):
            step_ns = float(np.diff(first_ns, prepend=first_ns[0])[anchored].min())
    short = VOLUME_TOLERANCE
    if not lossy:
        exact = best_track(curve._replace(short=EXACT), expected, np.ones(1), float(track.starts[0]))[1]
        hits = exact_hits(exact, expected)
        most = max(exact_hits(track, expected), EXACT_SHARE * track.snapped.sum())
        # Silences at one place inside of each are as far apart as their ends, but not what is between two waits.
        if hits and (hits >= most or astray(curve, exact) <= ROUNDED):
            track, short = exact, EXACT
    found = None if lossy or paced else rough(curve, track, t_ns, bin_ns, total, expected, volume)
    if found:
        return Learned(*found, paced, False, step_ns, short, True)
    return Learned(expected, float(track.starts[0]), paced, False, step_ns, short, False)


def _waited(call_ns: Longs, bin_ns: int) -> Flags:
    pause = np.diff(call_ns, prepend=call_ns[0])
    return np.asarray((pause >= 8 * bin_ns) & (pause >= PAUSE_SHARE * pause.max()))


def _learn(
    low: Longs, volume: Floats, kind: NDArray[Any], certain: Flags, bin_bytes: float
) -> tuple[Floats, bool]:
    """The bytes on the wire per expected byte of each operator, by kind, and whether the process is paced."""
    ratio = np.diff(low) / volume[:-1]
    usable = volume[:-1] >= LEAST_BINS * bin_bytes
    factor = np.ones(len(volume))
    agreeing = 0
    for number in np.unique(kind[:-1][usable]):
        chosen = usable & (kind[:-1] == number)
        middle = float(np.median(ratio[chosen]))
        least, most = _bounds(volume[:-1][chosen], certain[:-1][chosen])
        # Of what runs far ahead, hardly a bin is carried between two calls, whatever the volume.
        if not least <= middle <= most or middle * np.median(volume[:-1][chosen]) < LEAST_BINS * bin_bytes:
            continue
        near = np.abs(ratio - middle) <= PACED_TOLERANCE * middle + 2 * bin_bytes / volume[:-1]
        agreeing += int((near & chosen).sum())
        spread = float(np.median(np.abs(ratio[chosen] - middle)))
        if abs(middle - 1) > max(VOLUME_TOLERANCE, 3 * spread):
            factor[kind == number] = middle
    paced = int(usable.sum()) >= 3 and agreeing >= 0.6 * int(usable.sum())
    return (factor if paced else np.ones(len(volume))), paced


def _bounds(volume: Floats, certain: Flags) -> tuple[float, float]:
    """Between which multiples of the `volume` operators of one kind move."""
    if not certain.any():
        return LEAST_FACTOR, MOST_FACTOR
    return LEAST_CERTAIN, MOST_SIMPLE if volume[certain].min() > SIMPLE_BYTES else MOST_CERTAIN


def _fit(
    curve: Curve, volume: Floats, kind: NDArray[Any], certain: Flags, apart: Longs
) -> tuple[Floats, Track]:
    """The bytes of each operator, and where they are in the curve of a process whose calls run ahead.

    In `apart`, of the cumulated bytes, something ends that is followed by nothing for long.
    """
    factors = _factors(curve, volume)
    if certain.all():
        least, most = _bounds(volume, certain)
        factors = factors[(factors >= least) & (factors <= most)]
    best = best_track(curve, volume, factors)
    expected = volume * best[0]
    for most in np.unique(volume[(volume > LINES) & ~certain])[:-1][:MAX_CUTS]:
        # What is small is sent by LL128, most often, and what is large by Simple (src/graph/tuning.cc).
        mixed = np.where((volume <= most) & ~certain, volume * PROTOCOLS[1], volume)
        again = best_track(curve, mixed, factors)
        if again[1].score > best[1].score + MIXED_MARGIN:
            best, expected = again, mixed * again[0]
    best, expected = _by_kind(curve, kind, expected, best, certain & (volume > SIMPLE_BYTES))
    expected, seen = _alone(curve, best[1], kind, expected, apart)
    if seen.any():
        best = best_track(curve, expected, np.ones(1))
    first, guessed = best, expected
    best, expected = refined(curve, best, volume, kind, expected, seen)
    moved = _by_protocol(guessed / volume, 1e-9) & (np.abs(expected - guessed) > LINES)
    # What is learned to be another protocol's is no chance.
    moved &= ~_by_protocol(expected / volume, 0.1 * VOLUME_TOLERANCE)
    if moved.any():
        # More than rounding: silences inside of operators, whose number exceeds that of what was learned only where
        # it is true.
        again, kept = refined(curve, first, volume, kind, guessed, moved)
        if best[1].snapped.sum() <= again[1].snapped.sum() + len(np.unique(kind[moved])):
            best, expected = again, kept
    learned = np.abs(expected - guessed) > 1e-3 * guessed
    unseen = ~seen & (expected < TINY * expected.max()) & (~learned | (expected < LINE_BYTES))
    if unseen.any():
        expected = np.where(unseen, 0.0, expected)
        best = best_track(curve, expected, np.ones(1), float(best[1].starts[0]))
    return expected, best[1]


def _by_protocol(factor: Floats, tolerance: float) -> Flags:
    return np.asarray(np.isclose(factor[:, None], PROTOCOLS, rtol=tolerance).any(1))


def _alone(
    curve: Curve, track: Track, kind: NDArray[Any], expected: Floats, apart: Longs
) -> tuple[Floats, Flags]:
    """The bytes of each operator, where those of a few bytes have what lies alone after the one before; and of which.

    Headers, flags and rounding make many times their volume of them. Assumes that what was sent before the next call,
    and long before anything else, is the operator's. One that does not use these queue pairs has nothing there.
    """
    known, seen = expected.copy(), np.zeros(len(expected), np.bool_)
    numbers = np.unique(kind[expected <= LINES])
    if not len(numbers):
        return known, seen
    begins, following = np.r_[0, apart], np.r_[curve.low[1:], curve.total]
    # Between two calls there may be one such thing; otherwise it comes after what the track has before.
    between = np.searchsorted(apart, following, "right") - np.searchsorted(apart, curve.low, "right") == 1
    between &= np.isin(curve.low, begins) & np.isin(following, apart)
    after = np.searchsorted((begins[1:] + begins[:-1]) / 2, track.starts)
    near = np.abs(begins[after] - track.starts) <= ROUNDED
    starts = np.where(between, curve.low, begins[after])
    ends = apart[np.minimum(np.searchsorted(apart, starts, "right"), len(apart) - 1)]
    sizes = ends - starts
    alone = (between | near) & (sizes > 0) & (sizes <= LINES) & (ends <= following)
    for number in numbers:
        here = kind == number
        there = here & (starts < curve.total)
        if expected[here].max() > LINES or (there & alone).sum() < max(1.0, MOSTLY_ALONE * there.sum()):
            continue
        found = sizes[there & alone]
        # What rounding adds differs, and an operator is done with the least.
        known[here] = found[np.abs(found - np.median(found)) <= ROUNDED].min(initial=np.median(found))
        seen |= here
    return known, seen


def _by_kind(
    curve: Curve, kind: NDArray[Any], expected: Floats, best: tuple[float, Track], simple: Flags
) -> tuple[tuple[float, Track], Floats]:
    """Tries another protocol for each kind of which little ends in silences, but for what is `simple` for certain.

    It is believed where that kind ends in silences then; or where more operators than by chance, of whatever kind, end
    in them exactly: those that share a bin with what follows show by where the others end.
    """
    numbers = np.unique(kind)
    order = np.argsort([-expected[kind == number].sum() for number in numbers])
    for number in numbers[order][:MAX_KINDS]:
        here = kind == number
        if best[1].snapped[here].mean() >= 0.5 or expected[here].max() <= LINES or simple[here].all():
            continue
        for factor in (PROTOCOLS[1], 1 / PROTOCOLS[1], PROTOCOLS[2], 1 / PROTOCOLS[2]):
            changed = np.where(here, expected * factor, expected)
            again = best_track(curve, changed, np.ones(1), float(best[1].starts[0]))
            enough = again[1].snapped[here].sum() >= max(2, 0.5 * here.sum())
            more = exact_hits(again[1], changed) - exact_hits(best[1], expected)
            if (enough and again[1].score > best[1].score + 0.01) or (
                more >= max(2, MORE_EXACT * len(curve.silences)) and again[1].score >= best[1].score
            ):
                best, expected = again, changed
    return best, expected


def _factors(curve: Curve, volume: Floats) -> Floats:
    """Multiples of the volumes worth a trial.

    A call made when all before it are done sits where these end. Calls made ahead sit earlier in the bytes, so
    the former lie on the upper hull of calls over volumes, and its slope is the factor: of the whole, and
    between points far apart. It needs a host that waits now and then.
    """
    position = np.r_[0, np.cumsum(volume)[:-1]]
    at = _hull(curve.low, position)
    one, other = np.triu_indices(len(at), 1)
    one, other = at[one], at[other]
    across = position[other] - position[one]
    rise = curve.low[other] - curve.low[one]
    far = (rise >= 0.15 * curve.total) & (across > 0)
    slopes = rise[far] / across[far]
    slopes = slopes[np.argsort(-across[far])][: MAX_FACTORS - 3]
    whole = (curve.total - curve.low[0]) / volume.sum()
    sizes, middle = np.diff(curve.silences), np.median(volume)
    typical = [float(np.median(sizes) / middle)] if len(sizes) and middle <= LINES else []
    learned = np.r_[slopes, whole, typical]
    known = np.abs(learned[:, None] / PROTOCOLS - 1).min(1) <= 2 * VOLUME_TOLERANCE
    factors = np.r_[PROTOCOLS, learned[~known]]
    return np.asarray(np.unique(factors[(factors >= LEAST_FACTOR) & (factors <= MOST_FACTOR)]))


@compiled
def _hull(low: Floats, position: Floats) -> Longs:
    """The points of the upper hull of `low` over `position`."""
    hull = np.empty(len(position), np.int64)
    count = 0
    for index in range(len(position)):
        while count >= 2:
            first, second = hull[count - 2], hull[count - 1]
            left = (low[second] - low[first]) * (position[index] - position[first])
            if left > (low[index] - low[first]) * (position[second] - position[first]):
                break
            count -= 1
        hull[count] = index
        count += 1
    return hull[:count]
