"""Runs of the simulation made by hand: a ring AllReduce loop in which everything flows evenly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pulse_bpf.lab.sim import collect, nccl
from pulse_bpf.lab.sim.clocks import clocks
from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.model import (
    CALL_TIMES,
    CLOCK,
    COUNTER,
    EVENT,
    MOVED,
    SAMPLE,
    TASK_TIMES,
    Array,
    Cluster,
    Incident,
    Job,
    Network,
    Result,
    Settings,
)
from pulse_bpf.lab.sim.options import Options
from pulse_bpf.lab.sim.workloads import build
from pulse_bpf.lab.sim.workloads.configurations import Size
from pulse_bpf.store import RecordingWriter

BIN_NS = 100_000
PERIOD_NS, SENDING_NS, LATENCY_NS = 5e6, 3e6, 2000.0
MESSAGE_BYTES = 64 << 20
PLAIN = Options()
TRUTH: dict[str, Any] = {"scenario": "healthy", "seed": 3, "healthy": True, "faults": []}


@dataclass
class Run:
    """What goes into collect.write."""

    cluster: Cluster
    network: Network
    job: Job
    calls: Array
    settings: Settings
    result: Result

    def write(self, output: Path, options: Options = PLAIN, **given: Any) -> Path:
        truth, incident = given.get("truth", TRUTH), given.get("incident", Incident())
        collect.write(
            RecordingWriter(output),
            self.result,
            self.network,
            self.job,
            self.calls,
            self.cluster,
            self.settings,
            options,
            truth,
            incident,
        )
        return output


def ring_loop(
    nodes: int = 4,
    gpus: int = 2,
    seconds: float = 0.2,
    record_ns: float = 0.0,
    clock: Options | None = None,
    seed: int = 3,
) -> Run:
    """AllReduces of MESSAGE_BYTES, one every PERIOD_NS; clocks are true without `clock`."""
    cluster = Cluster(nodes=nodes, gpus=gpus, channels=gpus)
    job = build(
        "loops",
        cluster,
        size=Size(message_bytes=MESSAGE_BYTES),
        seconds=seconds,
        rng=np.random.default_rng(seed),
    )
    network, calls = nccl.build(cluster, Fabric(cluster), job, np.random.default_rng(seed))
    clock_rows = np.zeros(nodes, CLOCK)
    if clock is not None:
        clock_rows = clocks(cluster, clock, np.random.default_rng(seed))
    settings = Settings(seed, seconds * 1e9, record_ns, BIN_NS, clock_rows)
    return Run(cluster, network, job, calls, settings, _result(cluster, network, job, calls, settings))


def _result(cluster: Cluster, network: Network, job: Job, calls: Array, settings: Settings) -> Result:
    gpus = cluster.nodes * cluster.gpus
    per_gpu = len(calls) // gpus
    ops = min(per_gpu, int(settings.end_ns / PERIOD_NS))
    times = np.full((gpus, per_gpu), np.nan, CALL_TIMES)
    start_ns = PERIOD_NS * np.arange(ops) + 0.3e6
    times["call_ns"][:, :ops] = start_ns - 0.2e6 + 500 * np.arange(gpus)[:, None]
    times["start_ns"][:, :ops], times["end_ns"][:, :ops] = start_ns, start_ns + SENDING_NS
    far = np.flatnonzero(network.connections["flows"] > 0)
    bytes_each = 2 * (gpus - 1) / gpus * MESSAGE_BYTES / calls["channels"][0]
    moved = np.zeros((len(far), ops), MOVED)
    moved["connection"] = far[:, None]
    for side, name in (("src", "call"), ("dst", "recv_call")):
        moved[name] = network.connections[side][far][:, None] * per_gpu + np.arange(ops)
    moved["bytes"] = round(bytes_each)
    moved["first_tx_ns"], moved["last_tx_ns"] = start_ns, start_ns + SENDING_NS
    moved["first_rx_ns"], moved["last_rx_ns"] = start_ns + LATENCY_NS, start_ns + SENDING_NS + LATENCY_NS
    return Result(
        samples=_samples(cluster, network, far, start_ns, bytes_each, settings),
        events=np.zeros(0, EVENT),
        counters=_counters(gpus, settings),
        call_times=times.ravel(),
        task_times=np.zeros(len(job.tasks), TASK_TIMES),
        moved=moved.ravel(),
        ended_ns=settings.end_ns,
    )


def _samples(
    cluster: Cluster,
    network: Network,
    connections: np.ndarray,
    start_ns: np.ndarray,
    bytes_each: float,
    settings: Settings,
) -> Array:
    rows = []
    for flow in network.connections["flow"][connections]:
        for rx, nic in enumerate((network.flows["src_nic"][flow], network.flows["dst_nic"][flow])):
            clock = settings.clocks[nic // cluster.gpus]
            first_ns = np.maximum(start_ns + rx * LATENCY_NS, settings.record_ns)
            last_ns = start_ns + rx * LATENCY_NS + SENDING_NS
            edges = [
                (clock["offset_ns"] + (1 + clock["drift"]) * at - clock["phase_ns"]) / settings.bin_ns
                for at in (first_ns, last_ns)
            ]
            for first, last in zip(*edges, strict=True):
                if last <= first:
                    continue
                bins = np.arange(np.floor(first), np.ceil(last))
                part = np.minimum(bins + 1, last) - np.maximum(bins, first)
                row = np.zeros(len(bins), SAMPLE)
                row["flow"], row["rx"], row["bin"] = flow, rx, bins
                row["bytes"] = np.diff(
                    np.rint(np.r_[0, np.cumsum(part)] / (SENDING_NS / BIN_NS) * bytes_each)
                )
                row["packets"] = np.ceil(row["bytes"] / cluster.path_mtu)
                row["reverse_ctl"], row["reverse_acks"] = 1, 2
                rows.append(row)
    return np.concatenate(rows)


def _counters(gpus: int, settings: Settings) -> Array:
    at_ns = np.arange(0, settings.end_ns, settings.counter_interval_ns)
    counters = np.zeros((len(at_ns), gpus), COUNTER)
    counters["t_ns"], counters["nic"] = at_ns[:, None], np.arange(gpus)
    counters["tx_bytes"] = counters["rx_bytes"] = (at_ns * 10)[:, None].astype(np.uint64)
    return counters.ravel()


def with_events(run: Run, *events: tuple[float, int, int, int, int]) -> Run:
    """`run` in which these (t_ns, nic, flow, kind, value) were seen."""
    return replace(run, result=replace(run.result, events=np.array(list(events), EVENT)))


def table(directory: Path, name: str) -> pl.DataFrame:
    """All rows of one table of a recording, or of its truth."""
    files = [directory / f"{name}.parquet", *sorted((directory / name).glob("*.parquet"))]
    return pl.concat([pl.read_parquet(file) for file in files if file.exists()])
