"""From one iteration of each rank to the tasks and calls of a whole job.

A family of workloads writes one iteration per GPU with `Plan` and `Program`, as a training framework would enqueue
it; `Plan.job` repeats it, vectorised, with its own jitter in every task of every iteration.

Streams are as PyTorch's ProcessGroupNCCL has them: compute on stream 0, one stream per communicator, which by
default waits for what was enqueued on stream 0 before the call; the host waits for nothing but the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pulse_bpf.lab.sim.model import CALL, NONE, TASK, Array, Cluster, Floats, Job, Kind
from pulse_bpf.lab.sim.workloads.configurations import optimizer_ns

# CPU time to launch one kernel from Python, and to enqueue an NCCL call through it.
LAUNCH_NS, CALL_NS = 5e3, 10e3
# Between two iterations on the CPU: read the loss, fetch the batch that the loader has ready, log.
STEP_NS = 300e3
# A CUDA graph's launch replaces all launches of the iteration.
GRAPH_LAUNCH_NS = 100e3
# Spread (standard deviation of the logarithm) of kernels of equal work on healthy GPUs, and of CPU times.
COMPUTE_SIGMA, HOST_SIGMA = 0.01, 0.3
# Checkpoints: host time on each rank that writes its shard. Real ones last seconds; these go with iterations of a
# tenth of a second.
CHECKPOINT_NS, CHECKPOINT_SIGMA = 60e6, 0.1

_GATHERED = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


@dataclass(frozen=True)
class Variation:
    """How a workload departs from its family's plain form; a family heeds those that make sense in it."""

    warmup: tuple[float, ...] = ()  # factors of compute and host times in the first iterations
    checkpoint_every: int = 0  # iterations; 0: never
    uneven: bool = False  # one pipeline stage has a layer more than the others
    last_stage_layers: float = 0.0  # how many layers the loss costs the last stage
    sequence_sigma: float = 0.0  # spread of the compute that a replica's sequences need
    skew: float = 0.0  # spread of the load of experts
    interleaved: bool = False  # two model chunks per pipeline stage
    equal_exchange: bool = False  # experts exchange by AlltoAll with equal parts
    sync_each: bool = False  # the host waits for every operation
    graph: bool = False  # iterations are replays of a CUDA graph


@dataclass(frozen=True)
class Call:
    """One NCCL call of one rank; `count` as in the call, `peer` the rank of the peer or root."""

    comm: int
    kind: Kind
    count: int
    dtype_bytes: int
    peer: int = NONE


def _call_bytes(kind: int, count: int, dtype_bytes: int, ranks: int) -> int:
    """The bytes of an operator's whole buffer, as the recording format counts them."""
    return count * dtype_bytes * (ranks if kind in _GATHERED else 1)


class Program:
    """One GPU's iteration, in the order in which its host enqueues it."""

    def __init__(self) -> None:
        self.tasks: list[tuple[int, int, int, int, int, int, float, float]] = []
        self.parts: list[int] = []
        self.calls: list[Call] = []
        self._streams: dict[int, int] = {}
        self._computed = NONE

    def compute(self, ns: float, *, kernels: int = 1, waits: tuple[int, ...] = (), part: int = 0) -> int:
        """Enqueues `kernels` kernels that take `ns` together, after `waits`; returns the task's number.

        `part` is the column of `Plan.job`'s scale that applies, 0 for none.
        """
        self._computed = self._add(0, waits, (), ns, kernels * LAUNCH_NS, part=part)
        return self._computed

    def compute_then_call(self, ns: float, call: Call, *, kernels: int, part: int = 0) -> int:
        """As `compute`, then a collective that the next kernel needs at once (tensor parallelism)."""
        self._computed = self._add(0, (), (call,), ns, kernels * LAUNCH_NS + CALL_NS, part=part)
        return self._computed

    def communicate(self, *calls: Call, after: tuple[int, ...] | None = None, sync: bool = False) -> int:
        """Enqueues one launch, of one call or an ncclGroup, on its communicator's stream.

        It starts after the tasks `after`, None: the compute enqueued so far. `sync`: the host waits for its end.
        """
        stream = self._streams.setdefault(calls[0].comm, 1 + len(self._streams))
        waits = (self._computed,) if after is None else after
        return self._add(stream, waits, calls, 0.0, CALL_NS * len(calls), sync=sync)

    def _add(
        self,
        stream: int,
        waits: tuple[int, ...],
        calls: tuple[Call, ...],
        compute_ns: float,
        host_ns: float,
        *,
        part: int = 0,
        sync: bool = False,
    ) -> int:
        wait_a, wait_b = (*waits, NONE, NONE)[:2]
        first = len(self.calls) if calls else NONE
        self.tasks.append((stream, int(sync), wait_a, wait_b, first, len(calls), compute_ns, host_ns))
        self.parts.append(part)
        self.calls += calls
        return len(self.tasks) - 1


@dataclass
class Plan:
    """One iteration of all GPUs, and their communicators."""

    cluster: Cluster
    comm_members: list[list[int]] = field(default_factory=list)
    comm_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.programs = [Program() for _ in range(self.cluster.nodes * self.cluster.gpus)]

    def communicator(self, name: str, members: list[int]) -> int:
        """Adds a communicator of these GPUs, in the order of their ranks; returns its number."""
        self.comm_members.append(members)
        self.comm_names.append(name)
        return len(self.comm_members) - 1

    def communicators(self, name: str, groups: list[list[int]]) -> list[int]:
        """Adds a communicator for each group, and returns the one that each GPU is in, NONE for a group of one."""
        of_gpu = [NONE] * len(self.programs)
        for number, members in enumerate(groups):
            if len(members) > 1:
                comm = self.communicator(f"{name}{number}", members)
                for gpu in members:
                    of_gpu[gpu] = comm
        return of_gpu

    def end_step(self, world: int, parameters: float, waits: Sequence[tuple[int, ...]]) -> None:
        """Ends each GPU's iteration: optimizer over its `parameters` after `waits`, loss averaged and read back."""
        for program, needed in zip(self.programs, waits, strict=True):
            program.compute(optimizer_ns(parameters), kernels=20, waits=needed)
            program.communicate(Call(world, Kind.ALL_REDUCE, 1, 4), sync=True)

    def shortest_ns(self) -> float:
        """No iteration can be shorter: the busiest stream's compute, and its bytes at a whole node's line rate."""
        node_bytes_per_ns = self.cluster.gpus * self.cluster.nic_gbps / 8
        spans = [len({gpu // self.cluster.gpus for gpu in members}) > 1 for members in self.comm_members]
        shortest = 0.0
        for program in self.programs:
            busy: dict[int, float] = {}
            for stream, _, _, _, first, calls, compute_ns, _ in program.tasks:
                moved = sum(
                    _least_bytes(call) for call in program.calls[first : first + calls] if spans[call.comm]
                )
                busy[stream] = busy.get(stream, 0.0) + compute_ns + moved / node_bytes_per_ns
            shortest = max(shortest, *busy.values())
        return max(shortest, 20e3)

    def iterations(self, seconds: float) -> int:
        """How many iterations are sure to last `seconds`."""
        return math.ceil(seconds * 1e9 / self.shortest_ns()) + 1

    def job(
        self,
        iterations: int,
        variation: Variation,
        rng: np.random.Generator,
        *,
        scale: Floats | None = None,
        meta: dict[str, object],
    ) -> Job:
        """Repeats the iteration.

        `scale` stretches compute times, [iterations, GPUs, parts], ones in part 0. `meta` describes the job;
        nothing depends on it.
        """
        tasks, calls, first_task, first_call = [], [], [0], 0
        slow = _slow_iterations(variation.warmup, iterations)
        for gpu, program in enumerate(self.programs):
            part = None if scale is None else scale[:, gpu, :][:, program.parts]
            tasks.append(_repeat_tasks(program, iterations, first_call, slow, part, variation, rng))
            calls.append(np.tile(self._call_rows(gpu, program), iterations))
            first_task.append(first_task[-1] + len(tasks[-1]))
            first_call += len(calls[-1])
        return Job(
            np.concatenate(tasks),
            np.array(first_task, np.int32),
            np.concatenate(calls),
            self.comm_members,
            self.comm_names,
            variation.graph,
            iterations,
            meta,
        )

    def _call_rows(self, gpu: int, program: Program) -> Array:
        rows = np.zeros(len(program.calls), CALL)
        for row, call in zip(rows, program.calls, strict=True):
            members = self.comm_members[call.comm]
            row["comm"], row["kind"], row["peer"] = call.comm, call.kind, call.peer
            row["rank"] = members.index(gpu)
            row["count"], row["dtype_bytes"] = call.count, call.dtype_bytes
            row["bytes"] = _call_bytes(call.kind, call.count, call.dtype_bytes, len(members))
        return rows


def lognormal(rng: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> Floats:
    """Factors with mean 1."""
    return np.exp(rng.normal(-0.5 * sigma * sigma, sigma, shape))


def sequence_scale(
    iterations: int, replicas: Sequence[int], batches: int, variation: Variation, rng: np.random.Generator
) -> Floats | None:
    """Compute factors by the sequences that each data-parallel replica drew, [iterations, GPUs, 1 + batches].

    All GPUs of a replica work on the same sequences: `replicas` has the replica of each GPU; part 1 + b is micro
    batch b. Attention grows with the square of the length, so replicas differ although their tokens do not.
    """
    if not variation.sequence_sigma:
        return None
    drawn = np.ones((iterations, max(replicas) + 1, 1 + batches))
    drawn[:, :, 1:] = lognormal(rng, variation.sequence_sigma, (iterations, max(replicas) + 1, batches))
    return drawn[:, replicas, :]


def _least_bytes(call: Call) -> float:
    """What must at least leave a node: 2 (n - 1) / n of an all-reduce; the others never bound an iteration."""
    return call.count * call.dtype_bytes if call.kind == Kind.ALL_REDUCE else 0.0


def _slow_iterations(warmup: tuple[float, ...], iterations: int) -> Floats:
    slow = np.ones(iterations)
    slow[: len(warmup)] = warmup[:iterations]
    return slow


def _repeat_tasks(
    program: Program,
    iterations: int,
    first_call: int,
    slow: Floats,
    scale: Floats | None,
    variation: Variation,
    rng: np.random.Generator,
) -> Array:
    """One GPU's tasks of all iterations."""
    one = np.zeros(len(program.tasks), TASK)
    columns = zip(*program.tasks, strict=True)
    names = ("stream", "sync", "wait_a", "wait_b", "call", "calls", "compute_ns", "host_ns")
    for name, column in zip(names, columns, strict=True):
        one[name] = column
    if variation.graph:
        one["host_ns"] = 0
        one["host_ns"][0] = GRAPH_LAUNCH_NS
    one["host_ns"][0] += STEP_NS

    tasks = np.tile(one, iterations).reshape(iterations, len(one))
    number = np.arange(iterations, dtype=np.int32)[:, None]
    tasks["iteration"] = number
    for wait in ("wait_a", "wait_b"):
        tasks[wait] += np.where(tasks[wait] != NONE, number * len(one), 0)
    tasks["call"] += np.where(tasks["call"] != NONE, first_call + number * len(program.calls), 0)

    tasks["compute_ns"] *= lognormal(rng, COMPUTE_SIGMA, tasks.shape) * slow[:, None]
    if scale is not None:
        tasks["compute_ns"] *= scale
    tasks["host_ns"] *= lognormal(rng, HOST_SIGMA, tasks.shape) * slow[:, None]
    if variation.checkpoint_every:
        every = variation.checkpoint_every
        writes = tasks["host_ns"][every::every, 0]
        writes += CHECKPOINT_NS * lognormal(rng, CHECKPOINT_SIGMA, writes.shape)
    return tasks.reshape(-1)
