"""What really happened, in files beside the recording that no analysis opens: faults, operators and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.lab.sim.clocks import EPOCH_NS, wall_ns
from pulse_bpf.lab.sim.identity import PORT, Identity, nic_name, node_name
from pulse_bpf.lab.sim.model import NONE, Array, Cluster, Network, Result, Settings
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

_PLACE = ["direction", "two_sided", "gpu", "peer_gpu", "comm", "nic_number", "peer_nic_number"]
_OF_OPERATOR = ["operator_kind", "comm_id", "op_seq", "program_pos", "recorded_ns"]
_ENDS = (("tx", "call", "src", "dst"), ("rx", "recv_call", "dst", "src"))


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
    call was recorded, end_ns where the operator never ended.
    With PXN a process sends on behalf of its neighbours in the node. The processes of a row are those that own the
    queue pairs, since they all take part in a collective, with their own numbers of it. Send and Recv, which the
    owners know nothing of, are those of the processes that called.
    """
    two_sided = np.zeros(len(result.call_times), bool)
    two_sided[calls["call"].to_numpy()] = calls["two_sided"].to_numpy()
    rows = [_side(result.moved, network, two_sided, *side, settings, cluster) for side in _ENDS]
    gathered = (
        pl.concat(rows)
        .join(calls.select("call", "operator", "nccl_seq", "end_ns"), on="call")
        .with_columns(operator=pl.when("two_sided").then("operator"))
        .group_by("operator", "nccl_seq", *_PLACE)
        .agg(
            pl.col("start_ns").min(),
            pl.when(pl.col("end_ns").null_count() == 0).then(pl.col("last_ns").max()).alias("end_ns"),
            pl.col("bytes").sum().round(),
        )
    )
    collectives = calls.filter(~pl.col("two_sided")).select("gpu", "comm", "nccl_seq", *_OF_OPERATOR)
    groups = calls.unique("operator", keep="first").select("operator", *_OF_OPERATOR)
    named = pl.concat(
        [
            gathered.filter(~pl.col("two_sided")).join(
                collectives, on=["gpu", "comm", "nccl_seq"], how="left"
            ),
            gathered.filter("two_sided").join(groups, on="operator", how="left"),
        ]
    )
    ranks = calls.select("comm", "gpu", "rank").unique()
    peer_ranks = ranks.rename({"gpu": "peer_gpu", "rank": "peer_rank"})
    placed = (
        named.join(ranks, on=["comm", "gpu"], how="left")
        .join(peer_ranks, on=["comm", "peer_gpu"], how="left")
        .join(_flows(network, identity), on=_PLACE, how="left")
        .sort("operator", "nccl_seq", *_PLACE)
    )
    nics = pl.Series([nic_name(cluster, number) for number in range(len(identity.pids))], dtype=STR)
    nodes, pids = pl.Series(identity.nodes, dtype=STR), pl.Series(identity.pids)
    return placed.select(
        node=nodes.gather(placed["nic_number"] // cluster.gpus),
        nic=nics.gather(placed["nic_number"]),
        port=pl.lit(PORT, U8),
        direction="direction",
        pid=pids.gather(placed["gpu"]),
        peer_pid=pids.gather(placed["peer_gpu"]),
        gpu=pl.col("gpu") % cluster.gpus,
        comm_id="comm_id",
        kind="operator_kind",
        op_seq="op_seq",
        program_pos="program_pos",
        rank="rank",
        peer_rank="peer_rank",
        peer_node=nodes.gather(placed["peer_nic_number"] // cluster.gpus),
        peer_nic=nics.gather(placed["peer_nic_number"]),
        flows="flows",
        call_ns="recorded_ns",
        start_ns="start_ns",
        end_ns="end_ns",
        bytes="bytes",
    ).cast(OPERATORS)


def calls_table(calls: pl.DataFrame, cluster: Cluster) -> pl.DataFrame:
    """truth_calls: when each call that was made began and ended on its GPU; `seq` counts from the job's start."""
    return calls.with_columns(kind="kind_name", gpu=(pl.col("gpu") % cluster.gpus).cast(I32)).select(CALLS)


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
        told["peer_node"] = node_name(cluster, fault["peer_nic"] // cluster.gpus)
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
        names["node"] = node_name(cluster, told["node"])
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
    moved: Array,
    network: Network,
    two_sided: NDArray[np.bool_],
    direction: str,
    call: str,
    own: str,
    peer: str,
    settings: Settings,
    cluster: Cluster,
) -> pl.DataFrame:
    """What one end of all connections between nodes sent or received, on its clock."""
    times = {name: moved[f"{name}_{direction}_ns"] for name in ("first", "last")}
    known = (moved[call] != NONE) & np.isfinite(times["first"]) & np.isfinite(times["last"])
    known &= network.connections["flows"][moved["connection"]] > 0
    rows = moved[known]
    connections = network.connections[rows["connection"]]
    flows = network.flows[connections["flow"]]
    called = two_sided[rows[call]]
    node = flows[f"{own}_nic"] // cluster.gpus
    return pl.DataFrame(
        {
            "call": rows[call].astype(np.int64),
            "direction": np.full(len(rows), direction),
            "two_sided": called,
            "gpu": np.where(called, connections[own], connections[f"{own}_proxy"]).astype(np.int64),
            "peer_gpu": np.where(called, connections[peer], connections[f"{peer}_proxy"]).astype(np.int64),
            "comm": connections["comm"],
            "nic_number": flows[f"{own}_nic"],
            "peer_nic_number": flows[f"{peer}_nic"],
            "start_ns": wall_ns(settings, node, rows[f"first_{direction}_ns"]),
            "last_ns": wall_ns(settings, node, rows[f"last_{direction}_ns"]),
            "bytes": rows["bytes"],
        }
    )


def _flows(network: Network, identity: Identity) -> pl.DataFrame:
    """The flows of each group between two processes of a communicator and two NICs, by direction."""
    number = np.flatnonzero(network.flows["connection"] != NONE)
    flows = network.flows[number]
    connections = network.connections[flows["connection"]]
    frames = [
        pl.DataFrame(
            {
                "direction": np.full(len(flows), direction),
                "two_sided": np.full(len(flows), not suffix),
                "gpu": connections[own + suffix].astype(np.int64),
                "peer_gpu": connections[peer + suffix].astype(np.int64),
                "comm": connections["comm"],
                "nic_number": flows[f"{own}_nic"],
                "peer_nic_number": flows[f"{peer}_nic"],
                "flow": identity.ends["flow"].gather(2 * number + (own == "dst")),
            }
        )
        for direction, _, own, peer in _ENDS
        for suffix in ("", "_proxy")
    ]
    return pl.concat(frames).group_by(_PLACE).agg(pl.col("flow").sort().alias("flows"))
