"""Operators laid end to end in the bytes of one flow group, for any factor and offset, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Flags, Floats, Longs
from pulse_bpf.analysis.ends import INEXACT, LINES, drawn, resumed

# Simple, LL128 (120 of 128 bytes are data) and LL (8 of 16).
PROTOCOLS = (1.0, 128 / 120, 2.0)
# How much better another multiple must do than those of the protocols, and these than none; and of its operators that
# end in silences, so many do so because it and the offset are chosen.
LEARNED_MARGIN, PROTOCOL_MARGIN, CHOSEN_HITS = 0.1, 0.02, 2
# Ends of operators in silences, of those that should be, from which another offset than the calls' is believed.
SURE_HITS, CLEARLY_BETTER = 0.8, 0.2
# So many times that operators end just where the host has waited for them are no chance.
SURE_WAITS = 2
# How many offsets are tried for each multiple, fewer once the offset is about known.
MAX_OFFSETS, FEW_OFFSETS = 96, 16


class Curve(NamedTuple):
    """What bounds operators, in cumulated bytes: an operator begins at or after `low`, and may end in `silences`.

    `waited`: whether the host paused before the call, probably until all before it was done; `bin_bytes` of a
    full bin. `lossy`: whether bytes may be missing; `anchored`: what begins at its call, however many are. `short`: as
    of ends.drawn.
    """

    low: Floats
    silences: Longs
    total: float
    waited: Flags
    bin_bytes: float
    lossy: bool
    anchored: Flags
    short: float


class Track(NamedTuple):
    """Operators laid end to end from one offset; `jumped` bytes before each belong to none. See `_lay`."""

    starts: Floats
    ends: Floats
    snapped: Flags
    jumped: Floats
    score: float


@compiled
def best_track(curve: Curve, volume: Floats, factors: Floats, offset: float = -1.0) -> tuple[float, Track]:
    """The factor, and the track, with which operators fit the curve best; `offset` where it is about known."""
    position = np.cumsum(volume) - volume
    offsets, chosen = np.empty(0), np.empty(0)
    for factor in factors:
        # Every new maximum is a call that may have waited for all before it.
        lag = curve.low - factor * position
        records = _records(lag)
        if offset < 0:
            tried = records[-MAX_OFFSETS:]
        else:
            tried = np.append(np.array([offset]), records[-FEW_OFFSETS:])
        offsets = np.append(offsets, np.maximum(tried, 0.0))
        chosen = np.append(chosen, np.full(len(tried), factor))
    scores, on_time, hits = _trials(curve, volume, offsets, chosen)
    # What small operators move is rounded up to whole lines.
    large = np.median(volume) > LINES
    most, best, best_value = hits.max(), 0, -np.inf
    for trial in range(len(offsets)):
        told, margin = hits[trial], 0.0
        if large and chosen[trial] not in PROTOCOLS:
            told, margin = max(told - CHOSEN_HITS, 0), LEARNED_MARGIN
        elif large and chosen[trial] != 1.0:
            margin = PROTOCOL_MARGIN
        value = scores[trial] * np.sqrt((1 + told) / (1 + most)) - margin
        if value > best_value:
            best, best_value = trial, value
    factor, track = chosen[best], _track(curve, volume, offsets[best], chosen[best])
    about = astray(curve, track) <= INEXACT * factor * volume.max()
    if track.score >= SURE_HITS or on_time[best] >= 0.5 or offset >= 0 or about:
        return factor, track
    # Nothing waits: bytes of earlier, unseen calls may precede the first operator.
    earliest = np.max(curve.low - factor * position)
    begin = np.searchsorted(curve.silences, earliest)
    later = curve.silences[begin : begin + MAX_OFFSETS]
    ends = factor * (position + volume)[:4]
    moved = np.unique(np.array([silence - end for silence in later for end in ends]))
    moved = moved[moved >= max(earliest, 0.0)]
    if len(moved):
        scores, _, hits = _trials(curve, volume, moved, np.full(len(moved), factor))
        number = np.argmax(scores)
        enough = hits[number] >= track.snapped.sum()
        if enough and scores[number] >= max(SURE_HITS, track.score + CLEARLY_BETTER):
            track = _track(curve, volume, moved[number], factor)
    return factor, track


@compiled
def astray(curve: Curve, track: Track) -> float:
    """How far, at most, operators end from the calls after them for which the host waited, in bytes; infinite where
    these are too few to tell."""
    waits, most = 0, 0.0
    for index in range(1, len(curve.low)):
        if curve.waited[index]:
            waits += 1
            most = max(most, abs(track.ends[index - 1] - curve.low[index]))
    return most if waits >= SURE_WAITS else np.inf


@compiled
def _records(lag: Floats) -> Floats:
    """The values that exceed all before them, the first included."""
    kept = np.empty(len(lag))
    count = 0
    for value in lag:
        if count == 0 or value > kept[count - 1]:
            kept[count] = value
            count += 1
    return kept[:count]


@compiled
def _track(curve: Curve, volume: Floats, offset: float, factor: float) -> Track:
    count = len(volume)
    starts, ends, jumped = np.empty(count), np.empty(count), np.empty(count)
    snapped = np.zeros(count, np.bool_)
    score, _, _ = _lay(curve, volume, offset, factor, starts, ends, snapped, jumped)
    return Track(starts, ends, snapped, jumped, score)


@compiled
def _trials(
    curve: Curve,
    volume: Floats,
    offsets: Floats,
    factors: Floats,
) -> tuple[Floats, Floats, Longs]:
    """Score, share of pauses on time, and snapped operators of each trial (offset, factor), as `_lay` has them."""
    trials, count = len(offsets), len(volume)
    starts, ends, jumped = np.empty(count), np.empty(count), np.empty(count)
    snapped = np.zeros(count, np.bool_)
    scores, on_time, hits = np.empty(trials), np.empty(trials), np.empty(trials, np.int64)
    for trial in range(trials):
        scores[trial], on_time[trial], hits[trial] = _lay(
            curve,
            volume,
            offsets[trial],
            factors[trial],
            starts,
            ends,
            snapped,
            jumped,
        )
    return scores, on_time, hits


@compiled
def _lay(
    curve: Curve,
    volume: Floats,
    offset: float,
    factor: float,
    starts: Floats,
    ends: Floats,
    snapped: Flags,
    jumped: Floats,
) -> tuple[float, float, int]:
    """Lays the operators end to end from `offset`, their ends drawn to silences that are near; fills the last four.

    The score: operators that end in a silence, of those that end in the curve; half as much for calls after a pause
    that find all before them done; less the share of bytes since the first call that belong to no operator, those
    before the first, which may be of earlier calls, by half. Also the share of calls after a pause on time, and how
    many operators end in a silence.
    """
    count, low, silences = len(volume), curve.low, curve.silences
    at = offset
    punctual, pauses, inside, hits, all_hits, lost = 0, 0, 0, 0, 0, 0.0
    for index in range(count):
        start = low[index] if curve.anchored[index] else max(at, low[index])
        jumped[index] = max(start - at, 0.0)
        if index:
            lost += max(start - at, 0.0)
        if curve.waited[index]:
            pauses += 1
            punctual += abs(at - low[index]) <= 2 * curve.bin_bytes
        size = volume[index] * factor
        at, hit = drawn(silences, len(silences), -np.inf, start, size, curve.short)
        if curve.lossy and not hit and index + 2 < count:
            sizes = volume[index : index + 3]
            again = resumed(silences, len(silences), -np.inf, start, sizes, factor, curve.total, True)
            if again >= 0:
                at = again
                jumped[index] += start + size - at
                lost += start + size - at
        starts[index], ends[index], snapped[index] = start, at, hit
        all_hits += hit
        if start < at < curve.total:
            inside += 1
            hits += hit
    on_time = punctual / max(pauses, 1)
    lost += max(curve.total - at, 0.0) + 0.5 * (starts[0] - low[0])
    lost /= max(curve.total - low[0], 1.0)
    within = np.searchsorted(silences, at) - np.searchsorted(silences, starts[0])
    return hits / max(min(inside, within), 4) + 0.5 * on_time - lost, on_time, all_hits
