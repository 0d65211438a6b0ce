"""Jobs of a few launches and runs of them in the engine, for tests of the simulated physics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sim_networks import RING

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim import engine, nccl
from pulse_bpf.lab.sim.fabric import NIC_LATENCY_NS, SWITCH_LATENCY_NS, Fabric, latency_ns
from pulse_bpf.lab.sim.model import (
    BACKGROUND,
    CALL,
    CHANGE,
    CLOCK,
    CONNECTION,
    FLOW,
    LINK,
    MAX_HOPS,
    NONE,
    PAUSE,
    TASK,
    Array,
    Cluster,
    Executor,
    Incident,
    Job,
    Network,
    Result,
    Settings,
    Stage,
    Target,
)
from pulse_bpf.lab.sim.tuning import NcclOptions

MS = 1e6
SECOND = 1e9
# What of a line's rate is payload: 82 bytes around 4096 with Ethernet's gap, IPv4, UDP and InfiniBand's headers.
PAYLOAD = 4096 / 4178
NOTHING = Incident()


def line(cluster: Cluster) -> float:
    """Payload that a NIC's port carries, in bytes per ns."""
    return cluster.nic_gbps / 8 * PAYLOAD


@dataclass(frozen=True)
class Case:
    """A job on the network that was built for it."""

    cluster: Cluster
    fabric: Fabric
    network: Network
    job: Job
    calls: Array

    def run(self, incident: Incident = NOTHING, seconds: float = 1.0, **given: Any) -> Result:
        clocks = given.pop("clocks", np.zeros(self.cluster.nodes, CLOCK))
        settings = Settings(
            given.pop("seed", 1),
            seconds * SECOND,
            given.pop("record_ns", 0.0),
            given.pop("bin_ns", 32_000),
            clocks,
            **given,
        )
        return engine.run(self.network, self.job, self.calls, incident, settings, self.cluster)

    def with_tenant(self, src_nic: int, dst_nic: int, udp_sport: int = 0xC000) -> tuple[Case, int]:
        network, flow = background_flow(self.network, self.fabric, src_nic, dst_nic, udp_sport)
        return replace(self, network=network), flow


def background_flow(
    network: Network, fabric: Fabric, src_nic: int, dst_nic: int, udp_sport: int
) -> tuple[Network, int]:
    """The network with a tenant's connection of one flow, that belongs to no communicator; and the flow's number.

    With `src_nic` or `dst_nic` NONE that end is a node outside, behind the spines. Only a port of it is modelled:
    a link at the end of `links`, of a NIC numbered after all others, which has no GPU.
    """
    links = network.links
    used = network.flows
    if src_nic == NONE and dst_nic == NONE:
        raise UsageError("a tenant's flow touches no NIC of the cluster", "both ends are outside", "name one")
    outside = max([fabric.nics - 1, *used["src_nic"], *used["dst_nic"]]) + 1
    if src_nic == NONE or dst_nic == NONE:
        port = np.zeros(1, LINK)
        port["gbps"], port["nic"] = fabric.cluster.nic_gbps, outside
        path = np.full(MAX_HOPS, NONE, np.int32)
        if src_nic == NONE:
            src_nic, port["stage"] = outside, Stage.SENDER
            down = fabric.downlinks(fabric.leaf(dst_nic))[fabric.spine(src_nic, dst_nic, udp_sport)]
            path[:4] = len(links), down, fabric.ingress(dst_nic), fabric.pcie_write(dst_nic)
        else:
            dst_nic, port["stage"] = outside, Stage.SWITCH
            up = fabric.uplinks(fabric.leaf(src_nic))[fabric.spine(src_nic, dst_nic, udp_sport)]
            path[:4] = fabric.pcie_read(src_nic), fabric.egress(src_nic), up, len(links)
        links = np.concatenate([links, port])
    else:
        path = fabric.path(src_nic, dst_nic, udp_sport)
    flow = np.zeros(1, FLOW)
    flow["connection"], flow["src_nic"], flow["dst_nic"] = len(network.connections), src_nic, dst_nic
    flow["path"] = path
    # A node outside is as far away as one behind another leaf.
    far_ns = NIC_LATENCY_NS + 3 * SWITCH_LATENCY_NS
    flow["latency_ns"] = far_ns if outside in (src_nic, dst_nic) else latency_ns(path)
    connection = np.zeros(1, CONNECTION)
    connection["comm"] = connection["channel"] = NONE
    connection["src"] = connection["src_proxy"] = NONE if src_nic == outside else src_nic
    connection["dst"] = connection["dst_proxy"] = NONE if dst_nic == outside else dst_nic
    connection["flow"], connection["flows"], connection["slots"] = len(used), 1, 8
    larger = replace(
        network,
        links=links,
        flows=np.concatenate([used, flow]),
        connections=np.concatenate([network.connections, connection]),
    )
    return larger, len(used)


def task(**given: float) -> Array:
    row = np.zeros(1, TASK)
    for name in ("wait_a", "wait_b", "call"):
        row[name] = NONE
    for name, value in given.items():
        row[name] = value
    return row


def case(
    cluster: Cluster,
    members: Sequence[Sequence[int]],
    *launches: Array,
    options: NcclOptions = RING,
    host_ns: float = 5e3,
    compute_ns: float = 0.0,
    sync: bool = False,
    seed: int = 0,
) -> Case:
    """Every GPU makes the calls of each launch that are its own together, one launch after the other."""
    gpus = cluster.nodes * cluster.gpus
    tasks, first, calls = [np.zeros(0, TASK)], [0], [np.zeros(0, CALL)]
    for gpu in range(gpus):
        for launch in launches:
            owner = np.array([members[call["comm"]][call["rank"]] for call in launch])
            own = launch[owner == gpu]
            if not len(own):
                continue
            made = sum(map(len, calls))
            tasks.append(task(call=made, calls=len(own), compute_ns=compute_ns, host_ns=host_ns, sync=sync))
            calls.append(own)
        first.append(sum(map(len, tasks)))
    names = [""] * len(members)
    lists = [list(gpus) for gpus in members]
    job = Job(np.concatenate(tasks), np.array(first, np.int32), np.concatenate(calls), lists, names)
    fabric = Fabric(cluster)
    network, planned = nccl.build(cluster, fabric, job, np.random.default_rng(seed), options)
    return Case(cluster, fabric, network, job, planned)


def programs(cluster: Cluster, *of_gpus: Sequence[Array]) -> Case:
    """GPUs that compute only: the tasks of GPU 0, 1, ..., the others idle."""
    gpus = cluster.nodes * cluster.gpus
    lists = [list(tasks) for tasks in of_gpus] + [[]] * (gpus - len(of_gpus))
    first = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    tasks = np.concatenate([np.zeros(0, TASK), *(row for tasks in lists for row in tasks)])
    job = Job(tasks, first, np.zeros(0, CALL), [], [])
    fabric = Fabric(cluster)
    network, calls = nccl.build(cluster, fabric, job, np.random.default_rng(0))
    return Case(cluster, fabric, network, job, calls)


def changes(*rows: tuple[float, Target, int, float]) -> Incident:
    return Incident(changes=np.array(list(rows), CHANGE))


def pauses(*rows: tuple[Executor, int, float, float]) -> Incident:
    return Incident(pauses=np.array(list(rows), PAUSE))


def background(*rows: tuple[int, int, float, float]) -> Incident:
    return Incident(background=np.array(list(rows), BACKGROUND))


def by_flow(result: Result, network: Network, rx: int, name: str = "bytes") -> np.ndarray:
    """Sum of a column of the samples at one end of each flow, i8[flows]."""
    rows = result.samples[result.samples["rx"] == rx]
    return np.bincount(rows["flow"], rows[name], len(network.flows)).astype(np.int64)


def moved_by_connection(result: Result, network: Network) -> np.ndarray:
    """i8[connections]"""
    moved = result.moved
    return np.bincount(moved["connection"], moved["bytes"], len(network.connections)).astype(np.int64)


def bytes_in(result: Result, flow: int, rx: int, bin_ns: int, from_ns: float, to_ns: float) -> float:
    """Of one end of a flow, in the bins between, by clocks that are true."""
    rows = result.samples[(result.samples["flow"] == flow) & (result.samples["rx"] == rx)]
    inside = (rows["bin"] * bin_ns >= from_ns) & ((rows["bin"] + 1) * bin_ns <= to_ns)
    return float(rows["bytes"][inside].sum())
