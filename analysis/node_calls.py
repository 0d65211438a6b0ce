"""Which calls of a node's processes are those of one operator, in compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Longs

# How much later one process's observed calls may begin than another's, the likeliest first; and of the calls that fit
# at best, those that must.
SHIFTS = (0, -1, 1)
MOSTLY = 0.8
# The shift of two processes of which no calls fit yet.
UNKNOWN = 2


@compiled
def match_calls(
    members: Longs,
    comm: Longs,
    begin: Longs,
    end: Longs,
    step: Longs,
    alike: Longs,
    row: Longs,
    call_ns: Longs,
    last: Longs,
    shifts: Longs,
    first_ns: Longs,
    last_ns: Longs,
    complete: NDArray[np.bool_],
    others_ns: Longs,
) -> None:
    """Lowers `first_ns` and raises `last_ns`, which begin as `call_ns`, to the calls of other processes.

    The `members` between two of `comm` are the processes on one communicator, calls [begin, end) those of each, in the
    order of `step`, and `row` is where a call is in `call_ns` and the arrays after it. Two calls are one operator where
    their steps are the same, up to one of SHIFTS, and `alike` is, and the shift of two processes is that by which most
    calls fit, or nearly so many, closest in time on average: of calls that follow each other at once, those tell that
    are made after a pause. It is settled in `shifts` [process, member] with the first that fit.

    A call is not `complete` while another process may still make it, whose `last` step lies before. `others_ns` is
    lowered to the first call of others that a process has not made.
    """
    longest = max((end - begin).max(), 1) if len(begin) else 1
    here, there, apart_ns = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest)
    fitting, mean_ns = np.empty(len(SHIFTS), np.int64), np.empty(len(SHIFTS))
    for first in range(len(comm) - 1):
        for one in members[comm[first] : comm[first + 1]]:
            for place in range(comm[first + 1] - comm[first]):
                other = members[comm[first] + place]
                if other == one:
                    continue
                if shifts[one, place] == UNKNOWN:
                    for number in range(len(SHIFTS)):
                        count = _pairs(begin, end, one, other, SHIFTS[number], step, alike, here, there)
                        for pair in range(count):
                            apart_ns[pair] = abs(call_ns[row[there[pair]]] - call_ns[row[here[pair]]])
                        fitting[number] = count
                        mean_ns[number] = np.mean(apart_ns[:count]) if count else np.inf
                    best = -1
                    for number in range(len(SHIFTS)):
                        enough = fitting[number] > 0 and fitting[number] >= MOSTLY * fitting.max()
                        if enough and (best < 0 or mean_ns[number] < mean_ns[best]):
                            best = number
                    if best >= 0:
                        shifts[one, place] = SHIFTS[best]
                shift = shifts[one, place]
                if shift != UNKNOWN:
                    for pair in range(_pairs(begin, end, one, other, shift, step, alike, here, there)):
                        own, others = row[here[pair]], call_ns[row[there[pair]]]
                        first_ns[own], last_ns[own] = min(first_ns[own], others), max(last_ns[own], others)
                ahead = np.int64(1) if shift == UNKNOWN else shift
                for at in range(begin[one], end[one]):
                    if last[other] < step[at] + (1 if shift == UNKNOWN else -shift):
                        complete[row[at]] = False
                for at in range(begin[other], end[other]):
                    if step[at] + ahead > last[one]:
                        others_ns[one] = min(others_ns[one], call_ns[row[at]])


@compiled
def _pairs(
    begin: Longs,
    end: Longs,
    one: int,
    other: int,
    shift: int,
    step: Longs,
    alike: Longs,
    here: Longs,
    there: Longs,
) -> int:
    """How many calls of process `one` are `alike` that of the `other` `shift` steps before; fills which these are."""
    count = 0
    at = begin[other]
    for number in range(begin[one], end[one]):
        while at < end[other] and step[at] + shift < step[number]:
            at += 1
        if at == end[other]:
            break
        if step[at] + shift == step[number] and alike[at] == alike[number]:
            here[count], there[count] = number, at
            count += 1
    return count
