"""Another tenant's traffic, on the ports that the job uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pulse_bpf.lab.sim.fabric import UDP_SPORTS, Fabric
from pulse_bpf.lab.sim.model import (
    BACKGROUND,
    CONNECTION,
    FLOW,
    LINK,
    NONE,
    Floats,
    Incident,
    Network,
    Stage,
)

# As large as NCCL's own: what a message is cut into does not matter to who shares a link with it.
_MESSAGE_BYTES = 1 << 20
_LATENCY_NS = 2000.0


def elephants(
    network: Network, through: Sequence[int], dst_nic: int, gbps: Sequence[float], windows: Floats
) -> tuple[Network, Incident]:
    """One endless flow (`ib_write_bw`) for each of `gbps`, from as many NICs outside, over the links `through`.

    The flows end at `dst_nic`, or, where that is NONE, at another NIC outside that is never too slow. NICs outside
    are numbered after those of the cluster, and have one link each.
    """
    count, outside = (
        len(gbps),
        int(max(network.links["nic"].max(), network.flows["dst_nic"].max(initial=NONE))) + 1,
    )
    ports = np.zeros(count, LINK)
    ports["gbps"], ports["stage"], ports["nic"] = gbps, Stage.SENDER, outside + np.arange(count)
    if dst_nic == NONE:
        dst_nic, through = outside + count, [*through, len(network.links) + count]
        ports = np.append(ports, np.array((sum(gbps), Stage.SWITCH, dst_nic, 0.0), LINK))
    # The engine knows one life of a flow: each window has flows of its own.
    connections = np.zeros(count * len(windows), CONNECTION)
    for name in ("comm", "channel", "src", "dst", "src_proxy", "dst_proxy"):
        connections[name] = NONE
    connections["flow"] = len(network.flows) + np.arange(len(connections))
    connections["flows"], connections["slots"] = 1, 8
    flows = np.zeros(len(connections), FLOW)
    flows["connection"] = len(network.connections) + np.arange(len(connections))
    flows["src_nic"] = np.tile(ports["nic"][:count], len(windows))
    flows["dst_nic"], flows["latency_ns"], flows["path"] = dst_nic, _LATENCY_NS, NONE
    flows["udp_sport"] = UDP_SPORTS[0]
    flows["path"][:, 0] = len(network.links) + np.tile(np.arange(count), len(windows))
    flows["path"][:, 1 : 1 + len(through)] = through
    background = np.zeros(len(connections), BACKGROUND)
    background["flow"], background["message_bytes"] = connections["flow"], _MESSAGE_BYTES
    background["start_ns"], background["end_ns"] = np.repeat(windows, count, axis=0).T
    larger = replace(
        network,
        links=np.concatenate([network.links, ports]),
        flows=np.concatenate([network.flows, flows]),
        connections=np.concatenate([network.connections, connections]),
    )
    return larger, Incident(background=background)


def congested(
    network: Network, fabric: Fabric, link: int, sharers: int, severity: float, windows: Floats
) -> tuple[Network, Incident]:
    """Leave the job's flows on a switch's port 1/severity of it, where `sharers` of them are there at a time.

    Max-min fairness gives every flow the same unless it asks for less: so many tenants are needed that each
    gets what it asks for (at most 32, so that many sharers keep more than 1/severity).
    """
    gbps, nic = float(network.links["gbps"][link]), int(network.links["nic"][link])
    tenants = int(np.clip(np.ceil(sharers * (severity - 1)), 1, 32))
    through = [link] if nic == NONE else [link, fabric.pcie_write(nic)]
    return elephants(network, through, nic, [gbps * (1 - 1 / severity) / tenants] * tenants, windows)
