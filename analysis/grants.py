"""When receivers let senders send: clear-to-send writes that came in on flow groups that send, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Longs
from pulse_bpf.analysis.shape import NOTHING, WHOLE

START, LAST = WHOLE.index("start_ns"), WHOLE.index("last_byte_ns")
BEFORE, DURING, MEAN = (WHOLE.index(name) for name in ("credits_before", "credits_during", "credit_mean_ns"))


class Grants(NamedTuple):
    """Of group g the rows [begin[g], begin[g + 1]), in the order of time: how many came in the bin at `t_ns`."""

    begin: Longs
    t_ns: Longs
    number: Longs


def no_grants(groups: int) -> Grants:
    """Grants of so many groups without a row."""
    return Grants(np.zeros(groups + 1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


@compiled
def granted(
    grants: Grants,
    wanted: NDArray[np.bool_],
    group_of: Longs,
    streams: Longs,
    run: Longs,
    t_ns: Longs,
    ctl: NDArray[np.uint32],
) -> Grants:
    """`grants` with those of a window added, of the groups that are `wanted` only.

    `streams`, `run` and `group_of` as in curves.joined. What comes in on a queue pair lets its other direction send.
    """
    groups = len(grants.begin) - 1
    size = np.zeros(groups, np.int64)
    for group in range(groups):
        if wanted[group]:
            size[group] = grants.begin[group + 1] - grants.begin[group]
    many = np.zeros(len(streams), np.int64)
    for number in range(len(streams)):
        stream = streams[number]
        if stream < 0 or stream % 2 or group_of[stream + 1] < 0 or not wanted[group_of[stream + 1]]:
            continue
        count = 0
        for row in range(run[number], run[number + 1]):
            count += ctl[row] > 0
        many[number] = count
        size[group_of[stream + 1]] += count
    begin = np.zeros(groups + 1, np.int64)
    begin[1:] = np.cumsum(size)
    new = Grants(begin, np.empty(begin[-1], np.int64), np.empty(begin[-1], np.int64))
    fill = begin[:-1].copy()
    for group in range(groups):
        if wanted[group]:
            held = grants.begin[group + 1] - grants.begin[group]
            here = slice(fill[group], fill[group] + held)
            there = slice(grants.begin[group], grants.begin[group + 1])
            new.t_ns[here], new.number[here] = grants.t_ns[there], grants.number[there]
            fill[group] += held
    for number in range(len(streams)):
        if many[number] == 0:
            continue
        group = group_of[streams[number] + 1]
        at, last, row = fill[group], fill[group] + many[number], run[number]
        # Without a branch that nothing foretells: what is no grant is written over by the next row.
        while at < last:
            new.t_ns[at], new.number[at] = t_ns[row], np.int64(ctl[row])
            at += np.int64(ctl[row] > 0)
            row += 1
        fill[group] = last
    for group in range(groups):
        rows = new.t_ns[begin[group] : begin[group + 1]]
        for row in range(1, len(rows)):
            if rows[row] < rows[row - 1]:
                order = np.argsort(rows, kind="mergesort")
                new.t_ns[begin[group] : begin[group + 1]] = rows[order]
                numbers = new.number[begin[group] : begin[group + 1]]
                new.number[begin[group] : begin[group + 1]] = numbers[order]
                break
    return new


@compiled
def used(grants: Grants, since_ns: Longs, group: Longs, whole: Longs, idle_ns: Longs) -> Grants:
    """Fills the columns BEFORE, DURING and MEAN of operators, each group's in order; and returns the rest.

    Those of each group until its `idle_ns`, before which none of its later operators begins, become one row.

    `since_ns` of each group is the end of its last operator so far, NOTHING before the first: what came before that one
    is not known to be its own.
    """
    at = grants.begin[:-1].copy()
    for row in range(len(group)):
        own, start_ns, last_ns = group[row], whole[row, START], whole[row, LAST]
        if start_ns == NOTHING:
            continue
        end = grants.begin[own + 1]
        before, during, moment = 0, 0, 0.0
        while at[own] < end and grants.t_ns[at[own]] < start_ns:
            before += grants.number[at[own]]
            at[own] += 1
        while at[own] < end and grants.t_ns[at[own]] < last_ns:
            during += grants.number[at[own]]
            moment += float(grants.number[at[own]]) * float(grants.t_ns[at[own]] - start_ns)
            at[own] += 1
        if since_ns[own] != NOTHING:
            whole[row, BEFORE] = before
        whole[row, DURING] = during
        if during:
            whole[row, MEAN] = start_ns + np.int64(moment / during)
        since_ns[own] = last_ns
    _put_together(grants, at, idle_ns)
    groups = len(at)
    size = grants.begin[1:] - at
    begin = np.zeros(groups + 1, np.int64)
    begin[1:] = np.cumsum(size)
    new = Grants(begin, np.empty(begin[-1], np.int64), np.empty(begin[-1], np.int64))
    for own in range(groups):
        new.t_ns[begin[own] : begin[own + 1]] = grants.t_ns[at[own] : grants.begin[own + 1]]
        new.number[begin[own] : begin[own + 1]] = grants.number[at[own] : grants.begin[own + 1]]
    return new


@compiled
def _put_together(grants: Grants, at: Longs, idle_ns: Longs) -> None:
    """Adds up the rows of each group from `at` on until its `idle_ns`, and moves `at` to the last of them."""
    for own in range(len(at)):
        while at[own] + 1 < grants.begin[own + 1] and grants.t_ns[at[own] + 1] <= idle_ns[own]:
            grants.number[at[own] + 1] += grants.number[at[own]]
            at[own] += 1
