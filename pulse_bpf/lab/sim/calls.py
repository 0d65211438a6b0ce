"""The calls of all processes in program order, and what of them a recorder saw."""

from __future__ import annotations

import numpy as np
import polars as pl

from pulse_bpf.lab.sim.clocks import wall_ns
from pulse_bpf.lab.sim.identity import Identity, Longs
from pulse_bpf.lab.sim.loss import Windows
from pulse_bpf.lab.sim.model import KIND_NAMES, Array, Cluster, Job, Kind, Network, Result, Settings
from pulse_bpf.lab.sim.options import Options
from pulse_bpf.schema import I32, I64, STR, U64

# What NCCL's argument checks and its launch of a kernel take on a server's CPU; no more than _IN_LIBRARY of the
# host's time for the task, so that calls stay behind what comes before them.
_CALL_NS, _LAUNCH_NS = 400.0, 4_000.0
_IN_LIBRARY = 0.8
# How long before the recording a CUDA graph was captured.
_CAPTURED_BEFORE_NS = 500_000_000
_DTYPES = {1: "int8", 2: "bfloat16", 4: "float32", 8: "int64"}
_ROOTED = [int(kind) for kind in (Kind.SEND, Kind.RECV, Kind.BROADCAST, Kind.REDUCE)]
_TWO_SIDED = [int(kind) for kind in (Kind.SEND, Kind.RECV)]
_OF_COMM = ["gpu", "comm"]


def program(
    result: Result,
    network: Network,
    job: Job,
    calls: Array,
    cluster: Cluster,
    settings: Settings,
    identity: Identity,
) -> pl.DataFrame:
    """One row per call that was made, in program order of each GPU.

    call, gpu, node_number, comm, task, place (in its task), grouped, iteration; the columns of CALL; kind_name;
    the names that the recording has: node, pid, comm_id; seq, its number among all calls of the process on the
    communicator, nccl_seq, NCCL's own; call_ns, return_ns, launch_ns, start_ns, end_ns: true times on the node's
    clock, null where it never came to that.
    """
    number, task = _in_order(job.tasks)
    place = np.arange(len(number)) - np.searchsorted(task, task)
    made = np.isfinite(result.call_times["call_ns"][number])
    number, task, place = number[made], task[made], place[made]
    chosen, tasks, times = calls[number], job.tasks[task], result.call_times[number]
    comm = chosen["comm"].astype(np.int64)
    gpu = network.comm_gpus[network.comms["first_gpu"][comm] + chosen["rank"]].astype(np.int64)
    node = gpu // cluster.gpus
    # The engine's time is that of the launch, which ends the call, or the group of calls.
    spent_ns = np.minimum(_LAUNCH_NS + _CALL_NS * (tasks["calls"] - 1), _IN_LIBRARY * tasks["host_ns"])
    each_ns = spent_ns / tasks["calls"]
    call_ns = times["call_ns"] - spent_ns + each_ns * place
    return_ns = np.where(tasks["calls"] > 1, call_ns + 0.7 * each_ns, times["call_ns"])
    return (
        pl.DataFrame(
            {
                "call": number,
                "gpu": gpu,
                "node_number": node,
                "task": task,
                "place": place,
                "grouped": tasks["calls"] > 1,
                "iteration": tasks["iteration"],
                "stream": tasks["stream"],
                **{
                    name: chosen[name]
                    for name in ("comm", "rank", "peer", "kind", "dtype_bytes", "count", "bytes")
                },
                "nranks": network.comms["ranks"][comm],
                "node": pl.Series(identity.nodes, dtype=STR).gather(node),
                "pid": identity.pids[gpu],
                "comm_id": pl.Series(identity.comm_ids, dtype=STR).gather(comm),
                "comm_ptr": identity.comm_ptrs[comm, gpu],
                **{
                    name: _wall(settings, node, values)
                    for name, values in (
                        ("call_ns", call_ns),
                        ("return_ns", return_ns),
                        ("launch_ns", times["call_ns"]),
                        ("start_ns", times["start_ns"]),
                        ("end_ns", times["end_ns"]),
                    )
                },
            }
        )
        .with_columns(
            kind_name=pl.col("kind").replace_strict(dict(enumerate(KIND_NAMES)), return_dtype=STR),
            two_sided=pl.col("kind").is_in(_TWO_SIDED),
            seq=pl.int_range(pl.len(), dtype=U64).over(_OF_COMM),
        )
        .with_columns(
            # NCCL counts collectives alike on all ranks; what it counts of point-to-point calls differs.
            nccl_seq=pl.when(~pl.col("two_sided")).then(
                (~pl.col("two_sided")).cum_sum().over(_OF_COMM).cast(I64) - 1
            )
        )
    )


def ops(
    calls: pl.DataFrame, job: Job, identity: Identity, settings: Settings, options: Options, lost: Windows
) -> tuple[pl.DataFrame, Longs]:
    """The rows of `ops`, with `call`, and how many calls of each node were lost.

    Of a job that replays CUDA graphs there are only the calls that were captured, if that was seen.
    """
    node = calls["node_number"].to_numpy()
    if job.graph:
        first = pl.col("iteration") == pl.col("iteration").min()
        seen = calls.filter(first & (not options.late_attach)).with_columns(call_ns=_captured_ns(settings))
    else:
        first_ns, last_ns = (wall_ns(settings, node, at) for at in (settings.record_ns, settings.end_ns))
        seen = calls.filter(pl.col("call_ns").is_between(pl.Series(first_ns), pl.Series(last_ns)))
    seen = seen.filter(pl.Series(identity.recorded[seen["node_number"].to_numpy()], dtype=pl.Boolean))
    gone = np.zeros(seen.height, bool)
    if not job.graph:
        gone = lost.hit(seen["node_number"].to_numpy(), seen["call_ns"].to_numpy())
    missed = np.bincount(seen["node_number"].to_numpy()[gone], minlength=len(identity.nodes))
    rows = seen.filter(pl.Series(~gone, dtype=pl.Boolean))
    named = rows.select(
        "call",
        "node",
        "pid",
        pl.col("pid").alias("tid"),
        pl.col("gpu").mod(len(identity.pids) // len(identity.nodes)).cast(I32),
        "comm_id",
        "comm_ptr",
        "rank",
        "nranks",
        seq=pl.int_range(pl.len(), dtype=U64).over(_OF_COMM),
        kind="kind_name",
        count="count",
        dtype=pl.col("dtype_bytes").replace_strict(_DTYPES, return_dtype=STR),
        bytes="bytes",
        peer=pl.when(pl.col("kind").is_in(_ROOTED)).then("peer"),
        stream=0x5555_0000_0000 + 0x1000 * pl.col("stream").cast(U64),
        group=pl.when("grouped").then(pl.col("task").cast(U64)),
        call_ns="call_ns",
        return_ns=pl.lit(None, I64) if job.graph else "return_ns",
        launch_ns=pl.lit(None, I64) if job.graph else "launch_ns",
        status=pl.lit(0),
        nccl_seq=pl.when(options.comm_memory).then("nccl_seq"),
        origin=pl.lit("capture" if job.graph else "call"),
    )
    return named, missed


def operators(calls: pl.DataFrame, seen: pl.DataFrame) -> pl.DataFrame:
    """`calls` with the operator that each belongs to: all Send and Recv of one group on a communicator are one.

    `operator`: number of its first call; operator_kind, recorded_ns (call_ns of its first call that was seen);
    op_seq and program_pos: its numbers among the operators seen of the process, on the communicator and of all.
    """
    group = pl.col("grouped") & pl.col("two_sided")
    merged = calls.with_columns(
        operator=pl.when(group)
        .then(pl.col("call").min().over("gpu", "comm", "task", "two_sided"))
        .otherwise("call"),
        operator_kind=pl.when(group).then(pl.lit("Group")).otherwise("kind_name"),
    )
    numbered = (
        merged.join(
            seen.filter(pl.col("origin") == "call").select("call", "call_ns"), on="call", suffix="_seen"
        )
        .group_by("operator")
        .agg(pl.col("gpu", "comm").first(), pl.col("call_ns_seen").min().alias("recorded_ns"))
        .sort("gpu", "recorded_ns")
        .with_columns(
            op_seq=pl.int_range(pl.len(), dtype=U64).over(_OF_COMM),
            program_pos=pl.int_range(pl.len(), dtype=U64).over("gpu"),
        )
        .select("operator", "recorded_ns", "op_seq", "program_pos")
    )
    return merged.join(numbered, on="operator", how="left", maintain_order="left")


def _in_order(tasks: Array) -> tuple[Longs, Longs]:
    """Call numbers in program order, and the task of each."""
    count = tasks["calls"].astype(np.int64)
    task = np.repeat(np.arange(len(tasks)), count)
    first = np.cumsum(count) - count
    return tasks["call"][task] + np.arange(len(task)) - first[task], task


def _captured_ns(settings: Settings) -> pl.Expr:
    first_ns = pl.Series(wall_ns(settings, np.arange(len(settings.clocks)), settings.record_ns))
    began_ns = pl.lit(first_ns).gather(pl.col("node_number")) - _CAPTURED_BEFORE_NS
    return began_ns + int(_CALL_NS) * pl.int_range(pl.len()).over("gpu")


def _wall(settings: Settings, node: Longs, t_ns: np.ndarray) -> pl.Series:
    known = np.isfinite(t_ns)
    shown = wall_ns(settings, node, np.where(known, t_ns, 0.0))
    return pl.DataFrame({"t": shown, "known": known}).select(pl.when("known").then("t"))["t"]
