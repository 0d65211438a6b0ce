"""Fully sharded data parallelism (FSDP, ZeRO-3): parameters are gathered layer by layer, gradients scattered."""

from __future__ import annotations

import numpy as np

from pulse_bpf.lab.sim.model import Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads.configurations import Size, find_model, scale_model
from pulse_bpf.lab.sim.workloads.data_parallel import BACKWARD_KERNELS, FORWARD_KERNELS
from pulse_bpf.lab.sim.workloads.program import Call, Plan, Program, Variation, sequence_scale

SEQUENCES = 1
# Fewer layers would leave no prefetch to speak of; they get narrower instead.
MIN_LAYERS = 8
# Parameters are gathered and gradients scattered in bf16.
PARAMETER_BYTES = 2


def build(
    cluster: Cluster, size: Size, seconds: float, variation: Variation, rng: np.random.Generator
) -> Job:
    """`SEQUENCES` sequences per GPU forward and backward; UsageError as of workloads.build."""
    full = find_model(size, "llama2-70b")
    tokens = SEQUENCES * full.sequence
    model = scale_model(full, size, tokens, MIN_LAYERS)
    plan = Plan(cluster)
    gpus = len(plan.programs)
    world = plan.communicator("world", list(range(gpus)))
    # Unit 0 is what is outside the layers: embedding and output.
    shards = [int(model.embedding_parameters / gpus)] + [int(model.layer_parameters / gpus)] * model.layers

    scattered = []
    for program in plan.programs:
        _forward(program, world, shards, model.layer_ns(tokens))
        program.compute(3 * model.logits_ns(tokens), kernels=10, part=1)
        scattered.append((_backward(program, world, shards, 2 * model.layer_ns(tokens)),))
    plan.end_step(world, model.parameters / gpus, scattered)

    iterations = plan.iterations(seconds)
    scale = sequence_scale(iterations, list(range(gpus)), 1, variation, rng)
    meta: dict[str, object] = {"model": model, "roles": {"data": list(range(gpus))}}
    return plan.job(iterations, variation, rng, scale=scale, meta=meta)


def _gather(program: Program, world: int, shard: int, after: tuple[int, ...] = ()) -> int:
    return program.communicate(Call(world, Kind.ALL_GATHER, shard, PARAMETER_BYTES), after=after)


def _forward(program: Program, world: int, shards: list[int], layer_ns: float) -> None:
    """Each layer's parameters are gathered while the layer before computes, into the memory of the one before that.

    That is FSDP's limit of two gathered units in flight.
    """
    root = _gather(program, world, shards[0])
    gathered = _gather(program, world, shards[1])
    computed = program.compute(0.0, kernels=2, waits=(root,))
    for shard in shards[2:]:
        prefetched = _gather(program, world, shard, (computed,))
        computed = program.compute(layer_ns, kernels=FORWARD_KERNELS, waits=(gathered,), part=1)
        gathered = prefetched
    program.compute(layer_ns, kernels=FORWARD_KERNELS, waits=(gathered,), part=1)


def _backward(program: Program, world: int, shards: list[int], layer_ns: float) -> int:
    """The last layer is still gathered; the others are again, each while the one after computes.

    Gathers and scatters share one stream, in the order in which the host enqueues them. Returns the last scatter.
    """
    waits: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    for layer in range(len(shards) - 1, 0, -1):
        prefetched = _gather(program, world, shards[layer - 1], computed) if layer > 1 else None
        computed = (program.compute(layer_ns, kernels=BACKWARD_KERNELS, waits=waits, part=1),)
        program.communicate(Call(world, Kind.REDUCE_SCATTER, shards[layer], PARAMETER_BYTES))
        waits = () if prefetched is None else (prefetched,)
    return program.communicate(Call(world, Kind.REDUCE_SCATTER, shards[0], PARAMETER_BYTES))
