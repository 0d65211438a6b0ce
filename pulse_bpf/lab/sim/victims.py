"""What a job uses of a cluster, so that a fault hits something that carries traffic."""

from __future__ import annotations

import numpy as np

from pulse_bpf.lab.sim.model import NONE, P2P_PARTS, Algorithm, Array, Floats, Ints, Kind, Network

# Of the busiest one's bytes: a NIC, link or flow that carries less is no victim, for hardly anyone would notice.
_BUSY = 0.1


def flow_bytes(network: Network, calls: Array) -> Floats:
    """Bytes that each flow carries if all calls are made, f8[flows]: near enough to tell busy from idle ones.

    By the formulas of tests/test_sim_nccl.py without protocol factors and roots: rings carry bytes x (n - 1) / n,
    twice that for AllReduce, trees the bytes up and down.
    """
    carried = np.zeros(len(network.connections))
    calls = calls[np.argsort(calls["comm"], kind="stable")]
    bounds = np.searchsorted(calls["comm"], np.arange(len(network.comms) + 1))
    for number, comm in enumerate(network.comms):
        of_comm = calls[bounds[number] : bounds[number + 1]]
        ranks, channels, first = int(comm["ranks"]), int(comm["channels"]), int(comm["first_place"])
        places = network.places[first : first + ranks * channels].reshape(ranks, channels)
        rings = of_comm[(of_comm["algorithm"] == Algorithm.RING) & (of_comm["rank"] == 0)]
        crossings = np.where(rings["kind"] == Kind.ALL_REDUCE, 2, 1) * (ranks - 1) / ranks
        _add(carried, places["ring_send"], _by_channel(rings, crossings, channels)[None, :])
        trees = of_comm[(of_comm["algorithm"] == Algorithm.TREE) & (of_comm["rank"] == 0)]
        by_channel = _by_channel(trees, np.ones(len(trees)), channels)
        _add(carried, places["up_send"], by_channel[None, :])
        _add(carried, places["down_send"], by_channel[None, :, None])
        if comm["pairs"] != NONE:
            pairs = network.pairs[int(comm["pairs"]) :][: ranks * ranks * P2P_PARTS]
            _add(
                carried,
                pairs.reshape(ranks, ranks, P2P_PARTS),
                _by_pair(of_comm, ranks)[:, :, None] / P2P_PARTS,
            )
    share = carried / np.maximum(network.connections["flows"], 1)
    of_flow = network.flows["connection"]
    return np.asarray(np.where(of_flow == NONE, 0.0, share[of_flow]), np.float64)


def link_bytes(network: Network, carried: Floats) -> Floats:
    """Bytes over each link, f8[links], from those of each flow."""
    path = network.flows["path"]
    used = path != NONE
    weights = np.broadcast_to(carried[:, None], path.shape)[used]
    return np.bincount(path[used], weights, minlength=len(network.links)).astype(np.float64)


def busy(volume: Floats, among: Ints) -> Ints:
    """Those of `among` (numbers of links or flows) that carry much, judged by the busiest of them."""
    much = (volume[among] > 0) & (volume[among] >= _BUSY * volume[among].max(initial=0.0))
    return np.asarray(among[much], np.int32)


def _by_channel(calls: Array, crossings: Floats, channels: int) -> Floats:
    """Bytes over each channel: a call's are spread evenly over its first channels."""
    each = calls["bytes"] * crossings / np.maximum(calls["channels"], 1)
    by_last = np.bincount(calls["channels"], each, minlength=channels + 1)
    return np.cumsum(by_last[::-1])[::-1][1 : channels + 1].astype(np.float64)


def _by_pair(calls: Array, ranks: int) -> Floats:
    """Bytes from each rank to each, [ranks, ranks]."""
    sends = calls[calls["kind"] == Kind.SEND]
    pairs = np.bincount(sends["rank"] * ranks + sends["peer"], sends["bytes"], minlength=ranks * ranks)
    exchanges = calls[calls["kind"] == Kind.ALL_TO_ALL]
    rows = np.bincount(exchanges["rank"], exchanges["bytes"] / ranks, minlength=ranks)
    return np.asarray(pairs.reshape(ranks, ranks) + rows[:, None], np.float64)


def _add(carried: Floats, connections: Ints, volume: Floats) -> None:
    there = connections != NONE
    np.add.at(carried, connections[there], np.broadcast_to(volume, connections.shape)[there])
