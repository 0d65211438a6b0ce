"""The records of probes/bpf/events.h as numpy dtypes."""

from __future__ import annotations

import numpy as np

EVENT_VERSION = 1
RING_BYTES = 4 << 20

# enum nccl_call; the last one is no operator.
CALLS = (
    "AllReduce",
    "AllGather",
    "ReduceScatter",
    "Broadcast",
    "Reduce",
    "AlltoAll",
    "Gather",
    "Scatter",
    "Send",
    "Recv",
)
COMM_GONE = len(CALLS)

# enum verbs_call.
MODIFY_QP = 0
DESTROY_QP = 1

_HEADER = [
    ("version", "<u2"),
    ("kind", "<u2"),
    ("cpu", "<u4"),
    ("tgid", "<u4"),
    ("tid", "<u4"),
    ("mono_ns", "<u8"),
]

# struct nccl_event.
NCCL_EVENT: np.dtype[np.void] = np.dtype(
    [
        *_HEADER,
        ("comm_ptr", "<u8"),
        ("count", "<u8"),
        ("stream", "<u8"),
        ("group", "<u8"),
        ("comm_hash", "<u8"),
        ("rank", "<i4"),
        ("nranks", "<i4"),
        ("gpu", "<i4"),
        ("unused", "<i4"),
        ("dtype", "<u4"),
        ("peer", "<i4"),
    ]
)

# struct qp_event.
QP_EVENT: np.dtype[np.void] = np.dtype(
    [
        *_HEADER,
        ("qpn", "<u4"),
        ("mask", "<u4"),
        ("state", "<u4"),
        ("path_mtu", "<u4"),
        ("peer_qpn", "<u4"),
        ("gid_index", "u1"),
        ("service_level", "u1"),
        ("is_global", "u1"),
        ("path_port", "u1"),
        ("port", "u1"),
        ("timeout", "u1"),
        ("retry_count", "u1"),
        ("qp_type", "u1"),
        ("unused", "V4"),
        ("peer_gid", "V16"),
        ("nic", "S64"),
    ]
)
