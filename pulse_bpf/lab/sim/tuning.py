"""What NCCL decides about a call: algorithm, protocol, channels, and the size of what it sends at once.

The cost model is the one that NCCL publishes in src/graph/tuning.cc (the numbers are those of 2.27 for Hopper
with NVLink and Intel hosts): time = latency + bytes / bandwidth for each algorithm and protocol, and the least
wins. Left out, with what that means:
- NVLS and NVLSTree (as with NCCL_NVLS_ENABLE=0), CollNet and PAT: calls take rings and trees instead.
- The table of measured corrections of the tree's bandwidth for medium sizes: trees win up to sizes about twice
  as large as in NCCL.
- Aggregation: calls of one group are chosen for one by one, each over channels from 0 on.
The 64 ranks of 8 nodes thus take a tree up to several hundred MB; NcclOptions stands for NCCL_ALGO and NCCL_PROTO.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pulse_bpf.lab.sim.model import Algorithm, Array, Cluster, Floats, Ints, Kind, Protocol

KIB = 1024


@dataclass(frozen=True)
class NcclOptions:
    """What a job's environment sets: NCCL_ALGO (for AllReduce; the others know rings only), NCCL_PROTO (of
    collectives), NCCL_IB_SPLIT_DATA_ON_QPS."""

    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    split: bool = False


@dataclass(frozen=True)
class Shapes:
    """What the choice depends on, each i4[communicators]; `rails`: ranks in the fullest node."""

    ranks: Ints
    nodes: Ints
    rails: Ints
    channels: Ints


# In microseconds, by protocol in the order of Protocol (Simple, LL, LL128): once per call, per hop in a node, per
# hop between nodes.
BASE_US = {Algorithm.RING: (8.4, 6.6, 14.0), Algorithm.TREE: (8.4, 6.8, 14.0)}
NVLINK_HOP_US = {Algorithm.RING: (3.4, 0.6, 1.9), Algorithm.TREE: (4.0, 0.6, 1.25)}
NETWORK_HOP_US = {Algorithm.RING: (14.0, 2.7, 4.0), Algorithm.TREE: (14.0, 5.0, 8.5)}
# Least time of a step in a ring over several nodes: what posting to the network costs.
POST_US = (3.0, 1.0, 1.0)
# Ring AllReduce of the Simple protocol between nodes takes longer than its steps' sum.
PLATEAU = 1.4
# GB/s. Of all channels together with LL, with 2 nodes and with more; of each channel of a tree, and of each
# channel with LL128.
LL_GB_PER_S = (39.0, 20.4)
TREE_CHANNEL_GB_PER_S = (41.4, 36.0)
LL128_CHANNEL_GB_PER_S = {Algorithm.RING: (36.7, 36.7), Algorithm.TREE: (36.7, 29.0)}
# Part of a NIC's rate that NCCL reckons with: 48 GB/s of 50.
USABLE = 0.96

# Fewest bytes for which another channel is used: threads * bytes per thread (times the ranks in an LL ring), and
# the least part of a call that a channel gets (cells of 32 KiB of traffic; AllReduce counts twice, LL four times).
BYTES_PER_CHANNEL = (512 * 64, 512 * 8, 640 * 8)
CELL_BYTES = (32 * KIB, 8 * KIB, 32 * KIB)

# Payload of a step of a channel's buffer: 4 MiB / 8; 512 KiB / 8 of which half is data; 120 * 640 * 8 bytes of
# which 15 of 16 are data.
STEP_BYTES = (512 * KIB, 32 * KIB, 576_000)
P2P_STEP_BYTES = 128 * KIB  # NCCL_P2P_NET_CHUNKSIZE
P2P_LL_BYTES = 16 * KIB  # NCCL_P2P_LL_THRESHOLD
STEPS = 8


def choose(calls: Array, shapes: Shapes, cluster: Cluster, options: NcclOptions) -> Array:
    """CALL rows with algorithm, protocol, channels, slice_bytes and slices filled in."""
    calls = calls.copy()
    pairs = np.isin(calls["kind"], (Kind.SEND, Kind.RECV, Kind.ALL_TO_ALL))
    local = (shapes.nodes[calls["comm"]] == 1) & ~np.isin(calls["kind"], (Kind.SEND, Kind.RECV))
    _choose_pairs(calls, pairs & ~local, shapes)
    calls["algorithm"][local] = Algorithm.LOCAL
    calls["protocol"][local] = Protocol.SIMPLE
    calls["channels"][local], calls["slices"][local] = 1, 1
    calls["slice_bytes"][local] = STEP_BYTES[Protocol.SIMPLE]
    rest = ~pairs & ~local
    calls[rest] = _choose_collectives(calls[rest], shapes, cluster, options)
    return calls


def _choose_pairs(calls: Array, rows: np.ndarray[tuple[int], np.dtype[np.bool_]], shapes: Shapes) -> None:
    """Point-to-point: one channel per peer; chunks are smaller where a message has few of them."""
    calls["algorithm"][rows] = Algorithm.P2P
    to_all = rows & (calls["kind"] == Kind.ALL_TO_ALL)
    ranks = shapes.ranks[calls["comm"]]
    peer_bytes = np.where(to_all, calls["bytes"] // ranks.astype(np.uint64), calls["bytes"])[rows]
    ll = peer_bytes <= P2P_LL_BYTES
    few = np.where(peer_bytes < P2P_STEP_BYTES, 4, np.where(peer_bytes < 8 * P2P_STEP_BYTES, 2, 1))
    calls["protocol"][rows] = np.where(ll, Protocol.LL, Protocol.SIMPLE)
    calls["slice_bytes"][rows] = np.where(ll, STEP_BYTES[Protocol.LL] // 2, P2P_STEP_BYTES // few)
    calls["slices"][rows] = 1
    calls["channels"][rows] = 1
    calls["channels"][to_all] = np.minimum(shapes.channels[calls["comm"]], ranks - 1)[to_all]


def _choose_collectives(calls: Array, shapes: Shapes, cluster: Cluster, options: NcclOptions) -> Array:
    size = calls["bytes"].astype(np.float64)
    comm = calls["comm"]
    reduces_all = calls["kind"] == Kind.ALL_REDUCE
    best_us = np.full(len(calls), np.inf)
    for algorithm in (Algorithm.RING, Algorithm.TREE):
        for protocol in Protocol:
            if options.protocol not in (None, protocol):
                continue
            allowed = reduces_all | (algorithm == Algorithm.RING)
            if options.algorithm is not None:
                allowed &= ~reduces_all | (algorithm == options.algorithm)
            us = np.where(
                allowed, _us(algorithm, protocol, calls["kind"], size, comm, shapes, cluster), np.inf
            )
            better = us < best_us
            best_us[better] = us[better]
            calls["algorithm"][better], calls["protocol"][better] = algorithm, protocol
    ring = calls["algorithm"] == Algorithm.RING
    simple = calls["protocol"] == Protocol.SIMPLE
    per_channel = np.array(BYTES_PER_CHANNEL)[calls["protocol"]].astype(np.float64)
    per_channel *= np.where(ring & (calls["protocol"] == Protocol.LL), shapes.ranks[comm], 1)
    cell = np.array(CELL_BYTES)[calls["protocol"]] / np.where(reduces_all, 2, 1)
    channels = np.minimum(size // per_channel, np.ceil(size / cell))
    calls["channels"] = np.clip(channels, 1, shapes.channels[comm])
    # Rings of these three kinds send two steps at once, and a chunk is two such slices.
    double = ring & simple & np.isin(calls["kind"], (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER))
    calls["slices"] = np.where(double, 2, 1)
    calls["slice_bytes"] = np.array(STEP_BYTES)[calls["protocol"]] * np.where(double, 2, 1)
    small = ~ring & (calls["protocol"] == Protocol.LL128)
    calls["slice_bytes"][small] = _tree_ll128_bytes(calls[small], shapes)
    return calls


def _tree_ll128_bytes(calls: Array, shapes: Shapes) -> Ints:
    """LL128 trees halve their chunks until a channel's part is enough of them to keep the tree's height busy."""
    nodes = shapes.nodes[calls["comm"]]
    per_node = shapes.ranks[calls["comm"]] / nodes
    height = 1 + np.floor(np.log2(nodes)) + 0.1 * per_node
    per_channel = calls["bytes"].astype(np.int64) // calls["channels"]
    chunk = np.full(len(calls), STEP_BYTES[Protocol.LL128])
    for chunks, least in ((64, 128 * KIB), (16, 32 * KIB)):
        for _ in range(5):  # 576,000 / 2^5 is below the smaller limit
            chunk[(per_channel // chunk < height * chunks / per_node) & (chunk > least)] //= 2
    return chunk.astype(np.int32)


def _us(
    algorithm: Algorithm,
    protocol: Protocol,
    kind: Array,
    size: Floats,
    comm: Ints,
    shapes: Shapes,
    cluster: Cluster,
) -> Floats:
    """NCCL's estimate of each call's time in microseconds."""
    ranks, nodes, channels = (
        x[comm].astype(np.float64) for x in (shapes.ranks, shapes.nodes, shapes.channels)
    )
    many = (nodes > 2).astype(np.intp)
    gb_per_s = USABLE * cluster.nic_gbps / 8 * shapes.rails[comm]
    one_per_node = ranks == nodes
    # With one rank per node nothing hides a hop between nodes: it costs what it costs in a tree.
    hop_us = np.where(
        one_per_node, NETWORK_HOP_US[Algorithm.TREE][protocol], NETWORK_HOP_US[algorithm][protocol]
    )
    if algorithm == Algorithm.RING:
        if protocol == Protocol.LL:
            gb_per_s = np.minimum(gb_per_s / 2, np.array(LL_GB_PER_S)[many])
        elif protocol == Protocol.LL128:
            limit = channels * np.array(LL128_CHANNEL_GB_PER_S[algorithm])[many]
            gb_per_s = np.minimum(gb_per_s * 0.92, limit)
        twice = np.where(kind == Kind.ALL_REDUCE, 2, 1)
        chain = np.isin(kind, (Kind.BROADCAST, Kind.REDUCE))
        steps = np.where(chain, ranks, twice * (ranks - 1))
        crossings = twice * (nodes - 1)
        local_us = max(NVLINK_HOP_US[algorithm][protocol], POST_US[protocol])
        latency_us = BASE_US[algorithm][protocol] + np.where(
            chain, hop_us, (steps - crossings) * local_us + crossings * hop_us
        )
        if protocol == Protocol.SIMPLE:
            latency_us *= np.where(kind == Kind.ALL_REDUCE, PLATEAU, 1)
        gb_per_s *= ranks / steps
    else:
        gb_per_s = np.minimum(gb_per_s * 0.92, channels * np.array(TREE_CHANNEL_GB_PER_S)[many])
        if protocol == Protocol.LL:
            gb_per_s = np.minimum(gb_per_s / 3.8, np.array(LL_GB_PER_S)[many])
        elif protocol == Protocol.LL128:
            limit = channels * np.array(LL128_CHANNEL_GB_PER_S[algorithm])[many]
            gb_per_s = np.minimum(gb_per_s * 120 / 128, limit)
        gb_per_s = gb_per_s / 2
        local_us = NVLINK_HOP_US[algorithm][protocol]
        hops = (ranks / nodes - 1) * local_us + np.floor(np.log2(nodes)) * hop_us
        latency_us = BASE_US[algorithm][protocol] + 2 * hops
    return np.asarray(latency_us + size / (1000 * gb_per_s))
