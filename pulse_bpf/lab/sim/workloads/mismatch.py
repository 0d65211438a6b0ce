"""Programs that do not agree: one GPU calls something else than the others of its communicator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.model import KIND_NAMES, NONE, Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads.program import call_bytes

Longs = NDArray[np.int64]

MISMATCHES = ("skip", "count", "kind")


def mismatched(job: Job, cluster: Cluster, gpu: int, iteration: int, how: str) -> Job:
    """The job in which `gpu`, from `iteration` on, makes its largest collective wrongly, once per iteration.

    "skip" leaves it out, "count" asks for half (for two instead of one), "kind" for AllReduce instead of another
    kind or ReduceScatter instead of AllReduce. Collectives inside the node count only where there are no others.
    `meta["mismatch"]` has comm, kind and how. UsageError when `how` is unknown, the job has no such iteration, or
    the GPU makes no collective.
    """
    if how not in MISMATCHES:
        raise UsageError(f"no mismatch {how!r}", "", f"Choose one of: {', '.join(MISMATCHES)}")
    if not 0 <= iteration < job.iterations:
        raise UsageError(f"no iteration {iteration}", f"the job has {job.iterations}")
    wrong, launches = _largest_collective(job, cluster, gpu, iteration)
    comm, kind = int(job.calls["comm"][wrong[0]]), int(job.calls["kind"][wrong[0]])
    meta = {**job.meta, "mismatch": {"comm": comm, "kind": KIND_NAMES[kind], "how": how}}
    calls = job.calls.copy()
    if how == "skip":
        kept = np.ones(len(calls), bool)
        kept[wrong] = False
        tasks = job.tasks.copy()
        tasks["calls"][launches] -= 1
        kept_before = np.cumsum(kept) - kept
        tasks["call"] = np.where(tasks["calls"] > 0, kept_before[tasks["call"]], NONE)
        return replace(job, tasks=tasks, calls=calls[kept], meta=meta)
    # All of one iteration's place in the program, hence all alike.
    call = calls[wrong[0]].copy()
    if how == "count":
        call["count"] = int(call["count"]) // 2 or 2
    else:
        call["kind"] = Kind.REDUCE_SCATTER if kind == Kind.ALL_REDUCE else Kind.ALL_REDUCE
    call["bytes"] = call_bytes(
        int(call["kind"]), int(call["count"]), int(call["dtype_bytes"]), len(job.comm_members[comm])
    )
    calls[wrong] = call
    return replace(job, calls=calls, meta=meta)


def _largest_collective(job: Job, cluster: Cluster, gpu: int, iteration: int) -> tuple[Longs, Longs]:
    """Which calls, and which tasks launch them, one per iteration from `iteration` on."""
    first_task, end = (int(task) for task in job.first_task[gpu : gpu + 2])
    one = job.tasks[first_task : first_task + (end - first_task) // job.iterations]
    launching = np.flatnonzero(one["calls"])
    first_call = int(one["call"][launching].min(initial=len(job.calls)))
    per_iteration = int(one["calls"].sum())
    calls = job.calls[first_call : first_call + per_iteration]
    collective = ~np.isin(calls["kind"], (Kind.SEND, Kind.RECV))
    if not collective.any():
        raise UsageError(
            f"GPU {gpu} makes no collective", "it only sends and receives", "Choose another workload"
        )
    nodes = [len({member // cluster.gpus for member in members}) for members in job.comm_members]
    between = np.array(nodes)[calls["comm"]] > 1
    rank = np.where(collective, calls["bytes"].astype(np.float64), -1.0) + np.where(
        collective & between, 2.0**63, 0.0
    )
    chosen = int(rank.argmax())
    launch = launching[np.searchsorted(one["call"][launching] - first_call, chosen, side="right") - 1]
    turns = np.arange(iteration, job.iterations)
    return first_call + turns * per_iteration + chosen, first_task + turns * len(one) + launch
