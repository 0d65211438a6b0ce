"""What flow groups have yet to carry, as operators come and are done with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.curves import Flags, Longs
from pulse_bpf.analysis.pool import Found, Pool
from pulse_bpf.analysis.walk_state import Calls, State, nothing_known

Ops = NDArray[np.uint32]


class Sums(NamedTuple):
    """The sums over the peers of a NIC, numbered as in Calls.sum_of: `key` of the operator `op` and the PORT of
    `group`, and for how many groups each is `waiting`."""

    key: Longs
    group: Longs
    op: Ops
    waiting: Longs


class Listing:
    """The `calls` of `groups` that are listed and not done, their `group` and `op`, and the `sums` in which they count.

    What is done is left out each time that something is added.
    """

    def __init__(self, groups: pl.DataFrame) -> None:
        self._port = groups["port_index"].to_numpy().astype(np.int64)
        self._several = groups["peers"].to_numpy() > 1
        self.calls = nothing_known(groups.height)[0]
        self._had = np.zeros(groups.height, np.bool_)
        none = np.zeros(0, np.int64)
        self.group = none
        self.op = none.astype(np.uint32)
        self.sums = Sums(none, none, self.op, none)

    def add(self, state: State, new: pl.DataFrame) -> None:
        """Adds operators of groups: group, op, direct, first_call_ns, last_call_ns, expected, waited; each group's in
        order, and after those it had. The next one of a group is `state.op`, which is moved along."""
        group, op, first_ns, last_ns, expected, waited, direct = (
            new[name].to_numpy()
            for name in ("group", "op", "first_call_ns", "last_call_ns", "expected", "waited", "direct")
        )
        group = group.astype(np.int64)
        left = np.flatnonzero(np.arange(len(self.group)) >= state.op[self.group])
        together = np.r_[self.group[left], group]
        order = np.argsort(together, kind="stable")
        self.group = together[order]
        before = self.calls
        numbers = np.arange(len(before.begin))
        begin, end = np.searchsorted(self.group, numbers), np.searchsorted(self.group, numbers, "right")
        # What has none left is as if its next one were the first that is new.
        passed = state.op - begin
        first = np.where(self._had & (before.first != state.op), -1, begin)
        self._had |= begin < end
        sums = self._added(group, op, direct)
        self.op = np.r_[self.op[left], op][order]
        self.calls = Calls(
            begin,
            end,
            np.r_[before.first_ns[left], first_ns][order],
            np.r_[before.last_ns[left], last_ns][order],
            np.r_[before.expected[left], expected][order],
            np.r_[before.sum_of[left], sums][order],
            np.r_[before.waited[left], waited][order],
            np.r_[before.seen[left], expected][order],
            np.maximum(before.settled - passed, begin),
            first,
        )
        state.op[:] = begin

    def carried(self, found: Found) -> None:
        """Groups are done with the operators `found`, by their numbers in `calls`."""
        sums = self.calls.sum_of[found.number]
        np.subtract.at(self.sums.waiting, sums[sums >= 0], 1)

    def left(self, state: State) -> Ops:
        """Operators that a group is not done with."""
        return self.op[np.arange(len(self.op)) >= state.op[self.group]]

    def forget(self, done: Ops, pool: Pool) -> Pool:
        """Forgets the sums of operators that are done for all groups; returns the `pool`, as its keys change."""
        kept = ~np.isin(self.sums.op, done)
        number = np.where(kept, np.cumsum(kept) - 1, -1)
        key, group, op, waiting = self.sums
        self.sums = Sums(key[kept], group[kept], op[kept], waiting[kept])
        of = self.calls.sum_of
        self.calls = self.calls._replace(sum_of=np.where(of >= 0, number[of], -1) if len(number) else of)
        return pool._replace(key=number[pool.key]) if len(pool.key) else pool

    def _added(self, group: Longs, op: Ops, direct: Flags) -> Longs:
        """The number of the sum over the peers of a NIC in which each (group, op) counts, where there are several.

        Those of `direct` transfers may come to be several later.
        """
        sums = self.sums
        key = op.astype(np.int64) * len(self._port) + self._port[group]
        keys, first, which, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        older, of_older, at = np.intersect1d(sums.key, keys, assume_unique=True, return_indices=True)
        several = count > 1
        several[which[direct & self._several[group]]] = True
        several &= ~np.isin(keys, older)
        first = first[several]
        number = np.full(len(keys), -1)
        number[several] = len(sums.key) + np.arange(len(first))
        number[at] = of_older
        self.sums = Sums(
            np.r_[sums.key, keys[several]],
            np.r_[sums.group, group[first]],
            np.r_[sums.op, op[first]],
            np.r_[sums.waiting, np.zeros(len(first), np.int64)],
        )
        self.sums.waiting[number[number >= 0]] += count[number >= 0]
        return np.asarray(number[which], np.int64)
