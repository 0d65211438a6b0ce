"""What is known of flow groups while the walk goes along their rate curves, and how far it is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pulse_bpf.analysis.curves import Flags, Floats, Longs
from pulse_bpf.analysis.ends import VOLUME_TOLERANCE

# How far the walk along a group is: its next operator is to begin, to end, or to be told from the one that follows.
BEGIN, END, FOLLOW = range(3)
# Columns of the bytes outside operators.
OUTSIDE = ("rows", "net", "retx_bytes", "ctl_packets", "start_ns", "last_ns")
ROWS, NET, RETX, CTL, FIRST_NS, LAST_NS = range(6)
# Later than any row.
NEVER = 2**62


class Calls(NamedTuple):
    """What each group should carry: of group g the operators [begin[g], end[g]), in program order.

    `first_ns` and `last_ns` as in boundaries.learn, `expected` bytes, and `sum_of`, the number of the sum over the
    peers of a NIC in which an operator counts, -1 for none. `waited`: whether its call shows that all before it are
    done. `seen`: the bytes that are there of what is `expected`, which is known of operators before `settled` of g.
    `first` is the first operator that g ever had, -1 where it is none of these. Operators that are done may be left
    out, and those that are not listed yet.
    """

    begin: Longs
    end: Longs
    first_ns: Longs
    last_ns: Longs
    expected: Floats
    sum_of: Longs
    waited: Flags
    seen: Floats
    settled: Longs
    first: Longs


class Rules(NamedTuple):
    """How each group is cut: see boundaries.learn. Groups not `learned` are left alone."""

    learned: Flags
    paced: Flags
    alone: Flags
    lossy: Flags
    short: Floats
    step_ns: Floats
    inexact: Flags
    bin_ns: Longs
    window_bytes: Floats


class State(NamedTuple):
    """How far each group is.

    `op` is the next operator and `phase` says what of it is missing. `at`: where the next one begins unless its call
    says otherwise; `end` of this one, and whether it was `cut_short`, ended with bytes missing; `taken` bytes are
    behind, `used` of them of the first row left, the row before which is at `last_ns`, and the last silence before is
    at `quiet`; `outside`: the bytes of no operator, [groups, OUTSIDE].
    """

    op: Longs
    phase: Longs
    at: Floats
    end: Floats
    taken: Longs
    used: Longs
    quiet: Floats
    cut_short: Flags
    last_ns: Longs
    outside: Longs


def nothing_known(groups: int) -> tuple[Calls, Rules, State]:
    """Of so many groups no call, no rule, and no step made."""
    none = np.zeros(0, np.int64)

    def zeros() -> Longs:
        return np.zeros(groups, np.int64)

    def flags() -> Flags:
        return np.zeros(groups, np.bool_)

    return (
        Calls(
            zeros(),
            zeros(),
            none,
            none,
            np.zeros(0),
            none,
            np.zeros(0, np.bool_),
            np.zeros(0),
            zeros(),
            zeros(),
        ),
        Rules(
            flags(),
            flags(),
            flags(),
            flags(),
            np.full(groups, VOLUME_TOLERANCE),
            np.full(groups, np.inf),
            flags(),
            zeros(),
            np.zeros(groups),
        ),
        State(
            zeros(),
            zeros(),
            np.zeros(groups),
            np.zeros(groups),
            zeros(),
            zeros(),
            np.full(groups, -np.inf),
            flags(),
            np.full(groups, -NEVER),
            np.zeros((groups, len(OUTSIDE)), np.int64),
        ),
    )
