"""Who is who in a simulated recording: hosts, processes, communicators and queue pairs, as a real one names them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.lab.sim.model import NONE, Cluster, Network
from pulse_bpf.lab.sim.options import Options
from pulse_bpf.schema import BOOL, I64, STR, U8, U32, U64, comm_id, flow_id

Longs = NDArray[np.int64]

PORT = 1
# mlx5 hands out queue pair numbers upwards; what a freshly booted host has used by then.
_FIRST_QPN = 200
_TENANT_PID = 900_000
# As many nodes, and GPUs of a node, as `gid` has addresses for.
MOST_NODES, MOST_GPUS = 250 * 256, 256

ENDS = pl.Schema(
    {
        "end": I64,
        "at_node": I64,
        "at_nic": I64,
        "node": STR,
        "nic": STR,
        "port": U8,
        "qpn": U32,
        "flow": U64,
        "local_gid": STR,
        "pid": I64,
        "life": I64,
        "by_uprobe": BOOL,
    }
)


def node_name(cluster: Cluster, node: int) -> str:
    """The host name of a node."""
    return cluster.names[node] if node < len(cluster.names) else f"node{node}"


def nic_name(cluster: Cluster, nic: int) -> str:
    """The RDMA device of a NIC, numbered over all nodes."""
    return f"mlx5_{nic % cluster.gpus}"


def gid(cluster: Cluster, nic: int) -> str:
    """The RoCEv2 address of a NIC: a network of its own for each rail."""
    node, rail = divmod(nic, cluster.gpus)
    return f"::ffff:10.{rail}.{node // 250}.{node % 250 + 1}"


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Random numbers for one purpose, so that one option more or less changes nothing else."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


@dataclass(frozen=True)
class Identity:
    """`pids` by GPU; `comm_ids` by communicator, `comm_ptrs` by (communicator, GPU).

    `ends` (ENDS) has row 2 * flow for the queue pair that sends a flow's data, and the next one for that which
    receives them; `at_node` and `at_nic` are numbers, `life` counts the queue pairs that had the number before,
    `by_uprobe`: its making was seen. `recorded`: whether a node has an agent.
    """

    nodes: list[str]
    recorded: NDArray[np.bool_]
    pids: Longs
    comm_ids: list[str]
    comm_ptrs: NDArray[np.uint64]
    ends: pl.DataFrame


def identify(cluster: Cluster, network: Network, options: Options, seed: int) -> Identity:
    """Names for everything in a run."""
    gpus = np.arange(cluster.nodes * cluster.gpus)
    first_pid = generator(seed, "pids").integers(3_000, 200_000, cluster.nodes)
    pids = first_pid[gpus // cluster.gpus] + 137 * (gpus % cluster.gpus)
    hashes = generator(seed, "communicators").integers(1, 2**64, len(network.comms), np.uint64)
    ids = [
        comm_id(int(number), int(ranks)) for number, ranks in zip(hashes, network.comms["ranks"], strict=True)
    ]
    heap = generator(seed, "pointers").integers(0x7F00_0000, 0x7FFF_0000, len(gpus), np.uint64) << np.uint64(
        16
    )
    ptrs = heap[None, :] + (np.arange(len(ids), dtype=np.uint64) << np.uint64(14))[:, None]
    recorded = np.ones(cluster.nodes, bool)
    missing = generator(seed, "agents").permutation(cluster.nodes)[: options.missing_agents]
    recorded[missing] = False
    return Identity(
        [node_name(cluster, node) for node in range(cluster.nodes)],
        recorded,
        pids,
        ids,
        ptrs,
        _ends(cluster, network, pids, options, seed),
    )


def _ends(cluster: Cluster, network: Network, pids: Longs, options: Options, seed: int) -> pl.DataFrame:
    flows = network.flows
    nic = np.stack([flows["src_nic"], flows["dst_nic"]], 1).ravel().astype(np.int64)
    node = nic // cluster.gpus
    nics = int(nic.max(initial=len(pids) - 1)) + 1
    first_qpn = np.full(nics, _FIRST_QPN)
    if not options.same_qpns:
        first_qpn += 8 * generator(seed, "queue pairs").integers(0, 5_000, nics)
    order = np.argsort(nic, kind="stable")
    begins = np.searchsorted(nic[order], np.arange(nics))
    qpn = np.empty(len(nic), np.int64)
    qpn[order] = np.arange(len(nic)) - begins[nic[order]] + first_qpn[nic[order]]
    owner, tenant = _owners(network, pids)
    unseen = generator(seed, "netlink").random(len(nic)) < options.netlink_only
    by_uprobe = ~(tenant | unseen | options.late_attach)
    # A life that nobody saw does not count.
    reused = generator(seed, "reuse").random(len(nic)) < options.qpn_reuse
    life = (reused & by_uprobe).astype(np.int64)
    names = [node_name(cluster, int(number)) for number in node]
    devices = [nic_name(cluster, int(number)) for number in nic]
    lifetimes = zip(names, devices, qpn.tolist(), life.tolist(), strict=True)
    return pl.DataFrame(
        {
            "end": np.arange(len(nic)),
            "at_node": node,
            "at_nic": nic,
            "node": names,
            "nic": devices,
            "port": PORT,
            "qpn": qpn,
            "flow": [flow_id(name, device, PORT, number, n) for name, device, number, n in lifetimes],
            "local_gid": [gid(cluster, int(number)) for number in nic],
            "pid": owner,
            "life": life,
            "by_uprobe": by_uprobe,
        },
        schema=ENDS,
    )


def _owners(network: Network, pids: Longs) -> tuple[Longs, NDArray[np.bool_]]:
    """Process of each end, the one whose proxy posts, and whether that is another tenant's."""
    connection = network.flows["connection"]
    tenant = connection == NONE
    if len(network.connections):
        of_job = network.connections[np.maximum(connection, 0)]
        tenant = tenant | (of_job["comm"] == NONE)
        proxies = np.stack([of_job["src_proxy"], of_job["dst_proxy"]], 1)
        owner = pids[np.where(tenant[:, None], 0, proxies)]
    else:
        owner = np.zeros((len(connection), 2), np.int64)
    owner = np.where(tenant[:, None], _TENANT_PID, owner)
    return owner.ravel(), np.repeat(tenant, 2)
