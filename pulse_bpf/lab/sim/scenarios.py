"""The scenarios: what is broken, on which workload, how badly and when; the victim is chosen at random.

The rows S1 to S12 are those of docs/scenarios.md, which also shows what each looks like when it is run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim import faults, injections, mismatch
from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.injections import Build
from pulse_bpf.lab.sim.model import NONE, Array, Cluster, Executor, Floats, Incident, Job, Network
from pulse_bpf.lab.sim.paths import spread
from pulse_bpf.lab.sim.situation import Prepared, Situation
from pulse_bpf.lab.sim.victims import flow_bytes

CONTINUOUS, INTERMITTENT, LATE = "continuous", "intermittent", "late"
ALWAYS = (CONTINUOUS, INTERMITTENT, LATE)
ANY = (
    *("dp", "fsdp", "loops", "dp-tree", "megatron", "megatron-interleaved"),
    *("moe", "moe-alltoall", "context", "neighbour"),
)
# Of the recorded time: when a fault of late onset begins, and how long an intermittent one stays and is away.
_LATE = (0.4, 0.6)
_INTERMITTENT = (0.1, 0.25)


@dataclass(frozen=True)
class Scenario:
    """What can be run by name.

    `kinds` and `scopes` (parallel) are those of the findings to expect; scope "workload" leaves a run healthy.
    The first of `workloads` and of `onsets` is the default. `meaning` says what severity is.
    """

    name: str
    row: str
    title: str
    kinds: tuple[str, ...]
    scopes: tuple[str, ...]
    build: Build
    workloads: tuple[str, ...] = ANY
    severity: float = 2.0
    severities: tuple[float, float] = (1.1, 10.0)
    meaning: str = "what is hit takes so many times as long"
    onsets: tuple[str, ...] = ALWAYS

    @property
    def workload(self) -> str:
        return self.workloads[0]


def prepare(
    scenario: Scenario,
    cluster: Cluster,
    fabric: Fabric,
    network: Network,
    job: Job,
    calls: Array,
    rng: np.random.Generator,
    *,
    severity: float,
    onset: str,
    record_ns: float,
    end_ns: float,
) -> Prepared:
    """What the engine is to run so that the scenario happens between record_ns and end_ns, and the truth about it.

    `calls` are those that the library has planned. UsageError: a severity or onset that the scenario does not
    have, or a workload in which it has nothing to hit.
    """
    low, high = scenario.severities
    if not low <= severity <= high:
        raise UsageError(
            f"no {scenario.name} of severity {severity:g}",
            f"{scenario.meaning}; it goes from {low:g} to {high:g}",
        )
    if onset not in scenario.onsets:
        raise UsageError(f"no {onset} {scenario.name}", "", f"There is: {', '.join(scenario.onsets)}")
    carried = flow_bytes(network, calls)
    network = spread(network, fabric, carried, rng)
    situation = Situation(
        cluster,
        fabric,
        network,
        job,
        calls,
        rng,
        severity,
        _windows(onset, record_ns, end_ns, rng),
        end_ns,
        carried,
    )
    prepared = scenario.build(situation)
    return replace(prepared, incident=faults.combined(prepared.incident))


def moved(prepared: Prepared) -> Incident | None:
    """The incident with its only fault at the other end of the link; None when it lies on no link's end.

    Where that changes no sample, nothing in a recording can tell `nic` and `peer_nic` of the fault apart.
    """
    if len(prepared.faults) != 1 or prepared.faults[0].other_link == NONE:
        return None
    return faults.at_other_end(prepared.incident, prepared.faults[0])


def _windows(onset: str, record_ns: float, end_ns: float, rng: np.random.Generator) -> Floats:
    span_ns = end_ns - record_ns
    if onset == CONTINUOUS:
        return np.array([[0.0, end_ns]])
    if onset == LATE:
        return np.array([[record_ns + span_ns * rng.uniform(*_LATE), end_ns]])
    # Even the longest pair leaves room for a first window that ends in the recording.
    turns_ns = record_ns + np.cumsum(rng.uniform(*_INTERMITTENT, 20)) * span_ns
    turns_ns = np.minimum(turns_ns[: np.searchsorted(turns_ns, end_ns) // 2 * 2 + 2], end_ns)
    windows = turns_ns.reshape(-1, 2)
    return windows[windows[:, 0] < end_ns]


def _on_gpu(
    name: str,
    row: str,
    title: str,
    kind: str,
    scope: str,
    incident: injections.OnVictim,
    severity: float = 2.0,
) -> Scenario:
    return Scenario(
        name, row, title, (kind,), (scope,), injections.on_gpu(kind, scope, incident), severity=severity
    )


def _stops(
    name: str, row: str, title: str, kind: str, scope: str, build: Build, workloads: tuple[str, ...] = ANY
) -> Scenario:
    """Ends the job's progress, so it comes late and has no degree."""
    return Scenario(
        name, row, title, (kind,), (scope,), build, workloads, 1.0, (1.0, 1.0), "it stops", (LATE,)
    )


def _healthy(name: str, title: str, workloads: tuple[str, ...], kind: str | None = None) -> Scenario:
    """Nothing is broken; a finding of `kind` that blames the workload is right."""
    build = injections.of_workload(kind) if kind else injections.nothing
    kinds, scopes = ((kind,), ("workload",)) if kind else ((), ())
    return Scenario(
        name, "-", title, kinds, scopes, build, workloads, 1.0, (1.0, 1.0), "nothing is broken", (CONTINUOUS,)
    )


_SLOW_PORT = "bytes over it take so many times as long"

_ALL = (
    _healthy("healthy", "nothing is wrong", ANY),
    _healthy("healthy-uneven", "pipeline stages of unequal depth", ("megatron-uneven",), "uneven-stage"),
    _healthy(
        "healthy-last-stage",
        "the last stage also computes the loss",
        ("megatron-last-stage",),
        "uneven-stage",
    ),
    _healthy("healthy-long", "sequences of unequal length", ("dp-long", "fsdp-long"), "imbalance"),
    _healthy("healthy-skew", "experts with unequal load", ("moe-skew",), "imbalance"),
    _healthy("healthy-warmup", "the first iterations are slower", ("dp-warmup",)),
    _healthy("healthy-checkpoint", "all ranks pause to write a checkpoint", ("dp-checkpoint",)),
    _healthy("healthy-graph", "iterations are CUDA graphs", ("dp-graph", "fsdp-graph")),
    Scenario(
        "healthy-tenant",
        "-",
        "another tenant takes what is left over",
        (),
        (),
        injections.light_tenant,
        ANY,
        1.01,
        (1.005, 1.02),
        "where a port is full, bytes take so many times as long",
        ALWAYS,
    ),
    _on_gpu("gpu-slow", "S1", "GPU clocks locked low", "gpu-slow", "gpu", injections.slow_gpu),
    _on_gpu(
        "gpu-contended",
        "S2",
        "another process computes on the GPU",
        "gpu-contended",
        "gpu",
        injections.contended_gpu,
    ),
    _on_gpu("host-cpu", "S3", "a process shares its CPUs", "host-cpu", "node", injections.contended_cpu),
    Scenario(
        "pcie-slow",
        "S4",
        "the NIC's PCIe slot lost lanes",
        ("pcie-slow",),
        ("nic",),
        injections.pcie_slow,
        meaning=_SLOW_PORT,
    ),
    Scenario(
        "host-pause",
        "S5",
        "the Python thread stops for a while",
        ("host-pause",),
        ("node",),
        injections.on_gpu("host-pause", "node", injections.paused_host),
        severity=3.0,
        meaning="a pause is 50 ms long for each 1 above 1, at least 10 and at most 500 ms",
    ),
    Scenario(
        "nic-slow",
        "S6",
        "the NIC's port sends slower",
        ("nic-slow",),
        ("nic",),
        injections.on_port("nic-slow", False, injections.slow_port),
        meaning=_SLOW_PORT,
    ),
    Scenario(
        "nic-flap",
        "S7",
        "the NIC's port goes down and up again",
        ("nic-down",),
        ("nic",),
        injections.flapping,
        severity=3.0,
        meaning="it is down for so many times 20 ms, and up for 100 to 300 ms",
    ),
    Scenario(
        "lossy-link",
        "S8",
        "the cable has bit errors",
        ("lossy-link",),
        ("nic",),
        injections.on_port("lossy-link", False, injections.lossy),
        severity=3.0,
        meaning="of 200 packets one is lost for each 1 above 1",
    ),
    Scenario(
        "congestion",
        "S9",
        "another tenant sends through the same port",
        ("congestion",),
        ("network",),
        injections.congestion,
        meaning=_SLOW_PORT,
    ),
    Scenario(
        "path-collision",
        "S10",
        "elephants share an uplink",
        ("path-collision",),
        ("network",),
        injections.path_collision,
        ("fsdp", "loops", "context"),
        severities=(2.0, 4.0),
        meaning="how many there are (rounded)",
    ),
    Scenario(
        "pause-storm",
        "S11",
        "the NIC sends pause frames without end",
        ("pause-storm",),
        ("nic",),
        injections.pause_storm,
        severity=3.0,
        meaning="what arrives takes so many times as long, before congestion control reacts to it",
    ),
    _stops(
        "hang-before",
        "S12a",
        "a rank never enters an operator",
        "hang",
        "node",
        injections.on_gpu("hang", "node", injections.stopped(Executor.HOST)),
    ),
    _stops(
        "hang-inside",
        "S12b",
        "a process is stopped inside an operator",
        "hang",
        "node",
        injections.on_gpu("hang", "node", injections.stopped(Executor.HOST, Executor.PROXY)),
    ),
    _stops(
        "mismatch",
        "S12c",
        "a rank skips a collective",
        "mismatch",
        "node",
        mismatch.skipped,
        ("fsdp", "megatron"),
    ),
    _stops(
        "hang-kernel",
        "S12b",
        "a kernel never ends",
        "hang",
        "gpu",
        injections.on_gpu("hang", "gpu", injections.stopped(Executor.GPU)),
    ),
    _stops(
        "crash",
        "S12b",
        "a process is killed",
        "crash",
        "node",
        injections.on_gpu("crash", "node", injections.killed),
    ),
    _stops(
        "nic-down", "S7", "the NIC's port goes down and stays so", "nic-down", "nic", injections.port_down
    ),
    Scenario(
        "ingress-slow",
        "spare",
        "the NIC's port receives slower",
        ("nic-slow",),
        ("nic",),
        injections.on_port("nic-slow", True, injections.slow_port),
        meaning=_SLOW_PORT,
    ),
    _on_gpu(
        "nvlink-slow", "spare", "NVLink lanes lost", "intra-node-slow", "gpu", injections.slow_nvlink, 4.0
    ),
    Scenario(
        "memory-pressure",
        "spare",
        "a node swaps and reclaims",
        ("host-cpu",),
        ("node",),
        injections.memory_pressure,
        meaning="host threads are so many times slower, and threads wait for pages now and then",
    ),
    Scenario(
        "far-socket",
        "spare",
        "a GPU uses a NIC of the other socket",
        ("pcie-slow",),
        ("nic",),
        injections.far_socket,
        meaning=_SLOW_PORT,
        onsets=(CONTINUOUS,),
    ),
    Scenario(
        "sockets",
        "spare",
        "NCCL fell back to TCP",
        ("unknown",),
        ("workload",),
        injections.sockets,
        severity=8.0,
        severities=(2.0, 10.0),
        meaning=_SLOW_PORT,
        onsets=(CONTINUOUS,),
    ),
    Scenario(
        "two-nics",
        "two",
        "two NICs of different nodes send slower",
        ("nic-slow", "nic-slow"),
        ("nic", "nic"),
        injections.two(
            injections.on_port("nic-slow", False, injections.slow_port),
            injections.on_port("nic-slow", False, injections.slow_port),
        ),
        meaning=_SLOW_PORT,
    ),
    Scenario(
        "gpu-and-nic",
        "two",
        "a slow GPU and, on another node, a slow NIC",
        ("gpu-slow", "nic-slow"),
        ("gpu", "nic"),
        injections.two(
            injections.on_gpu("gpu-slow", "gpu", injections.slow_gpu),
            injections.on_port("nic-slow", False, injections.slow_port),
        ),
    ),
)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
