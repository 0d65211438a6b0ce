"""Which calls of different processes are the same work: one operator, or the same stage's part in two pipelines."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Longs
from pulse_bpf.analysis.shape import NOTHING

# Two-sided calls: what the ranks of one communicator do in them depends on their place in the pipeline.
TWO_SIDED = ("Send", "Recv")
# What is compared: the same work of several ranks.
KEY = ["team", "place"]
# Smaller sums, of a loss or a norm, are taken of all ranks, whatever their work.
LEAST_BYTES = 65_536
# More calls than a process makes between two operators with its replicas.
_CALLS = 2**24
# Kinds of calls: Send or Recv, several of these together, all with all, and what all ranks of a communicator do as one.
STAGE, GROUP, ALL_TO_ALL, COLLECTIVE = range(4)


class Calls(NamedTuple):
    """Calls in order of process and program: numbers of process, node, communicator and kind; NOTHING where unknown.

    `what` is STAGE to COLLECTIVE; `operator` numbers communicator and step, of which there are `operators`.
    """

    process: Longs
    node: Longs
    comm: Longs
    kind: Longs
    what: Longs
    rank: Longs
    nranks: Longs
    op_bytes: Longs
    step: Longs
    operator: Longs
    operators: int
    comms: int


def twins(calls: Calls) -> tuple[Longs, Longs, Longs]:
    """With whom to compare each call, and in what: team, place, and a number for both (`same`, -1 without a place).

    Rows of one team and place are the same work, NOTHING where there is none known. That is one operator of a
    communicator, the team even; or, with the team odd, in a communicator with Send and Recv, whose members are the
    stages of a pipeline, what the replicas of a stage do at one point of their programs. Replicas are taken to be
    ranks of one communicator that sums much and that have equal ranks in their pipelines; the point in their programs
    is the number of calls in pipelines from their next common sum backwards, or, at the end, from their last.
    """
    team, place = _places(calls, _replicas(calls))
    same = np.where(place != NOTHING, calls.operator, -1)
    stages = np.flatnonzero((team % 2 == 1) & (place != NOTHING))
    order = stages[np.lexsort((place[stages], team[stages]))]
    _alike(calls, order, team, place, same)
    return team, place, same


@compiled
def _replicas(calls: Calls) -> Longs:
    """Of each process the smallest communicator over several nodes on which it sums much; -1 without one."""
    first = np.full(calls.comms, -1)
    several = np.zeros(calls.comms, np.bool_)
    for row in range(len(calls.comm)):
        comm = calls.comm[row]
        if calls.what[row] != COLLECTIVE or calls.step[row] == NOTHING or calls.op_bytes[row] < LEAST_BYTES:
            continue
        if first[comm] < 0:
            first[comm] = row
        several[comm] |= calls.node[first[comm]] != calls.node[row]
    chosen = np.full(calls.process[-1] + 1 if len(calls.process) else 0, -1)
    for row in range(len(calls.comm)):
        comm, process = calls.comm[row], calls.process[row]
        if several[comm] and comm != chosen[process]:
            size, known = calls.nranks[first[comm]], chosen[process]
            least = calls.nranks[first[known]] if known >= 0 else 0
            if known < 0 or size < least or (size == least and comm < known):
                chosen[process] = comm
    return chosen


@compiled
def _places(calls: Calls, replicas: Longs) -> tuple[Longs, Longs]:
    two_sided = np.zeros(calls.comms, np.bool_)
    for row in range(len(calls.comm)):
        two_sided[calls.comm[row]] |= calls.what[row] == STAGE
    team, place = 2 * calls.comm, calls.step.copy()
    begin = 0
    while begin < len(team):
        process = calls.process[begin]
        end = begin
        while end < len(team) and calls.process[end] == process:
            end += 1
        # From each common sum backwards, and from the last one, or the first call, on.
        last = begin - 1
        for row in range(begin, end + 1):
            common = row < end and calls.what[row] == COLLECTIVE and calls.comm[row] == replicas[process]
            if row < end and not (common and calls.step[row] != NOTHING):
                continue
            anchor = row if row < end else last
            following = calls.step[anchor] if anchor >= begin else NOTHING
            count = 0
            for back in range(row - 1, last, -1) if row < end else range(last + 1, end):
                if two_sided[calls.comm[back]] and calls.what[back] <= GROUP:
                    known = replicas[process] >= 0
                    team[back] = 2 * replicas[process] + 1 if known else -1
                    count += 1
                    number = count if row < end else _CALLS // 2 + count - 1
                    place[back] = following * _CALLS + number if following != NOTHING else NOTHING
            last = row
        begin = end
    return team, place


@compiled
def _alike(calls: Calls, order: Longs, team: Longs, place: Longs, same: Longs) -> None:
    """Numbers the rows of stages, which are in `order` of team and place.

    Who does something else at that point has a different stage, or lost calls.
    """
    begin, number = 0, calls.operators
    while begin < len(order):
        first, end, alike = order[begin], begin, True
        while end < len(order) and team[order[end]] == team[first] and place[order[end]] == place[first]:
            row = order[end]
            alike &= calls.kind[row] == calls.kind[first] and calls.op_bytes[row] == calls.op_bytes[first]
            alike &= calls.nranks[row] == calls.nranks[first] and calls.rank[row] == calls.rank[first]
            end += 1
        for at in range(begin, end):
            same[order[at]] = number if alike else -1
        if not alike:
            for at in range(begin, end):
                place[order[at]] = NOTHING
        begin, number = end, number + 1
