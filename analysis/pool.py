"""Operators as they are found, and their bins added up over the peers of a NIC, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Floats, Longs, in_time_order
from pulse_bpf.analysis.shape import REAL, WHOLE, shape


class Found(NamedTuple):
    """Operators that were cut out: what they are of, and their columns WHOLE and REAL of shape.py."""

    number: Longs
    whole: Longs
    real: Floats


class Pool(NamedTuple):
    """Bins of operators that are to be summed over the peers of a NIC, `key` as Calls.sum_of says."""

    key: Longs
    t_ns: Longs
    net: Longs
    retx: Longs
    ctl: Longs


def no_pool() -> Pool:
    """A pool without a row."""
    nothing = np.zeros(0, np.int64)
    return Pool(nothing, nothing, nothing, nothing, nothing)


@compiled
def sums(pool: Pool, waiting: Longs, bin_ns: Longs, window_bytes: Floats, open_ns: int) -> tuple[Found, Pool]:
    """The bins in `pool` of each key added up, and the rest of the pool.

    Keys that groups are `waiting` to add to, or that have bins from `open_ns` on, are left in the pool.
    """
    keys = len(waiting)
    whole_keys = waiting == 0
    for row in range(len(pool.key)):
        if pool.t_ns[row] >= open_ns:
            whole_keys[pool.key[row]] = False
    size = np.zeros(keys + 1, np.int64)
    kept = 0
    for row in range(len(pool.key)):
        if whole_keys[pool.key[row]]:
            size[pool.key[row]] += 1
        else:
            kept += 1
    end = np.cumsum(size)
    count = end[-1]
    fill = end - size
    t_ns, net = np.empty(count, np.int64), np.empty(count, np.int64)
    retx, ctl = np.empty(count, np.int64), np.empty(count, np.int64)
    rest = Pool(
        np.empty(kept, np.int64),
        np.empty(kept, np.int64),
        np.empty(kept, np.int64),
        np.empty(kept, np.int64),
        np.empty(kept, np.int64),
    )
    kept = 0
    for row in range(len(pool.key)):
        key = pool.key[row]
        if whole_keys[key]:
            at = fill[key]
            fill[key] += 1
            t_ns[at], net[at], retx[at], ctl[at] = (
                pool.t_ns[row],
                pool.net[row],
                pool.retx[row],
                pool.ctl[row],
            )
        else:
            rest.key[kept], rest.t_ns[kept], rest.net[kept] = key, pool.t_ns[row], pool.net[row]
            rest.retx[kept], rest.ctl[kept] = pool.retx[row], pool.ctl[row]
            kept += 1
    number = np.flatnonzero(size)
    found = Found(number, np.zeros((len(number), len(WHOLE)), np.int64), np.empty((len(number), len(REAL))))
    longest = size.max() if keys else 0
    order, scratch = np.empty((2, longest), np.int64), np.empty(longest, np.int64)
    for index in range(len(number)):
        key = number[index]
        begin = end[key] - size[key]
        stop = in_time_order(t_ns, net, retx, ctl, begin, end[key], bin_ns[key], order)
        filled = begin
        whole = found.whole[index]
        for row in range(begin, stop):
            whole[0] += net[row] + retx[row]
            whole[1] += retx[row]
            whole[2] += ctl[row]
            if net[row] > 0:
                t_ns[filled], net[filled] = t_ns[row], net[row]
                filled += 1
        shape(
            t_ns[begin:filled],
            net[begin:filled],
            bin_ns[key],
            window_bytes[key],
            whole,
            found.real[index],
            scratch,
        )
    return found, rest
