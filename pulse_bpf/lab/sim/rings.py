"""Rings over the members of a communicator, one per channel, as NCCL lays them on nodes with a NIC per GPU."""

from __future__ import annotations

import numpy as np

from pulse_bpf.lab.sim.model import Ints


def members_by_node(gpus: Ints, gpus_per_node: int) -> list[Ints]:
    """Ranks of each node in the order of their GPUs, nodes in the order of their first rank.

    `gpus` is the GPU of each rank. NCCL numbers nodes the same way (initTransportsRank in src/init.cc).
    """
    nodes = gpus // gpus_per_node
    _, first = np.unique(nodes, return_index=True)
    ranks = [np.flatnonzero(nodes == nodes[rank]) for rank in np.sort(first)]
    return [of_node[np.argsort(gpus[of_node])].astype(np.int32) for of_node in ranks]


def ring(nodes: list[Ints], channel: int, pxn: bool) -> Ints:
    """Ranks in the order of this channel's ring, i4[ranks]; each rank sends to the next one, the last to the first.

    In each node the chain begins at the GPU on the channel's rail, so that a ring crosses into a node once and
    over that rail. The chain's last GPU is on another rail: with PXN it hands its data to the GPU on the channel's
    rail, whose proxy sends it; without, every other node runs its chain backwards, so that both ends of a crossing
    are on one rail (NCCL_CROSS_NIC=2; with an odd number of nodes one crossing changes the rail).
    """
    chains = []
    for number, ranks in enumerate(nodes):
        chain = np.roll(ranks, -(channel % len(ranks)))
        chains.append(chain[::-1] if not pxn and number % 2 else chain)
    return np.concatenate(chains)
