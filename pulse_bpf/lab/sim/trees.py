"""Double binary trees over the nodes of a communicator, and chains inside the nodes."""

from __future__ import annotations

import numpy as np

from pulse_bpf.lab.sim.model import NONE, Ints


def binary_tree(nodes: int) -> list[int]:
    """The parent of each node, NONE for node 0: odd numbers are leaves, inner ones have two children or one.

    A node is at the height of its lowest set bit and its parent is the nearest node one level higher; the root
    has a single child. Source of the form: NCCL, src/graph/trees.cc; idea: Sanders, Speck, Traff, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009).
    """
    parents = [NONE]
    for node in range(1, nodes):
        height = node & -node
        higher = (node ^ height) | (height << 1)
        parents.append(higher if higher < nodes else node ^ height)
    return parents


def double_tree(nodes: int) -> tuple[list[int], list[int]]:
    """Parents in two trees, such that a node is mostly inner in one and a leaf in the other.

    The second is the first one mirrored (even number of nodes) or shifted by one (odd).
    """
    first = binary_tree(nodes)
    renumbered = [nodes - 1 - n if nodes % 2 == 0 else (n + 1) % nodes for n in range(nodes)]
    second = [NONE] * nodes
    for node, parent in enumerate(first):
        second[renumbered[node]] = NONE if parent == NONE else renumbered[parent]
    return first, second


def tree(nodes: list[Ints], channel: int, channels: int) -> Ints:
    """The parent of each rank in this channel's tree, NONE for the root, i4[ranks].

    The GPU on the channel's rail is its node's head: parent and children in other nodes are its own, and the
    node's other GPUs hang below it in a chain (NCCL's pattern "tree"; "balanced tree" gives the two children to
    the second GPU, which moves the same bytes over the same NICs with PXN). The first half of the channels uses
    the first tree, as NCCL's duplicated channels do.
    """
    parents_of_nodes = double_tree(len(nodes))[0 if channel < -(-channels // 2) else 1]
    chains = [np.roll(ranks, -(channel % len(ranks))) for ranks in nodes]
    parents = np.full(sum(map(len, chains)), NONE, np.int32)
    for chain, parent in zip(chains, parents_of_nodes, strict=True):
        parents[chain[1:]] = chain[:-1]
        if parent != NONE:
            parents[chain[0]] = chains[parent][0]
    return parents
