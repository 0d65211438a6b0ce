"""Jobs in layouts that the simulated workloads lack: what frameworks call, without any compute times."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pulse_bpf.lab.sim.model import NONE, Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads import schedule
from pulse_bpf.lab.sim.workloads.layout import Layout
from pulse_bpf.lab.sim.workloads.program import Call, Plan, Program, Variation

HIDDEN = 4096
TOKENS = 2048
LAYERS = 2  # of a stage
BUCKET = 40_000_000
ITERATIONS = 8

# The kind of each communicator, by the first part of its name.
KINDS = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "dp": "data",
    "edp": "data",
    "pp": "pipeline",
    "world": "world",
    "embedding": "unknown",
    "norm": "unknown",
    "fsdp": "shard",
    "hsdp": "hybrid-shard",
    "replicas": "data",
}


@dataclass(frozen=True)
class Megatron:
    """What a run of Megatron-LM or DeepSpeed may do otherwise.

    `pairs`: a communicator per pair of stages; `grouped`: Send and Recv of an exchange in one ncclGroup; `backwards`:
    ranks of a pipeline's communicator run against its stages; `embedding`: the first and last stage share one, whose
    gradients they sum; `norm`: the gradients' norm is summed over the parts of a replica; `sequence`: activations are
    gathered and scattered instead of summed; `sharded`: so are gradients and parameters (distributed optimizer);
    `gathered`: keys and values are gathered, not passed on in a ring; `loss`: is averaged over all.
    """

    pairs: bool = False
    grouped: bool = True
    backwards: bool = False
    embedding: bool = False
    norm: bool = False
    sequence: bool = False
    sharded: bool = False
    gathered: bool = False
    loss: bool = True
    chunks: int = 1


def megatron(cluster: Cluster, layout: Layout, how: Megatron = Megatron()) -> Job:
    """All dimensions of `layout` that are larger than one, by the 1F1B schedule."""
    plan = Plan(cluster)
    world = plan.communicator("world", list(range(len(plan.programs))))
    comms = {
        "tp": plan.communicators("tp", layout.groups("tensor")),
        "cp": plan.communicators("cp", layout.groups("context")),
        "ep": plan.communicators("ep", layout.groups("expert")),
        "dp": plan.communicators("dp", layout.groups("context", "expert", "data")),
        "norm": plan.communicators("norm", layout.groups("tensor", "pipeline") if how.norm else []),
    }
    if layout.expert > 1:
        comms["edp"] = plan.communicators("edp", layout.groups("context", "data"))
    lines = layout.groups("pipeline")
    peers: dict[tuple[int, int], tuple[int, int]] = {}  # (GPU, peer): communicator, rank of the peer
    for number, line in enumerate(lines if layout.pipeline > 1 else []):
        if how.pairs:
            for one, then in pairwise(line):
                comm = plan.communicator(f"pp{number}-{one}", [one, then])
                peers[one, then], peers[then, one] = (comm, 1), (comm, 0)
        else:
            ranks = line[::-1] if how.backwards else line
            comm = plan.communicator(f"pp{number}", ranks)
            peers |= {(one, then): (comm, ranks.index(then)) for one in line for then in line if one != then}
    ends = [[line[0], line[-1]] for line in lines] if how.embedding else []
    comms["embedding"] = plan.communicators("embedding", ends)
    roles = layout.roles()
    line_of = {gpu: line for line in lines for gpu in line}
    for gpu, program in enumerate(plan.programs):
        mine = {name: of_gpu[gpu] for name, of_gpu in comms.items()}
        stage = _Stage(program, how, layout, mine, line_of[gpu], gpu, roles["context"][gpu], peers)
        stage.write(roles["pipeline"][gpu])
        if how.loss:
            program.communicate(Call(world, Kind.ALL_REDUCE, 1, 4), sync=True)
    return plan.job(ITERATIONS, Variation(), np.random.default_rng(0), meta={})


@dataclass
class _Stage:
    program: Program
    how: Megatron
    layout: Layout
    comms: dict[str, int]
    line: list[int]
    gpu: int
    place: int
    peers: dict[tuple[int, int], tuple[int, int]]

    def write(self, stage: int) -> None:
        stages = self.layout.pipeline
        order = schedule.slots(stage, stages, 2 * stages, self.how.chunks)
        before = schedule.exchanges(order, stage, stages, self.how.chunks)
        self._exchange(before[0])
        for slot, launches in zip(order, before[1:], strict=True):
            for step in slot:
                for _ in range(LAYERS):
                    self._layer(forward=step.forward)
            self._exchange(launches)
        for name in ("edp", "dp"):
            self._average(name)
        self._call("embedding", Kind.ALL_REDUCE, BUCKET // 4)
        self._call("norm", Kind.ALL_REDUCE, 1)

    def _exchange(self, launches: list[list[schedule.Transfer]]) -> None:
        for launch in launches:
            calls = []
            for send, _, stage in launch:
                comm, rank = self.peers[self.gpu, self.line[stage]]
                calls.append(Call(comm, Kind.SEND if send else Kind.RECV, TOKENS * HIDDEN, 2, rank))
            for together in [calls] if self.how.grouped else [[call] for call in calls]:
                self.program.communicate(*together)

    def _layer(self, *, forward: bool) -> None:
        for _ in range(2):
            if self.how.sequence:
                self._call("tp", Kind.ALL_GATHER, TOKENS * HIDDEN // self.layout.tensor)
                self._call("tp", Kind.REDUCE_SCATTER, TOKENS * HIDDEN // self.layout.tensor)
            else:
                self._call("tp", Kind.ALL_REDUCE, TOKENS * HIDDEN)
        if self.how.gathered:
            self._call("cp", Kind.ALL_GATHER, TOKENS * 1024)
            if not forward:
                self._call("cp", Kind.REDUCE_SCATTER, TOKENS * 1024)
        elif self.comms["cp"] != NONE:
            ring = self.layout.context
            for _ in range(ring - 1):
                self.program.communicate(
                    Call(self.comms["cp"], Kind.SEND, TOKENS * 1024, 2, (self.place + 1) % ring),
                    Call(self.comms["cp"], Kind.RECV, TOKENS * 1024, 2, (self.place - 1) % ring),
                )
        for _ in range(2):
            self._call("ep", Kind.ALL_TO_ALL, TOKENS * HIDDEN // self.layout.expert)

    def _average(self, name: str) -> None:
        kinds = [Kind.REDUCE_SCATTER, Kind.ALL_GATHER] if self.how.sharded else [Kind.ALL_REDUCE]
        for kind in kinds:
            for _ in range(3):
                self._call(name, kind, BUCKET // 16 if self.how.sharded else BUCKET)

    def _call(self, name: str, kind: Kind, count: int) -> None:
        if self.comms.get(name, NONE) != NONE:
            self.program.communicate(Call(self.comms[name], kind, count, 2))


def hybrid_sharded(cluster: Cluster, shards: int, layers: int = 12) -> Job:
    """FSDP's HYBRID_SHARD: parameters sharded over `shards` neighbours, gradients averaged over all such groups."""
    plan = Plan(cluster)
    gpus = len(plan.programs)
    world = plan.communicator("world", list(range(gpus)))
    inside = plan.communicators("hsdp", [list(range(at, at + shards)) for at in range(0, gpus, shards)])
    across = plan.communicators("replicas", [list(range(at, gpus, shards)) for at in range(shards)])
    shard = BUCKET // shards
    for gpu, program in enumerate(plan.programs):
        for _ in range(layers):
            program.communicate(Call(inside[gpu], Kind.ALL_GATHER, shard, 2))
        for _ in range(layers):
            program.communicate(Call(inside[gpu], Kind.ALL_GATHER, shard, 2))
            program.communicate(Call(inside[gpu], Kind.REDUCE_SCATTER, shard, 2))
            program.communicate(Call(across[gpu], Kind.ALL_REDUCE, shard, 2))
        program.communicate(Call(world, Kind.ALL_REDUCE, 1, 4), sync=True)
    return plan.job(ITERATIONS, Variation(), np.random.default_rng(0), meta={})


def sharded_tensor(cluster: Cluster, tensor: int, layers: int = 12) -> Job:
    """FSDP over nodes, tensor parallel inside them."""
    plan = Plan(cluster)
    gpus = len(plan.programs)
    layout = Layout(tensor=tensor, data=gpus // tensor)
    inside = plan.communicators("tp", layout.groups("tensor"))
    across = plan.communicators("fsdp", layout.groups("data"))
    for gpu, program in enumerate(plan.programs):
        for backward in (False, True):
            for _ in range(layers):
                program.communicate(Call(across[gpu], Kind.ALL_GATHER, BUCKET // gpus, 2))
                for _ in range(2):
                    program.communicate(Call(inside[gpu], Kind.ALL_REDUCE, TOKENS * HIDDEN, 2))
                if backward:
                    program.communicate(Call(across[gpu], Kind.REDUCE_SCATTER, BUCKET // gpus, 2))
        # The norm of the gradients; there is no communicator of all ranks.
        program.communicate(Call(across[gpu], Kind.ALL_REDUCE, 1, 4))
        program.communicate(Call(inside[gpu], Kind.ALL_REDUCE, 1, 4), sync=True)
    return plan.job(ITERATIONS, Variation(), np.random.default_rng(0), meta={})


def buckets(cluster: Cluster, *, sizes: tuple[int, ...], log_every: int = 0) -> Job:
    """Data parallel, without a loss that is averaged; with `log_every`, a small AllReduce before so many iterations."""
    plan = Plan(cluster)
    world = plan.communicator("dp", list(range(len(plan.programs))))
    steps = max(1, log_every)
    for program in plan.programs:
        for step in range(steps):
            if log_every and not step:
                program.communicate(Call(world, Kind.ALL_REDUCE, 8, 4))
            for size in sizes:
                program.communicate(Call(world, Kind.ALL_REDUCE, size, 4))
    return plan.job(ITERATIONS, Variation(), np.random.default_rng(0), meta={})
