"""The small tables of a recording: hosts, cards, processes, communicators, their channels and queue pairs."""

from __future__ import annotations

import numpy as np
import polars as pl

from pulse_bpf.lab.sim.clocks import error_ns, wall_ns
from pulse_bpf.lab.sim.identity import PORT, Identity, generator, gid, nic_name
from pulse_bpf.lab.sim.model import NONE, Cluster, Incident, Ints, Network, Settings, Target
from pulse_bpf.lab.sim.options import Options
from pulse_bpf.schema import I32, I64, NODES, STR, U64, flow_id

# Before the recording of the job's traffic: when its processes began, its communicators and queue pairs were made.
_PROCESS_AGE_NS, _COMM_AGE_NS, _QP_AGE_NS = 60_000_000_000, 2_000_000_000, 1_000_000_000
_BETWEEN_QPS_NS = 20_000
_NCCL = "2.27.5"


def nodes(identity: Identity, options: Options) -> pl.DataFrame:
    """Rows of `nodes`."""
    rows = [
        (name, options.clock, error_ns(options), f"simulated-{name}", "6.8.0")
        for name, recorded in zip(identity.nodes, identity.recorded, strict=True)
        if recorded
    ]
    return pl.DataFrame(rows, schema=NODES, orient="row")


def clocks(identity: Identity, settings: Settings) -> pl.DataFrame:
    """Rows of `clocks`: anchors of each host's monotonic clock, as many as there are parts."""
    numbers = np.flatnonzero(identity.recorded)
    node, at_ns = np.meshgrid(numbers, np.arange(settings.record_ns, settings.end_ns, 1e9), indexing="ij")
    shown_ns = wall_ns(settings, node.ravel(), at_ns.ravel())
    booted_ns = wall_ns(settings, node.ravel(), 0.0) - (3_600_000_000_000 * (1 + node.ravel()))
    names = pl.Series(identity.nodes, dtype=STR).gather(node.ravel())
    return pl.DataFrame(
        {
            "node": names,
            "domain": "monotonic",
            "raw": shown_ns - booted_ns,
            "wall_ns": shown_ns,
            "error_ns": 60,
        }
    ).sort("wall_ns")


def nics(identity: Identity, cluster: Cluster) -> pl.DataFrame:
    """Rows of `nics`."""
    rails = [
        (node, rail) for node in np.flatnonzero(identity.recorded).tolist() for rail in range(cluster.gpus)
    ]
    numbers = [node * cluster.gpus + rail for node, rail in rails]
    return pl.DataFrame(
        {
            "node": [identity.nodes[node] for node, _ in rails],
            "nic": [nic_name(cluster, number) for number in numbers],
            "port": PORT,
            "link_gbps": cluster.nic_gbps,
            "gids": [[gid(cluster, number)] for number in numbers],
            "rail": [rail for _, rail in rails],
            "netdev": [f"eth{rail}" for _, rail in rails],
            "numa": [2 * rail // cluster.gpus for _, rail in rails],
            "pci": [f"0000:{0x10 + 0x10 * rail:02x}:00.0" for _, rail in rails],
        }
    )


def processes(
    identity: Identity, cluster: Cluster, settings: Settings, incident: Incident
) -> dict[str, pl.DataFrame]:
    """Rows of `processes` and `libraries`: one process per GPU."""
    gpus = np.arange(len(identity.pids))
    gpus = gpus[identity.recorded[gpus // cluster.gpus]]
    node = gpus // cluster.gpus
    killed = incident.changes[incident.changes["what"] == Target.KILLED]
    killed_ns = dict(zip(killed["target"].tolist(), killed["t_ns"].tolist(), strict=True))
    names = pl.Series("node", identity.nodes, STR).gather(node)
    found = pl.DataFrame(
        {
            "node": names,
            "pid": identity.pids[gpus],
            "start_ns": wall_ns(settings, node, settings.record_ns) - _PROCESS_AGE_NS,
            "gone_ns": pl.Series(
                [
                    int(wall_ns(settings, gpu // cluster.gpus, killed_ns[gpu])) if gpu in killed_ns else None
                    for gpu in gpus.tolist()
                ],
                dtype=I64,
            ),
            "exe": "/usr/bin/python3.11",
        }
    )
    mapped = found.select(
        "node",
        "pid",
        path=pl.lit(f"/usr/lib/x86_64-linux-gnu/libnccl.so.{_NCCL}"),
        version=pl.lit(_NCCL),
        transport=pl.lit("verbs"),
    )
    return {"processes": found, "libraries": mapped}


def comms(
    identity: Identity,
    network: Network,
    cluster: Cluster,
    settings: Settings,
    options: Options,
    ops: pl.DataFrame,
) -> pl.DataFrame:
    """Rows of `comms`: those whose making was seen, or whose calls were."""
    comm, rank, gpu = _members(network)
    node = gpu // cluster.gpus
    found = pl.DataFrame(
        {
            "node_number": node,
            "comm": comm,
            "node": pl.Series(identity.nodes, dtype=STR).gather(node),
            "pid": identity.pids[gpu],
            "comm_ptr": identity.comm_ptrs[comm, gpu],
            "comm_id": pl.Series(identity.comm_ids, dtype=STR).gather(comm),
            "rank": rank,
            "nranks": network.comms["ranks"][comm],
            "gpu": gpu % cluster.gpus,
            "first_seen_ns": wall_ns(settings, node, settings.record_ns) - _COMM_AGE_NS,
            "ambiguous": False,
        }
    )
    if options.comm_memory:
        first = found.unique(["comm", "node"], keep="first", maintain_order=True).select(
            "comm", "node", node_index=pl.int_range(pl.len(), dtype=I32).over("comm")
        )
        found = found.with_columns(local_rank=pl.int_range(pl.len(), dtype=I32).over("comm", "node")).join(
            first, on=["comm", "node"]
        )
    if options.late_attach:
        calls = ops.group_by("node", "pid", "comm_id").agg(pl.col("call_ns").min().alias("first_seen_ns"))
        found = found.drop("first_seen_ns").join(calls, on=["node", "pid", "comm_id"])
    recorded = pl.Series(identity.recorded[found["node_number"].to_numpy()], dtype=pl.Boolean)
    return found.filter(recorded).sort("comm", "rank")


def channels(identity: Identity, network: Network, cluster: Cluster, options: Options) -> pl.DataFrame:
    """Rows of `channels`, of ranks on recorded nodes."""
    comm, rank, gpu = _members(network)
    count = network.comms["channels"][comm].astype(np.int64)
    member = np.repeat(np.arange(len(comm)), count)
    channel = np.arange(len(member)) - (np.cumsum(count) - count)[member]
    place = network.places[
        network.comms["first_place"][comm[member]] + rank[member] * count[member] + channel
    ]
    ranks = np.full((len(network.comms), len(identity.pids)), NONE, np.int32)
    ranks[comm, gpu] = rank

    def peers(connections: Ints, side: str) -> Ints:
        found = network.connections[np.maximum(connections, 0)][side]
        return np.where(
            connections == NONE, NONE, ranks[comm[member].reshape(-1, *[1] * (found.ndim - 1)), found]
        )

    if not options.comm_memory or not len(network.connections):
        return pl.DataFrame({"comm_id": []}, schema={"comm_id": STR})
    numbers = {
        "ring_prev": peers(place["ring_recv"], "src"),
        "ring_next": peers(place["ring_send"], "dst"),
        "tree_up": peers(place["up_send"], "dst"),
    }
    frame = pl.DataFrame(
        {
            "comm_id": pl.Series(identity.comm_ids, dtype=STR).gather(comm[member]),
            "rank": rank[member],
            "channel": channel,
            **numbers,
            "tree_down": peers(place["down_send"], "dst"),
            "recorded": identity.recorded[gpu[member] // cluster.gpus],
        }
    )
    # A communicator whose calls need no ring or tree has none in the simulation.
    placed = pl.any_horizontal(pl.col(name) != NONE for name in numbers) | pl.col("tree_down").arr.max().gt(
        NONE
    )
    return frame.filter(placed & pl.col("recorded")).with_columns(
        *(pl.col(name).replace(NONE, None) for name in numbers),
        tree_down=pl.col("tree_down").arr.to_list().list.filter(pl.element() != NONE),
    )


def qps(identity: Identity, cluster: Cluster, settings: Settings, options: Options) -> pl.DataFrame:
    """Rows of `qps`: each queue pair of the recorded nodes, and those that had its number before."""
    peer = identity.ends.select(
        pl.col("end") + 1 - 2 * (pl.col("end") % 2), peer_qpn="qpn", peer_gid="local_gid"
    )
    ends = identity.ends.join(peer, on="end", maintain_order="left").filter(
        pl.col("at_node") < len(identity.nodes)
    )
    node = ends["at_node"].to_numpy()
    made_ns = wall_ns(settings, node, settings.record_ns) - _QP_AGE_NS
    made_ns += _BETWEEN_QPS_NS * (ends["qpn"].to_numpy() % 5_000)
    by_uprobe = pl.col("by_uprobe")
    # Netlink does not tell the peer's address; a packet does.
    peer_gid = pl.col("peer_gid") if options.source == "packets" else pl.when(by_uprobe).then("peer_gid")
    living = ends.with_columns(
        peer_gid,
        created_ns=pl.when(by_uprobe).then(pl.Series(made_ns)),
        gone_ns=pl.lit(None, I64),
        path_mtu=pl.when(by_uprobe).then(cluster.path_mtu),
        retry_count=pl.when(by_uprobe).then(settings.retry_count),
        timeout=pl.when(by_uprobe).then(settings.timeout),
        service_level=pl.when(by_uprobe).then(3),
        origin=pl.when(by_uprobe).then(pl.lit("uprobe")).otherwise(pl.lit("netlink")),
    )
    found = pl.concat([living, _earlier(living, settings)]).sort("node", "nic", "qpn", "created_ns")
    return found.filter(pl.Series(identity.recorded[found["at_node"].to_numpy()], dtype=pl.Boolean))


def _earlier(living: pl.DataFrame, settings: Settings) -> pl.DataFrame:
    """The queue pairs of an earlier job's processes, to other peers, whose numbers were used again."""
    reused = living.filter(pl.col("life") > 0)
    other = generator(settings.seed, "earlier peers").permutation(reused.height)
    keys = reused.select("node", "nic", "qpn").iter_rows()
    return reused.with_columns(
        *(reused[name].gather(other).alias(name) for name in ("peer_qpn", "peer_gid")),
        flow=pl.Series([flow_id(node, nic, PORT, qpn, 0) for node, nic, qpn in keys], dtype=U64),
        pid=pl.col("pid") - 1,
        created_ns=pl.col("created_ns") - 400_000_000,
        gone_ns=pl.col("created_ns") - 200_000_000,
    )


def _members(network: Network) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Communicator, rank and GPU of every member."""
    size = network.comms["ranks"].astype(np.int64)
    comm = np.repeat(np.arange(len(size)), size)
    rank = np.arange(len(comm)) - (np.cumsum(size) - size)[comm]
    return comm, rank, network.comm_gpus[network.comms["first_gpu"][comm] + rank].astype(np.int64)
