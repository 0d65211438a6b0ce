"""Mixture of experts: tokens go to the GPUs of the experts they chose, and come back, in every layer.

Attention is tensor parallel inside a node; a group of experts spreads over nodes, one share of each per tensor
rank. A dispatch sends a rank's tokens to all members of its group, a combine brings them back; backward does the
same in reverse. Either as one group of Send and Recv with the sizes that the router drew, or as AlltoAll with
equal parts (a fixed capacity per expert). What stays on a GPU is not sent.
"""

from __future__ import annotations

import numpy as np

from pulse_bpf.lab.sim.model import NONE, Cluster, Floats, Job, Kind
from pulse_bpf.lab.sim.workloads.configurations import Model, Size, find_model, scale_model
from pulse_bpf.lab.sim.workloads.data_parallel import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    GRADIENT_BYTES,
    gradient_buckets,
)
from pulse_bpf.lab.sim.workloads.layout import Layout, spread
from pulse_bpf.lab.sim.workloads.program import Call, Plan, Program, Variation, lognormal

SEQUENCES = 4
MIN_LAYERS = 4
TOKEN_BYTES = 2
# How much of the experts' popularity lasts from one iteration to the next, against what is drawn anew.
LASTING, DRAWN = 0.9, 0.4


def build(
    cluster: Cluster, size: Size, seconds: float, variation: Variation, rng: np.random.Generator
) -> Job:
    """`SEQUENCES` sequences per group of tensor ranks; UsageError as of workloads.build, or of layout.spread."""
    full = find_model(size, "mixtral-8x7b")
    tensor, expert, data = spread(cluster, full.experts, "expert")
    layout = Layout(tensor=tensor, expert=expert, data=data)
    tokens = SEQUENCES * full.sequence
    model = scale_model(full, size, tokens / tensor, MIN_LAYERS)
    # Tokens that a tensor rank sends to each member when the load is equal.
    share = tokens // tensor * model.top_k // expert

    plan = Plan(cluster)
    world = plan.communicator("world", list(range(len(plan.programs))))
    comms = {
        "tp": plan.communicators("tp", layout.groups("tensor")),
        "ep": plan.communicators("ep", layout.groups("expert")),
        "dp": plan.communicators("dp", layout.groups("expert", "data")),
        "edp": plan.communicators("edp", layout.groups("data")),
    }
    roles = layout.roles()
    writers = [
        _Writer(
            program,
            model,
            layout,
            {name: of_gpu[gpu] for name, of_gpu in comms.items()},
            roles["expert"][gpu],
        )
        for gpu, program in enumerate(plan.programs)
    ]
    equal = variation.equal_exchange
    averaged = [writer.write(tokens, share, equal) for writer in writers]
    parameters = model.attention_parameters + model.experts / expert * model.expert_parameters
    plan.end_step(world, model.layers * parameters / tensor, averaged)

    iterations = plan.iterations(seconds)
    meta: dict[str, object] = {"model": model, "layout": layout, "roles": roles}
    if equal:
        return plan.job(iterations, variation, rng, meta=meta)
    loads = _loads(iterations, model.layers, layout, variation.skew, rng)
    scale = np.ones((iterations, len(plan.programs), 1 + model.layers))
    scale[:, :, 1:] = loads[:, :, roles["data"], roles["expert"]].transpose(0, 2, 1)
    job = plan.job(iterations, variation, rng, scale=scale, meta=meta)
    _set_counts(job, writers, roles["data"], np.maximum(1, np.rint(share * loads)) * model.hidden)
    return job


def _loads(iterations: int, layers: int, layout: Layout, skew: float, rng: np.random.Generator) -> Floats:
    """What each member of a group gets of the tokens, times the members; [iterations, layers, data, expert].

    The tensor ranks of a replica see the same router. Popularity lasts, with changes from iteration to iteration.
    """
    lasting = lognormal(rng, LASTING * skew, (1, layers, layout.data, layout.expert))
    drawn = lognormal(rng, DRAWN * skew, (iterations, layers, layout.data, layout.expert))
    loads: Floats = lasting * drawn
    loads /= loads.mean(axis=-1, keepdims=True)
    return loads


def _set_counts(job: Job, writers: list[_Writer], replicas: list[int], counts: Floats) -> None:
    """Gives each Send and Recv the load of the member whose experts the tokens go to or come from."""
    first = 0
    for writer, replica in zip(writers, replicas, strict=True):
        per_iteration = len(writer.program.calls)
        calls = job.calls[first : first + job.iterations * per_iteration].reshape(
            job.iterations, per_iteration
        )
        first += calls.size
        number, layer, member = np.array(writer.exchanged).T
        chosen = counts[:, layer, replica, member]
        calls["count"][:, number] = chosen
        calls["bytes"][:, number] = chosen * TOKEN_BYTES


class _Writer:
    """Writes one GPU's iteration; `exchanged` has, per Send and Recv, its call, layer and loaded member."""

    def __init__(
        self, program: Program, model: Model, layout: Layout, comms: dict[str, int], member: int
    ) -> None:
        self.program = program
        self.model = model
        self.layout = layout
        self.comms = comms
        self.member = member
        self.exchanged: list[tuple[int, int, int]] = []

    def write(self, tokens: int, share: int, equal: bool) -> tuple[int, ...]:
        """The iteration but for its end; returns what must have ended before the optimizer may run."""
        model, tensor = self.model, self.layout.tensor
        attention_ns = (model.projections_ns(tokens) + model.scores_ns(tokens)) / tensor
        experts_ns = model.ffn_ns(tokens) / tensor
        for layer in range(model.layers):
            self._attention(attention_ns, tokens, FORWARD_KERNELS)
            self._experts(experts_ns, layer, share, equal, FORWARD_KERNELS)
        self.program.compute(3 * model.logits_ns(tokens) / tensor, kernels=10)

        held = model.experts / self.layout.expert * model.expert_parameters
        dense = gradient_buckets([model.attention_parameters / tensor] * model.layers, self.layout.data)
        sparse = gradient_buckets([held / tensor] * model.layers, self.layout.data)
        averaged: dict[str, int] = {}
        for layer in reversed(range(model.layers)):
            self._experts(2 * experts_ns, layer, share, equal, BACKWARD_KERNELS)
            self._average("edp", sparse[model.layers - 1 - layer], averaged)
            self._attention(2 * attention_ns, tokens, BACKWARD_KERNELS)
            self._average("dp", dense[model.layers - 1 - layer], averaged)
        return tuple(averaged.values())

    def _attention(self, ns: float, tokens: int, kernels: int) -> None:
        if self.comms["tp"] == NONE:
            self.program.compute(ns, kernels=kernels)
        else:
            call = Call(self.comms["tp"], Kind.ALL_REDUCE, tokens * self.model.hidden, TOKEN_BYTES)
            self.program.compute_then_call(ns, call, kernels=kernels)

    def _experts(self, ns: float, layer: int, share: int, equal: bool, kernels: int) -> None:
        arrived = self._exchange(layer, share, equal, combine=False)
        self.program.compute(ns, kernels=kernels, waits=(arrived,), part=0 if equal else 1 + layer)
        returned = self._exchange(layer, share, equal, combine=True)
        self.program.compute(0.0, waits=(returned,))

    def _exchange(self, layer: int, share: int, equal: bool, *, combine: bool) -> int:
        comm, count = self.comms["ep"], share * self.model.hidden
        if equal:
            return self.program.communicate(Call(comm, Kind.ALL_TO_ALL, count, TOKEN_BYTES))
        calls: list[Call] = []
        for distance in range(1, self.layout.expert):
            to, source = (
                (self.member + distance) % self.layout.expert,
                (self.member - distance) % self.layout.expert,
            )
            first = len(self.program.calls) + len(calls)
            calls += [
                Call(comm, Kind.SEND, count, TOKEN_BYTES, to),
                Call(comm, Kind.RECV, count, TOKEN_BYTES, source),
            ]
            # A dispatch is as large as its receiver's load, a combine as its sender's.
            loaded = (self.member, source) if combine else (to, self.member)
            self.exchanged += [(first, layer, loaded[0]), (first + 1, layer, loaded[1])]
        return self.program.communicate(*calls)

    def _average(self, group: str, buckets: list[int], averaged: dict[str, int]) -> None:
        if self.comms[group] != NONE:
            for bucket in buckets:
                call = Call(self.comms[group], Kind.ALL_REDUCE, bucket, GRADIENT_BYTES)
                averaged[group] = self.program.communicate(call)
