"""What really happened, in files beside the recording that no analysis opens: faults, operators and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from pulse_bpf.lab.sim.clocks import EPOCH_NS, wall_ns
from pulse_bpf.lab.sim.identity import PORT, Identity, nic_name, node_name
from pulse_bpf.lab.sim.model import NONE, Cluster, Network, Result, Settings
from pulse_bpf.schema import I32, I64, STR, U8, U64

_COLUMNS: dict[str, pl.DataType | type[pl.DataType]] = {
    "node": STR,
    "nic": STR,
    "port": U8,
    "direction": STR,
    "pid": I64,
    "peer_pid": I64,
    "gpu": I32,
    "comm_id": STR,
    "kind": STR,
    "op_seq": U64,
    "program_pos": U64,
    "rank": I32,
    "peer_rank": I32,
    "peer_node": STR,
    "peer_nic": STR,
    "flows": pl.List(U64),
    "call_ns": I64,
    "start_ns": I64,
    "end_ns": I64,
    "bytes": U64,
}
OPERATORS = pl.Schema(_COLUMNS)
CALLS = ("node", "pid", "gpu", "rank", "comm_id", "kind", "seq", "bytes", "call_ns", "start_ns", "end_ns")

_PLACE = ["gpu", "peer_gpu", "comm", "nic_number", "peer_nic_number"]


def operators(
    calls: pl.DataFrame,
    result: Result,
    network: Network,
    cluster: Cluster,
    settings: Settings,
    identity: Identity,
) -> pl.DataFrame:
    """truth_operators (OPERATORS): one row per operator, flows to one peer, and direction, as the format has them.

    `calls` are those of calls.operators. Bytes are payload, without repeats, of all channels; times are those
    of the first and last of them, on the node's own clock. op_seq, program_pos and call_ns are null where no
    call was recorded, end_ns where the operator never ended. `pid` is the process that called, which with PXN
    is not the one that owns the queue pairs.
    """
    moved = result.moved
    connections = network.connections[moved["connection"]]
    between = connections["flows"] > 0
    moved, connections = moved[between], connections[between]
    flow = network.flows[connections["flow"]]
    ends = {"src": flow["src_nic"].astype(np.int64), "dst": flow["dst_nic"].astype(np.int64)}
    sides = [
        _side(moved, connections, ends, *side, settings, cluster)
        for side in (("tx", "call", "src", "dst"), ("rx", "recv_call", "dst", "src"))
    ]
    of_call = calls.select(
        "call",
        "operator",
        "operator_kind",
        "rank",
        "comm_id",
        "op_seq",
        "program_pos",
        "recorded_ns",
        "end_ns",
    )
    ranks = calls.select("comm", "gpu", "rank").unique()
    peer_ranks = ranks.rename({"gpu": "peer_gpu", "rank": "peer_rank"})
    gathered = (
        pl.concat(sides)
        .join(of_call, on="call")
        .group_by("operator", "direction", *_PLACE)
        .agg(
            pl.col("operator_kind", "rank", "comm_id", "op_seq", "program_pos", "recorded_ns").first(),
            pl.col("start_ns").min(),
            pl.when(pl.col("end_ns").null_count() == 0).then(pl.col("last_ns").max()).alias("end_ns"),
            pl.col("bytes").sum(),
        )
        .join(peer_ranks, on=["comm", "peer_gpu"], how="left")
        .join(_flows(network, identity), on=["direction", *_PLACE], how="left")
        .sort("operator", "direction", *_PLACE)
    )
    nics = pl.Series([nic_name(cluster, number) for number in range(len(identity.pids))], dtype=STR)
    nodes, pids = pl.Series(identity.nodes, dtype=STR), pl.Series(identity.pids)
    return gathered.select(
        node=nodes.gather(gathered["nic_number"] // cluster.gpus),
        nic=nics.gather(gathered["nic_number"]),
        port=pl.lit(PORT, U8),
        direction="direction",
        pid=pids.gather(gathered["gpu"]),
        peer_pid=pids.gather(gathered["peer_gpu"]),
        gpu=pl.col("gpu") % cluster.gpus,
        comm_id="comm_id",
        kind="operator_kind",
        op_seq="op_seq",
        program_pos="program_pos",
        rank="rank",
        peer_rank="peer_rank",
        peer_node=nodes.gather(gathered["peer_nic_number"] // cluster.gpus),
        peer_nic=nics.gather(gathered["peer_nic_number"]),
        flows="flows",
        call_ns="recorded_ns",
        start_ns="start_ns",
        end_ns="end_ns",
        bytes="bytes",
    ).cast(OPERATORS)


def calls_table(calls: pl.DataFrame, cluster: Cluster) -> pl.DataFrame:
    """truth_calls: when each call was made, and began and ended on its GPU; `seq` counts from the job's start."""
    made = calls.filter(pl.col("call_ns").is_not_null())
    return made.select(CALLS[:2], gpu=(pl.col("gpu") % cluster.gpus).cast(I32)).hstack(
        made.with_columns(kind="kind_name").select(CALLS[3:])
    )


def content(
    truth: Mapping[str, Any],
    result: Result,
    network: Network,
    cluster: Cluster,
    identity: Identity,
) -> dict[str, Any]:
    """`truth` as truth.json has it: names for numbers, and times in ns since 1970 of a clock without error.

    Its `faults` have the fields of faults.Fault and further ones, `indistinguishable_from` components with node,
    gpu and nic as numbers. A fault in a call begins with that call.
    """
    faults = [_fault(fault, result, network, cluster, identity) for fault in truth["faults"]]
    return {"version": 1, **truth, "faults": faults}


def _fault(
    fault: Mapping[str, Any], result: Result, network: Network, cluster: Cluster, identity: Identity
) -> dict[str, Any]:
    inside = ("call", "link", "other_link", "flows", "peer_nic")
    told = {name: value for name, value in fault.items() if name not in inside and value is not None}
    called_ns = np.nan if fault.get("call") is None else result.call_times["call_ns"][fault["call"]]
    if np.isfinite(called_ns):
        told["start_ns"] = called_ns
    for name in ("start_ns", "end_ns"):
        if name in told:
            told[name] = EPOCH_NS + round(told[name])
    told |= _component(told, cluster)
    if fault.get("peer_nic") is not None:
        told["peer_node"] = node_name(fault["peer_nic"] // cluster.gpus)
        told["peer_nic"] = nic_name(cluster, fault["peer_nic"])
    if fault.get("flows"):
        told["flows"] = _queue_pairs(fault["flows"], identity, cluster)
    alike = fault.get("indistinguishable_from") or ()
    return {
        **told,
        "indistinguishable_from": [{**other, **_component(other, cluster)} for other in alike],
    }


def _component(told: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    names: dict[str, Any] = {}
    if told.get("node") is not None:
        names["node"] = node_name(told["node"])
    if told.get("gpu") is not None:
        names["gpu"] = told["gpu"] % cluster.gpus
    if told.get("nic") is not None:
        names["nic"] = nic_name(cluster, told["nic"])
    return names


def _queue_pairs(flows: Sequence[int], identity: Identity, cluster: Cluster) -> list[dict[str, Any]]:
    """The sending queue pair of each flow, with the NIC at its other end."""
    sent = identity.ends.filter(pl.col("end").is_in([2 * flow for flow in flows]))
    received = identity.ends.filter(pl.col("end").is_in([2 * flow + 1 for flow in flows]))
    return sent.select("node", "nic", "qpn", peer_node=received["node"], peer_nic=received["nic"]).to_dicts()


def _side(
    moved: np.ndarray,
    connections: np.ndarray,
    nics: Mapping[str, np.ndarray],
    direction: str,
    call: str,
    own: str,
    peer: str,
    settings: Settings,
    cluster: Cluster,
) -> pl.DataFrame:
    """What one end of all connections sent or received, on its clock; nothing of what it does not know yet."""
    times = {name: moved[f"{name}_{direction}_ns"] for name in ("first", "last")}
    known = (moved[call] != NONE) & np.isfinite(times["first"]) & np.isfinite(times["last"])
    node = nics[own][known] // cluster.gpus
    return pl.DataFrame(
        {
            "call": moved[call][known].astype(np.int64),
            "direction": np.full(int(known.sum()), direction),
            "gpu": connections[own][known].astype(np.int64),
            "peer_gpu": connections[peer][known].astype(np.int64),
            "comm": connections["comm"][known],
            "nic_number": nics[own][known],
            "peer_nic_number": nics[peer][known],
            "start_ns": wall_ns(settings, node, times["first"][known]),
            "last_ns": wall_ns(settings, node, times["last"][known]),
            "bytes": moved["bytes"][known],
        }
    )


def _flows(network: Network, identity: Identity) -> pl.DataFrame:
    """The flows of each group between two processes of a communicator and two NICs, by direction."""
    flows = network.flows[network.flows["connection"] != NONE]
    number = np.flatnonzero(network.flows["connection"] != NONE)
    connection = network.connections[flows["connection"]]
    frames = [
        pl.DataFrame(
            {
                "direction": np.full(len(flows), direction),
                "gpu": connection[own].astype(np.int64),
                "peer_gpu": connection[peer].astype(np.int64),
                "comm": connection["comm"],
                "nic_number": flows[f"{own}_nic"].astype(np.int64),
                "peer_nic_number": flows[f"{peer}_nic"].astype(np.int64),
                "flows": identity.ends["flow"].gather(2 * number + end),
            }
        )
        for direction, own, peer, end in (("tx", "src", "dst", 0), ("rx", "dst", "src", 1))
    ]
    return pl.concat(frames).group_by("direction", *_PLACE).agg(pl.col("flows").sort())
