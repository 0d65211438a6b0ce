"""What a scenario is made from, and what comes out: the machines, the job's traffic, and victims among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.faults import Fault
from pulse_bpf.lab.sim.model import Array, Cluster, Floats, Incident, Ints, Job, Network
from pulse_bpf.lab.sim.victims import busy, link_bytes


@dataclass(frozen=True)
class Prepared:
    """What the engine is to run, and the truth about it: tenants' flows may have been added to the network,
    calls of the job changed."""

    incident: Incident
    network: Network
    job: Job
    calls: Array
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Situation:
    """What a scenario is made from. `carried` is the job's bytes per flow, `spared` are nodes not to be hit."""

    cluster: Cluster
    fabric: Fabric
    network: Network
    job: Job
    calls: Array
    rng: np.random.Generator
    severity: float
    windows: Floats
    end_ns: float
    carried: Floats
    spared: frozenset[int] = frozenset()

    def fault(self, kind: str, scope: str, **where: Any) -> Fault:
        end_ns = float(self.windows[-1, 1])
        fault = Fault(
            kind,
            scope,
            self.severity,
            float(self.windows[0, 0]),
            None if end_ns >= self.end_ns else end_ns,
            **where,
        )
        part = fault.gpu if fault.nic is None else fault.nic
        return fault if part is None else replace(fault, node=part // self.cluster.gpus)

    def with_incident(self, incident: Incident, *done: Fault) -> Prepared:
        return Prepared(incident, self.network, self.job, self.calls, done)

    @property
    def port_gbps(self) -> float:
        """What is left of a NIC's port when what goes over it is to take `severity` times as long."""
        return self.cluster.nic_gbps / self.severity

    def any_gpu(self) -> int:
        return self._choose(np.flatnonzero(np.diff(self.job.first_task)).astype(np.int32), "calls NCCL")

    def any_nic(self, link_of: Callable[[int], int]) -> int:
        """A NIC of which this link carries much."""
        links = np.array([link_of(nic) for nic in range(self.fabric.nics)], np.int32)
        nics = busy(link_bytes(self.network, self.carried), links)
        return self._choose(self.network.links["nic"][nics], "sends from node to node")

    def peer(self, nic: int, receives: bool = False) -> int:
        """The NIC that this one sends most to, or receives most from."""
        ends = ("dst_nic", "src_nic") if receives else ("src_nic", "dst_nic")
        mine = self.network.flows[ends[0]] == nic
        volume = np.bincount(self.network.flows[ends[1]][mine], self.carried[mine])
        return int(volume.argmax())

    def _choose(self, numbers: Ints, does_what: str) -> int:
        left = numbers[~np.isin(numbers // self.cluster.gpus, list(self.spared))]
        if not len(left):
            raise nothing_to_hit(f"no {'other ' if self.spared else ''}GPU of this workload {does_what}")
        return int(self.rng.choice(left))


def nothing_to_hit(why: str) -> UsageError:
    return UsageError(
        "there is nothing for this scenario to hit",
        why,
        "Choose another workload, or more nodes: pulse lab scenarios",
    )
