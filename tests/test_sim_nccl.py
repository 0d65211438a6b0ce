"""What the simulated NCCL builds, against its published rules and the formulas of its traffic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_networks import MIB, RING, TREE, all_gpus, built, cases, everyone, one, places_of
from sim_volumes import wire_bytes

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim import nccl
from pulse_bpf.lab.sim.fabric import UDP_SPORTS
from pulse_bpf.lab.sim.model import NONE, Algorithm, Array, Cluster, Kind
from pulse_bpf.lab.sim.rings import members_by_node
from pulse_bpf.lab.sim.trees import double_tree
from pulse_bpf.lab.sim.tuning import NcclOptions


@given(case=cases())
@settings(max_examples=60)
def test_each_channel_has_a_ring_over_all_ranks_that_enters_every_node_once(
    case: tuple[Cluster, list[int]],
) -> None:
    cluster, members = case
    network, _ = built(cluster, [members], everyone(Kind.ALL_REDUCE, 64 * MIB, len(members)))
    connections = network.connections
    nodes = len({gpu // cluster.gpus for gpu in members})
    for channel in range(network.comms["channels"][0]):
        places = places_of(network)[:, channel]
        order = np.argsort(places["ring_index"])
        assert sorted(places["ring_index"].tolist()) == list(range(len(members)))
        send = connections[places["ring_send"][order]]
        assert (send["src"] == np.array(members)[order]).all()
        assert (send["dst"] == np.array(members)[np.roll(order, -1)]).all()
        assert (send["channel"] == channel).all()
        assert (places["ring_recv"][np.roll(order, -1)] == places["ring_send"][order]).all()
        crossing = send[send["flows"] > 0]
        assert (crossing["src"] // cluster.gpus != crossing["dst"] // cluster.gpus).all()
        assert len(set(crossing["src"] // cluster.gpus)) == len(set(crossing["dst"] // cluster.gpus)) == nodes
        assert len(crossing) == nodes


@given(case=cases())
@settings(max_examples=60)
def test_each_channel_has_a_tree_with_its_heads_between_nodes(case: tuple[Cluster, list[int]]) -> None:
    cluster, members = case
    network, _ = built(cluster, [members], everyone(Kind.ALL_REDUCE, 64 * MIB, len(members)), options=TREE)
    rank_of = {gpu: rank for rank, gpu in enumerate(members)}
    node = np.array(members) // cluster.gpus
    for channel in range(network.comms["channels"][0]):
        places = places_of(network)[:, channel]
        parents = {}
        for rank, place in enumerate(places):
            if place["up_send"] == NONE:
                assert place["down_recv"] == NONE
                parents[rank] = NONE
                continue
            up, down = network.connections[place["up_send"]], network.connections[place["down_recv"]]
            assert up["src"] == down["dst"] == members[rank]
            assert up["dst"] == down["src"]
            parents[rank] = rank_of[up["dst"]]
            above = places[parents[rank]]
            assert place["up_send"] in above["up_recv"]
            assert above["down_send"][above["up_recv"] == place["up_send"]].tolist() == [place["down_recv"]]
        roots = [rank for rank, parent in parents.items() if parent == NONE]
        assert len(roots) == 1
        for rank in parents:  # no cycle
            steps = 0
            while parents[rank] != NONE:
                rank, steps = parents[rank], steps + 1
                assert steps < len(members)
        children: dict[int, list[int]] = {rank: [] for rank in parents}
        for rank, parent in parents.items():
            children.setdefault(parent, []).append(rank)
        for rank in range(len(members)):
            inside = [child for child in children[rank] if node[child] == node[rank]]
            outside = len(children[rank]) - len(inside)
            parent = parents[rank]
            assert len(inside) <= 1
            assert outside <= 2
            if parent != NONE and node[parent] == node[rank]:
                assert outside == 0  # only the head of a node has to do with others
            if inside:
                assert places["up_recv"][rank][0] == places["up_send"][inside[0]]


@pytest.mark.parametrize("nodes", [*range(2, 40), 128])
def test_two_trees_share_the_work(nodes: int) -> None:
    trees = double_tree(nodes)
    inner = []
    for parents in trees:
        children = np.bincount([parent for parent in parents if parent != NONE], minlength=nodes)
        assert parents.count(NONE) == 1
        assert children.max() <= 2
        depths = []
        for node in range(nodes):
            depth = 0
            while parents[node] != NONE:
                node, depth = parents[node], depth + 1
            depths.append(depth)
        assert max(depths) <= np.ceil(np.log2(nodes))
        inner.append(set(np.flatnonzero(children).tolist()))
    assert trees[0] != trees[1]
    # With an even number no node forwards in both trees, with an odd one a node may.
    assert len(inner[0] & inner[1]) <= nodes % 2
    assert len(inner[0] | inner[1]) >= nodes - 1


def test_the_trees_that_nccl_draws() -> None:
    # From the comment in NCCL's src/graph/trees.cc: the children of 4, 8 and 12 in the tree of 14 ranks, and the
    # mirrored one of 12.
    parents, _ = double_tree(14)
    assert [node for node in range(14) if parents[node] == 8] == [4, 12]
    assert [node for node in range(14) if parents[node] == 4] == [2, 6]
    assert [node for node in range(14) if parents[node] == 12] == [10, 13]
    _, mirrored = double_tree(12)
    assert mirrored.index(NONE) == 11
    assert [node for node in range(12) if mirrored[node] == 3] == [1, 7]


@pytest.mark.parametrize("pxn", [True, False])
def test_a_ring_over_whole_nodes_stays_on_its_channels_rail(pxn: bool) -> None:
    cluster = Cluster(nodes=6, gpus=4, channels=8, pxn=pxn)
    network, _ = built(cluster, [all_gpus(cluster)], everyone(Kind.ALL_REDUCE, 512 * MIB, 24))
    src, dst = network.flows["src_nic"], network.flows["dst_nic"]
    channel = network.connections["channel"][network.flows["connection"]]
    assert (src % 4 == dst % 4).all()
    assert len(src) == 6 * 8
    if pxn:
        assert (src % 4 == channel % 4).all()
        crossing = network.connections[network.flows["connection"]]
        # The chain ends on another rail than it began: the GPU that posts is not the one that calls.
        assert (crossing["src"] != crossing["src_proxy"]).all()
        assert (crossing["src"] // 4 == crossing["src_proxy"] // 4).all()
    else:
        assert (src == network.connections["src"][network.flows["connection"]]).all()
    # Of every node and rail two flows leave and two come in: eight channels over four rails.
    assert (np.bincount(src, minlength=24) == 2).all()
    assert (np.bincount(dst, minlength=24) == 2).all()


def test_who_posts_for_a_pair() -> None:
    members = [list(range(16)), [0, 1, 9, 10]]
    calls = [one(Kind.SEND, MIB, 0, 13), one(Kind.RECV, MIB, 13, 0), one(Kind.SEND, MIB, 3, 5)]
    calls += [one(Kind.SEND, MIB, 0, 3, comm=1), one(Kind.SEND, MIB, 0, 2, comm=1)]
    for pxn, posts in ((True, 5), (False, 0)):
        network, _ = built(Cluster(nodes=2, gpus=8, pxn=pxn), members, *calls)
        first = network.comms["pairs"]
        table = network.pairs[first[0] :][:256].reshape(16, 16)
        assert np.argwhere(table != NONE).tolist() == [[0, 13], [3, 5]]
        far, near = network.connections[[table[0, 13], table[3, 5]]]
        # GPU 13 is on rail 5; NVLink takes the data there when PXN is on.
        assert (far["src"], far["dst"], far["src_proxy"], far["dst_proxy"]) == (0, 13, posts, 13)
        assert network.flows["src_nic"][far["flow"]] == posts
        assert network.flows["dst_nic"][far["flow"]] == 13
        assert (near["flows"], near["flow"], near["src_proxy"]) == (0, NONE, 3)
        # A GPU that is no member cannot post: rail 2 of node 0 is not in the second communicator, rail 1 is.
        other = network.pairs[first[1] :][:16].reshape(4, 4)
        foreign, own = network.connections[[other[0, 3], other[0, 2]]]
        assert (foreign["dst"], foreign["src_proxy"]) == (10, 0)
        assert (own["dst"], own["src_proxy"]) == (9, 1 if pxn else 0)


def test_the_parts_of_a_pair_are_on_channels_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "P2P_PARTS", 2)
    cluster = Cluster(nodes=2, gpus=4, channels=4)
    network, _ = built(cluster, [all_gpus(cluster)], one(Kind.SEND, MIB, 1, 7), one(Kind.SEND, MIB, 0, 2))
    parts = network.pairs.reshape(8, 8, 2)
    assert network.connections["channel"][parts[1, 7]].tolist() == [2, 3]
    assert network.connections["channel"][parts[0, 2]].tolist() == [2, 3]
    assert network.connections["dst"][parts[1, 7]].tolist() == [7, 7]
    assert (parts != NONE).sum() == 4


@given(case=cases())
@settings(max_examples=40)
def test_queue_pairs_and_proxies_fit_their_connections(case: tuple[Cluster, list[int]]) -> None:
    cluster, members = case
    calls = [everyone(Kind.ALL_REDUCE, 64 * MIB, len(members)), one(Kind.SEND, 1, 0, len(members) - 1)]
    network, _ = built(cluster, [members], *calls, options=replace(RING, split=True))
    between = network.connections["src"] // cluster.gpus != network.connections["dst"] // cluster.gpus
    assert (network.connections["flows"] == between * cluster.qps_per_connection).all()
    assert (network.connections["split"] == 1).all()
    for number, connection in enumerate(network.connections):
        flows = network.flows[connection["flow"] :][: connection["flows"]]
        assert (flows["connection"] == number).all()
        assert (flows["src_nic"] == connection["src_proxy"]).all()
        assert (flows["dst_nic"] == connection["dst_proxy"]).all()
        assert connection["src_proxy"] // cluster.gpus == connection["src"] // cluster.gpus
        assert connection["dst_proxy"] == connection["dst"]
        assert connection["src_proxy"] in members
    assert len(network.flows) == network.connections["flows"].sum()


def test_paths_differ_between_seeds_and_nothing_else_does() -> None:
    cluster = Cluster(nodes=8, gpus=2, channels=4)
    calls = everyone(Kind.ALL_REDUCE, 512 * MIB, 16)
    first, again, other = (built(cluster, [all_gpus(cluster)], calls, seed=seed)[0] for seed in (1, 1, 2))
    assert first.flows.tobytes() == again.flows.tobytes()
    assert (first.flows["path"] != other.flows["path"]).any()
    assert first.connections.tobytes() == other.connections.tobytes()
    assert first.places.tobytes() == other.places.tobytes()
    assert UDP_SPORTS.min() == 0xC000
    assert UDP_SPORTS.max() == 0xFFFF


def test_ring_and_tree_share_a_connection_between_the_same_ranks() -> None:
    cluster = Cluster(nodes=4, gpus=1, channels=2)
    ring, _ = built(cluster, [[0, 1, 2, 3]], everyone(Kind.ALL_GATHER, 64 * MIB, 4))
    both, _ = built(
        cluster,
        [[0, 1, 2, 3]],
        everyone(Kind.ALL_GATHER, 64 * MIB, 4),
        everyone(Kind.ALL_REDUCE, 64, 4),
        options=NcclOptions(),
    )
    places = places_of(both)
    # In the first tree 1 sends to its parent 2, as it does in the ring.
    assert places["up_send"][1, 0] == places["ring_send"][1, 0] != NONE
    ends = both.connections[["channel", "src", "dst"]].tolist()
    assert len(set(ends)) == len(ends)
    assert len(ring.connections) == 8 < len(ends)


def test_only_what_is_used_is_built() -> None:
    cluster = Cluster(nodes=4, gpus=2, channels=4)
    members = [all_gpus(cluster), [0, 2, 4, 6], [0, 1]]
    network, calls = built(
        cluster, members, one(Kind.SEND, 64, 0, 1, comm=1), everyone(Kind.ALL_REDUCE, 64, 2, comm=2)
    )
    assert network.connections[["comm", "src", "dst"]].tolist() == [(1, 0, 2)]
    assert network.comms["pairs"].tolist() == [NONE, 0, NONE]
    assert (places_of(network)["ring_send"] == NONE).all()
    assert calls["algorithm"].tolist() == [Algorithm.P2P, Algorithm.LOCAL, Algorithm.LOCAL]


def test_slots_are_eight_steps() -> None:
    cluster = Cluster(nodes=4, gpus=1, channels=2)
    for kind, slots in ((Kind.ALL_REDUCE, 4), (Kind.REDUCE_SCATTER, 4), (Kind.BROADCAST, 8)):
        network, calls = built(cluster, [[0, 1, 2, 3]], everyone(kind, 64 * MIB, 4, root=0))
        assert set(network.connections["slots"]) == {slots}
        assert set(calls["slice_bytes"]) == {4 * MIB // slots}  # the whole buffer, in any case
    network, _ = built(cluster, [[0, 1, 2, 3]], one(Kind.SEND, 64 * MIB, 0, 1))
    assert set(network.connections["slots"]) == {8}


# (n - 1) / n of the data for each pass, or all of it in a chain that ends before the root.
NODE_EGRESS = {
    Kind.ALL_REDUCE: lambda n, s: 2 * (n - 1) / n * s,
    Kind.ALL_GATHER: lambda n, s: (n - 1) / n * s,
    Kind.REDUCE_SCATTER: lambda n, s: (n - 1) / n * s,
}


@given(case=cases(), kind=st.sampled_from(sorted(NODE_EGRESS)), size=st.integers(MIB, 512 * MIB))
@settings(max_examples=60)
def test_ring_bytes_out_of_every_node(case: tuple[Cluster, list[int]], kind: Kind, size: int) -> None:
    cluster, members = case
    network, calls = built(cluster, [members], everyone(kind, size, len(members)))
    on_wire = np.where(network.connections["flows"] > 0, wire_bytes(network, calls), 0)
    for end in ("src", "dst"):
        by_node = np.bincount(network.connections[end] // cluster.gpus, on_wire)
        assert by_node[by_node > 0] == pytest.approx(NODE_EGRESS[kind](len(members), size))
        assert (by_node > 0).sum() == len({gpu // cluster.gpus for gpu in members})


@given(case=cases(), size=st.integers(MIB, 512 * MIB))
@settings(max_examples=60)
def test_tree_bytes_between_nodes(case: tuple[Cluster, list[int]], size: int) -> None:
    cluster, members = case
    network, calls = built(cluster, [members], everyone(Kind.ALL_REDUCE, size, len(members)), options=TREE)
    on_wire = np.where(network.connections["flows"] > 0, wire_bytes(network, calls), 0)
    nodes = len({gpu // cluster.gpus for gpu in members})
    # 2 (N - 1) / N of the data on the average over nodes.
    assert on_wire.sum() == pytest.approx(2 * (nodes - 1) * size)


@pytest.mark.parametrize("kind", [Kind.BROADCAST, Kind.REDUCE])
@pytest.mark.parametrize("root", [0, 3, 4, 11])
def test_chains_leave_out_one_link(kind: Kind, root: int) -> None:
    cluster = Cluster(nodes=3, gpus=4, channels=4)
    network, calls = built(cluster, [all_gpus(cluster)], everyone(kind, 64 * MIB, 12, root=root))
    carried = wire_bytes(network, calls)
    assert np.unique(carried).tolist() == [0, 16 * MIB]
    assert (carried == 0).sum() == 4  # of each channel's ring
    idle = network.connections[carried == 0]
    assert set(idle["dst" if kind == Kind.BROADCAST else "src"].tolist()) == {root}


def test_all_to_all_leaves_the_node_for_all_but_its_own() -> None:
    cluster = Cluster(nodes=3, gpus=4)
    network, calls = built(cluster, [all_gpus(cluster)], everyone(Kind.ALL_TO_ALL, 12 * MIB, 12))
    assert set(calls["algorithm"]) == {Algorithm.P2P}
    assert len(network.connections) == 12 * 11
    on_wire = np.where(network.connections["flows"] > 0, wire_bytes(network, calls), 0)
    assert (np.bincount(network.connections["src"], on_wire) == (12 - 4) * MIB).all()
    # With PXN every NIC receives and sends its rail only.
    assert (network.flows["src_nic"] % 4 == network.flows["dst_nic"] % 4).all()


def test_a_communicator_has_the_channels_of_its_nics() -> None:
    cluster = Cluster(nodes=2, gpus=8, channels=16)
    members = [all_gpus(cluster), [0, 8], [0, 1, 8, 9], [0, 1]]
    calls = [everyone(Kind.ALL_REDUCE, 256 * MIB, len(gpus), comm) for comm, gpus in enumerate(members)]
    network, planned = built(cluster, members, *calls)
    assert network.comms["channels"].tolist() == [16, 2, 4, 1]
    for comm in range(4):
        assert set(planned["channels"][planned["comm"] == comm]) == {network.comms["channels"][comm]}


def test_each_nic_serves_both_trees() -> None:
    cluster = Cluster(nodes=4, gpus=2, channels=4)
    network, _ = built(cluster, [all_gpus(cluster)], everyone(Kind.ALL_REDUCE, 256 * MIB, 8), options=TREE)
    roots = [np.flatnonzero(places["up_send"] == NONE)[0] for places in places_of(network).T]
    # GPU 0 and 1 of node 0, then of node 3: channels 0 and 2 are on rail 0.
    assert roots == [0, 1, 6, 7]


def test_nodes_by_first_rank_and_ranks_by_gpu() -> None:
    members = members_by_node(np.array([9, 2, 8, 1, 17], np.int32), 8)
    assert [ranks.tolist() for ranks in members] == [[2, 0], [3, 1], [4]]


def test_a_thousand_gpus() -> None:
    cluster = Cluster(nodes=128, gpus=8)
    network, _ = built(cluster, [all_gpus(cluster)], everyone(Kind.ALL_REDUCE, 512 * MIB, 1024))
    assert (network.comms["ranks"][0], len(network.connections)) == (1024, 8 * 1024)
    assert len(network.flows) == 8 * 128


@pytest.mark.parametrize(
    ("members", "call"),
    [
        ([0, 0], one(Kind.SEND, 1, 0, 1)),
        ([0, 99], one(Kind.SEND, 1, 0, 1)),
        ([], one(Kind.SEND, 1, 0, 1)),
        ([0, 1], one(Kind.SEND, 1, 0, 0)),
        ([0, 1], one(Kind.RECV, 1, 0, 2)),
        ([0, 1], one(Kind.ALL_REDUCE, 1, 2, NONE)),
    ],
)
def test_what_cannot_be_built(members: list[int], call: Array) -> None:
    with pytest.raises(UsageError):
        built(Cluster(nodes=2, gpus=2), [members], call)
