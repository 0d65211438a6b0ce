"""Context parallelism: a long sequence is spread over nodes, keys and values go round a ring during attention.

Ring attention (Liu et al. 2023, arXiv:2310.01889): while a GPU works on one block of keys and values it hands it on
to the next rank and gets another from the one before. Backward, gradients of the block travel with it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pulse_bpf.lab.sim.model import NONE, Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads.configurations import Model, Size, find_model, scale_model
from pulse_bpf.lab.sim.workloads.data_parallel import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    GRADIENT_BYTES,
    gradient_buckets,
)
from pulse_bpf.lab.sim.workloads.layout import Layout, spread
from pulse_bpf.lab.sim.workloads.program import Call, Plan, Program, Variation

# Tokens that stay on one rank of a ring. Llama 3 is trained at up to 131,072 tokens with context parallelism
# (arXiv:2407.21783, section 3.3.2): eight such shares.
TOKENS = 16_384
MOST_IN_A_RING = 8
MIN_LAYERS = 2
BLOCK_BYTES = 2


def build(
    cluster: Cluster, size: Size, seconds: float, variation: Variation, rng: np.random.Generator
) -> Job:
    """One sequence per ring of GPUs; UsageError as of workloads.build, or of layout.spread."""
    tensor, ring, data = spread(cluster, MOST_IN_A_RING, "context")
    layout = Layout(tensor=tensor, context=ring, data=data)
    full = replace(find_model(size, "llama3-70b"), sequence=TOKENS * ring)
    model = scale_model(full, size, TOKENS / tensor, MIN_LAYERS)
    plan = Plan(cluster)
    world = plan.communicator("world", list(range(len(plan.programs))))
    context = plan.communicators("cp", layout.groups("context"))
    averaging = plan.communicators("dp", layout.groups("context", "data"))
    roles = layout.roles()
    averaged = [
        _write(program, model, layout, context[gpu], roles["context"][gpu], averaging[gpu])
        for gpu, program in enumerate(plan.programs)
    ]
    plan.end_step(world, model.parameters / tensor, averaged)
    meta: dict[str, object] = {"model": model, "layout": layout, "roles": roles}
    return plan.job(plan.iterations(seconds), variation, rng, meta=meta)


def _write(
    program: Program, model: Model, layout: Layout, context: int, place: int, averaging: int
) -> tuple[int, ...]:
    dense_ns = (model.projections_ns(TOKENS) + model.ffn_ns(TOKENS)) / layout.tensor
    scores_ns = model.scores_ns(TOKENS) / layout.tensor
    # Keys and values of this GPU's tokens and heads.
    block = round(2 * TOKENS * model.hidden * model.kv_heads / model.heads / layout.tensor)
    for _ in range(model.layers):
        _attention(program, scores_ns, block, layout, context, place, FORWARD_KERNELS)
        program.compute(dense_ns, kernels=FORWARD_KERNELS)
    program.compute(3 * model.logits_ns(TOKENS) / layout.tensor, kernels=10)
    parameters = [model.layer_parameters / layout.tensor] * model.layers
    parameters[-1] += model.embedding_parameters / layout.tensor
    averaged: tuple[int, ...] = ()
    for buckets in gradient_buckets(parameters, layout.context * layout.data):
        program.compute(2 * dense_ns, kernels=BACKWARD_KERNELS)
        _attention(program, 2 * scores_ns, 2 * block, layout, context, place, BACKWARD_KERNELS)
        if averaging != NONE:
            for bucket in buckets:
                averaged = (program.communicate(Call(averaging, Kind.ALL_REDUCE, bucket, GRADIENT_BYTES)),)
    return averaged


def _attention(
    program: Program, ns: float, block: int, layout: Layout, context: int, place: int, kernels: int
) -> None:
    """One block per step; the next one travels meanwhile. Causal blocks are balanced, so all steps are alike."""
    ring = layout.context
    waits: tuple[int, ...] = ()
    for step in range(ring):
        arriving = waits
        if step < ring - 1:
            handed_on = Call(context, Kind.SEND, block, BLOCK_BYTES, (place + 1) % ring)
            next_block = Call(context, Kind.RECV, block, BLOCK_BYTES, (place - 1) % ring)
            arriving = (program.communicate(handed_on, next_block),)
        program.compute(ns / ring, kernels=max(1, kernels // ring), waits=waits)
        waits = arriving
