"""Which rows of the operators belong to one call, without sorting them."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis.curves import Longs


def call_numbers(node: Longs, pid: Longs, position: Longs) -> tuple[Longs, Longs]:
    """Numbers of the process and of the call of rows with these, from 0, in order of node, pid and position.

    Rows of a process stand together in long runs, and its positions are nearly all there: only the first of each run
    are compared, and the positions counted.
    """
    change = (node[1:] != node[:-1]) | (pid[1:] != pid[:-1])
    heads = np.flatnonzero(np.r_[True, change][: len(node)])
    _, of_head = np.unique(np.stack([node[heads], pid[heads]]), axis=1, return_inverse=True)
    of_head = of_head.ravel().astype(np.int64)
    process = np.repeat(of_head, np.diff(np.r_[heads, len(node)]))
    if not len(node):
        return process, process
    first = np.full(int(of_head.max()) + 1, np.iinfo(np.int64).max)
    last = np.full(len(first), -1, np.int64)
    np.minimum.at(first, of_head, np.minimum.reduceat(position, heads))
    np.maximum.at(last, of_head, np.maximum.reduceat(position, heads))
    length = last - first + 1
    place = (np.cumsum(length) - length - first)[process] + position
    used = np.zeros(int(length.sum()), np.bool_)
    used[place] = True
    return process, (np.cumsum(used) - 1)[place]
