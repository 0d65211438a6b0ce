"""The simulated fabric: paths, hashing, and traffic of others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_networks import all_gpus, built, everyone
from sim_programs import background_flow

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim import fabric as fabrics
from pulse_bpf.lab.sim.fabric import UDP_SPORTS, Fabric, flows_over, latency_ns
from pulse_bpf.lab.sim.model import NONE, Cluster, Kind, Network, Stage

CLUSTERS = st.builds(
    Cluster,
    nodes=st.integers(2, 12),
    gpus=st.integers(1, 8),
    nodes_per_leaf=st.integers(1, 5),
    spines=st.integers(1, 9),
)


def a_network(cluster: Cluster) -> tuple[Fabric, Network]:
    """A ring over all GPUs."""
    gpus = all_gpus(cluster)
    return Fabric(cluster), built(cluster, [gpus], everyone(Kind.ALL_GATHER, 1 << 30, len(gpus)))[0]


@given(cluster=CLUSTERS, data=st.data())
def test_a_path_goes_up_to_a_spine_and_down_again_only_between_leaves(
    cluster: Cluster, data: st.DataObject
) -> None:
    fabric = Fabric(cluster)
    src_node, dst_node = data.draw(st.permutations(range(cluster.nodes)))[:2]
    src_rail, dst_rail = data.draw(st.tuples(*[st.integers(0, cluster.gpus - 1)] * 2))
    src, dst = src_node * cluster.gpus + src_rail, dst_node * cluster.gpus + dst_rail
    path = fabric.path(src, dst, data.draw(st.sampled_from(UDP_SPORTS.tolist())))
    hops = path[path != NONE].tolist()
    assert hops[:2] == [fabric.pcie_read(src), fabric.egress(src)]
    assert hops[-2:] == [fabric.ingress(dst), fabric.pcie_write(dst)]
    assert (path[len(hops) :] == NONE).all()
    same_leaf = (
        src_rail == dst_rail and src_node // cluster.nodes_per_leaf == dst_node // cluster.nodes_per_leaf
    )
    assert (fabric.leaf(src) == fabric.leaf(dst)) == same_leaf
    if same_leaf:
        assert len(hops) == 4
    else:
        up, down = hops[2:4]
        spine = fabric.uplinks(fabric.leaf(src)).tolist().index(up)
        assert down == fabric.downlinks(fabric.leaf(dst))[spine]
        assert len(hops) == 6
    stages = fabric.links["stage"][hops].tolist()
    assert stages == [Stage.SENDER] * 2 + [Stage.SWITCH] * (len(hops) - 2)
    owners = fabric.links["nic"][hops].tolist()
    assert owners == [src, src] + [NONE] * (len(hops) - 4) + [dst, dst]


@given(cluster=CLUSTERS)
def test_every_link_has_one_owner_and_one_name(cluster: Cluster) -> None:
    fabric = Fabric(cluster)
    of_nics = [
        link(nic)
        for nic in range(fabric.nics)
        for link in (fabric.pcie_read, fabric.egress, fabric.ingress, fabric.pcie_write)
    ]
    of_leaves = [
        link
        for leaf in range(fabric.leaves)
        for link in (*fabric.uplinks(leaf).tolist(), *fabric.downlinks(leaf).tolist())
    ]
    assert sorted(of_nics + of_leaves) == list(range(len(fabric.links)))
    assert len({fabric.name(link) for link in range(len(fabric.links))}) == len(fabric.links)


def test_what_a_link_is_called() -> None:
    fabric = Fabric(Cluster(nodes=8, gpus=4, nodes_per_leaf=4, spines=2))
    assert fabric.name(fabric.egress(3 * 4 + 2)) == "node 3 nic 2 egress"
    assert fabric.leaf(5 * 4 + 1) == 3  # rail 1, second group of nodes
    assert fabric.name(int(fabric.uplinks(3)[1])) == "leaf 3 to spine 1"
    assert fabric.name(int(fabric.downlinks(3)[0])) == "spine 0 to leaf 3"


def test_a_port_is_slower_than_its_slot() -> None:
    fabric = Fabric(Cluster(nic_gbps=200.0))
    assert fabric.links["gbps"][fabric.egress(9)] == fabric.links["gbps"][fabric.ingress(9)] == 200.0
    # Gen4 x16: 16 GT/s * 16 lanes * 128/130, less the headers of its packets.
    assert 200.0 < fabric.links["gbps"][fabric.pcie_read(9)] < 252.0
    assert fabric.links["gbps"][fabric.pcie_read(9)] == fabric.links["gbps"][fabric.pcie_write(9)]


def test_the_hash_spreads_flows_evenly_over_the_spines() -> None:
    fabric = Fabric(Cluster(spines=8))
    by_port = np.bincount(fabric.spine(0, 32, UDP_SPORTS), minlength=8)
    by_pair = np.bincount(
        fabric.spine(np.arange(32)[:, None], np.arange(32, 64), 50_000).ravel(), minlength=8
    )
    for counts in (by_port, by_pair):
        even = counts.sum() / 8
        assert (abs(counts - even) < 5 * np.sqrt(even)).all()


def test_latency_counts_switches() -> None:
    fabric = Fabric(Cluster(nodes=8, gpus=2, nodes_per_leaf=4))
    within, between = latency_ns(fabric.path(0, [2, 8], 50_000))
    # One switch against leaf, spine, leaf.
    assert between - within == pytest.approx(2 * fabrics.SWITCH_LATENCY_NS)
    assert within == fabrics.NIC_LATENCY_NS + fabrics.SWITCH_LATENCY_NS


def test_flows_over_a_link() -> None:
    fabric, network = a_network(Cluster(nodes=8, gpus=4, channels=8, spines=2))
    for nic in (0, 5, 31):
        assert (
            flows_over(network, fabric.egress(nic)).tolist()
            == np.flatnonzero(network.flows["src_nic"] == nic).tolist()
        )
        assert (
            flows_over(network, fabric.pcie_write(nic)).tolist()
            == np.flatnonzero(network.flows["dst_nic"] == nic).tolist()
        )
    over_spines = [
        flow
        for leaf in range(fabric.leaves)
        for up in fabric.uplinks(leaf)
        for flow in flows_over(network, up)
    ]
    # The ring leaves each group of four nodes once per channel.
    assert len(over_spines) == 2 * 8


def test_two_flows_made_to_collide() -> None:
    fabric, network = a_network(Cluster(nodes=8, gpus=1, channels=2, nodes_per_leaf=4, spines=8))
    crossing = np.flatnonzero((network.flows["path"][:, 4] != NONE) & (network.flows["src_nic"] == 3))
    assert len(crossing) == 2
    before = network.flows.copy()
    rng = np.random.default_rng(5)
    for flow in crossing:
        sport = fabrics.udp_sport_through(fabric, 3, 4, 6, rng)
        fabrics.reroute(network, fabric, flow, sport)
    uplink = int(fabric.uplinks(fabric.leaf(3))[6])
    assert flows_over(network, uplink).tolist() == crossing.tolist()
    others = np.setdiff1d(np.arange(len(before)), crossing)
    assert (network.flows[others] == before[others]).all()
    with pytest.raises(UsageError, match="spine 8"):
        fabrics.udp_sport_through(fabric, 3, 4, 8, rng)


def test_a_tenant_between_two_nics_of_the_cluster() -> None:
    fabric, network = a_network(Cluster(nodes=4, gpus=2, nodes_per_leaf=2))
    larger, flow = background_flow(network, fabric, 1, 6, 50_000)
    assert (len(network.flows), len(network.connections)) == (flow, len(larger.connections) - 1)
    row = larger.flows[flow]
    assert row["path"].tolist() == fabric.path(1, 6, 50_000).tolist()
    assert larger.links is network.links
    connection = larger.connections[row["connection"]]
    assert (connection["comm"], connection["flow"], connection["flows"]) == (NONE, flow, 1)
    assert (connection["src"], connection["dst"]) == (1, 6)
    assert (larger.connections[:-1] == network.connections).all()


def test_a_tenant_from_and_to_nodes_outside() -> None:
    fabric, network = a_network(Cluster(nodes=4, gpus=2, nodes_per_leaf=2))
    network, into = background_flow(network, fabric, NONE, 5, 50_000)
    network, out = background_flow(network, fabric, 2, NONE, 50_000)
    first, second = network.flows[[into, out]]
    # NICs without a GPU, numbered after all others.
    assert (first["src_nic"], first["dst_nic"]) == (8, 5)
    assert (second["src_nic"], second["dst_nic"]) == (2, 9)
    ports = len(fabric.links), len(fabric.links) + 1
    assert network.links["nic"][list(ports)].tolist() == [8, 9]
    assert network.links["stage"][list(ports)].tolist() == [Stage.SENDER, Stage.SWITCH]
    assert first["path"][0] == ports[0]
    assert first["path"][1] in fabric.downlinks(fabric.leaf(5))
    assert first["path"][2:5].tolist() == [fabric.ingress(5), fabric.pcie_write(5), NONE]
    assert second["path"][:2].tolist() == [fabric.pcie_read(2), fabric.egress(2)]
    assert second["path"][2] in fabric.uplinks(fabric.leaf(2))
    assert second["path"][3:5].tolist() == [ports[1], NONE]
    ends = network.connections[["src", "dst"]][-2:]
    assert ends.tolist() == [(NONE, 5), (2, NONE)]
    assert (network.flows["latency_ns"][[into, out]] == latency_ns(fabric.path(0, 4, 0))).all()
    with pytest.raises(UsageError, match="no NIC of the cluster"):
        background_flow(network, fabric, NONE, NONE, 50_000)


def test_nothing_to_build_a_fabric_from() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Fabric(Cluster(spines=0))
