"""Bytes that NCCL's operators put on connections, by the formulas alone: what the simulation is held against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.lab.sim.model import NONE, Algorithm, Array, Kind, Network, Protocol

# 8 bytes of data in a line of 16; 120 in one of 128.
FACTOR = {Protocol.SIMPLE: 1.0, Protocol.LL: 2.0, Protocol.LL128: 128 / 120}


def wire_bytes(network: Network, calls: Array) -> NDArray[np.float64]:
    """Bytes with the protocol's overhead on each connection, f8[connections], of calls with all members' rows.

    A channel carries an equal part of its operator; parts of an element and empty slices are not reckoned with.
    """
    total = np.zeros(len(network.connections))
    for call in calls:
        comm = network.comms[call["comm"]]
        ranks, channels = int(comm["ranks"]), int(call["channels"])
        size = float(call["bytes"]) * FACTOR[Protocol(call["protocol"])]
        if call["algorithm"] == Algorithm.LOCAL or call["kind"] == Kind.RECV:
            continue
        if call["algorithm"] == Algorithm.P2P:
            row = network.pairs[comm["pairs"] + call["rank"] * ranks :][:ranks]
            if call["kind"] == Kind.SEND:
                total[row[call["peer"]]] += size
            else:
                total[row[row != NONE]] += size / ranks
            continue
        first = comm["first_place"] + call["rank"] * comm["channels"]
        for place in network.places[first : first + channels]:
            part = size / channels
            if call["algorithm"] == Algorithm.TREE:
                for connection in (place["up_send"], *place["down_send"]):
                    total[connection] += part if connection != NONE else 0
                continue
            gpus = network.comm_gpus[comm["first_gpu"] :][:ranks]
            following = network.connections["dst"][place["ring_send"]]
            into_root = following == gpus[call["peer"]]
            total[place["ring_send"]] += {
                Kind.ALL_REDUCE: part * 2 * (ranks - 1) / ranks,
                Kind.ALL_GATHER: part * (ranks - 1) / ranks,
                Kind.REDUCE_SCATTER: part * (ranks - 1) / ranks,
                Kind.BROADCAST: 0 if into_root else part,
                Kind.REDUCE: 0 if call["rank"] == call["peer"] else part,
            }[Kind(call["kind"])]
    return total
