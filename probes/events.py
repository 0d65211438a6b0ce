"""The records of probes/bpf/events.h as numpy dtypes."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from pulse_bpf.probes.layouts import PROXY_OP_BYTES

EVENT_VERSION = 2
# At 100,000 calls a second the ring holds what three seconds bring: more than a slow disk holds the reader up.
NCCL_RING_BYTES = 32 << 20
# A record for each channel of each operator.
PROXY_RING_BYTES = 64 << 20
VERBS_RING_BYTES = 1 << 20


class NcclCall(IntEnum):
    """enum nccl_call."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_TO_ALL = 5
    GATHER = 6
    SCATTER = 7
    SEND = 8
    RECV = 9
    COMM_GONE = 10
    COMM_INIT = 11
    COMM_INIT_ALL = 12
    COMM_SPLIT = 13
    COMM_GROW = 14
    DEVICE_COMM = 15
    LAUNCH = 16
    CAPTURE = 17
    CAPTURE_ON_STACK = 18
    REPLAY = 19
    GROUP_START = 20
    GROUP_END = 21


# What the recording calls the operators among them, in their order.
KINDS = (
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
# `nccl_seq` where the library's own number of a call is not known.
NO_SEQ = (1 << 64) - 1


class VerbsCall(IntEnum):
    """enum verbs_call."""

    MODIFY_QP = 0
    DESTROY_QP = 1
    CREATE_QP = 2


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
        ("nccl_seq", "<u8"),
        ("comm_hash", "<u8"),
        ("rank", "<i4"),
        ("nranks", "<i4"),
        ("gpu", "<i4"),
        ("nvml_gpu", "<i4"),
        ("dtype", "<u4"),
        ("peer", "<i4"),
        ("file", "<u4"),
        ("unused", "V4"),
    ]
)

# struct proxy_event.
PROXY_EVENT: np.dtype[np.void] = np.dtype(
    [
        *_HEADER,
        ("comm_ptr", "<u8"),
        ("file", "<u4"),
        ("unused", "V4"),
        ("op", f"V{PROXY_OP_BYTES}"),
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
