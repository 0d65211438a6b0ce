"""When a process was ready for each of its calls: when what it did before had ended, and what it needs had come."""

from __future__ import annotations

import numpy as np

from pulse_bpf.analysis.compiled import compiled
from pulse_bpf.analysis.curves import Flags, Longs
from pulse_bpf.analysis.shape import NOTHING
from pulse_bpf.analysis.twins import COLLECTIVE, GROUP, STAGE, Calls

# The ends of so many machines are not believed where they are the last.
MISTAKEN = 2
# Of the operators of the replicas of a stage, those that overlap, from which on they were not told apart well.
MAX_ASTRAY = 0.02


@compiled
def end_together(calls: Calls, end_ns: Longs, one_clock: bool) -> None:
    """Moves the ends of collectives to the last one on the machine and, on one clock, on all but two machines: one flow
    that was not cut well looks late at both its ends.
    """
    # Rows of a machine follow each other in each operator. Of each operator the three latest machines.
    latest = np.full((calls.operators, MISTAKEN + 1), NOTHING)
    machines = np.zeros(calls.operators, np.int64)
    node = np.full(calls.operators, -1)
    here = np.full(calls.operators, NOTHING)
    local = np.empty(len(end_ns), np.int64)
    for side in range(2):
        for place in range(len(end_ns)):
            row = place if side == 0 else len(end_ns) - 1 - place
            operator = calls.operator[row]
            if calls.node[row] != node[operator]:
                if side == 0:
                    _insert(latest[operator], here[operator])
                    machines[operator] += here[operator] != NOTHING
                node[operator], here[operator] = calls.node[row], NOTHING
            here[operator] = max(here[operator], end_ns[row] if side == 0 else local[row])
            local[row] = here[operator]
        for operator in range(calls.operators):
            if side == 0:
                _insert(latest[operator], here[operator])
                machines[operator] += here[operator] != NOTHING
            node[operator], here[operator] = -1, NOTHING
    for row in range(len(end_ns)):
        if calls.step[row] == NOTHING or calls.what[row] != COLLECTIVE:
            continue
        operator = calls.operator[row]
        end_ns[row] = local[row]
        if one_clock:
            common = latest[operator, min(MISTAKEN, max(0, machines[operator] - 2))]
            end_ns[row] = max(end_ns[row], common)


@compiled
def _insert(latest: Longs, value: int) -> None:
    """Puts `value` among the greatest, in falling order."""
    for place in range(len(latest)):
        if value > latest[place]:
            latest[place], value = value, latest[place]


@compiled
def in_stages(calls: Calls) -> Flags:
    """Whether each call is a stage's part in a pipeline: in a communicator with Send and Recv."""
    two_sided = np.zeros(calls.comms, np.bool_)
    for row in range(len(calls.comm)):
        two_sided[calls.comm[row]] |= calls.what[row] == STAGE
    stage = np.zeros(len(calls.comm), np.bool_)
    for row in range(len(stage)):
        stage[row] = two_sided[calls.comm[row]] and calls.what[row] <= GROUP
    return stage


@compiled
def ended_before(calls: Calls, large: Flags, stage: Flags, end_ns: Longs) -> tuple[Longs, Longs]:
    """When the last operator of the process, and of its communicator, before each ended; NOTHING where unknown.

    Operators of a communicator end one after the other, whatever of others' bytes is taken for their last ones: ends
    are put right first. A few bytes are easily found too early, and say nothing of when the operators before ended.
    What moved nothing that was seen is passed over.
    """
    process, state = np.full(calls.comms, -1), np.full(calls.comms, NOTHING)
    for row in range(len(end_ns) - 1, -1, -1):
        comm = calls.comm[row]
        if process[comm] != calls.process[row]:
            process[comm], state[comm] = calls.process[row], NOTHING
        if end_ns[row] == NOTHING:
            continue
        if large[row] and (state[comm] == NOTHING or end_ns[row] < state[comm]):
            state[comm] = end_ns[row]
        if not stage[row] and state[comm] != NOTHING:
            end_ns[row] = min(end_ns[row], state[comm])
    process[:] = -1
    before, same = np.full(len(end_ns), NOTHING), np.full(len(end_ns), NOTHING)
    whole = NOTHING
    for row in range(len(end_ns)):
        comm = calls.comm[row]
        if row == 0 or calls.process[row] != calls.process[row - 1]:
            whole = NOTHING
        if process[comm] != calls.process[row]:
            process[comm], state[comm] = calls.process[row], NOTHING
        before[row], same[row] = whole, state[comm]
        whole, state[comm] = max(whole, end_ns[row]), max(state[comm], end_ns[row])
    return before, same


@compiled
def ready(
    calls: Calls,
    stage: Flags,
    team: Longs,
    same: Longs,
    receives: Flags,
    entry_ns: Longs,
    bin_ns: Longs,
    before_ns: Longs,
    same_ns: Longs,
    end_ns: Longs,
    came: Longs,
    since: Longs,
    one_clock: bool,
) -> Longs:
    """When each process was ready for a call; NOTHING where that is not known."""
    hears = np.zeros(calls.comms, np.bool_)
    count = same.max() + 1 if len(same) else 0
    # Of an operator that overlaps with another communicator's on some ranks, what each waited for is not the same.
    some, none = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    # Two of one communicator never overlap: what one moved is taken for the other's.
    astray, judged = np.zeros(2 * calls.comms, np.int64), np.zeros(2 * calls.comms, np.int64)
    overlaps = np.zeros(len(team), np.bool_)
    for row in range(len(team)):
        hears[calls.comm[row]] |= receives[row]
        came_ns = entry_ns[row] + bin_ns[row]
        known = entry_ns[row] != NOTHING and before_ns[row] != NOTHING
        overlaps[row] = known and before_ns[row] > came_ns
        if same[row] >= 0:
            if overlaps[row] and same_ns[row] != NOTHING and before_ns[row] > same_ns[row]:
                some[same[row]] = True
            elif (known and not overlaps[row]) or NOTHING < before_ns[row] <= same_ns[row]:
                none[same[row]] = True
        if stage[row] and team[row] >= 0 and entry_ns[row] != NOTHING and same_ns[row] != NOTHING:
            judged[team[row]] += 1
            astray[team[row]] += same_ns[row] > came_ns
    ready = np.full(len(team), NOTHING)
    begin = 0
    while begin < len(team):
        process, end = calls.process[begin], begin
        while end < len(team) and calls.process[end] == process:
            end += 1
        ends = np.zeros(0, np.int64)
        for row in range(begin, end):
            # Where only what is sent is seen, what a stage receives shows at its sender.
            unseen = stage[row] and not hears[calls.comm[row]]
            if same[row] >= 0 and some[same[row]] and none[same[row]]:
                continue
            if stage[row] and team[row] >= 0 and astray[team[row]] > MAX_ASTRAY * judged[team[row]]:
                continue
            if unseen and not one_clock:
                continue
            if not (overlaps[row] or unseen):
                ready[row] = before_ns[row]
                continue
            # When, by its first byte, another of its operators had last ended, or what a stage before or after it sent
            # had last come.
            ready[row] = same_ns[row]
            if entry_ns[row] != NOTHING:
                if len(ends) == 0:
                    ends = np.sort(end_ns[begin:end])
                for times in (ends, came[since[process] : since[process + 1]]):
                    place = np.searchsorted(times, entry_ns[row] + bin_ns[row], side="right")
                    if place > 0:
                        ready[row] = max(ready[row], times[place - 1])
        begin = end
    return ready
