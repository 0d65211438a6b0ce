"""Walking along the rate curves of flow groups, from operator to operator, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Curves, Floats, Longs
from pulse_bpf.analysis.pool import Found, Pool
from pulse_bpf.analysis.shape import NOTHING, REAL, WHOLE, shape

Flags = NDArray[np.bool_]

# An operator is complete when all but this share of its bytes were seen: more would hide its last message.
VOLUME_TOLERANCE = 0.004
# A process that waits for each operator moves between two calls what the first needs, to this accuracy.
PACED_TOLERANCE = 0.02
# Volumes are rounded to lines of this size at least, and what is smaller than so many is not told by its volume.
ROUNDED, LINES = 128.0, 64 * 1024
# Silences are taken for ends of operators only where fewer than this share of all places are near one.
CHANCE = 0.1
UNDECIDED, NOWHERE = -1.0, -2.0
# Repeats and control packets that come so long after an operator's last new byte are not its own.
HOLD_NS = 50_000_000
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
    peers of a NIC in which an operator counts, -1 for none.
    """

    begin: Longs
    end: Longs
    first_ns: Longs
    last_ns: Longs
    expected: Floats
    sum_of: Longs


class Rules(NamedTuple):
    """How each group is cut: see boundaries.learn. Groups not `learned` are left alone."""

    learned: Flags
    paced: Flags
    alone: Flags
    lossy: Flags
    bin_ns: Longs
    window_bytes: Floats


class State(NamedTuple):
    """How far each group is.

    `op` is the next operator and `phase` says what of it is missing. `at`: where the next one begins unless its call
    says otherwise; `end` of this one, and whether it was `cut_short`, ended with bytes missing; `taken` bytes are
    behind, `used` of them of the first row left, and the last silence before is at `quiet`; `outside`: the bytes of
    no operator, [groups, OUTSIDE].
    """

    op: Longs
    phase: Longs
    at: Floats
    end: Floats
    taken: Longs
    used: Longs
    quiet: Floats
    cut_short: Flags
    outside: Longs


def nothing_known(groups: int) -> tuple[Calls, Rules, State]:
    """Of so many groups no call, no rule, and no step made."""
    none = np.zeros(0, np.int64)

    def zeros() -> Longs:
        return np.zeros(groups, np.int64)

    def flags() -> Flags:
        return np.zeros(groups, np.bool_)

    return (
        Calls(zeros(), zeros(), none, none, np.zeros(0), none),
        Rules(flags(), flags(), flags(), flags(), zeros(), np.zeros(groups)),
        State(
            zeros(),
            zeros(),
            np.zeros(groups),
            np.zeros(groups),
            zeros(),
            zeros(),
            np.full(groups, -np.inf),
            flags(),
            np.zeros((groups, len(OUTSIDE)), np.int64),
        ),
    )


@compiled
def drawn(silences: Longs, count: int, quiet: float, start: float, size: float) -> tuple[float, bool]:
    """The end of an operator of `size` bytes from `start`, drawn to the nearest silence if near, and whether it is.

    Of several silences within some lines of each other it is the first: what follows is the next, small operator.
    Of the `silences` the first `count` count; `quiet` is the last one before them.
    """
    end = start + size
    reach = max(VOLUME_TOLERANCE * size, ROUNDED)
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if silences[middle] < end:
            low = middle + 1
        else:
            high = middle
    near = float(silences[low - 1]) if low > 0 else quiet
    if low < count and silences[low] - end < end - near:
        near = float(silences[low])
    if size > LINES:
        while low > 0 and silences[low - 1] >= near - ROUNDED and silences[low - 1] > start:
            low -= 1
        if low < count and near - ROUNDED <= silences[low] < near:
            near = float(silences[low])
    if abs(near - end) <= reach and near > start:
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
def _ended(t_ns: Longs, before_ns: int) -> int:
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
def walk(
    curves: Curves, calls: Calls, rules: Rules, state: State, pool: Pool, until_ns: int, final: bool
) -> tuple[Found, Pool, Longs]:
    """Cuts out every operator that the rows decide, all rows before `until_ns` being there; all when `final`.

    Advances `state`. Returns the operators found, the pool with their bins added, and where the rows that are still
    needed begin. What is found does not depend on how the rows came: a decision waits until no later row can change
    it.
    """
    groups = len(curves.begin)
    rows = 0
    longest = 1
    most = 0
    for group in range(groups):
        if rules.learned[group]:
            rows += curves.end[group] - curves.begin[group]
            longest = max(longest, curves.end[group] - curves.begin[group])
            most += calls.end[group] - state.op[group]
    found = Found(
        np.empty(most, np.int64), np.zeros((most, len(WHOLE)), np.int64), np.empty((most, len(REAL)))
    )
    held = len(pool.key)
    more = Pool(
        np.empty(held + rows + 2 * most, np.int64),
        np.empty(held + rows + 2 * most, np.int64),
        np.empty(held + rows + 2 * most, np.int64),
        np.empty(held + rows + 2 * most, np.int64),
        np.empty(held + rows + 2 * most, np.int64),
    )
    more.key[:held] = pool.key
    more.t_ns[:held] = pool.t_ns
    more.net[:held] = pool.net
    more.retx[:held] = pool.retx
    more.ctl[:held] = pool.ctl
    cum = np.empty(longest, np.int64)
    silences = np.empty(longest, np.int64)
    bins_ns = np.empty(longest + 2, np.int64)
    bins = np.empty(longest + 2, np.int64)
    scratch = np.empty(longest + 2, np.int64)
    needed = curves.begin.copy()
    out = 0
    for group in range(groups):
        if not rules.learned[group]:
            continue
        begin, end = curves.begin[group], curves.end[group]
        while not final and end > begin and curves.t_ns[end - 1] >= until_ns:
            end -= 1
        t_ns, net = curves.t_ns[begin:end], curves.net[begin:end]
        retx, ctl = curves.retx[begin:end], curves.ctl[begin:end]
        count = end - begin
        bin_ns = rules.bin_ns[group]
        base = state.taken[group] - state.used[group]
        total = base
        silent = 0
        for row in range(count):
            total += net[row]
            cum[row] = total
            following = until_ns if row + 1 == count else t_ns[row + 1]
            if following - t_ns[row] > bin_ns or (final and row + 1 == count):
                silences[silent] = total
                silent += 1
        taken, used, row = state.taken[group], state.used[group], 0
        outside = state.outside[group]
        last_op = calls.end[group]
        while True:
            op = state.op[group]
            if state.phase[group] != END:
                follows = op if state.phase[group] == BEGIN else op + 1
                known, start, begins = False, 0.0, total
                if follows >= last_op:
                    known = final
                elif final or (
                    calls.first_ns[follows] <= until_ns
                    and not (rules.alone[group] and calls.last_ns[follows] + bin_ns >= until_ns)
                ):
                    known = True
                    ended = _ended(t_ns, calls.first_ns[follows] - bin_ns)
                    low = cum[ended - 1] if ended else base
                    if rules.alone[group]:
                        # Where the volume so far ends away from the call, bytes are missing or unknown.
                        ended = _ended(t_ns, calls.last_ns[follows] + bin_ns)
                        high = cum[ended - 1] if ended else base
                        start = state.at[group] if low <= state.at[group] <= high else float(low)
                    else:
                        start = max(state.at[group], float(low))
                    begins = min(np.int64(np.rint(start)), total)
                at_least, ended_ns = begins, np.int64(0)
                if known:
                    ended_ns = calls.first_ns[follows] if follows < last_op else np.iinfo(np.int64).max
                else:
                    ended_ns = until_ns
                    ended = _ended(t_ns, until_ns - bin_ns)
                    at_least = cum[ended - 1] if ended else base
                if state.phase[group] == FOLLOW:
                    stop = np.int64(np.rint(state.end[group]))
                    slack = PACED_TOLERANCE * calls.expected[op]
                    if known:
                        stop = min(stop, begins)
                        # What exceeds the volume only slightly is the operator's, a repeat that was not seen as one.
                        if rules.paced[group] and begins - stop <= slack:
                            stop = begins
                    elif rules.paced[group] and at_least - stop <= slack:
                        break
                    stop = max(stop, taken)
                    hold_ns = np.int64(0)
                    if stop > taken and not final and total <= stop:
                        hold_ns = t_ns[count - 1]
                        for back in range(count - 1, -1, -1):
                            if net[back] > 0:
                                hold_ns = t_ns[back]
                                break
                        if until_ns <= hold_ns + HOLD_NS:
                            break
                    # Take the rows up to `stop`.
                    whole, real = found.whole[out], found.real[out]
                    found.number[out] = op
                    key = calls.sum_of[op]
                    filled, last_ns = 0, np.int64(0)
                    if stop == taken:
                        whole[2] = NOTHING
                    if stop > taken:
                        while row < count and taken <= stop:
                            if net[row] == 0:
                                if taken == stop and t_ns[row] > last_ns + HOLD_NS:
                                    break
                                size = np.int64(0)
                            else:
                                if taken == stop:
                                    break
                                size = min(cum[row], stop) - taken
                                bins_ns[filled], bins[filled] = t_ns[row], size
                                filled += 1
                                last_ns = t_ns[row]
                            taken += size
                            done = taken == cum[row]
                            again, control = (retx[row], ctl[row]) if done else (0, 0)
                            whole[0] += size + again
                            whole[1] += again
                            whole[2] += control
                            if key >= 0:
                                more.key[held], more.t_ns[held], more.net[held] = key, t_ns[row], size
                                more.retx[held], more.ctl[held] = again, control
                                held += 1
                            if not done:
                                used += size
                                break
                            used = 0
                            row += 1
                    window = rules.window_bytes[group]
                    shape(bins_ns[:filled], bins[:filled], bin_ns, window, whole, real, scratch)
                    whole[3] = np.int64(state.cut_short[group])
                    state.cut_short[group] = False
                    out += 1
                    state.op[group] = op + 1
                    state.phase[group] = BEGIN
                # What lies before the next operator belongs to none.
                upto = max(at_least, taken)
                while row < count and (
                    cum[row] < upto or (cum[row] == upto and (net[row] > 0 or t_ns[row] + bin_ns <= ended_ns))
                ):
                    size = cum[row] - taken
                    _outside(outside, t_ns[row], size, retx[row], ctl[row])
                    taken, used = cum[row], 0
                    row += 1
                if upto > taken:
                    _outside(outside, t_ns[row], upto - taken, 0, 0)
                    used += upto - taken
                    taken = upto
                if not known or follows >= last_op:
                    break
                state.at[group] = start
                state.phase[group] = END
            size_of = calls.expected[state.op[group]]
            reach = max(VOLUME_TOLERANCE * size_of, ROUNDED)
            ends = state.at[group] + size_of
            if not (final or total > ends + reach or (silent and silences[silent - 1] >= ends)):
                break
            quiet, start_of = state.quiet[group], state.at[group]
            near, hit = drawn(silences, silent, quiet, start_of, size_of)
            if rules.lossy[group] and not hit and not rules.alone[group] and state.op[group] + 2 < last_op:
                sizes = calls.expected[state.op[group] : state.op[group] + 3]
                again = resumed(silences, silent, quiet, start_of, sizes, 1.0, float(total), final)
                if again == UNDECIDED:
                    break
                if again >= 0:
                    near = again
                    state.cut_short[group] = True
            state.end[group] = ends if rules.alone[group] else near
            state.at[group] = near
            state.phase[group] = FOLLOW
        state.taken[group], state.used[group] = taken, used
        for number in range(silent):
            if silences[number] <= taken:
                state.quiet[group] = silences[number]
        needed[group] = begin + row
    return (
        Found(found.number[:out], found.whole[:out], found.real[:out]),
        Pool(more.key[:held], more.t_ns[:held], more.net[:held], more.retx[:held], more.ctl[:held]),
        needed,
    )


@compiled
def _outside(outside: Longs, t_ns: int, size: int, retx: int, ctl: int) -> None:
    if outside[ROWS] == 0:
        outside[FIRST_NS] = t_ns
    outside[ROWS] += 1
    outside[NET] += size
    outside[RETX] += retx
    outside[CTL] += ctl
    outside[LAST_NS] = max(outside[LAST_NS], t_ns)
