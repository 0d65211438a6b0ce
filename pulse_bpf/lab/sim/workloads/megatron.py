"""Tensor x pipeline x data parallelism as Megatron-LM runs it, with the 1F1B or the interleaved schedule.

Each layer has two tensor-parallel AllReduces forward and two backward, inside the node. Activations go between
stages in shares of one per tensor rank (sequence parallelism). The last micro batch's backward pass starts the
averaging of gradients, bucket by bucket. Left out: tied embeddings, gradient norm, distributed optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.model import NONE, Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads import schedule
from pulse_bpf.lab.sim.workloads.configurations import Model, Size, find_model, scale_model
from pulse_bpf.lab.sim.workloads.data_parallel import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    GRADIENT_BYTES,
    gradient_buckets,
)
from pulse_bpf.lab.sim.workloads.layout import Layout, pipeline_layout
from pulse_bpf.lab.sim.workloads.program import Call, Plan, Program, Variation, sequence_scale

# Micro batches of one sequence each, per stage: enough that the bubble is a third of an iteration, as with GPT-3
# on a small cluster.
BATCHES_PER_STAGE = 2
CHUNKS = 2
ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class _Stage:
    """One GPU's view: its stage, the layers of each of its chunks, and its communicators (NONE: group of one)."""

    model: Model
    layout: Layout
    stage: int
    layers: list[int]
    loss_ns: float
    tensor: int
    pipeline: int
    data: int

    @property
    def tokens(self) -> int:
        return self.model.sequence

    def half_layer_ns(self) -> float:
        return self.model.layer_ns(self.tokens) / self.layout.tensor / 2

    def has_loss(self, chunk: int) -> bool:
        return self.stage == self.layout.pipeline - 1 and chunk == len(self.layers) - 1

    def has_embedding(self, chunk: int) -> bool:
        return self.stage == 0 and chunk == 0


def build(
    cluster: Cluster, size: Size, seconds: float, variation: Variation, rng: np.random.Generator
) -> Job:
    """`BATCHES_PER_STAGE` micro batches per stage, laid out by pipeline_layout; UsageError as of workloads.build."""
    layout = pipeline_layout(cluster)
    if variation.interleaved and layout.pipeline == 1:
        raise UsageError(
            "no interleaved pipeline", "all GPUs are one stage, which would send to itself", "Use more nodes"
        )
    chunks = CHUNKS if variation.interleaved else 1
    batches = BATCHES_PER_STAGE * layout.pipeline
    full = find_model(size, "gpt3-175b")
    tokens_per_gpu = batches * full.sequence / (layout.tensor * layout.pipeline)
    model = scale_model(full, size, tokens_per_gpu, layout.pipeline * chunks)
    layers = [[model.layers // (layout.pipeline * chunks)] * chunks for _ in range(layout.pipeline)]
    if variation.uneven:
        layers[int(rng.integers(layout.pipeline))][0] += 1
    loss_ns = model.logits_ns(full.sequence) + variation.last_stage_layers * model.layer_ns(full.sequence)

    plan = Plan(cluster)
    world = plan.communicator("world", list(range(len(plan.programs))))
    tensor = plan.communicators("tp", layout.groups("tensor"))
    pipeline = plan.communicators("pp", layout.groups("pipeline"))
    data = plan.communicators("dp", layout.groups("data"))
    roles = layout.roles()
    averaged = []
    for gpu, program in enumerate(plan.programs):
        stage = roles["pipeline"][gpu]
        here = _Stage(
            model,
            layout,
            stage,
            layers[stage],
            loss_ns / layout.tensor,
            tensor[gpu],
            pipeline[gpu],
            data[gpu],
        )
        averaged.append(_write(program, here, batches))
    plan.end_step(world, model.parameters / (layout.tensor * layout.pipeline), averaged)

    iterations = plan.iterations(seconds)
    scale = sequence_scale(iterations, roles["data"], batches, variation, rng)
    meta: dict[str, object] = {"model": model, "layout": layout, "roles": roles}
    return plan.job(iterations, variation, rng, scale=scale, meta=meta)


def _write(program: Program, here: _Stage, batches: int) -> tuple[int, ...]:
    """One GPU's iteration but for its end; returns the task that must have ended before the optimizer may run."""
    order = schedule.slots(here.stage, here.layout.pipeline, batches, len(here.layers))
    before = schedule.exchanges(order, here.stage, here.layout.pipeline, len(here.layers))
    averaged: tuple[int, ...] = ()
    waits = _exchange(program, here, before[0])
    for slot, launches in zip(order, before[1:], strict=True):
        if waits:
            program.compute(0.0, waits=waits)
        for step in slot:
            if step.forward:
                _forward(program, here, step)
            else:
                averaged = _backward(program, here, step, last=step.batch == batches - 1) or averaged
        waits = _exchange(program, here, launches)
    return averaged


def _exchange(program: Program, here: _Stage, launches: list[list[schedule.Transfer]]) -> tuple[int, ...]:
    """What follows waits for receives and sends alike, as Megatron-LM does."""
    waits: tuple[int, ...] = ()
    count = here.tokens * here.model.hidden // here.layout.tensor
    for launch in launches:
        calls = [
            Call(here.pipeline, Kind.SEND if send else Kind.RECV, count, ACTIVATION_BYTES, peer)
            for send, _, peer in launch
        ]
        waits = (program.communicate(*calls),)
    return waits


def _forward(program: Program, here: _Stage, step: schedule.Step) -> None:
    for _ in range(2 * here.layers[step.chunk]):
        _half_layer(program, here, here.half_layer_ns(), FORWARD_KERNELS // 2, 1 + step.batch)
    if here.has_loss(step.chunk):
        program.compute(here.loss_ns, kernels=5, part=1 + step.batch)


def _backward(program: Program, here: _Stage, step: schedule.Step, *, last: bool) -> tuple[int, ...]:
    """Returns the last averaging of gradients, if this step has one."""
    if here.has_loss(step.chunk):
        program.compute(2 * here.loss_ns, kernels=5, part=1 + step.batch)
    layers = here.layers[step.chunk]
    parameters = [here.model.layer_parameters / here.layout.tensor] * layers
    embedding = here.model.embedding_parameters / here.layout.tensor
    parameters[0] += embedding * here.has_loss(step.chunk)
    parameters[-1] += embedding * here.has_embedding(step.chunk)
    averaged: tuple[int, ...] = ()
    for buckets in gradient_buckets(parameters, here.layout.data):
        for _ in range(2):
            _half_layer(program, here, 2 * here.half_layer_ns(), BACKWARD_KERNELS // 2, 1 + step.batch)
        if last and here.data != NONE:
            for bucket in buckets:
                averaged = (program.communicate(Call(here.data, Kind.ALL_REDUCE, bucket, GRADIENT_BYTES)),)
    return averaged


def _half_layer(program: Program, here: _Stage, ns: float, kernels: int, part: int) -> None:
    """Attention or feed-forward part: its result is summed over the tensor group before anything goes on."""
    if here.tensor == NONE:
        program.compute(ns, kernels=kernels, part=part)
    else:
        count = here.tokens * here.model.hidden
        call = Call(here.tensor, Kind.ALL_REDUCE, count, ACTIVATION_BYTES)
        program.compute_then_call(ns, call, kernels=kernels, part=part)
