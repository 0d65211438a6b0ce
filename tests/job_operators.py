"""The operators table of a simulated job without a run of the engine: from the calls of its programs alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.lab.sim.model import KIND_NAMES, Cluster, Job, Kind
from pulse_bpf.schema import COMMS, comm_id

START_NS = 1_700_000_000_000_000_000
PERIOD_NS = 100_000_000
CLOCK_ERROR_NS = 20_000
# What of an iteration the host spends on enqueueing when it waits for the loss, and when the queue holds it up.
_AHEAD, _HELD_UP = 0.05, 0.9


@dataclass(frozen=True)
class Times:
    """When iterations begin: `begins_ns` of each; `waits`: the host waits for the end of each iteration."""

    begins_ns: np.ndarray
    waits: bool = True

    @classmethod
    def regular(cls, iterations: int, *, waits: bool = True) -> Times:
        return cls(np.arange(iterations + 1) * PERIOD_NS, waits)


def operators_of(
    job: Job, cluster: Cluster, times: Times, seed: int = 0
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`job`'s operators (metrics.OPERATORS) and communicators (schema.COMMS), as many iterations as `times` has.

    A collective of GPUs on several nodes has a row per direction, to the ranks beside; all Send and Recv of a task
    with several calls are one "Group" with a row per direction and peer on another node.
    """
    rng = np.random.default_rng(seed)
    tasks = job.tasks
    task = np.repeat(np.arange(len(tasks)), tasks["calls"])
    number = tasks["call"][task] + np.arange(len(task)) - np.searchsorted(task, task)
    calls = job.calls[number]
    gpu = np.searchsorted(job.first_task, task, "right") - 1
    iteration = tasks["iteration"][task].astype(np.int64)
    kept = iteration < len(times.begins_ns) - 1
    gpus = cluster.nodes * cluster.gpus
    sizes = np.array([len(members) for members in job.comm_members])
    spans = np.array([len({gpu // cluster.gpus for gpu in members}) > 1 for members in job.comm_members])
    member = np.full((len(sizes), int(sizes.max())), -1)
    for comm, members in enumerate(job.comm_members):
        member[comm, : len(members)] = members
    names = pl.Series([comm_id(0xABC0_0000_0000_0000 + n, int(size)) for n, size in enumerate(sizes)])
    nodes = pl.Series([f"node{node}" for node in range(cluster.nodes)])
    two_sided = np.isin(calls["kind"], (Kind.SEND, Kind.RECV))
    late_ns = rng.integers(0, CLOCK_ERROR_NS, gpus)
    frame = (
        pl.DataFrame(
            {
                "task": task,
                "gpu_number": gpu,
                "iteration": iteration,
                "comm": calls["comm"].astype(np.int64),
                "rank": calls["rank"],
                "peer": calls["peer"],
                "kind": pl.Series(KIND_NAMES).gather(calls["kind"]),
                "grouped": two_sided & (tasks["calls"][task] > 1),
                "two_sided": two_sided,
                "bytes": calls["bytes"].astype(np.int64),
                "peer_gpu": np.where(two_sided, member[calls["comm"], np.maximum(calls["peer"], 0)], -1),
            }
        )
        .filter(pl.Series(kept))
        .with_row_index("call")
        .with_columns(op=pl.when("grouped").then(pl.col("call").min().over("task", "comm")).otherwise("call"))
    )
    ops = (
        frame.group_by("op")
        .agg(
            pl.col("gpu_number", "iteration", "comm", "rank", "two_sided").first(),
            kind=pl.when(pl.col("grouped").first()).then(pl.lit("Group")).otherwise(pl.col("kind").first()),
            op_bytes=pl.when(~pl.col("grouped").first()).then(pl.col("bytes").first()),
        )
        .sort("op")
        .with_columns(
            program_pos=pl.int_range(pl.len()).over("gpu_number"),
            op_seq=pl.int_range(pl.len()).over("gpu_number", "comm"),
            place=(pl.int_range(pl.len()) / pl.len()).over("gpu_number", "iteration"),
        )
    )
    begins = times.begins_ns[ops["iteration"].to_numpy()]
    lasts = np.diff(times.begins_ns)[ops["iteration"].to_numpy()]
    place = ops["place"].to_numpy()
    call_ns = begins + lasts * place * (_AHEAD if times.waits else _HELD_UP) + rng.integers(0, 2000, len(ops))
    ops = ops.with_columns(
        call_ns=START_NS + pl.Series(call_ns + late_ns[ops["gpu_number"].to_numpy()]).cast(pl.Int64),
        start_ns=START_NS + pl.Series(begins + lasts * (0.05 + 0.8 * place)).cast(pl.Int64),
        comm_id=names.gather(ops["comm"]),
        nranks=pl.Series(sizes).gather(ops["comm"]),
        spans=pl.Series(spans).gather(ops["comm"]),
        node_number=pl.col("gpu_number") // cluster.gpus,
    )
    rings = ops.filter(~pl.col("two_sided"), "spans").with_columns(
        far=pl.lit([["tx", "1"], ["rx", "-1"]], pl.List(pl.List(pl.String)))
    )
    rings = rings.explode("far").with_columns(
        direction=pl.col("far").list.get(0),
        peer_rank=(pl.col("rank") + pl.col("far").list.get(1).cast(pl.Int64)) % pl.col("nranks"),
        bytes="op_bytes",
    )
    pairs = (
        frame.filter("two_sided", pl.col("gpu_number") // cluster.gpus != pl.col("peer_gpu") // cluster.gpus)
        .with_columns(direction=pl.when(pl.col("kind") == "Send").then(pl.lit("tx")).otherwise(pl.lit("rx")))
        .group_by("op", "direction", peer_rank=pl.col("peer").cast(pl.Int64))
        .agg(pl.col("bytes").sum())
        .join(ops, on="op")
    )
    far = pl.concat([rings, pairs], how="diagonal_relaxed").with_columns(
        level=pl.lit("flow"),
        nic=pl.format("mlx5_{}", pl.col("gpu_number") % cluster.gpus),
        end_ns=pl.col("start_ns") + 100_000,
        last_byte_ns=pl.col("start_ns") + 100_000,
        expected_bytes="bytes",
    )
    near = ops.join(far, on="op", how="anti").with_columns(
        level=pl.lit("call"), direction=pl.lit("tx"), bytes=0, start_ns=None
    )
    table = pl.concat([far, near], how="diagonal_relaxed").with_columns(
        node=nodes.gather(pl.concat([far["node_number"], near["node_number"]])),
        pid=1000 + pl.col("gpu_number"),
        gpu=pl.col("gpu_number") % cluster.gpus,
        origin=pl.lit("call"),
        covered=pl.lit(True),
    )
    columns = [
        (pl.col(name) if name in table.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPERATORS.items()
    ]
    comms = pl.DataFrame(
        [
            (comm, gpu, rank, len(members))
            for comm, members in enumerate(job.comm_members)
            for rank, gpu in enumerate(members)
        ],
        schema=["comm", "gpu_number", "rank", "nranks"],
        orient="row",
    )
    comms = comms.with_columns(
        node=nodes.gather(comms["gpu_number"] // cluster.gpus),
        pid=1000 + pl.col("gpu_number"),
        comm_id=names.gather(comms["comm"]),
        gpu=pl.col("gpu_number") % cluster.gpus,
    )
    comms = comms.select(
        (pl.col(name) if name in comms.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in COMMS.items()
    )
    return table.select(columns).sort("node", "nic", "direction", "pid", "program_pos", "peer_rank"), comms


def degraded(operators: pl.DataFrame, lost: float = 0.0, seed: int = 0) -> pl.DataFrame:
    """`operators` of which this share of calls was not seen: the others are numbered without them."""
    made = operators.select("node", "pid", "program_pos").unique(maintain_order=True)
    kept = made.filter(pl.Series(np.random.default_rng(seed).random(made.height) >= lost))
    number = pl.col("program_pos").rank("dense").over("node", "pid") - 1
    return operators.join(kept, on=["node", "pid", "program_pos"], maintain_order="left").with_columns(
        number.cast(pl.UInt64)
    )
