"""Communicators, calls and networks for tests of the simulated NCCL."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.model import CALL, NONE, TASK, Algorithm, Array, Cluster, Job, Kind, Network, Protocol
from pulse_bpf.lab.sim.nccl import build
from pulse_bpf.lab.sim.tuning import NcclOptions

MIB = 1 << 20
RING = NcclOptions(algorithm=Algorithm.RING, protocol=Protocol.SIMPLE)
TREE = NcclOptions(algorithm=Algorithm.TREE, protocol=Protocol.SIMPLE)


def everyone(kind: Kind, size: int, ranks: int, comm: int = 0, root: int = NONE) -> Array:
    """One call of each rank of a communicator."""
    calls = np.zeros(ranks, CALL)
    calls["comm"], calls["rank"], calls["peer"] = comm, range(ranks), root
    calls["kind"], calls["bytes"], calls["dtype_bytes"] = kind, size, 4
    return calls


def one(kind: Kind, size: int, rank: int, peer: int, comm: int = 0) -> Array:
    call = everyone(kind, size, 1, comm, peer)
    call["rank"] = rank
    return call


def built(
    cluster: Cluster, members: list[list[int]], *calls: Array, options: NcclOptions = RING, seed: int = 0
) -> tuple[Network, Array]:
    gpus = cluster.nodes * cluster.gpus
    job = Job(
        np.zeros(0, TASK), np.zeros(gpus + 1, np.int32), np.concatenate(calls), members, ["" for _ in members]
    )
    return build(cluster, Fabric(cluster), job, np.random.default_rng(seed), options)


def all_gpus(cluster: Cluster) -> list[int]:
    return list(range(cluster.nodes * cluster.gpus))


def places_of(network: Network, comm: int = 0) -> Array:
    """PLACE[ranks, channels]"""
    row = network.comms[comm]
    places = network.places[row["first_place"] :][: row["ranks"] * row["channels"]]
    return places.reshape(row["ranks"], row["channels"])


CLUSTERS = st.builds(
    Cluster,
    nodes=st.integers(2, 9),
    gpus=st.integers(1, 8),
    channels=st.integers(1, 10),
    nodes_per_leaf=st.integers(1, 4),
    qps_per_connection=st.integers(1, 3),
    pxn=st.booleans(),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, list[int]]:
    """A cluster and a communicator over at least two of its nodes, in any order of ranks."""
    cluster = draw(CLUSTERS)
    gpus = draw(st.permutations(all_gpus(cluster)))
    members = gpus[: draw(st.integers(2, len(gpus)))]
    if len({gpu // cluster.gpus for gpu in members}) < 2:
        members = [0, cluster.gpus]
    return cluster, members
