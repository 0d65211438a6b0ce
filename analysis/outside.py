"""Bursts of traffic that no call explains, such as that of a CUDA graph which is replayed, in compiled code."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Curves, Flags, Longs
from pulse_bpf.analysis.walk import add_outside
from pulse_bpf.analysis.walk_state import LAST_NS, OUTSIDE, ROWS

# A silence of so many bins ends a burst: shorter ones are those between packets and slices.
SILENCE_BINS = 8


@compiled
def bursts(curves: Curves, upto: Longs, uncalled: Flags, bin_ns: Longs, begun: Longs) -> tuple[Longs, Longs]:
    """The group and the columns OUTSIDE of each burst that ended in the rows before `upto` of groups `uncalled`.

    `begun`, [groups, OUTSIDE], is what there is of bursts that go on: those of the rows before, and, afterwards, those
    of these.
    """
    most = 0
    for group in range(len(upto)):
        most += (upto[group] - curves.begin[group]) if uncalled[group] else 0
    groups, ended = np.empty(most, np.int64), np.empty((most, len(OUTSIDE)), np.int64)
    count = 0
    for group in range(len(upto)):
        if not uncalled[group]:
            continue
        of = begun[group]
        for row in range(curves.begin[group], upto[group]):
            moves = curves.net[row] + curves.retx[row] > 0
            silent_ns = curves.t_ns[row] - of[LAST_NS] - bin_ns[group]
            if moves and of[ROWS] and silent_ns >= SILENCE_BINS * bin_ns[group]:
                groups[count], ended[count] = group, of
                count += 1
                of[:] = 0
            add_outside(of, curves.t_ns[row], curves.net[row], curves.retx[row], curves.ctl[row])
    return groups[:count].copy(), ended[:count].copy()
