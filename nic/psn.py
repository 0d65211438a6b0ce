"""Which packets are repeats, by their sequence numbers; the rule is that of is_repeat in probes/bpf/roce.c.

Numbers (24 bits) come in blocks of 64, and block b has place b modulo 32. A place holds the block that took it last,
and which of its numbers were seen. A packet of a block up to 1,024 blocks behind the one in its place is older than
what is remembered, and so a repeat. A packet of any other block takes the place: what is further behind is a new life
of a reused queue pair number, starting anywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

PLACES = 32
BLOCK_BITS = 6
REPEAT_BLOCKS = 1024
_BLOCK_MASK = (1 << 24 - BLOCK_BITS) - 1


class PsnHistory:
    """The numbers seen in each of many spaces (0, 1, ...), one for each flow of requests or of responses.

    Memory: PLACES x 16 bytes for each space up to the highest one used.
    """

    def __init__(self) -> None:
        # By lane: space x PLACES + place. Nothing seen: no block is held.
        self._held = np.zeros(0, np.int64)
        self._seen = np.zeros(0, np.uint64)

    def repeats(self, space: I64Array, psn: I64Array) -> BoolArray:
        """Whether each of these packets, in the order they passed, had passed before; from now on it has."""
        if not len(space):
            return np.zeros(0, np.bool_)
        self._grow((int(space.max()) + 1) * PLACES)
        block = psn >> BLOCK_BITS
        lane = space * PLACES + block % PLACES
        order = np.argsort(lane, kind="stable")
        lane, block = lane[order], block[order]
        index = psn[order] & 63

        stale = self._stale(lane, block)
        repeated = np.ones(len(space), np.bool_)
        kept = np.flatnonzero(~stale)
        repeated[kept] = self._seen_before(lane[kept], block[kept], index[kept])
        result = np.empty(len(space), np.bool_)
        result[order] = repeated
        return result

    def _stale(self, lane: I64Array, block: I64Array) -> BoolArray:
        """Whether each packet is of a block too old to be held; sorted by lane, and by time within."""
        first = _first_of_run(lane)
        before = np.where(first, self._held[lane], np.roll(block, 1))
        holds = ~first | (self._seen[lane] != 0)
        stale: BoolArray = holds & _is_behind(block, before)
        # Right if no packet is stale, as then each finds in place what the one before it left. Else the lanes with
        # stale ones are gone through, all of them in step, a run of packets of one block at a time.
        lanes = np.unique(lane[stale])
        if not len(lanes):
            return stale
        runs = np.flatnonzero((first | (block != before)) & np.isin(lane, lanes))
        run_lane, run_block = lane[runs], block[runs]
        starts = np.flatnonzero(_first_of_run(run_lane))
        lengths = np.diff(starts, append=len(runs))
        longest = np.argsort(-lengths, kind="stable")
        starts, lengths = starts[longest], lengths[longest]
        held = np.where(self._seen[run_lane[starts]] != 0, self._held[run_lane[starts]], -1)
        run_stale = np.zeros(len(runs), np.bool_)
        for step in range(int(lengths[0])):
            going = int(np.searchsorted(-lengths, -step))
            at = starts[:going] + step
            now = held[:going]
            is_stale = (now >= 0) & _is_behind(run_block[at], now)
            run_stale[at] = is_stale
            held[:going] = np.where(is_stale, now, run_block[at])
        affected = np.flatnonzero(np.isin(lane, lanes))
        stale[affected] = run_stale[np.searchsorted(runs, affected, side="right") - 1]
        return stale

    def _seen_before(self, lane: I64Array, block: I64Array, index: I64Array) -> BoolArray:
        """Whether each number, `index` in a block that is not stale, was seen there; it is added to those that were."""
        count = len(lane)
        bit = np.uint64(1) << index.astype(np.uint64)
        if not count:
            return np.zeros(0, np.bool_)
        first = _first_of_run(lane)
        stays = first & (self._seen[lane] != 0) & (self._held[lane] == block)
        taken = first | (block != np.roll(block, 1))
        starts = np.flatnonzero(taken)
        # What was seen of the block before this call, and within it: the first with each number is no repeat.
        earlier = np.where(stays, self._seen[lane], np.uint64(0))[starts]
        tenure = np.cumsum(taken) - 1
        repeated: BoolArray = (earlier[tenure] & bit) != 0
        number = tenure * 64 + index
        firsts = np.empty(len(starts) * 64, np.int64)
        firsts[number[::-1]] = np.arange(count - 1, -1, -1)
        repeated |= firsts[number] != np.arange(count)

        seen = np.bitwise_or.reduceat(bit, starts) | earlier
        last = np.flatnonzero(np.append(first[starts][1:], True))
        self._held[lane[starts[last]]] = block[starts[last]]
        self._seen[lane[starts[last]]] = seen[last]
        return repeated

    def _grow(self, lanes: int) -> None:
        if lanes > len(self._held):
            more = max(lanes, 2 * len(self._held)) - len(self._held)
            self._held = np.append(self._held, np.zeros(more, np.int64))
            self._seen = np.append(self._seen, np.zeros(more, np.uint64))


def _is_behind(block: I64Array, held: I64Array) -> BoolArray:
    behind = (held - block) & _BLOCK_MASK
    is_behind: BoolArray = (behind > 0) & (behind <= REPEAT_BLOCKS)
    return is_behind


def _first_of_run(values: I64Array) -> BoolArray:
    """Whether each value differs from the one before it."""
    first = np.ones(len(values), np.bool_)
    first[1:] = values[1:] != values[:-1]
    return first
