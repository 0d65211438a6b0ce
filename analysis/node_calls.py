"""Which calls of a node's processes are those of one operator, in compiled code."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Longs

# How much later one process's observed calls may begin than another's, the likeliest first; and of the calls that fit
# at best, those that must.
SHIFTS = (0, -1, 1)
MOSTLY = 0.8


@compiled
def match_calls(
    begins: Longs,
    together: Longs,
    step: Longs,
    alike: Longs,
    row: Longs,
    call_ns: Longs,
    first_ns: Longs,
    last_ns: Longs,
) -> None:
    """Lowers `first_ns` and raises `last_ns`, which begin as `call_ns`, to the calls of other processes.

    A process's calls are those between two of `begins`, in the order of `step`; those of equal `together` are on one
    communicator. Two calls are one operator where their steps are the same, up to one of SHIFTS, and `alike` is, and
    the shift of two processes is that by which most calls fit, or nearly so many, closest in time. `row` is where a
    call is in the last three arrays.
    """
    processes = len(begins) - 1
    longest = np.diff(begins).max()
    here, there, apart_ns = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest)
    fitting, median_ns = np.empty(len(SHIFTS), np.int64), np.empty(len(SHIFTS))
    first_of = 0
    for one in range(processes):
        if together[begins[one]] != together[begins[first_of]]:
            first_of = one
        for other in range(first_of, processes):
            if together[begins[other]] != together[begins[one]]:
                break
            if other == one:
                continue
            for number in range(len(SHIFTS)):
                count = _pairs(begins, one, other, SHIFTS[number], step, alike, here, there)
                for pair in range(count):
                    apart_ns[pair] = abs(call_ns[row[there[pair]]] - call_ns[row[here[pair]]])
                fitting[number] = count
                median_ns[number] = np.median(apart_ns[:count]) if count else np.inf
            best = -1
            for number in range(len(SHIFTS)):
                enough = fitting[number] > 0 and fitting[number] >= MOSTLY * fitting.max()
                if enough and (best < 0 or median_ns[number] < median_ns[best]):
                    best = number
            if best < 0:
                continue
            for pair in range(_pairs(begins, one, other, SHIFTS[best], step, alike, here, there)):
                own, others_ns = row[here[pair]], call_ns[row[there[pair]]]
                first_ns[own], last_ns[own] = min(first_ns[own], others_ns), max(last_ns[own], others_ns)


@compiled
def _pairs(
    begins: Longs, one: int, other: int, shift: int, step: Longs, alike: Longs, here: Longs, there: Longs
) -> int:
    """How many calls of process `one` are `alike` that of the `other` `shift` steps before; fills which these are."""
    count = 0
    at = begins[other]
    for number in range(begins[one], begins[one + 1]):
        while at < begins[other + 1] and step[at] + shift < step[number]:
            at += 1
        if at == begins[other + 1]:
            break
        if step[at] + shift == step[number] and alike[at] == alike[number]:
            here[count], there[count] = number, at
            count += 1
    return count
