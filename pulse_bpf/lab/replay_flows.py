"""The flows of a recording as they are addressed on the wire."""

from __future__ import annotations

import ipaddress
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis.pairing import QP
from pulse_bpf.lab.replay_packets import PSN_MASK
from pulse_bpf.schema import I64, STR, U64

# Mirror of struct flow in replay.c.
FLOW = np.dtype([("header", "u1", 62), ("header_bytes", "<u2"), ("qpn", "<u4")])
ROCE_PORT = 4791
# UDP, BTH, RETH and immediate of the longest packet, and the ICRC.
ROCE_BYTES = 8 + 12 + 16 + 4 + 4
# From the smallest path MTU that is usual over Ethernet.
MTUS = (1024, 2048, 4096)

_INDEX = pl.Schema({"flow": U64, "direction": STR, "number": I64, "mtu": I64})

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class Flows:
    """Numbers the flows to be replayed, given the `ends` of flows that a recording has samples of.

    Both ends of a flow saw the same packets: taken are tx ends, and rx ends that no tx end sends to. What cannot be
    addressed is counted with the reason in `skipped`. `ends` has node, nic, port, direction, packet_bytes (the
    most data seen in a packet) and what the qps table knows.

    `index` has number and mtu by (flow, direction). By number there are `headers` (FLOW), `first_psns`, and
    `partners`, the flow the other way or -1. A path MTU that the recording does not have is the smallest that the
    packets fit in, the largest if they were not counted. `ip_bytes` is the longest packet from its IP header on.
    """

    def __init__(self, ends: pl.DataFrame, nics: pl.DataFrame) -> None:
        gids = {_port(nic): nic["gids"] or [] for nic in nics.iter_rows(named=True)}
        numbers: dict[tuple[Address, Address, int], int] = {}
        senders: defaultdict[tuple[Address | None, int], set[Address]] = defaultdict(set)
        index: list[tuple[int, str, int, int]] = []
        headers: list[tuple[NDArray[np.uint8], int, int]] = []
        first_psns: list[int] = []
        both_ways: list[tuple[tuple[Address, Address, int], tuple[Address, Address, int]]] = []
        skipped: Counter[str] = Counter()
        self.ip_bytes = 0
        # All tx ends come before the rx ends.
        by_direction = ends.sort("direction", *QP, "flow", descending=[True, *[False] * 5])
        for end in by_direction.iter_rows(named=True):
            sends = end["direction"] == "tx"
            peer = _address(end["peer_gid"])
            own = _address(end["local_gid"]) or _like(peer, gids.get(_port(end), []))
            source, target, qpn = (own, peer, end["peer_qpn"]) if sends else (peer, own, end["qpn"])
            if own and peer and end["peer_qpn"] is not None:
                both_ways.append(((own, peer, end["peer_qpn"]), (peer, own, end["qpn"])))
            sent_by = set() if sends else senders[target, qpn]
            if sent_by and (source is None or source in sent_by):
                continue
            if own is None or peer is None or qpn is None or end["flow"] is None:
                skipped["whose peer is unknown" if own else "whose own address is unknown"] += 1
                continue
            if own.version != peer.version:
                skipped["between an IPv4 and an IPv6 address"] += 1
                continue
            assert source is not None
            assert target is not None
            if sends:
                senders[target, qpn].add(source)
            number = numbers.setdefault((source, target, qpn), len(headers))
            if number == len(headers):
                port = end["udp_sport"] or 0xC000 | end["flow"] & 0x3FFF
                headers.append(_header(source, target, port, qpn))
                first_psns.append(end["flow"] & PSN_MASK)
            mtu = end["path_mtu"] or next(
                (m for m in MTUS if m >= (end["packet_bytes"] or MTUS[-1])), MTUS[-1]
            )
            index.append((end["flow"], end["direction"], number, mtu))
            self.ip_bytes = max(self.ip_bytes, (20 if own.version == 4 else 40) + ROCE_BYTES + mtu)
        columns = pl.DataFrame(index, schema=_INDEX, orient="row")
        self.index = columns.group_by("flow", "direction", "number").agg(pl.col("mtu").max())
        self.headers: NDArray[np.void] = np.array(headers, FLOW)
        self.first_psns = np.array(first_psns, np.int64)
        self.partners = np.full(len(headers), -1, np.int64)
        for one, other in both_ways:
            if one in numbers and other in numbers:
                self.partners[[numbers[one], numbers[other]]] = numbers[other], numbers[one]
        self.skipped = [f"{count} flows {reason}" for reason, count in skipped.items()]


def _port(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["node"], row["nic"], row["port"]


def _address(gid: str | None) -> Address | None:
    """What a GID is on the wire: the IPv4 address it maps, or itself; None when it is neither."""
    try:
        address = ipaddress.IPv6Address(gid or "")
    except ValueError:
        return None
    return address.ipv4_mapped or address


def _like(peer: Address | None, gids: Iterable[str]) -> Address | None:
    """Which of a port's addresses speaks to `peer`: the first of the same family and, in IPv6, the same scope."""
    addresses = [address for address in map(_address, gids) if address]
    for address in addresses:
        if peer and (address.version, address.is_link_local) == (peer.version, peer.is_link_local):
            return address
    return addresses[0] if addresses else None


def _header(
    source: Address, target: Address, source_port: int, qpn: int
) -> tuple[NDArray[np.uint8], int, int]:
    """Ethernet, IP and UDP in FLOW: lengths and the IPv4 checksum are the sender's to fill in, UDP has none.

    The Ethernet addresses are made up from the IP addresses and belong to nobody, so that no host's own stack
    takes the packets for its own.
    """
    ethernet = b"\x02" + target.packed[-4:].rjust(5, b"\0") + b"\x02" + source.packed[-4:].rjust(5, b"\0")
    addresses = source.packed + target.packed
    if source.version == 4:
        dont_fragment, ttl, udp = 0x4000, 64, 17
        ip = b"\x08\x00" + struct.pack(">BBHHHBBH", 0x45, 0, 0, 0, dont_fragment, ttl, udp, 0)
    else:
        ip = b"\x86\xdd" + struct.pack(">IHBB", 6 << 28, 0, 17, 64)
    frame = ethernet + ip + addresses + struct.pack(">HHHH", source_port, ROCE_PORT, 0, 0)
    return np.frombuffer(frame.ljust(62, b"\0"), np.uint8), len(frame), qpn
