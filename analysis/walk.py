"""Walking along the rate curves of flow groups, from operator to operator, in compiled code."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Curves, Longs
from pulse_bpf.analysis.ends import (
    LINES,
    LONG_BINS,
    LONGEST_STEP_NS,
    NOWHERE,
    ROUNDED,
    RUN,
    UNDECIDED,
    VOLUME_TOLERANCE,
    about,
    drawn,
    ended,
    quiet_at,
    resumed,
    seen_of,
)
from pulse_bpf.analysis.pool import Found, Pool
from pulse_bpf.analysis.shape import NOTHING, REAL, WHOLE, shape
from pulse_bpf.analysis.walk_state import (
    BEGIN,
    CTL,
    END,
    FIRST_NS,
    FOLLOW,
    LAST_NS,
    NET,
    RETX,
    ROWS,
    Calls,
    Rules,
    State,
)

# A process that waits for each operator moves between two calls what the first needs, to this accuracy.
PACED_TOLERANCE = 0.02
# Repeats and control packets that come so long after an operator's last new byte are not its own.
HOLD_NS = 50_000_000


@compiled
def walk(
    curves: Curves,
    calls: Calls,
    rules: Rules,
    state: State,
    pool: Pool,
    unlisted_ns: Longs,
    until_ns: int,
    final: bool,
) -> tuple[Found, Pool, Longs]:
    """Cuts out every operator that the rows decide, all rows before `until_ns` being there; all when `final`.

    No operator of a group is called before its `unlisted_ns` that is not among the `calls`.
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
    # Rows are written when an operator is found: memory that nothing touches costs nothing.
    found = Found(
        np.empty(most, np.int64), np.empty((most, len(WHOLE)), np.int64), np.empty((most, len(REAL)))
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
    silences, silent_ns = np.empty(longest, np.int64), np.empty(longest, np.int64)
    lows = np.empty(len(calls.expected) + 1)
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
                silences[silent], silent_ns[silent] = total, following - t_ns[row]
                silent += 1
        taken, used, row = state.taken[group], state.used[group], 0
        outside = state.outside[group]
        last_op = calls.end[group]
        stepped = rules.step_ns[group] < np.inf
        before_ns = state.last_ns[group]
        while True:
            op = state.op[group]
            if state.phase[group] != END:
                follows = op if state.phase[group] == BEGIN else op + 1
                known, start, begins = False, 0.0, total
                waited = follows < last_op and calls.waited[follows]
                if waited and not final and 0 <= until_ns - calls.first_ns[follows] < 2 * bin_ns:
                    break
                if follows >= last_op:
                    known = final
                elif final or (
                    calls.first_ns[follows] <= until_ns
                    and not (rules.alone[group] and calls.last_ns[follows] + bin_ns >= until_ns)
                ):
                    known = True
                    upto_row = ended(t_ns, calls.first_ns[follows] - bin_ns)
                    low = cum[upto_row - 1] if upto_row else base
                    if rules.alone[group]:
                        # Where the volume so far ends away from the call, bytes are missing or unknown.
                        upto_row = ended(t_ns, calls.last_ns[follows] + bin_ns)
                        high = cum[upto_row - 1] if upto_row else base
                        start = state.at[group] if low <= state.at[group] <= high else float(low)
                    else:
                        start = max(state.at[group], float(low))
                        quiet_row = (
                            quiet_at(t_ns, before_ns, calls.first_ns[follows], bin_ns) if waited else -1
                        )
                        if quiet_row >= 0:
                            start = float(cum[quiet_row - 1] if quiet_row else base)
                    begins = min(np.int64(np.rint(start)), total)
                at_least, ended_ns = begins, np.int64(0)
                if known:
                    ended_ns = calls.first_ns[follows] if follows < last_op else np.iinfo(np.int64).max
                else:
                    follows_ns = calls.first_ns[follows] if follows < last_op else unlisted_ns[group]
                    ended_ns = min(until_ns, follows_ns)
                    upto_row = ended(t_ns, ended_ns - bin_ns)
                    at_least = cum[upto_row - 1] if upto_row else base
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
                    whole[:] = 0
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
                    add_outside(outside, t_ns[row], size, retx[row], ctl[row])
                    taken, used = cum[row], 0
                    row += 1
                if upto > taken:
                    add_outside(outside, t_ns[row], upto - taken, 0, 0)
                    used += upto - taken
                    taken = upto
                if not known or follows >= last_op:
                    break
                state.at[group] = start
                state.phase[group] = END
            op = state.op[group]
            if stepped and calls.settled[group] <= op and (calls.waited[op] or op == calls.first[group]):
                # Of a step that lost bytes both ends are known.
                later = op + 1
                while later < last_op and not calls.waited[later]:
                    later += 1
                ends_ns = calls.first_ns[op] + LONGEST_STEP_NS
                if later < last_op:
                    ends_ns = min(ends_ns, calls.first_ns[later])
                elif not final and unlisted_ns[group] < ends_ns:
                    break
                if not final and ends_ns + 2 * bin_ns > until_ns:
                    break
                for number in range(op, later):
                    upto_row = ended(t_ns, calls.first_ns[number] - bin_ns)
                    lows[number - op] = cum[upto_row - 1] if upto_row else base
                upto_row = max(quiet_at(t_ns, before_ns, ends_ns, bin_ns), 0)
                seen_of(
                    t_ns[:upto_row],
                    cum[:upto_row],
                    bin_ns,
                    silences[:silent],
                    state.quiet[group],
                    state.at[group],
                    lows[: later - op],
                    calls.expected[op:later],
                    calls.seen[op:later],
                    calls.first_ns[op],
                    ends_ns,
                )
                if upto_row > 0 and later < last_op:
                    calls.settled[group] = later
            size_of = calls.seen[op]
            state.cut_short[group] = size_of < (1 - VOLUME_TOLERANCE) * calls.expected[op]
            reach = max(VOLUME_TOLERANCE * size_of, ROUNDED)
            ends = state.at[group] + size_of
            if not (final or total > ends + reach or (silent and silences[silent - 1] >= ends)):
                break
            roughly = NOWHERE
            if rules.inexact[group]:
                if not final and op + RUN > last_op:
                    break
                last = min(op + RUN, last_op)
                for number in range(op, last):
                    upto_row = ended(t_ns, calls.first_ns[number] - bin_ns)
                    lows[number - op] = cum[upto_row - 1] if upto_row else base
                roughly, _, _ = about(
                    silences,
                    silent_ns,
                    silent,
                    LONG_BINS * bin_ns,
                    state.at[group],
                    calls.expected[op:last],
                    lows[: last - op],
                    float(total),
                    final,
                )
                if roughly == UNDECIDED:
                    break
            quiet, start_of = state.quiet[group], state.at[group]
            near, hit = drawn(silences, silent, quiet, start_of, size_of, rules.short[group])
            unsettled = rules.lossy[group] and not rules.alone[group] and calls.settled[group] <= op
            if unsettled and not hit and not final and op + 2 >= last_op:
                break
            if unsettled and not hit and op + 2 < last_op:
                sizes = calls.expected[op : op + 3]
                again = resumed(silences, silent, quiet, start_of, sizes, 1.0, float(total), final)
                if again == UNDECIDED:
                    break
                if again >= 0:
                    near = again
                    state.cut_short[group] = True
            elif roughly >= 0:
                near = roughly
                state.cut_short[group] = True
            elif not hit and size_of > LINES:
                near = _of_bin(cum[:count], near)
            state.end[group] = ends if rules.alone[group] else near
            state.at[group] = near
            state.phase[group] = FOLLOW
        state.taken[group], state.used[group] = taken, used
        if row > 0:
            state.last_ns[group] = t_ns[row - 1]
        for number in range(silent):
            if silences[number] <= taken:
                state.quiet[group] = silences[number]
        needed[group] = begin + row
    return (
        Found(found.number[:out].copy(), found.whole[:out].copy(), found.real[:out].copy()),
        Pool(more.key[:held], more.t_ns[:held], more.net[:held], more.retx[:held], more.ctl[:held]),
        needed,
    )


@compiled
def _of_bin(cum: Longs, end: float) -> float:
    """Where an operator ends: with its bin, where that holds but what rounding may leave over of the next one."""
    low = np.searchsorted(cum, np.int64(np.ceil(end - ROUNDED)))
    if low < len(cum) and cum[low] <= end + ROUNDED:
        return float(cum[low])
    return end


@compiled
def add_outside(outside: Longs, t_ns: int, size: int, retx: int, ctl: int) -> None:
    """Adds a row of so many new bytes, repeats and control packets to the columns OUTSIDE of bytes of no operator."""
    if outside[ROWS] == 0:
        outside[FIRST_NS] = t_ns
    outside[ROWS] += 1
    outside[NET] += size
    outside[RETX] += retx
    outside[CTL] += ctl
    outside[LAST_NS] = max(outside[LAST_NS], t_ns)
