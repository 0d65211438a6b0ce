"""What jobs do: families of training workloads and loops, as programs of all GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.model import Algorithm, Cluster, Job
from pulse_bpf.lab.sim.workloads import context, data_parallel, experts, fsdp, loops, megatron, neighbour
from pulse_bpf.lab.sim.workloads.configurations import Size
from pulse_bpf.lab.sim.workloads.program import Variation

Family = Callable[[Cluster, Size, float, Variation, np.random.Generator], Job]

WARMUP = Variation(warmup=(3.0, 1.6, 1.2, 1.05))
CHECKPOINTS = Variation(checkpoint_every=4)
LONG_SEQUENCES = Variation(sequence_sigma=0.2)
GRAPH = Variation(graph=True)


@dataclass(frozen=True)
class Workload:
    """A family of jobs in one of its forms; `algorithm` as the job's environment has it in NCCL_ALGO."""

    title: str
    family: Family
    variation: Variation = field(default_factory=Variation)
    algorithm: Algorithm | None = None


WORKLOADS: dict[str, Workload] = {
    "dp": Workload(
        "data parallel, ring all-reduce of buckets", data_parallel.build, algorithm=Algorithm.RING
    ),
    "dp-tree": Workload(
        "data parallel, tree all-reduce of buckets", data_parallel.build, algorithm=Algorithm.TREE
    ),
    "dp-warmup": Workload(
        "data parallel, first iterations slower", data_parallel.build, WARMUP, Algorithm.RING
    ),
    "dp-checkpoint": Workload(
        "data parallel, pauses for checkpoints", data_parallel.build, CHECKPOINTS, Algorithm.RING
    ),
    "dp-long": Workload(
        "data parallel, sequences of unequal length", data_parallel.build, LONG_SEQUENCES, Algorithm.RING
    ),
    "dp-graph": Workload(
        "data parallel, iterations in CUDA graphs", data_parallel.build, GRAPH, Algorithm.RING
    ),
    "fsdp": Workload("fully sharded data parallel with prefetch", fsdp.build),
    "fsdp-long": Workload("fully sharded, sequences of unequal length", fsdp.build, LONG_SEQUENCES),
    "fsdp-graph": Workload("fully sharded, iterations in CUDA graphs", fsdp.build, GRAPH),
    "megatron": Workload("tensor x pipeline x data parallel, 1F1B", megatron.build),
    "megatron-interleaved": Workload(
        "tensor x pipeline x data parallel, interleaved", megatron.build, Variation(interleaved=True)
    ),
    "megatron-uneven": Workload(
        "pipeline with a stage of more layers", megatron.build, Variation(uneven=True)
    ),
    "megatron-last-stage": Workload(
        "pipeline with a costly loss in the last stage", megatron.build, Variation(last_stage_layers=1.0)
    ),
    "megatron-long": Workload("pipeline, sequences of unequal length", megatron.build, LONG_SEQUENCES),
    "megatron-warmup": Workload("pipeline, first iterations slower", megatron.build, WARMUP),
    "megatron-checkpoint": Workload("pipeline, pauses for checkpoints", megatron.build, CHECKPOINTS),
    "megatron-graph": Workload("pipeline, iterations in CUDA graphs", megatron.build, GRAPH),
    "moe": Workload("experts, tokens exchanged by Send and Recv", experts.build, Variation(skew=0.3)),
    "moe-skew": Workload("experts of very unequal popularity", experts.build, Variation(skew=0.8)),
    "moe-alltoall": Workload(
        "experts of fixed capacity, tokens exchanged by AlltoAll",
        experts.build,
        Variation(equal_exchange=True),
    ),
    "context": Workload("a long sequence over nodes, ring attention", context.build),
    "neighbour": Workload("a torus of GPUs that swap borders", neighbour.build),
    "loops": Workload("AllReduce of one size back to back", loops.build),
    "loops-sync": Workload(
        "AllReduce of one size, the host waits for each", loops.build, Variation(sync_each=True)
    ),
}


def build(name: str, cluster: Cluster, *, size: Size, seconds: float, rng: np.random.Generator) -> Job:
    """The programs of all GPUs of `cluster`, with iterations for `seconds` and more.

    Calls lack what the library decides: algorithm, protocol, channels, slices. UsageError when `name` is not a
    workload, or the workload or its model is impossible on this cluster.
    """
    if name not in WORKLOADS:
        raise UsageError(f"no workload {name!r}", "", f"Choose one of: {', '.join(WORKLOADS)}")
    if cluster.nodes * cluster.gpus < 2:
        raise UsageError("a job on one GPU", "it has nobody to communicate with", "Use at least two GPUs")
    workload = WORKLOADS[name]
    return workload.family(cluster, size, seconds, workload.variation, rng)
