"""Lets a job run on a cluster: hands model.py's arrays to the C engine and takes its arrays back."""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.lab import CACHE
from pulse_bpf.lab.compiled import compiled
from pulse_bpf.lab.sim.model import (
    CALL_TIMES,
    COUNTER,
    EVENT,
    MOVED,
    P2P_PARTS,
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

_HERE = Path(__file__).parent
_PARTS = (
    *("engine.c", "dues.c", "meter.c", "flows.c", "sharing.c", "filling.c"),
    *("connections.c", "kernels.c", "hosts.c", "rows.c", "engine.h", "sharing.h"),
)
SOURCES = [_HERE / name for name in _PARTS]
# Without fused multiply-add, so that the same seed gives the same bytes on every machine; symbolic, since glibc
# has an `advance` of its own.
_OPTIONS = ("-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-Bsymbolic")
_COMPILE = ("gcc", *_OPTIONS, "-lm")
# MAX_STREAMS and half of SLICES in engine.h.
_MOST_STREAMS, _MOST_SLOTS = 16, 16
# Ethernet with its gap and preamble 38, IPv4 20, UDP 8, base transport header 12, ICRC 4.
_PACKET_OVERHEAD_BYTES = 82

_ARRAYS = (
    *(
        "links",
        "flows",
        "connections",
        "comms",
        "comm_gpus",
        "places",
        "pairs",
        "tasks",
        "first_task",
        "calls",
    ),
    *("changes", "pauses", "background", "clocks"),
)
_COUNTS = ("links", "flows", "connections", "comms", "tasks", "calls", "changes", "pauses", "background")


class _Inputs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_ARRAYS, "awaited", "told")),
        *((f"{name}_count", ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_int64) for name in ("gpu_count", "gpus_per_node")),
        ("seed", ctypes.c_uint64),
        *(
            (name, ctypes.c_double)
            for name in ("end_ns", "record_ns", "bin_ns", "counter_interval_ns", "retry_ns", "mtu_bytes")
        ),
        *((name, ctypes.c_double) for name in ("channel_gbps", "nvlink_gbps")),
        *((name, ctypes.c_int32) for name in ("retry_count", "p2p_parts", "tenant_nics")),
    )


class _Array(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("count", ctypes.c_int64), ("capacity", ctypes.c_int64))


class _Outputs(ctypes.Structure):
    _fields_ = (
        *((name, _Array) for name in ("samples", "events", "counters", "moved")),
        ("call_times", ctypes.c_void_p),
        ("task_times", ctypes.c_void_p),
        ("ended_ns", ctypes.c_double),
        ("steps", ctypes.c_int64),
    )


class Awaited:
    """The calls that a run goes on for: all there are until, while it runs already, it is told which."""

    def __init__(self, calls: Array) -> None:
        self.calls, self.told = np.ones(len(calls), np.uint8), np.zeros(1, np.uint8)

    def tell(self, calls: NDArray[np.bool_]) -> None:
        """From now on the run ends within a millisecond of the last of `calls`, true where it is awaited."""
        self.calls[:] = calls
        self.told[0] = 1


@cache
def library() -> ctypes.CDLL:
    """The engine, compiled if it was not yet. HostError when it cannot be."""
    return ctypes.CDLL(str(compiled(SOURCES, CACHE, _COMPILE, "gcc")))


def run(
    network: Network,
    job: Job,
    calls: Array,
    incident: Incident,
    settings: Settings,
    cluster: Cluster,
    awaited: Awaited | None = None,
) -> Result:
    """Runs `job`, whose `calls` nccl.build has planned, to `settings.end_ns`, or until all that is `awaited` has ended.

    The same arguments give the same result. Links give their payload's share of the line rate, headers taken
    off. HostError when the engine cannot be compiled.
    """
    if (
        job.tasks["stream"].max(initial=0) >= _MOST_STREAMS
        or network.connections["slots"].max(initial=0) > _MOST_SLOTS
    ):
        raise ValueError("more streams or slots than the engine has places for")
    links = network.links.copy()
    links["gbps"] *= cluster.path_mtu / (cluster.path_mtu + _PACKET_OVERHEAD_BYTES)
    gpus = cluster.nodes * cluster.gpus
    given = {
        "links": links,
        "flows": network.flows,
        "connections": network.connections,
        "comms": network.comms,
        "comm_gpus": network.comm_gpus,
        "places": network.places,
        "pairs": network.pairs,
        "tasks": job.tasks,
        "first_task": job.first_task,
        "calls": calls,
        "changes": incident.changes,
        "pauses": incident.pauses,
        "background": incident.background,
        "clocks": settings.clocks,
    }
    given = {name: np.ascontiguousarray(array) for name, array in given.items()}
    awaited = awaited or Awaited(calls)
    call_times = np.full(len(calls), np.nan, np.dtype([("x", "f8", 3)])).view(CALL_TIMES)
    task_times = np.full(len(job.tasks), np.nan, np.dtype([("x", "f8", 2)])).view(TASK_TIMES)
    inputs = _Inputs(
        **{name: given[name].ctypes.data for name in _ARRAYS},
        **{f"{name}_count": len(given[name]) for name in _COUNTS},
        awaited=awaited.calls.ctypes.data,
        told=awaited.told.ctypes.data,
        gpu_count=gpus,
        gpus_per_node=cluster.gpus,
        seed=settings.seed,
        end_ns=settings.end_ns,
        record_ns=settings.record_ns,
        bin_ns=settings.bin_ns,
        counter_interval_ns=settings.counter_interval_ns,
        retry_ns=4096.0 * 2**settings.timeout,
        mtu_bytes=cluster.path_mtu,
        channel_gbps=cluster.channel_gbps,
        nvlink_gbps=cluster.nvlink_gbps,
        retry_count=settings.retry_count,
        p2p_parts=P2P_PARTS,
        tenant_nics=max(0, int(links["nic"].max(initial=0)) + 1 - gpus),
    )
    outputs = _Outputs(call_times=call_times.ctypes.data, task_times=task_times.ctypes.data)
    library().sim_run(ctypes.byref(inputs), ctypes.byref(outputs))
    return Result(
        samples=_taken(outputs.samples, SAMPLE),
        events=_taken(outputs.events, EVENT),
        counters=_taken(outputs.counters, COUNTER),
        call_times=call_times,
        task_times=task_times,
        moved=_taken(outputs.moved, MOVED),
        ended_ns=outputs.ended_ns,
    )


def _taken(array: _Array, dtype: np.dtype[np.void]) -> Array:
    """The engine's own memory as an array, freed with it."""
    if not array.count:
        return np.zeros(0, dtype)
    data = (ctypes.c_char * (array.count * dtype.itemsize)).from_address(array.data)
    weakref.finalize(data, library().sim_free, ctypes.c_void_p(array.data)).atexit = False
    return np.frombuffer(data, dtype)
