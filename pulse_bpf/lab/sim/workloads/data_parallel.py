"""Data-parallel training: every GPU has the whole model, gradients are averaged in buckets while backward runs."""

from __future__ import annotations

import numpy as np

from pulse_bpf.lab.sim.model import Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads.configurations import Size, find_model, scale_model
from pulse_bpf.lab.sim.workloads.program import Call, Plan, Variation, sequence_scale

# Sequences per GPU and iteration: 64 GPUs then have GPT-3 XL's published batch of a million tokens.
SEQUENCES = 8
MIN_LAYERS = 4
# Kernels that PyTorch launches for one layer, forward and backward.
FORWARD_KERNELS, BACKWARD_KERNELS = 12, 24
# Gradients are kept and averaged in fp32. Megatron-LM's bucket has at least 40 million parameters, or a million
# per data-parallel rank; PyTorch's 25 MiB would be cut into chunks of tens of KiB on 64 ranks.
GRADIENT_BYTES = 4
BUCKET_PARAMETERS = 40_000_000


def build(
    cluster: Cluster, size: Size, seconds: float, variation: Variation, rng: np.random.Generator
) -> Job:
    """`SEQUENCES` sequences per GPU forward and backward; UsageError as of workloads.build."""
    full = find_model(size, "gpt3-xl")
    tokens = SEQUENCES * full.sequence
    model = scale_model(full, size, tokens, MIN_LAYERS)
    plan = Plan(cluster)
    gpus = len(plan.programs)
    world = plan.communicator("world", list(range(gpus)))
    buckets = gradient_buckets([model.layer_parameters] * model.layers + [model.embedding_parameters], gpus)
    backward_ns = [2 * model.layer_ns(tokens)] * model.layers + [0.0]

    averaged = []
    for program in plan.programs:
        for _ in range(model.layers):
            program.compute(model.layer_ns(tokens), kernels=FORWARD_KERNELS, part=1)
        program.compute(3 * model.logits_ns(tokens), kernels=10, part=1)
        last = 0
        for ns, bucket in zip(backward_ns, buckets, strict=True):
            program.compute(ns, kernels=BACKWARD_KERNELS, part=1)
            for parameters in bucket:
                last = program.communicate(Call(world, Kind.ALL_REDUCE, parameters, GRADIENT_BYTES))
        averaged.append((last,))
    plan.end_step(world, model.parameters, averaged)

    iterations = plan.iterations(seconds)
    scale = sequence_scale(iterations, list(range(gpus)), 1, variation, rng)
    meta: dict[str, object] = {"model": model, "roles": {"data": list(range(gpus))}}
    return plan.job(iterations, variation, rng, scale=scale, meta=meta)


def gradient_buckets(parameters: list[float], ranks: int) -> list[list[int]]:
    """The buckets (in parameters) that are full after each of several parts of the backward pass.

    Buckets fill in the order in which gradients appear; what remains goes with the last part.
    """
    size = max(BUCKET_PARAMETERS, 1_000_000 * ranks)
    filled = 0
    buckets = []
    for added in parameters:
        full, filled = divmod(filled + int(added), size)
        buckets.append([size] * full)
    if filled:
        buckets[-1].append(filled)
    return buckets
