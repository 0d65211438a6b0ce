"""What real faults do to machines: each function stands for an injector and returns the incident that it makes.

A fault acts in windows of time, an array of (start_ns, end_ns) rows. Severity is a factor: 2 means that what is
hit takes twice as long while it is hit, unless a function says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pulse_bpf.lab.sim.model import (
    CHANGE,
    NONE,
    PAUSE,
    Array,
    Executor,
    Floats,
    Incident,
    Network,
    Target,
)


@dataclass(frozen=True)
class Fault:
    """One thing that was broken, for the truth files.

    `kind` and `scope` are those of findings. GPUs and NICs are numbers over all nodes, flows those of the
    network, times are of the simulation. `start_ns` of a fault that lies in a call is that call's `call_ns`,
    which only the run tells. `link` and `other_link` are the two ends of the cable path that `peer_nic` is on:
    a fault at either may look alike.
    """

    kind: str
    scope: str
    severity: float
    start_ns: float
    end_ns: float | None = None
    node: int | None = None
    gpu: int | None = None
    nic: int | None = None
    peer_nic: int | None = None
    flows: tuple[int, ...] = ()
    call: int | None = None
    link: int = NONE
    other_link: int = NONE


def slow_gpu(gpu: int, severity: float, windows: Floats) -> Incident:
    """Clocks locked low or a power cap, as by `nvidia-smi -lgc` or `-pl`: all that the GPU does is slower."""
    return _changed(Target.GPU_SPEED, [gpu], 1 / severity, windows)


def slow_nvlink(gpu: int, severity: float, windows: Floats) -> Incident:
    """NVLink lanes lost: kernels of this GPU move data slower, computing is as fast as ever."""
    return _changed(Target.NVLINK_FACTOR, [gpu], 1 / severity, windows)


def contended_gpu(gpu: int, severity: float, windows: Floats, rng: np.random.Generator) -> Incident:
    """Another process's matrix products on the same GPU: each holds it for 30 to 300 us."""
    return _stalled(Executor.GPU, gpu, 1 - 1 / severity, (30e3, 300e3), windows, rng)


def contended_cpu(gpu: int, severity: float, windows: Floats, rng: np.random.Generator) -> Incident:
    """`stress-ng` on the CPUs that a process is bound to: its two threads wait for scheduler slices of 0.1 to
    10 ms, each of them at times of its own."""
    duty = 1 - 1 / severity
    return combined(
        _stalled(Executor.HOST, gpu, duty, (0.1e6, 10e6), windows, rng),
        _stalled(Executor.PROXY, gpu, duty, (0.1e6, 10e6), windows, rng),
    )


def short_of_memory(
    gpus: Sequence[int], severity: float, windows: Floats, rng: np.random.Generator
) -> Incident:
    """A node that swaps and reclaims its page cache: all its host threads are slower, and now and then a
    thread of any of its processes waits 1 to 20 ms for a page (a tenth of the time at severity 2)."""
    stalls = [
        _stalled(executor, gpu, (1 - 1 / severity) / 5, (1e6, 20e6), windows, rng)
        for gpu in gpus
        for executor in (Executor.PROXY, Executor.HOST)
    ]
    return combined(_changed(Target.HOST_SPEED, gpus, 1 / severity, windows), *stalls)


def paused_host(gpu: int, severity: float, windows: Floats, rng: np.random.Generator) -> Incident:
    """A slow data loader or a garbage collection: the Python thread stops, the library's proxy goes on.

    Each pause is severity - 1 times 50 ms long, give or take a fifth, within 10 to 500 ms, and one is to come
    every 300 ms and its own length; the first comes within the first 200 ms.
    """
    length_ns = float(np.clip((severity - 1) * 50e6, 10e6, 500e6))
    rows = []
    for start_ns, end_ns in windows:
        at_ns = start_ns + rng.uniform(0, min(200e6, (end_ns - start_ns) / 2))
        while at_ns < end_ns:
            paused_ns = length_ns * rng.uniform(0.8, 1.2)
            rows.append((Executor.HOST, gpu, at_ns, at_ns + paused_ns))
            at_ns += paused_ns + rng.exponential(300e6)
    return Incident(pauses=np.array(rows, PAUSE))


def slow_links(network: Network, links: Sequence[int], gbps: float, windows: Floats) -> Incident:
    """A PCIe slot at fewer lanes (`setpci`), or a port capped by `mlnx_qos`, `tc` or a rate register, at `gbps`."""
    return combined(
        *(
            _changed(Target.LINK_FACTOR, [link], min(1.0, gbps / network.links["gbps"][link]), windows)
            for link in links
        )
    )


def flapping(
    links: Sequence[int], severity: float, windows: Floats, rng: np.random.Generator
) -> tuple[Incident, Floats]:
    """`ip link set down` and up again, or a bad transceiver: a port is down for severity x 20 ms at a time, and
    up for 100 to 300 ms. Also gives the windows in which it was down."""
    down = []
    for start_ns, end_ns in windows:
        at_ns = start_ns + rng.uniform(0, min(100e6, (end_ns - start_ns) / 2))
        while at_ns < end_ns:
            up_ns = at_ns + severity * 20e6 * rng.uniform(0.8, 1.2)
            down.append((at_ns, up_ns))
            at_ns = up_ns + rng.uniform(100e6, 300e6)
    outages = np.array(down)
    return _changed(Target.LINK_DOWN, links, 1.0, outages, normal=0.0), outages


def port_down(links: Sequence[int], start_ns: float) -> Incident:
    """A port that goes down and stays so."""
    return _changed(Target.LINK_DOWN, links, 1.0, np.array([[start_ns, np.inf]]), normal=0.0)


def lossy_link(network: Network, link: int, severity: float, windows: Floats) -> Incident:
    """A cable with bit errors, as `tc netem loss` stands for: severity - 1 of 200 packets are lost.

    What that costs depends on the card's recovery, so severity is only of the order of the slow-down.
    """
    return _changed(
        Target.LINK_LOSS, [link], (severity - 1) / 200, windows, normal=float(network.links["loss"][link])
    )


def pause_storm(link: int, severity: float, windows: Floats, rng: np.random.Generator) -> Incident:
    """A receiver that sends pause frames without end: nothing passes its port for 0.3 to 3 ms at a time."""
    storms = _spans(1 - 1 / severity, (0.3e6, 3e6), windows, rng)
    return _changed(Target.LINK_FACTOR, [link], 0.0, storms)


def stopped(executors: Sequence[Executor], gpu: int, start_ns: float) -> Incident:
    """These never run again: the host thread alone as in a deadlock, host and proxy as after SIGSTOP, the GPU
    as with a kernel without end."""
    return combined(
        Incident(pauses=np.array([(executor, gpu, start_ns, np.inf) for executor in executors], PAUSE))
    )


def killed(gpu: int, start_ns: float) -> Incident:
    """`kill -9`."""
    return Incident(changes=np.array([(start_ns, Target.KILLED, gpu, 1.0)], CHANGE))


def combined(*incidents: Incident) -> Incident:
    """All of them at once, in the order that the engine asks for; windows of one target that overlap are one."""
    changes = np.concatenate([incident.changes for incident in incidents])
    pauses = np.concatenate([incident.pauses for incident in incidents])
    background = np.concatenate([incident.background for incident in incidents])
    changes = changes[np.argsort(changes["t_ns"], kind="stable")]
    return Incident(changes=changes, pauses=_disjoint(pauses), background=background)


def at_other_end(incident: Incident, fault: Fault) -> Incident:
    """The same incident with the fault's link exchanged for the one at the other end."""
    changes = incident.changes.copy()
    of_links = np.isin(changes["what"], (Target.LINK_FACTOR, Target.LINK_LOSS, Target.LINK_DOWN))
    changes["target"][of_links & (changes["target"] == fault.link)] = fault.other_link
    return replace(incident, changes=changes)


def _changed(
    what: Target, targets: Sequence[int], value: float, windows: Floats, normal: float = 1.0
) -> Incident:
    """`value` inside the windows and `normal` outside, for each target."""
    start_ns, end_ns = windows[:, 0], windows[windows[:, 1] < np.inf, 1]
    changes = np.zeros((len(targets), len(start_ns) + len(end_ns)), CHANGE)
    changes["t_ns"] = np.concatenate([start_ns, end_ns])
    changes["value"] = np.repeat([value, normal], [len(start_ns), len(end_ns)])
    changes["target"] = np.asarray(targets, "i4")[:, None]
    changes["what"] = what
    return Incident(changes=changes.ravel())


def _stalled(
    executor: Executor,
    target: int,
    duty: float,
    between_ns: tuple[float, float],
    windows: Floats,
    rng: np.random.Generator,
) -> Incident:
    spans = _spans(duty, between_ns, windows, rng)
    pauses = np.zeros(len(spans), PAUSE)
    pauses["executor"], pauses["target"] = executor, target
    pauses["start_ns"], pauses["end_ns"] = spans.T
    return Incident(pauses=pauses)


def _spans(duty: float, between_ns: tuple[float, float], windows: Floats, rng: np.random.Generator) -> Floats:
    """Spans of log-uniform lengths, at random distances, that cover `duty` of the windows on average."""
    shortest_ns, longest_ns = between_ns
    mean_ns = (longest_ns - shortest_ns) / np.log(longest_ns / shortest_ns)
    free_ns = mean_ns * (1 - duty) / duty
    parts = []
    for start_ns, end_ns in windows:
        count = int(2 * (end_ns - start_ns) / (mean_ns + free_ns)) + 50
        lengths_ns = np.exp(rng.uniform(np.log(shortest_ns), np.log(longest_ns), count))
        starts_ns = start_ns + np.cumsum(rng.exponential(free_ns, count))
        starts_ns[1:] += np.cumsum(lengths_ns)[:-1]
        spans = np.stack([starts_ns, np.minimum(starts_ns + lengths_ns, end_ns)], axis=1)
        parts.append(spans[starts_ns < end_ns])
    return np.concatenate(parts)


def _disjoint(pauses: Array) -> Array:
    pauses = np.sort(pauses, order=["executor", "target", "start_ns"])
    parts = [np.zeros(0, PAUSE)]
    for key in np.unique(pauses[["executor", "target"]]):
        of_key = pauses[pauses[["executor", "target"]] == key]
        reach_ns = np.maximum.accumulate(of_key["end_ns"])
        first = np.concatenate([[True], of_key["start_ns"][1:] > reach_ns[:-1]])
        merged = of_key[first]
        merged["end_ns"] = np.maximum.reduceat(of_key["end_ns"], np.flatnonzero(first))
        parts.append(merged)
    return np.concatenate(parts)
