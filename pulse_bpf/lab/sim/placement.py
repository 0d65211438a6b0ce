"""Where a scheduler puts a job's nodes: next to each other, as workloads have it, or wherever there was room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pulse_bpf.lab.sim import nccl
from pulse_bpf.lab.sim.model import Cluster, Job
from pulse_bpf.lab.sim.paths import spread
from pulse_bpf.lab.sim.situation import Situation
from pulse_bpf.lab.sim.victims import flow_bytes


def scattered(situation: Situation) -> Situation:
    """The same job with neighbours in its order on different leaves, so that every hop of a ring crosses spines."""
    job = _placed(situation.job, situation.cluster)
    network, calls = nccl.build(situation.cluster, situation.fabric, job, situation.rng)
    carried = flow_bytes(network, calls)
    network = spread(network, situation.fabric, carried, situation.rng)
    return replace(situation, job=job, network=network, calls=calls, carried=carried)


def _placed(job: Job, cluster: Cluster) -> Job:
    """The job's nodes dealt out over the groups of nodes that share leaves. Calls keep their numbers."""
    nodes = np.argsort(np.arange(cluster.nodes) % cluster.nodes_per_leaf, kind="stable")
    gpus = (nodes[:, None] * cluster.gpus + np.arange(cluster.gpus)).ravel()
    parts = [job.tasks[job.first_task[gpu] : job.first_task[gpu + 1]] for gpu in np.argsort(gpus)]
    first_task = np.cumsum([0, *(len(part) for part in parts)]).astype(np.int32)
    members = [[int(gpus[gpu]) for gpu in comm] for comm in job.comm_members]
    return replace(job, tasks=np.concatenate(parts), first_task=first_task, comm_members=members)
