"""Neighbour exchange: a simulation on a torus of GPUs, each swapping its borders by one group of Send and Recv."""

from __future__ import annotations

import numpy as np

from pulse_bpf.lab.sim.model import Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads.configurations import Size
from pulse_bpf.lab.sim.workloads.program import Call, Plan, Variation

# Between two sums of the residual over all GPUs, which the host waits for.
STEPS = 16
STEP_NS = 5e6
MESSAGE_BYTES = 32 << 20
DTYPE_BYTES = 4


def build(
    cluster: Cluster, size: Size, seconds: float, variation: Variation, rng: np.random.Generator
) -> Job:
    """`STEPS` time steps per iteration, on a torus of nodes by GPUs of a node."""
    plan = Plan(cluster)
    world = plan.communicator("world", list(range(len(plan.programs))))
    count = (size.message_bytes or MESSAGE_BYTES) // DTYPE_BYTES
    for gpu, program in enumerate(plan.programs):
        calls = [
            Call(world, kind, count, DTYPE_BYTES, peer)
            for peer in _neighbours(gpu, cluster)
            for kind in (Kind.SEND, Kind.RECV)
        ]
        waits: tuple[int, ...] = ()
        for _ in range(STEPS):
            program.compute(STEP_NS, kernels=10, waits=waits)
            waits = (program.communicate(*calls),)
        program.compute(0.0, waits=waits)
        program.communicate(Call(world, Kind.ALL_REDUCE, 1, DTYPE_BYTES), sync=True)
    return plan.job(plan.iterations(seconds), variation, rng, meta={"roles": {}})


def _neighbours(gpu: int, cluster: Cluster) -> list[int]:
    """One node on and back at the same place, one place on and back in the node; those that are different GPUs."""
    node, local = divmod(gpu, cluster.gpus)
    beside = {(node + step) % cluster.nodes * cluster.gpus + local for step in (1, -1)}
    inside = {node * cluster.gpus + (local + step) % cluster.gpus for step in (1, -1)}
    return sorted((beside | inside) - {gpu})
