"""Runs the programs of a simulated job by the rules of who waits for whom, on a network that nothing else uses."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from pulse_bpf.lab.sim.model import NONE, Cluster, Floats, Job, Kind


class Disagreement(Exception):
    """Calls that meet do not fit together."""


@dataclass
class _Meeting:
    """Calls that end together: one of each member of a communicator, or a Send and its Recv."""

    what: tuple[int, ...]
    ready_ns: float = 0.0
    tasks: list[int] = field(default_factory=list)


def run(job: Job, cluster: Cluster, iterations: int) -> Floats:
    """When each task of the first `iterations` iterations ended, f8[tasks]; NaN: never, or of a later iteration.

    A task starts when the one before it on its stream, its waits, and what its host waited for have ended. A
    collective ends when all members have come to it, a Send when its Recv has, in the order of the calls.
    """
    tasks = job.tasks
    chosen = np.flatnonzero(tasks["iteration"] < iterations)
    missing, followers = _dependencies(job, chosen)
    ready_ns: defaultdict[int, float] = defaultdict(float)
    ended_ns = np.full(len(tasks), np.nan)
    open_calls: dict[int, int] = {}
    meetings: dict[tuple[int, ...], _Meeting] = {}
    made: Counter[tuple[int, ...]] = Counter()
    ending: list[int] = []

    def start(task: int) -> None:
        row = tasks[task]
        ready_ns[task] += float(row["compute_ns"])
        open_calls[task] = int(row["calls"])
        for call in job.calls[row["call"] : row["call"] + row["calls"]]:
            key, what, wanted = _meets(call, job)
            turn = made[key]
            made[key] += 1
            # A Send and its Recv have one key but for who calls.
            meeting = meetings.setdefault((*key[1:], turn), _Meeting(what))
            if meeting.what != what:
                raise Disagreement(f"{meeting.what} meets {what} in communicator {call['comm']}")
            meeting.ready_ns = max(meeting.ready_ns, ready_ns[task])
            meeting.tasks.append(task)
            if len(meeting.tasks) == wanted:
                end_ns = meeting.ready_ns + _moving_ns(call, job, cluster)
                for member in meeting.tasks:
                    ready_ns[member] = max(ready_ns[member], end_ns)
                    open_calls[member] -= 1
                    if not open_calls[member]:
                        ending.append(member)
        if not row["calls"]:
            ending.append(task)

    for task in chosen:
        if not missing[task]:
            start(int(task))
    while ending:
        task = ending.pop()
        ended_ns[task] = ready_ns[task]
        for follower in followers[task]:
            ready_ns[follower] = max(ready_ns[follower], ready_ns[task])
            missing[follower] -= 1
            if not missing[follower]:
                start(follower)
    return ended_ns


def _dependencies(job: Job, chosen: np.ndarray) -> tuple[Counter[int], defaultdict[int, list[int]]]:
    missing: Counter[int] = Counter()
    followers: defaultdict[int, list[int]] = defaultdict(list)
    gpu_of = np.searchsorted(job.first_task, chosen, side="right") - 1
    on_stream: dict[tuple[int, int], int] = {}
    synced: dict[int, int] = {}
    for task, gpu in zip(chosen.tolist(), gpu_of.tolist(), strict=True):
        row = job.tasks[task]
        first = int(job.first_task[gpu])
        needed = {first + int(row[wait]) for wait in ("wait_a", "wait_b") if row[wait] != NONE}
        earlier = (on_stream.get((gpu, int(row["stream"]))), synced.get(gpu))
        needed |= {number for number in earlier if number is not None}
        on_stream[gpu, int(row["stream"])] = task
        if row["sync"]:
            synced[gpu] = task
        missing[task] = len(needed)
        for other in needed:
            assert first <= other < task, "a task waits for one that its host enqueues later"
            followers[other].append(task)
    return missing, followers


def _meets(call: np.void, job: Job) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Whose turn is counted (caller first), what both sides must say alike, and how many meet."""
    comm, rank, peer, kind = (int(call[name]) for name in ("comm", "rank", "peer", "kind"))
    size = (int(call["count"]), int(call["dtype_bytes"]), int(call["bytes"]))
    if kind == Kind.SEND:
        return (kind, comm, rank, peer), size, 2
    if kind == Kind.RECV:
        return (kind, comm, peer, rank), size, 2
    # The caller counts its own collectives; all ranks' nth ones meet.
    return (rank, comm, NONE), (kind, *size), len(job.comm_members[comm])


def _moving_ns(call: np.void, job: Job, cluster: Cluster) -> float:
    """At the line rate of the members' NICs, or NVLink's inside a node."""
    members = job.comm_members[int(call["comm"])]
    nodes = len({gpu // cluster.gpus for gpu in members})
    moved = int(call["bytes"]) * (2 if call["kind"] == Kind.ALL_REDUCE else 1)
    if call["kind"] in (Kind.SEND, Kind.RECV) or nodes == 1:
        return moved * 8 / (cluster.nic_gbps if nodes > 1 else cluster.nvlink_gbps)
    return moved * 8 / (cluster.nic_gbps * len(members) / nodes)
