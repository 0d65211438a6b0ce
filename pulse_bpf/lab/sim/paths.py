"""Which uplinks a job's heavy flows share: none on a healthy fabric as far as possible, one in a path collision.

Assumed: where a job runs well, someone has seen to it that its elephants take different uplinks, by choosing UDP
source ports (as Qian et al., "Alibaba HPN", SIGCOMM 2024, do) or by a hash that was tuned. Left to chance, most
healthy runs would have collisions that the truth does not name.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pulse_bpf.lab.sim.fabric import Fabric, reroute, udp_sport_through
from pulse_bpf.lab.sim.model import NONE, Floats, Ints, Network
from pulse_bpf.lab.sim.victims import busy

# All-to-alls of a thousand GPUs have a million small flows, which mix well enough by themselves.
_MOST = 4096


def between_spines(network: Network, carried: Floats) -> Ints:
    """The heavy flows that cross spines, heaviest first."""
    heavy = busy(carried, np.arange(len(network.flows), dtype=np.int32))
    far = heavy[network.flows["path"][heavy, 4] != NONE]
    return np.asarray(far[np.argsort(-carried[far], kind="stable")], np.int32)


def spread(network: Network, fabric: Fabric, carried: Floats, rng: np.random.Generator) -> Network:
    """Ports that keep elephants of different NICs apart, each on the spine with the least of others on its way."""
    network = replace(network, flows=network.flows.copy())
    flows, spines = network.flows, fabric.cluster.spines
    # Bytes over [leaf, spine], in all and by the NIC at this end, up and down.
    total = np.zeros((2, fabric.leaves, spines))
    by_nic = np.zeros((2, fabric.nics, spines))
    for flow in between_spines(network, carried)[:_MOST]:
        nics = int(flows["src_nic"][flow]), int(flows["dst_nic"][flow])
        leaves = fabric.leaf(nics[0]), fabric.leaf(nics[1])
        others = sum(total[way, leaves[way]] - by_nic[way, nics[way]] for way in (0, 1))
        spine = _spine(network, fabric, flow)
        if others[spine] > others.min():
            spine = int(rng.choice(np.flatnonzero(others == others.min())))
            reroute(network, fabric, flow, udp_sport_through(fabric, *nics, spine, rng))
        for way in (0, 1):
            total[way, leaves[way], spine] += carried[flow]
            by_nic[way, nics[way], spine] += carried[flow]
    return network


def rivals(network: Network, fabric: Fabric, flow: int, among: Ints) -> Ints:
    """Those `among` that can be put onto one port between switches with `flow`: its leaf's or its peer's leaf's,
    whichever more of them use. No two of all these share a NIC, for such are no faster apart."""
    ends = [network.flows[end] for end in ("src_nic", "dst_nic")]
    leaf = np.array([fabric.leaf(nic) for nic in range(fabric.nics)])
    apart = among[(ends[0][among] != ends[0][flow]) & (ends[1][among] != ends[1][flow])]
    up, down = (_apart(apart[leaf[end[apart]] == leaf[end[flow]]], ends[0], ends[1]) for end in ends)
    return up if len(up) >= len(down) else down


def _apart(flows: Ints, src: Ints, dst: Ints) -> Ints:
    kept = []
    while len(flows):
        kept.append(flows[0])
        flows = flows[(src[flows] != src[flows[0]]) & (dst[flows] != dst[flows[0]])]
    return np.array(kept, np.int32)


def put_together(
    network: Network, fabric: Fabric, flow: int, others: Ints, rng: np.random.Generator
) -> Network:
    """UDP source ports that lead `others` through the spine of `flow`."""
    network = replace(network, flows=network.flows.copy())
    spine = _spine(network, fabric, flow)
    for other in others:
        src, dst = int(network.flows["src_nic"][other]), int(network.flows["dst_nic"][other])
        reroute(network, fabric, int(other), udp_sport_through(fabric, src, dst, spine, rng))
    return network


def _spine(network: Network, fabric: Fabric, flow: int) -> int:
    uplinks = fabric.uplinks(fabric.leaf(int(network.flows["src_nic"][flow])))
    return int(np.flatnonzero(uplinks == network.flows["path"][flow, 2])[0])
