"""libibverbs' control calls: what to probe, and what the recorded calls say about queue pairs."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv6Address

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.probes.events import EVENT_VERSION, VerbsCall

# What to probe at the entry, at its default version: the one that NCCL binds.
PROBES = {"ibv_modify_qp": VerbsCall.MODIFY_QP, "ibv_destroy_qp": VerbsCall.DESTROY_QP}
# What to look at when it returns, where that is possible.
RETURNS = {"ibv_create_qp": VerbsCall.CREATE_QP}

# enum ibv_qp_attr_mask of <infiniband/verbs.h>.
MASK_STATE, MASK_PORT, MASK_AV, MASK_PATH_MTU = 1 << 0, 1 << 5, 1 << 7, 1 << 8
MASK_TIMEOUT, MASK_RETRY_COUNT, MASK_PEER_QPN = 1 << 9, 1 << 10, 1 << 20
# enum ibv_mtu.
_MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
# enum ibv_qp_type: the only type whose packets have one peer for good.
RC = 2

# enum ibv_qp_state: what a queue pair is in when it has been created.
RESET = 0

QP_EVENTS = pl.Schema(
    {
        "node": pl.String,
        "nic": pl.String,
        "port": pl.UInt8,
        "qpn": pl.UInt32,
        "peer_qpn": pl.UInt32,
        "local_gid_index": pl.Int32,
        "peer_gid": pl.String,
        "pid": pl.Int64,
        "state": pl.Int32,
        "t_ns": pl.Int64,
        "service_level": pl.Int32,
        "path_mtu": pl.Int32,
        "retry_count": pl.Int32,
        "timeout": pl.Int32,
        "destroyed": pl.Boolean,
    }
)


def qp_events(events: NDArray[np.void], nodes: Mapping[int, str], wall_offset_ns: int) -> pl.DataFrame:
    """QP_EVENT records as rows of QP_EVENTS in order of time, one per call on a reliable-connection queue pair.

    An attribute that a call does not set is null; `state` is enum ibv_qp_state, `path_mtu` is in bytes, `timeout`
    is the InfiniBand exponent (4.096 us x 2^n). A created queue pair shows as one in state RESET.
    Events of processes not in `nodes` are dropped. Assumes each requested change succeeded: one that failed shows
    up as a queue pair that never carries traffic.
    """
    events = events[(events["version"] == EVENT_VERSION) & (events["qp_type"] == RC)]
    mask = pl.col("mask")
    given = {
        "state": MASK_STATE,
        "peer_qpn": MASK_PEER_QPN,
        "path_mtu": MASK_PATH_MTU,
        "retry_count": MASK_RETRY_COUNT,
        "timeout": MASK_TIMEOUT,
        "service_level": MASK_AV,
    }
    plain = ("tgid", "mono_ns", "kind", "mask", "qpn", "is_global", "path_port", "port", "gid_index", *given)
    frame = pl.DataFrame(
        {
            **{name: np.ascontiguousarray(events[name]) for name in plain},
            "nic": pl.Series([name.decode(errors="replace") for name in events["nic"]], dtype=pl.String),
            "peer_gid": pl.Series([_gid_text(bytes(gid)) for gid in events["peer_gid"]], dtype=pl.String),
        }
    )
    has_path = mask & MASK_AV != 0
    port = pl.when(mask & MASK_PORT != 0).then("port").when(has_path).then("path_port")
    frame = frame.with_columns(
        pl.col("tgid")
        .cast(pl.Int64)
        .replace_strict(dict(nodes), default=None, return_dtype=pl.String)
        .alias("node"),
        pl.col("tgid").alias("pid"),
        (pl.col("mono_ns").cast(pl.Int64) + wall_offset_ns).alias("t_ns"),
        (pl.col("kind") == VerbsCall.DESTROY_QP).alias("destroyed"),
        port.alias("port"),
        *(pl.when(mask & bit != 0).then(name).alias(name) for name, bit in given.items()),
        *(
            pl.when(has_path & (pl.col("is_global") != 0)).then(source).alias(name)
            for name, source in (("local_gid_index", "gid_index"), ("peer_gid", "peer_gid"))
        ),
    )
    is_new = pl.col("kind") == VerbsCall.CREATE_QP
    return (
        frame.filter(pl.col("node").is_not_null())
        .with_columns(pl.when(is_new).then(RESET).otherwise("state").alias("state"))
        .with_columns(pl.col("path_mtu").replace_strict(_MTU_BYTES, default=None, return_dtype=pl.Int32))
        # What no such attribute can be, a program's garbage, is null.
        .select(pl.col(name).cast(dtype, strict=False) for name, dtype in QP_EVENTS.items())
        .sort("t_ns")
    )


def _gid_text(gid: bytes) -> str:
    """A GID as the recording writes it: an IPv4 address as ::ffff:10.0.0.1."""
    address = IPv6Address(gid)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)
