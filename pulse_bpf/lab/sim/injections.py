"""How each scenario hits the machines: victims drawn at random, the incident, and the truth about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pulse_bpf.lab.sim import faults
from pulse_bpf.lab.sim.fabric import flows_over
from pulse_bpf.lab.sim.model import NONE, Executor, Incident, Stage
from pulse_bpf.lab.sim.paths import between_spines, put_together, rivals
from pulse_bpf.lab.sim.placement import scattered
from pulse_bpf.lab.sim.situation import Prepared, Situation, nothing_to_hit
from pulse_bpf.lab.sim.tenants import congested, elephants
from pulse_bpf.lab.sim.victims import busy, link_bytes

Build = Callable[[Situation], Prepared]
OnVictim = Callable[[Situation, int], Incident]

# Of the job's NICs that a light tenant sends to.
_TENANT_NICS = 8


def nothing(situation: Situation) -> Prepared:
    return situation.with_incident(Incident())


def of_workload(kind: str) -> Build:
    """Slow by what the job does: no machine is at fault."""
    return lambda situation: situation.with_incident(Incident(), situation.fault(kind, "workload"))


def light_tenant(situation: Situation) -> Prepared:
    """Another tenant's small streams, each to one of the job's NICs, that hardly take anything from it."""
    fabric, prepared = situation.fabric, situation.with_incident(Incident())
    for nic in situation.rng.choice(fabric.nics, min(_TENANT_NICS, fabric.nics), replace=False):
        network, incident = congested(
            prepared.network, fabric, fabric.ingress(nic), 1, situation.severity, situation.windows
        )
        prepared = replace(prepared, network=network, incident=faults.combined(prepared.incident, incident))
    return prepared


def on_gpu(kind: str, scope: str, incident: OnVictim) -> Build:
    """On a random GPU, or its process."""

    def build(situation: Situation) -> Prepared:
        gpu = situation.any_gpu()
        return situation.with_incident(incident(situation, gpu), situation.fault(kind, scope, gpu=gpu))

    return build


def slow_gpu(s: Situation, gpu: int) -> Incident:
    return faults.slow_gpu(gpu, s.severity, s.windows)


def slow_nvlink(s: Situation, gpu: int) -> Incident:
    return faults.slow_nvlink(gpu, s.severity, s.windows)


def contended_gpu(s: Situation, gpu: int) -> Incident:
    return faults.contended_gpu(gpu, s.severity, s.windows, s.rng)


def contended_cpu(s: Situation, gpu: int) -> Incident:
    return faults.contended_cpu(gpu, s.severity, s.windows, s.rng)


def paused_host(s: Situation, gpu: int) -> Incident:
    return faults.paused_host(gpu, s.severity, s.windows, s.rng)


def killed(s: Situation, gpu: int) -> Incident:
    return faults.killed(gpu, s.windows[0, 0])


def stopped(*executors: Executor) -> OnVictim:
    return lambda s, gpu: faults.stopped(executors, gpu, s.windows[0, 0])


def memory_pressure(situation: Situation) -> Prepared:
    node, gpus = situation.any_gpu() // situation.cluster.gpus, situation.cluster.gpus
    processes = range(node * gpus, (node + 1) * gpus)
    incident = faults.short_of_memory(processes, situation.severity, situation.windows, situation.rng)
    return situation.with_incident(incident, replace(situation.fault("host-cpu", "node"), node=node))


def pcie_slow(situation: Situation) -> Prepared:
    fabric = situation.fabric
    nic = situation.any_nic(fabric.pcie_read)
    links = [fabric.pcie_read(nic), fabric.pcie_write(nic)]
    incident = faults.slow_links(situation.network, links, situation.port_gbps, situation.windows)
    return situation.with_incident(incident, situation.fault("pcie-slow", "nic", nic=nic))


def far_socket(situation: Situation) -> Prepared:
    """As a slow slot, and every message of the NIC crosses the link between the sockets: 1 us more each way."""
    slow = pcie_slow(situation)
    flows = slow.network.flows.copy()
    flows["latency_ns"][
        (flows["src_nic"] == slow.faults[0].nic) | (flows["dst_nic"] == slow.faults[0].nic)
    ] += 1000
    return replace(slow, network=replace(slow.network, flows=flows))


def on_port(kind: str, receives: bool, incident: OnVictim) -> Build:
    """On one direction of a NIC's port; the other end of that path is the peer's port, in its direction."""

    def build(situation: Situation) -> Prepared:
        fabric = situation.fabric
        mine, others = (fabric.ingress, fabric.egress) if receives else (fabric.egress, fabric.ingress)
        nic = situation.any_nic(mine)
        peer = situation.peer(nic, receives)
        fault = situation.fault(kind, "nic", nic=nic, peer_nic=peer, link=mine(nic), other_link=others(peer))
        return situation.with_incident(incident(situation, mine(nic)), fault)

    return build


def slow_port(situation: Situation, link: int) -> Incident:
    return faults.slow_links(situation.network, [link], situation.port_gbps, situation.windows)


def lossy(situation: Situation, link: int) -> Incident:
    return faults.lossy_link(situation.network, link, situation.severity, situation.windows)


def pause_storm(situation: Situation) -> Prepared:
    nic = situation.any_nic(situation.fabric.ingress)
    incident = faults.pause_storm(
        situation.fabric.ingress(nic), situation.severity, situation.windows, situation.rng
    )
    return situation.with_incident(incident, situation.fault("pause-storm", "nic", nic=nic))


def sockets(situation: Situation) -> Prepared:
    """NCCL found no RDMA and talks TCP through the kernel, on all nodes alike, at a fraction of every port's rate.

    Nothing is broken but the configuration, and no queue pair is there to be seen: the job's meta says "socket".
    """
    fabric = situation.fabric
    links = [link(nic) for nic in range(fabric.nics) for link in (fabric.egress, fabric.ingress)]
    incident = faults.slow_links(situation.network, links, situation.port_gbps, situation.windows)
    job = replace(situation.job, meta={**situation.job.meta, "transport": "socket"})
    return replace(situation.with_incident(incident, situation.fault("unknown", "workload")), job=job)


def flapping(situation: Situation) -> Prepared:
    nic = situation.any_nic(situation.fabric.egress)
    ports = [situation.fabric.egress(nic), situation.fabric.ingress(nic)]
    incident, outages = faults.flapping(ports, situation.severity, situation.windows, situation.rng)
    fault = replace(situation.fault("nic-down", "nic", nic=nic), start_ns=float(outages[0, 0]))
    return situation.with_incident(incident, fault)


def port_down(situation: Situation) -> Prepared:
    nic = situation.any_nic(situation.fabric.egress)
    ports = [situation.fabric.egress(nic), situation.fabric.ingress(nic)]
    incident = faults.port_down(ports, situation.windows[0, 0])
    return situation.with_incident(incident, situation.fault("nic-down", "nic", nic=nic))


def congestion(situation: Situation) -> Prepared:
    """At a port of a switch, to a NIC or between switches, that the job uses."""
    network, volume = situation.network, link_bytes(situation.network, situation.carried)
    ports = np.flatnonzero(network.links["stage"] == Stage.SWITCH)
    writes = [situation.fabric.pcie_write(nic) for nic in range(situation.fabric.nics)]
    used = busy(volume, np.setdiff1d(ports, writes))
    if not len(used):
        raise nothing_to_hit("no flow of this workload passes a switch")
    link = int(situation.rng.choice(used))
    flows = busy(situation.carried, flows_over(network, link))
    larger, incident = congested(
        network, situation.fabric, link, len(flows), situation.severity, situation.windows
    )
    fault = situation.fault("congestion", "network", flows=tuple(flows.tolist()))
    return replace(situation.with_incident(incident, fault), network=larger)


def path_collision(situation: Situation) -> Prepared:
    """As many elephants as severity says on one port between switches: the job's own where they are there from
    the start, for a path does not change while a connection lives, else tenants' that come and go."""
    wanted, from_start = round(situation.severity) - 1, situation.windows[0, 0] == 0
    if from_start:
        situation = scattered(situation)
    network, rng = situation.network, situation.rng
    far = between_spines(network, situation.carried)
    if not len(far):
        raise nothing_to_hit("no heavy flow of this workload leaves its leaf switch")
    flow = int(rng.choice(far))
    if from_start:
        others = rivals(network, situation.fabric, flow, far)
        if not len(others):
            raise nothing_to_hit("no two heavy flows of this workload can share an uplink")
        others = rng.choice(others, min(wanted, len(others)), replace=False)
        network, incident = put_together(network, situation.fabric, flow, others, rng), Incident()
    else:
        port, others = int(network.flows["path"][flow, 2]), np.zeros(0, np.int32)
        gbps = [float(network.links["gbps"][port])] * wanted
        network, incident = elephants(network, [port], NONE, gbps, situation.windows)
    fault = situation.fault("path-collision", "network", flows=(flow, *map(int, others)))
    return replace(situation.with_incident(incident, fault), network=network)


def two(first: Build, second: Build) -> Build:
    """Both at once, on different nodes."""

    def build(situation: Situation) -> Prepared:
        one = first(situation)
        hit = frozenset(fault.node for fault in one.faults if fault.node is not None)
        rest = replace(situation, network=one.network, job=one.job, calls=one.calls, spared=hit)
        two = second(rest)
        incident = faults.combined(one.incident, two.incident)
        return replace(two, incident=incident, faults=one.faults + two.faults)

    return build
