"""What the simulated NCCL chooses for a call, against the published costs and constants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_networks import MIB, RING, TREE, all_gpus, built, cases, everyone, one

from pulse_bpf.lab.sim.model import KIND_NAMES, Algorithm, Cluster, Kind, Protocol
from pulse_bpf.lab.sim.tuning import NcclOptions


def chosen(
    size: int, cluster: Cluster, members: list[int], kind: Kind = Kind.ALL_REDUCE
) -> tuple[object, ...]:
    _, calls = built(cluster, [members], everyone(kind, size, len(members), root=0), options=NcclOptions())
    assert len(np.unique(calls[["algorithm", "protocol", "channels", "slice_bytes", "slices"]])) == 1
    return Algorithm(calls["algorithm"][0]), Protocol(calls["protocol"][0])


def test_the_published_costs_choose_the_algorithm() -> None:
    # Worked out by hand from the published numbers for 8 nodes with one rank each and two channels:
    # LL128 tree 14 + 2 * 3 * 8.5 us and 20.7 GB/s; LL128 ring 14 + 14 * 8.5 us and 25.2 GB/s;
    # Simple ring 1.4 * (8.4 + 14 * 14) us and 27.4 GB/s. They cross at 7.8 MB and at 48 MB.
    cluster = Cluster(nodes=8, gpus=8)
    members = list(range(0, 64, 8))
    # LL tree 6.8 + 2 * 3 * 5 us and 5.8 GB/s: it crosses the LL128 tree at 228 KB.
    assert chosen(220_000, cluster, members) == (Algorithm.TREE, Protocol.LL)
    assert chosen(236_000, cluster, members) == (Algorithm.TREE, Protocol.LL128)
    assert chosen(7_500_000, cluster, members) == (Algorithm.TREE, Protocol.LL128)
    assert chosen(8_200_000, cluster, members) == (Algorithm.RING, Protocol.LL128)
    assert chosen(46_000_000, cluster, members) == (Algorithm.RING, Protocol.LL128)
    assert chosen(51_000_000, cluster, members) == (Algorithm.RING, Protocol.SIMPLE)
    # 64 ranks: 112 steps in the nodes and 14 between make the ring's latency 0.8 ms, the tree's is 0.15 ms.
    assert chosen(256 * MIB, cluster, all_gpus(cluster)) == (Algorithm.TREE, Protocol.SIMPLE)
    assert chosen(4096 * MIB, cluster, all_gpus(cluster)) == (Algorithm.RING, Protocol.SIMPLE)
    # LL tree 6.8 + 2 * (7 * 0.6 + 3 * 5) us and 20.4 GB/s in all channels / 2; LL128 14 + 2 * (7 * 1.25 + 3 * 8.5)
    # and 116 GB/s: they cross at 420 KB.
    assert chosen(400_000, cluster, all_gpus(cluster)) == (Algorithm.TREE, Protocol.LL)
    assert chosen(440_000, cluster, all_gpus(cluster)) == (Algorithm.TREE, Protocol.LL128)
    # The others know no tree.
    assert chosen(4096, cluster, members, Kind.ALL_GATHER) == (Algorithm.RING, Protocol.LL)
    assert chosen(4096, cluster, members, Kind.BROADCAST) == (Algorithm.RING, Protocol.LL)


@given(
    case=cases(),
    sizes=st.lists(st.integers(1, 4096 * MIB), min_size=2, max_size=6),
    kind=st.sampled_from([Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.BROADCAST]),
)
@settings(max_examples=60)
def test_larger_calls_never_turn_back_to_a_smaller_protocol(
    case: tuple[Cluster, list[int]], sizes: list[int], kind: Kind
) -> None:
    cluster, members = case
    calls = np.concatenate([one(kind, size, 0, 0) for size in sorted(sizes)])
    _, planned = built(cluster, [members], calls, options=NcclOptions())
    # A tree before a ring, and with each LL, LL128, Simple.
    assert (np.diff(planned["algorithm"].astype(int)) <= 0).all()
    for algorithm in (Algorithm.TREE, Algorithm.RING):
        order = np.array([2, 0, 1])[planned["protocol"][planned["algorithm"] == algorithm]]
        assert (np.diff(order) >= 0).all()
    assert ((planned["channels"] >= 1) & (planned["channels"] <= cluster.channels)).all()
    assert (planned["slices"] * planned["slice_bytes"] <= 2 * MIB).all()


def test_chunks_of_ll128_trees_shrink_with_the_data() -> None:
    # 8 nodes with one rank: the height counts as 1 + 3 + 0.1 steps, so that below 65.6 chunks of a channel's part
    # a chunk of more than 32 KiB is halved, and below 262.4 one of more than 128 KiB.
    cluster = Cluster(nodes=8, gpus=1, channels=2)
    options = NcclOptions(algorithm=Algorithm.TREE, protocol=Protocol.LL128)

    def chunk(per_channel: int) -> int:
        _, calls = built(
            cluster, [all_gpus(cluster)], everyone(Kind.ALL_REDUCE, 2 * per_channel, 8), options=options
        )
        assert set(calls["channels"]) == {2}
        return int(calls["slice_bytes"][0])

    for size, fewest in ((576_000, 263), (288_000, 263), (144_000, 263), (72_000, 66), (36_000, 66)):
        assert chunk(fewest * size) == size
        assert chunk((fewest - 1) * size) == size // 2
    assert chunk(MIB) == 18_000


@pytest.mark.parametrize("kind", [k for k in Kind if k not in (Kind.SEND, Kind.RECV)])
def test_calls_inside_a_node_meet_locally(kind: Kind) -> None:
    cluster = Cluster(nodes=2, gpus=4)
    network, calls = built(cluster, [[4, 5, 6, 7]], everyone(kind, MIB, 4, root=0), options=TREE)
    assert set(calls["algorithm"]) == {Algorithm.LOCAL}
    assert len(network.connections) == 0, KIND_NAMES[kind]


def test_what_the_environment_forces() -> None:
    cluster = Cluster(nodes=8, gpus=1, channels=2)
    calls = [everyone(kind, MIB, 8, root=0) for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST)]
    for options in (RING, TREE, NcclOptions(algorithm=Algorithm.RING, protocol=Protocol.LL)):
        _, planned = built(cluster, [all_gpus(cluster)], *calls, options=options)
        reduces = planned["kind"] == Kind.ALL_REDUCE
        assert set(planned["algorithm"][reduces]) == {options.algorithm}
        assert set(planned["algorithm"][~reduces]) == {Algorithm.RING}
        assert set(planned["protocol"]) == {options.protocol}


@pytest.mark.parametrize(
    ("size", "protocol", "chunk"),
    [
        (16_384, Protocol.LL, 16_384),
        (16_385, Protocol.SIMPLE, 32_768),
        (131_071, Protocol.SIMPLE, 32_768),
        (131_072, Protocol.SIMPLE, 65_536),
        (MIB - 1, Protocol.SIMPLE, 65_536),
        (MIB, Protocol.SIMPLE, 131_072),
        (1 << 30, Protocol.SIMPLE, 131_072),
    ],
)
def test_chunks_between_two_ranks(size: int, protocol: Protocol, chunk: int) -> None:
    cluster = Cluster(nodes=2, gpus=4)
    _, pair = built(cluster, [all_gpus(cluster)], one(Kind.SEND, size, 0, 5), one(Kind.RECV, size, 5, 0))
    _, to_all = built(cluster, [all_gpus(cluster)], everyone(Kind.ALL_TO_ALL, 8 * size, 8))
    for calls in (pair, to_all):
        assert set(calls["protocol"]) == {protocol}
        assert set(calls["slice_bytes"]) == {chunk}
        assert set(calls["slices"]) == {1}


def test_small_calls_take_few_channels() -> None:
    cluster = Cluster(nodes=2, gpus=8, channels=8)

    def channels(size: int, options: NcclOptions) -> int:
        _, calls = built(cluster, [all_gpus(cluster)], everyone(Kind.ALL_REDUCE, size, 16), options=options)
        return int(calls["channels"][0])

    # 512 threads of 64 bytes; an LL ring of 512 threads of 8 bytes for each rank.
    assert [channels(size, RING) for size in (1, 65_535, 65_536, 8 * 32_768, MIB)] == [1, 1, 2, 8, 8]
    ll_ring = NcclOptions(algorithm=Algorithm.RING, protocol=Protocol.LL)
    assert [channels(size, ll_ring) for size in (131_071, 131_072, MIB)] == [1, 2, 8]
    ll_tree = NcclOptions(algorithm=Algorithm.TREE, protocol=Protocol.LL)
    assert [channels(size, ll_tree) for size in (4096, 8192)] == [1, 2]
