"""The tables of a recording (format version 1): names, dtypes and which of them grow while recording.

Source of every column: the recording format document. Version 1 only grows.
"""

from __future__ import annotations

import hashlib
from functools import cache

import polars as pl

FORMAT = "pulse-recording"
FORMAT_VERSION = 1

STR, I32, I64, U8, U32, U64 = pl.String, pl.Int32, pl.Int64, pl.UInt8, pl.UInt32, pl.UInt64
F64, BOOL = pl.Float64, pl.Boolean


def _schema(columns: dict[str, pl.DataType | type[pl.DataType]]) -> pl.Schema:
    return pl.Schema(columns)


NODES = _schema({"node": STR, "clock_source": STR, "clock_error_ns": I64, "boot_id": STR, "kernel": STR})
CLOCKS = _schema({"node": STR, "domain": STR, "raw": I64, "wall_ns": I64, "error_ns": I64})
NICS = _schema(
    {
        "node": STR,
        "nic": STR,
        "port": U8,
        "link_gbps": F64,
        "gids": pl.List(STR),
        "rail": I32,
        "netdev": STR,
        "numa": I32,
        "pci": STR,
    }
)
PROCESSES = _schema(
    {"node": STR, "pid": I64, "start_ns": I64, "gone_ns": I64, "exe": STR, "container": STR, "job": STR}
)
LIBRARIES = _schema({"node": STR, "pid": I64, "path": STR, "build_id": STR, "version": STR, "transport": STR})
COMMS = _schema(
    {
        "node": STR,
        "pid": I64,
        "comm_ptr": U64,
        "comm_id": STR,
        "rank": I32,
        "nranks": I32,
        "gpu": I32,
        "first_seen_ns": I64,
        "gone_ns": I64,
        "parent_comm_id": STR,
        "local_rank": I32,
        "node_index": I32,
        "ambiguous": BOOL,
    }
)
CHANNELS = _schema(
    {
        "comm_id": STR,
        "rank": I32,
        "channel": I32,
        "ring_prev": I32,
        "ring_next": I32,
        "tree_up": I32,
        "tree_down": pl.List(I32),
    }
)
OPS = _schema(
    {
        "node": STR,
        "pid": I64,
        "tid": I64,
        "gpu": I32,
        "comm_id": STR,
        "comm_ptr": U64,
        "rank": I32,
        "nranks": I32,
        "seq": U64,
        "kind": STR,
        "count": U64,
        "dtype": STR,
        "bytes": U64,
        "peer": I32,
        "stream": U64,
        "group": U64,
        "call_ns": I64,
        "return_ns": I64,
        "launch_ns": I64,
        "status": I32,
        "nccl_seq": U64,
        "origin": STR,
    }
)
OP_DETAILS = _schema(
    {
        "node": STR,
        "pid": I64,
        "comm_id": STR,
        "seq": U64,
        "channel": I32,
        "algorithm": STR,
        "protocol": STR,
        "bytes": U64,
    }
)
QPS = _schema(
    {
        "node": STR,
        "nic": STR,
        "port": U8,
        "qpn": U32,
        "flow": U64,
        "peer_qpn": U32,
        "local_gid": STR,
        "peer_gid": STR,
        "pid": I64,
        "comm_id": STR,
        "created_ns": I64,
        "gone_ns": I64,
        "udp_sport": I32,
        "service_level": I32,
        "path_mtu": I32,
        "retry_count": I32,
        "timeout": I32,
        "origin": STR,
    }
)
SAMPLES = _schema(
    {
        "node": STR,
        "nic": STR,
        "port": U8,
        "qpn": U32,
        "flow": U64,
        "source": STR,
        "direction": STR,
        "t_ns": I64,
        "bin_ns": U32,
        "bytes": U64,
        "retx_bytes": U64,
        "packets": U32,
        "ctl_packets": U32,
        "ack_packets": U32,
    }
)
PORT_SAMPLES = _schema(
    {
        "node": STR,
        "nic": STR,
        "port": U8,
        "source": STR,
        "direction": STR,
        "t_ns": I64,
        "bin_ns": U32,
        "bytes": U64,
        "packets": U32,
    }
)
COVERAGE = _schema(
    {
        "node": STR,
        "source": STR,
        "nic": STR,
        "port": U8,
        "direction": STR,
        "first_ns": I64,
        "last_ns": I64,
        "lost": U64,
        "pid": I64,
        "unseen": pl.List(STR),
    }
)
EVENTS = _schema({"node": STR, "nic": STR, "port": U8, "qpn": U32, "t_ns": I64, "kind": STR, "value": U64})
PORT_COUNTERS = _schema(
    {
        "node": STR,
        "nic": STR,
        "port": U8,
        "source": STR,
        "counter": STR,
        "t_ns": I64,
        "value": U64,
        "cumulative": BOOL,
    }
)

# Derived by the analysis; one row per (operator, flows to one peer, direction).
OPERATORS = _schema(
    {
        "node": STR,
        "nic": STR,
        "port": U8,
        "direction": STR,
        "pid": I64,
        "peer_pid": I64,
        "gpu": I32,
        "comm_id": STR,
        "channel": I32,
        "kind": STR,
        "op_seq": U64,
        "program_pos": U64,
        "rank": I32,
        "peer_rank": I32,
        "peer_node": STR,
        "peer_nic": STR,
        "flows": pl.List(U64),
        "call_ns": I64,
        "prev_end_ns": I64,
        "start_ns": I64,
        "end_ns": I64,
        "start_err_ns": I64,
        "end_err_ns": I64,
        "bytes": I64,
        "expected_bytes": I64,
        "completion": F64,
        "retx_bytes": I64,
        "ctl_packets": I64,
        "active_ns": I64,
        "active_gbps": F64,
        "peak_gbps": F64,
        "max_gbps": F64,
        "p95_gbps": F64,
        "wmed_gbps": F64,
        "bin_cv": F64,
        "start_lag_ns": I64,
        "gap_sender_ns": I64,
        "gap_receiver_ns": I64,
        "gap_network_ns": I64,
        "gap_unknown_ns": I64,
        "tail_ns": I64,
        "first_gap_ns": I64,
        "stalls": I64,
        "stall_ns": I64,
        "stall_trickle_ns": I64,
        "first_stall_ns": I64,
        "first_stall_len_ns": I64,
        "first_stall_bytes": I64,
        "bin_ns": I64,
        "origin": STR,
        "confidence": F64,
    }
)

TABLES: dict[str, pl.Schema] = {
    "nodes": NODES,
    "clocks": CLOCKS,
    "nics": NICS,
    "processes": PROCESSES,
    "libraries": LIBRARIES,
    "comms": COMMS,
    "channels": CHANNELS,
    "ops": OPS,
    "op_details": OP_DETAILS,
    "qps": QPS,
    "samples": SAMPLES,
    "port_samples": PORT_SAMPLES,
    "coverage": COVERAGE,
    "events": EVENTS,
    "port_counters": PORT_COUNTERS,
}
REQUIRED = ("nodes", "nics", "ops", "comms", "qps", "samples")
# Written as parts while the recording runs; the others are small and rewritten whole when they change.
STREAMED = ("ops", "op_details", "samples", "port_samples", "events", "port_counters", "clocks")

# ncclDataType_t: name and size, by its number in nccl.h.
NCCL_DTYPES: tuple[tuple[str, int], ...] = (
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bfloat16", 2),
    ("float8e4m3", 1),
    ("float8e5m2", 1),
)
# `bytes` of these is nranks x count x size(dtype); of the others count x size(dtype).
PER_RANK_KINDS = ("AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter")


@cache
def empty(table: str) -> pl.DataFrame:
    """An empty frame of `table`; KeyError when the table is not part of the format."""
    return pl.DataFrame(schema=TABLES[table])


def conform(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    """`frame` with exactly the columns of `table`, in order: missing ones null, dtypes cast strictly."""
    schema = TABLES[table]
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in schema.items()
    )


def flow_id(node: str, nic: str, port: int, qpn: int, life: int) -> int:
    """The `flow` of the life numbered `life` (from 0) of one queue pair: 8 bytes of blake2b, little-endian."""
    key = f"{node}|{nic}|{port}|{qpn}|{life}".encode()
    return int.from_bytes(hashlib.blake2b(key).digest()[:8], "little")


def comm_id(comm_hash: int, nranks: int) -> str:
    """The name of a communicator, the same on every rank: HASH-NRANKS in hex."""
    return f"{comm_hash:016x}-{nranks:x}"
