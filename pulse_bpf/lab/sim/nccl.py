"""What NCCL builds for a job: connections, queue pairs and who posts, for the communicators' rings, trees and pairs.

A model of NCCL's IB transport, with its constants from src/graph/connect.cc, src/transport/net.cc and
src/transport/net_ib (2.27). Assumed: every rank of a node reaches every other over NVLink (no network connection
inside a node); the NIC of a GPU is the one of its own number; NCCL's topology search finds one channel per NIC
and turn, as on the machines it is tuned for. Left out: sharing of queue pairs between communicators made by
ncclCommSplit, and between pairs of one proxy (NCCL_NET_SHARED_COMMS).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.fabric import UDP_SPORTS, Fabric, latency_ns
from pulse_bpf.lab.sim.model import (
    COMM,
    CONNECTION,
    FLOW,
    NONE,
    P2P_PARTS,
    PLACE,
    Algorithm,
    Array,
    Cluster,
    Ints,
    Job,
    Kind,
    Network,
)
from pulse_bpf.lab.sim.rings import members_by_node, ring
from pulse_bpf.lab.sim.trees import tree
from pulse_bpf.lab.sim.tuning import STEPS, NcclOptions, Shapes, choose

Numbers = NDArray[np.signedinteger[Any]]

DEFAULTS = NcclOptions()
# NCCL has at least so many channels between nodes, that both trees are in use.
MIN_CHANNELS = 2


@dataclass
class _Built:
    """What exists so far, as tables still to be put together."""

    connections: list[Array] = field(default_factory=list)
    places: list[Array] = field(default_factory=list)
    pairs: list[Ints] = field(default_factory=list)
    connection_count: int = 0
    place_count: int = 0
    pair_count: int = 0


def build(
    cluster: Cluster,
    fabric: Fabric,
    job: Job,
    rng: np.random.Generator,
    options: NcclOptions = DEFAULTS,
) -> tuple[Network, Array]:
    """The network of a job, and its calls with algorithm, protocol, channels, slice_bytes and slices filled in.

    Connections exist only for what the calls use: ring and tree of a communicator with such calls, and the pairs
    that send. Raises UsageError when a communicator or call names a GPU or rank that does not exist.
    """
    members = [np.array(gpus, np.int32) for gpus in job.comm_members]
    _check(members, job.calls, cluster)
    layouts = [members_by_node(gpus, cluster.gpus) for gpus in members]
    shapes = _shapes(layouts, cluster)
    calls = choose(job.calls, shapes, cluster, options)
    comms = np.zeros(len(members), COMM)
    comms["ranks"], comms["channels"] = shapes.ranks, shapes.channels
    comms["first_gpu"] = np.cumsum(shapes.ranks) - shapes.ranks
    used = np.zeros((len(members), len(Algorithm)), bool)
    used[calls["comm"], calls["algorithm"]] = True
    # A ring buffer of 8 steps holds 4 slices of 2 steps; everything else sends single steps.
    wide = np.zeros(len(members), bool)
    wide[calls["comm"][calls["slices"] == 2]] = True
    pairs = _used_pairs(calls, shapes)
    built = _Built()
    for comm, (gpus, layout) in enumerate(zip(members, layouts, strict=True)):
        comms["first_place"][comm] = built.place_count
        slots = STEPS // 2 if wide[comm] else STEPS
        algorithms = [a for a in (Algorithm.RING, Algorithm.TREE) if used[comm, a]]
        _collectives(built, comm, gpus, layout, int(shapes.channels[comm]), algorithms, slots, cluster)
        comms["pairs"][comm] = _pairs(built, comm, gpus, pairs[comm], int(shapes.channels[comm]), cluster)
    connections = np.concatenate([np.zeros(0, CONNECTION), *built.connections])
    connections["split"] = options.split
    flows = _flows(connections, fabric, cluster, rng)
    network = Network(
        links=fabric.links.copy(),
        flows=flows,
        connections=connections,
        comms=comms,
        comm_gpus=np.concatenate([np.zeros(0, np.int32), *members]),
        places=np.concatenate([np.zeros(0, PLACE), *built.places]),
        pairs=np.concatenate([np.zeros(0, np.int32), *built.pairs]),
    )
    return network, calls


def _check(members: list[Ints], calls: Array, cluster: Cluster) -> None:
    for number, gpus in enumerate(members):
        if (
            len(np.unique(gpus)) < len(gpus)
            or len(gpus) == 0
            or not _within(gpus, cluster.nodes * cluster.gpus)
        ):
            raise UsageError(
                f"communicator {number} cannot be built",
                f"its members are not distinct GPUs of {cluster.nodes} x {cluster.gpus}",
                "correct the workload",
            )
    ranks = np.array([len(gpus) for gpus in members], np.int64)[calls["comm"]]
    paired = np.isin(calls["kind"], (Kind.SEND, Kind.RECV))
    wrong = (calls["rank"] < 0) | (calls["rank"] >= ranks)
    wrong |= paired & ((calls["peer"] < 0) | (calls["peer"] >= ranks) | (calls["peer"] == calls["rank"]))
    if wrong.any():
        raise UsageError(
            f"call {np.flatnonzero(wrong)[0]} cannot be made",
            "its rank or peer is not another member of its communicator",
            "correct the workload",
        )


def _within(numbers: Ints, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _shapes(layouts: list[list[Ints]], cluster: Cluster) -> Shapes:
    ranks = np.array([sum(map(len, layout)) for layout in layouts], np.int32)
    nodes = np.array([len(layout) for layout in layouts], np.int32)
    rails = np.array([max(map(len, layout)) for layout in layouts], np.int32)
    # A communicator has its share of the channels: those of the NICs of its GPUs.
    channels = np.maximum(cluster.channels * rails // cluster.gpus, MIN_CHANNELS)
    channels = np.where(nodes == 1, 1, np.minimum(channels, cluster.channels)).astype(np.int32)
    return Shapes(ranks, nodes, rails, channels)


def _collectives(
    built: _Built,
    comm: int,
    gpus: Ints,
    layout: list[Ints],
    channels: int,
    algorithms: list[Algorithm],
    slots: int,
    cluster: Cluster,
) -> None:
    """Add the connections of a communicator's rings and trees, and its places.

    Ring and tree of a channel share a connection where both lead from one rank to the same other one, as in NCCL.
    """
    ranks = len(gpus)
    places = np.zeros((ranks, channels), PLACE)
    for name in places.dtype.names or ():
        places[name] = NONE
    for channel in range(channels):
        here = places[:, channel]
        first = channel * ranks * ranks  # a connection's key: (channel, source rank, destination rank)
        if Algorithm.RING in algorithms:
            order = ring(layout, channel, cluster.pxn)
            following = np.roll(order, -1)
            here["ring_index"][order] = np.arange(ranks)
            here["ring_send"][order] = here["ring_recv"][following] = first + order * ranks + following
        if Algorithm.TREE in algorithms:
            parents = tree(layout, channel, channels)
            children = np.flatnonzero(parents != NONE)
            parent = parents[children]
            far = gpus[children] // cluster.gpus != gpus[parent] // cluster.gpus
            # In the node first, like NCCL's tree.down[0].
            by_parent = np.lexsort((children, far, parent))
            child, parent = children[by_parent], parent[by_parent]
            which = np.arange(len(child)) - np.searchsorted(parent, parent)
            here["up_send"][child] = here["up_recv"][parent, which] = first + child * ranks + parent
            here["down_recv"][child] = here["down_send"][parent, which] = first + parent * ranks + child
    named = [places[name] for name in places.dtype.names or () if name != "ring_index"]
    keys = np.unique(np.concatenate([numbers.ravel() for numbers in named]))
    keys = keys[keys != NONE]
    for numbers in named:
        numbers[...] = np.where(
            numbers == NONE, NONE, built.connection_count + np.searchsorted(keys, numbers)
        )
    channel_of, pair = np.divmod(keys, ranks * ranks)
    source, destination = np.divmod(pair, ranks)
    _connect(built, comm, gpus, channel_of, source, destination, slots, cluster)
    built.places.append(places.ravel())
    built.place_count += places.size


def _used_pairs(calls: Array, shapes: Shapes) -> list[Ints]:
    """Of each communicator, the pairs of ranks that send: source * ranks + destination, sorted."""
    most = int(shapes.ranks.max(initial=1))
    comm = calls["comm"].astype(np.int64)
    to_all = (calls["kind"] == Kind.ALL_TO_ALL) & (calls["algorithm"] == Algorithm.P2P)
    paired = np.isin(calls["kind"], (Kind.SEND, Kind.RECV))
    sends = calls["kind"] == Kind.SEND
    source = np.where(sends, calls["rank"], calls["peer"]).astype(np.int64)
    destination = np.where(sends, calls["peer"], calls["rank"])
    seen = np.unique(((comm * most + source) * most + destination)[paired])
    pairs: list[Ints] = []
    everyone = np.zeros(len(shapes.ranks), bool)
    everyone[comm[to_all]] = True
    bounds = np.searchsorted(seen, np.arange(len(shapes.ranks) + 1) * most * most)
    for number, ranks in enumerate(shapes.ranks):
        if everyone[number]:
            grid = np.arange(ranks * ranks)
            pairs.append(grid[grid // ranks != grid % ranks].astype(np.int32))
        else:
            source, destination = np.divmod(seen[bounds[number] : bounds[number + 1]] % (most * most), most)
            pairs.append((source * ranks + destination).astype(np.int32))
    return pairs


def _pairs(built: _Built, comm: int, gpus: Ints, pairs: Ints, channels: int, cluster: Cluster) -> int:
    """Add a communicator's point-to-point connections; where its table begins in `Network.pairs`, NONE without.

    A pair's channels follow from the distance of its ranks, so that a rank's peers are spread over the channels.
    NCCL stripes a large message over as many channels as the topology gives a peer: here over P2P_PARTS.
    """
    if not len(pairs):
        return NONE
    ranks = len(gpus)
    table = np.full((ranks * ranks, P2P_PARTS), NONE, np.int32)
    table[pairs] = built.connection_count + np.arange(len(pairs) * P2P_PARTS).reshape(-1, P2P_PARTS)
    source, destination = np.divmod(np.repeat(pairs, P2P_PARTS), ranks)
    part = np.tile(np.arange(P2P_PARTS), len(pairs))
    channel = ((destination - source) % ranks + part) % channels
    _connect(built, comm, gpus, channel, source, destination, STEPS, cluster)
    built.pairs.append(table.ravel())
    first, built.pair_count = built.pair_count, built.pair_count + table.size
    return first


def _connect(
    built: _Built,
    comm: int,
    gpus: Ints,
    channel: Numbers,
    source: Numbers,
    destination: Numbers,
    slots: int,
    cluster: Cluster,
) -> None:
    """Add connections between ranks of a communicator, one for each entry of channel, source, destination.

    With PXN the member of the source's node that is on the destination's rail posts, if there is one (the
    receiving side never moves; ncclTopoGetNetDev in src/graph/search.cc); otherwise the source, across rails.
    """
    rows = np.zeros(len(source), CONNECTION)
    rows["comm"], rows["channel"], rows["slots"] = comm, channel, slots
    rows["src"], rows["dst"] = gpus[source], gpus[destination]
    rows["src_proxy"], rows["dst_proxy"] = rows["src"], rows["dst"]
    src_node, dst_node = rows["src"] // cluster.gpus, rows["dst"] // cluster.gpus
    if cluster.pxn:
        is_member = np.zeros(cluster.nodes * cluster.gpus, bool)
        is_member[gpus] = True
        on_rail = src_node * cluster.gpus + rows["dst"] % cluster.gpus
        handed = (src_node != dst_node) & is_member[on_rail]
        rows["src_proxy"][handed] = on_rail[handed]
    rows["flows"] = np.where(src_node == dst_node, 0, cluster.qps_per_connection)
    built.connections.append(rows)
    built.connection_count += len(rows)


def _flows(connections: Array, fabric: Fabric, cluster: Cluster, rng: np.random.Generator) -> Array:
    """The flows of these connections, whose `flow` is set to the first one's number.

    The driver derives a queue pair's UDP source port from both QP numbers (mlx5_set_path_udp_sport; NCCL leaves
    the flow label 0), which differ from run to run: drawn evenly here.
    """
    connections["flow"] = np.where(
        connections["flows"] > 0, np.cumsum(connections["flows"]) - connections["flows"], NONE
    )
    connection = np.repeat(np.arange(len(connections)), connections["flows"])
    flows = np.zeros(len(connection), FLOW)
    flows["connection"] = connection
    flows["src_nic"] = connections["src_proxy"][connection]
    flows["dst_nic"] = connections["dst_proxy"][connection]
    udp_sport = rng.choice(UDP_SPORTS, len(flows))
    flows["udp_sport"] = udp_sport
    flows["path"] = fabric.path(flows["src_nic"], flows["dst_nic"], udp_sport)
    flows["latency_ns"] = latency_ns(flows["path"])
    return flows
