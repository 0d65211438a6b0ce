"""Loops of one collective, as nccl-tests runs them: nothing but communication."""

from __future__ import annotations

import numpy as np

from pulse_bpf.lab.sim.model import Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads.configurations import Size
from pulse_bpf.lab.sim.workloads.program import Call, Plan, Variation

# As nccl-tests: 20 operations between two looks at the clock; floats.
OPERATIONS = 20
# Per GPU of a node, hence per NIC.
MESSAGE_BYTES = 128 << 20
DTYPE_BYTES = 4


def build(
    cluster: Cluster, size: Size, seconds: float, variation: Variation, rng: np.random.Generator
) -> Job:
    """`OPERATIONS` AllReduces of all GPUs per iteration."""
    plan = Plan(cluster)
    world = plan.communicator("world", list(range(len(plan.programs))))
    count = (size.message_bytes or MESSAGE_BYTES * cluster.gpus) // DTYPE_BYTES
    call = Call(world, Kind.ALL_REDUCE, count, DTYPE_BYTES)
    for program in plan.programs:
        for operation in range(OPERATIONS):
            program.communicate(call, sync=variation.sync_each or operation == OPERATIONS - 1)
    return plan.job(plan.iterations(seconds), variation, rng, meta={"roles": {}})
