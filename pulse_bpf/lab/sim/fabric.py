"""The network between the NICs: two tiers of switches, rail-optimised, and the path that each flow takes.

A leaf switch serves one rail (the NICs of one local number) of `nodes_per_leaf` nodes, so that a rail of these
nodes meets in one switch; `spines` uplinks of every leaf, one to each spine, connect everything else. That is
the layout of NVIDIA's DGX SuperPOD reference architecture (rail-optimised leaf and spine) and of Meta's RoCE
clusters (Gangidi et al., "RDMA over Ethernet for Distributed Training at Meta Scale", SIGCOMM 2024).
A leaf chooses the uplink by equal-cost multipath routing: a hash of addresses and UDP source port, the same for
every packet of a queue pair. Assumed: one path per queue pair for its whole life (no adaptive routing and no
packet spraying), and spines that never run full inside. Where a fabric sprays, S10 cannot happen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.model import (
    LINK,
    MAX_HOPS,
    NONE,
    Cluster,
    Ints,
    Network,
    Stage,
)

# A PCIe slot of the NIC's generation over the NIC's rate: Gen5 x16 is 32 GT/s * 16 * 128/130 = 504 Gbit/s, of
# which 256-byte TLPs with about 24 bytes of headers leave 91 %: 460 Gbit/s for a 400 Gbit/s port. Gen4 x16 with
# 200 Gbit/s has the same ratio.
PCIE_FACTOR = 1.15
# Both ends together: perftest's latency of small messages between directly connected adapters, 0.8 to 1 us.
NIC_LATENCY_NS = 800.0
# Cut-through port to port, 425 ns in the data sheet of NVIDIA's SN3000 series, and 15 m of cable at 5 ns/m.
SWITCH_LATENCY_NS = 500.0

# RoCEv2 source ports as Linux makes them (rdma_flow_label_to_udp_sport): 14 bits of a hash of both QP numbers
# under 0xC000.
UDP_SPORTS = np.arange(0xC000, 0x10000)

# PCIe read, egress, ingress, PCIe write.
LINKS_OF_NIC = 4


class Fabric:
    """All links of a healthy cluster (LINK, numbered as `Network.links`) and the ways through them."""

    def __init__(self, cluster: Cluster) -> None:
        if min(cluster.nodes, cluster.gpus, cluster.nodes_per_leaf, cluster.spines) < 1:
            raise UsageError(
                "no fabric can be built",
                "nodes, GPUs per node, nodes per leaf and spines must each be at least 1",
                "give positive numbers",
            )
        self.cluster = cluster
        self.nics = cluster.nodes * cluster.gpus
        self.groups = -(-cluster.nodes // cluster.nodes_per_leaf)
        self.leaves = self.groups * cluster.gpus
        self._first_uplink = self.nics * LINKS_OF_NIC
        self.links = np.zeros(self._first_uplink + self.leaves * 2 * cluster.spines, LINK)
        self.links["gbps"] = cluster.nic_gbps
        self.links["stage"] = Stage.SWITCH
        self.links["nic"] = NONE
        of_nics = self.links[: self._first_uplink].reshape(self.nics, LINKS_OF_NIC)
        of_nics["nic"] = np.arange(self.nics)[:, None]
        of_nics["gbps"] *= np.array([PCIE_FACTOR, 1.0, 1.0, PCIE_FACTOR])
        of_nics["stage"][:, :2] = Stage.SENDER

    def pcie_read(self, nic: int) -> int:
        """Link over which a NIC fetches what it sends."""
        return nic * LINKS_OF_NIC

    def egress(self, nic: int) -> int:
        """Link from a NIC's port to its leaf."""
        return nic * LINKS_OF_NIC + 1

    def ingress(self, nic: int) -> int:
        """Link from the leaf's port to a NIC."""
        return nic * LINKS_OF_NIC + 2

    def pcie_write(self, nic: int) -> int:
        """Link over which a NIC stores what it received."""
        return nic * LINKS_OF_NIC + 3

    def leaf(self, nic: int) -> int:
        """The leaf switch that a NIC is connected to."""
        return int(self._leaf(np.int64(nic)))

    def uplinks(self, leaf: int) -> Ints:
        """Links from a leaf to spine 0, 1, ..."""
        first = self._first_uplink + leaf * 2 * self.cluster.spines
        return np.arange(first, first + self.cluster.spines, dtype=np.int32)

    def downlinks(self, leaf: int) -> Ints:
        """Links from spine 0, 1, ... to a leaf."""
        first = self._first_uplink + (leaf * 2 + 1) * self.cluster.spines
        return np.arange(first, first + self.cluster.spines, dtype=np.int32)

    def name(self, link: int) -> str:
        """What a link is called in truth files and plots, for example "node 3 nic 2 egress"."""
        if link < self._first_uplink:
            nic, which = divmod(link, LINKS_OF_NIC)
            node, rail = divmod(nic, self.cluster.gpus)
            return f"node {node} nic {rail} {('PCIe read', 'egress', 'ingress', 'PCIe write')[which]}"
        if link >= len(self.links):
            return "port of a node outside"
        leaf, place = divmod(link - self._first_uplink, 2 * self.cluster.spines)
        way, spine = divmod(place, self.cluster.spines)
        return f"leaf {leaf} to spine {spine}" if way == 0 else f"spine {spine} to leaf {leaf}"

    def spine(self, src_nic: ArrayLike, dst_nic: ArrayLike, udp_sport: ArrayLike) -> NDArray[np.int64]:
        """The spine that the hash gives these flows; a flow inside one leaf does not use it.

        Switches hash the five-tuple, of which protocol and destination port are constant in RoCEv2. Their hash
        functions are not published; any that spreads well does here (the finaliser of SplitMix64, Steele et al.,
        "Fast splittable pseudorandom number generators", OOPSLA 2014).
        """
        src, dst, sport = (np.asarray(x, np.int64).astype(np.uint64) for x in (src_nic, dst_nic, udp_sport))
        x = (src << np.uint64(40)) ^ (dst << np.uint64(16)) ^ sport
        with np.errstate(over="ignore"):  # the product is meant modulo 2^64
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return np.asarray((x ^ (x >> np.uint64(31))) % np.uint64(self.cluster.spines), np.int64)

    def path(self, src_nic: ArrayLike, dst_nic: ArrayLike, udp_sport: ArrayLike) -> Ints:
        """Links in order, [..., MAX_HOPS], NONE-padded, from NIC to NIC of different nodes."""
        src, dst, sport = np.broadcast_arrays(
            *(np.asarray(x, np.int64) for x in (src_nic, dst_nic, udp_sport))
        )
        path = np.full((*src.shape, MAX_HOPS), NONE, np.int32)
        path[..., 0] = src * LINKS_OF_NIC
        path[..., 1] = src * LINKS_OF_NIC + 1
        path[..., 2] = dst * LINKS_OF_NIC + 2
        path[..., 3] = dst * LINKS_OF_NIC + 3
        far = self._leaf(src) != self._leaf(dst)
        path[far, 4:6] = path[far, 2:4]
        spine = self.spine(src, dst, sport)
        uplinks = self._first_uplink + np.arange(self.leaves) * 2 * self.cluster.spines
        path[far, 2] = (uplinks[self._leaf(src)] + spine)[far]
        path[far, 3] = (uplinks[self._leaf(dst)] + self.cluster.spines + spine)[far]
        return path

    def _leaf(self, nic: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
        node, rail = np.divmod(nic, self.cluster.gpus)
        return np.asarray(rail * self.groups + node // self.cluster.nodes_per_leaf)


def latency_ns(path: Ints) -> NDArray[np.float64]:
    """Time of a bit through idle links, f8[...] for paths [..., MAX_HOPS]: NICs and every switch between."""
    # Three hops are the PCIe links and the sender's port; each further one is a switch's egress port.
    return np.asarray(NIC_LATENCY_NS + SWITCH_LATENCY_NS * ((path != NONE).sum(-1) - 3))


def flows_over(network: Network, link: int) -> Ints:
    """Numbers of the flows whose path has this link."""
    return np.flatnonzero((network.flows["path"] == link).any(1)).astype(np.int32)


def udp_sport_through(
    fabric: Fabric, src_nic: int, dst_nic: int, spine: int, rng: np.random.Generator
) -> int:
    """A UDP source port with which the hash sends a flow through this spine."""
    # Of 16,384 ports each of a few dozen spines has hundreds.
    ports = UDP_SPORTS[fabric.spine(src_nic, dst_nic, UDP_SPORTS) == spine]
    if not len(ports):
        raise UsageError(
            f"no UDP source port leads through spine {spine}",
            f"spines are numbered 0 to {fabric.cluster.spines - 1}",
            "choose one of them",
        )
    return int(rng.choice(ports))


def reroute(network: Network, fabric: Fabric, flow: int, udp_sport: int) -> None:
    """Give a flow between two NICs of the cluster another UDP source port, and with it its path, in place."""
    row = network.flows[flow]
    row["udp_sport"] = udp_sport
    row["path"] = fabric.path(row["src_nic"], row["dst_nic"], udp_sport)
    row["latency_ns"] = latency_ns(row["path"])
