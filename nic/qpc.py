"""What an mlx5 device itself keeps about a queue pair: its QP context, out of RES_QP_GET_RAW.

Layout: the answer is a firmware resource dump, segments of big-endian words; the one of the queue pair holds the output
of the command QUERY_QP, in it the context (QPC) as the Programmer's Reference Manual and mlx5_ifc.h of the kernel have
it. Not run on a card; so a context is only believed when its remote_qpn is the one that the kernel lists.
"""

from __future__ import annotations

import ipaddress
import struct

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.nic.identity import gid_text
from pulse_bpf.schema import I32, STR, U8, U32

_SEGMENT = struct.Struct(">HHIII")  # length in 4-byte words, type, reserved, index 1 (the QPN), index 2
_CONTROL_TYPES = 0xFFF0  # info, command, terminate, error, notice, reference, menu
_QPC_OFFSET, _QPC_BYTES = 0x18, 232
_PSNS = 1 << 24

CONTEXTS = pl.Schema(
    {
        "nic": STR,
        "port": U8,
        "qpn": U32,
        "state": I32,
        "peer_qpn": U32,
        "peer_gid": STR,
        "peer_mac": STR,
        "udp_sport": I32,
        "service_level": I32,
        "path_mtu": I32,
        "timeout": I32,
        "retry_count": I32,
        "retries_left": I32,
        "next_send_psn": U32,
        "last_acked_psn": U32,
        "next_recv_psn": U32,
        "lag_port": I32,
    }
)
_KEYS = ["nic", "port", "qpn"]
_LEARNT = ["peer_gid", "udp_sport", "service_level", "path_mtu", "timeout", "retry_count"]

# The address path of the connection within the QPC.
_PATH = 0x18
# name: byte offset of the word, shift, mask
_FIELDS = {
    "state": (0x00, 28, 0xF),
    "lag_port": (0x00, 24, 0xF),
    "mtu_code": (0x08, 29, 0x7),
    "peer_qpn": (0x14, 0, 0xFFFFFF),
    "timeout": (_PATH + 0x08, 27, 0x1F),
    "udp_sport": (_PATH + 0x20, 0, 0xFFFF),
    "ethernet_priority": (_PATH + 0x24, 28, 0xF),
    "infiniband_level": (_PATH + 0x24, 24, 0xF),
    "retry_count": (0x70, 16, 0x7),
    "retries_left": (0x70, 5, 0x7),
    "next_send_psn": (0x78, 0, 0xFFFFFF),
    "last_acked_psn": (0x88, 0, 0xFFFFFF),
    "next_recv_psn": (0x94, 0, 0xFFFFFF),
}
_GID, _MAC = slice(_PATH + 0x10, _PATH + 0x20), slice(_PATH + 0x26, _PATH + 0x2C)


def decode(raw: pl.DataFrame, listed: pl.DataFrame) -> pl.DataFrame:
    """CONTEXTS rows of `raw` (Nldev.raw_contexts) that agree with `listed` (Nldev.queue_pairs), in that order.

    Left out, and to be counted by the caller as the difference: answers without a segment of their queue pair, and
    those whose peer is not the listed one, be it that the number was reused meanwhile or that this firmware's layout
    is another. Ethernet fields are null on InfiniBand, `peer_gid` where the connection has none.
    """
    found = [
        (*key, context)
        for *key, answer in raw.select(*_KEYS, "raw").iter_rows()
        if (context := _context(answer, key[2])) is not None
    ]
    if not found:
        return pl.DataFrame(schema=CONTEXTS)
    octets = np.frombuffer(b"".join(row[3] for row in found), np.uint8).reshape(len(found), _QPC_BYTES)
    words = octets.view(">u4").astype(np.uint32)
    fields = {name: words[:, at // 4] >> shift & mask for name, (at, shift, mask) in _FIELDS.items()}
    ethernet = pl.col("peer_mac").is_not_null()
    keys = pl.DataFrame([row[:3] for row in found], schema={"nic": STR, "port": U8, "qpn": U32}, orient="row")
    return (
        keys.with_columns(
            *(pl.Series(name, values) for name, values in fields.items()),
            pl.Series("peer_gid", _gids(octets[:, _GID]), STR),
            pl.Series("peer_mac", _macs(octets[:, _MAC]), STR),
        )
        .with_columns(
            path_mtu=pl.when(pl.col("mtu_code").is_between(1, 5)).then(
                pl.lit(128) * 2 ** pl.col("mtu_code").cast(I32)
            ),
            udp_sport=pl.when(ethernet).then("udp_sport"),
            service_level=pl.when(ethernet).then("ethernet_priority").otherwise("infiniband_level"),
        )
        .join(listed.select("nic", "qpn", "peer_qpn"), on=["nic", "qpn", "peer_qpn"], maintain_order="left")
        .select(pl.col(name).cast(dtype) for name, dtype in CONTEXTS.items())
    )


def with_contexts(listed: pl.DataFrame, contexts: pl.DataFrame) -> pl.DataFrame:
    """`listed` with what `contexts` know, null where they do not: what QpTable.observe_netlink takes."""
    return listed.join(
        contexts.select("nic", "qpn", *_LEARNT), on=["nic", "qpn"], how="left", maintain_order="left"
    )


def stuck(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Queue pairs that send and are not answered, by two CONTEXTS of different moments: nic, port, qpn u32,
    `retries` u32 (used up so far), `unacked` u32 (packets).

    Such a one has sent again after a timeout (fewer retries left than it may make), has packets under way, and its
    last acknowledged packet is the same at both moments. It needs nothing of the job. Assumes that a repeat which gets
    through is acknowledged within the time between the two; if not, a connection that is recovering is named too.
    """
    unacked = (pl.col("next_send_psn").cast(pl.Int64) - pl.col("last_acked_psn").cast(pl.Int64)) % _PSNS
    return (
        after.join(
            before.select(*_KEYS, "peer_qpn", "last_acked_psn"), on=[*_KEYS, "peer_qpn", "last_acked_psn"]
        )
        .with_columns(
            retries=(pl.col("retry_count") - pl.col("retries_left")).cast(pl.Int64),
            unacked=unacked,
        )
        # Half the number space is the most that can be under way; more is an acknowledgement ahead of it.
        .filter(pl.col("retries") > 0, pl.col("unacked").is_between(1, _PSNS // 2))
        .select(*_KEYS, pl.col("retries", "unacked").cast(U32))
    )


def _context(answer: bytes, qpn: int) -> bytes | None:
    """The QPC in a resource dump: that of the segment which is no control segment and names `qpn`."""
    at = 0
    while at + _SEGMENT.size <= len(answer):
        words, kind, _, index, _ = _SEGMENT.unpack_from(answer, at)
        if kind < _CONTROL_TYPES and index == qpn:
            start = at + _SEGMENT.size + _QPC_OFFSET
            context = answer[start : min(start + _QPC_BYTES, at + 4 * words)]
            return context if len(context) == _QPC_BYTES else None
        if words == 0:
            return None
        at += 4 * words
    return None


def _gids(octets: NDArray[np.uint8]) -> list[str | None]:
    return [gid_text(ipaddress.IPv6Address(row.tobytes())) if row.any() else None for row in octets]


def _macs(octets: NDArray[np.uint8]) -> list[str | None]:
    return [row.tobytes().hex(":") if row.any() else None for row in octets]
