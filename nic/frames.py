"""RoCEv2 packets decoded from captured frames, whole blocks at a time; the rules are those of probes/bpf/roce.c.

A frame is for the RoCE port when it is Ethernet (or Linux cooked) with up to two VLAN tags, IPv4 with any options or
IPv6 with up to six extension headers, UDP to port 4791, and no later fragment. Of those frames
- `fragment`: the first one of a fragmented datagram;
- `malformed`: the UDP length is more than IP says there is, or too short for the headers; or the frame was cut short
  inside a header that is needed: BTH, the AETH of an acknowledge, the RETH of an RDMA WRITE only;
- `uc`, `rd`, `ud`, `xrc`, `reserved`: kinds that are not counted in bins, by the upper bits of the opcode;
- `counted`: the others, reliable connections and congestion notifications.
Payload is the UDP length less all headers, padding and ICRC, however much of the frame was captured. A later fragment
and any other frame is `other`. An ERSPAN packet (type I, II or III) counts as the frame that it holds.

Layouts: InfiniBand Architecture Specification vol. 1, chapter 9, and annex A17; RFC 8200; tcpdump's LINKTYPE_ pages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.nic.captured import Frames, I64Array, U8Array, load
from pulse_bpf.nic.erspan import GRE, MirrorClocks, unwrap

BoolArray = NDArray[np.bool_]

ROCE_UDP_PORT = 4791
# What a frame can begin with: name, offset of the EtherType, offset of what it announces.
LINK_TYPES = {
    1: ("Ethernet", 12, 14),
    113: ("Linux cooked (SLL)", 14, 16),
    276: ("Linux cooked (SLL2)", 0, 20),
}
_COOKED_2, _COOKED_2_INTERFACE = 276, 4
_MAX_VLAN_TAGS, _MAX_EXTENSIONS = 2, 6
_HOP_BY_HOP, _UDP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _OPTIONS = 0, 17, 43, 44, 51, 60

SEND_LAST_IMM, SEND_ONLY_IMM, WRITE_FIRST, WRITE_LAST_IMM, WRITE_ONLY, WRITE_ONLY_IMM = 3, 5, 6, 9, 10, 11
READ_REQUEST, READ_FIRST, READ_MIDDLE, READ_LAST, READ_ONLY, ACK, ATOMIC_ACK = 12, 13, 14, 15, 16, 17, 18
COMPARE_SWAP, FETCH_ADD, _RESERVED_21, SEND_LAST_INVALIDATE, SEND_ONLY_INVALIDATE = 19, 20, 21, 22, 23
CNP = 0x81
_EXTENDED_BYTES = np.zeros(256, np.int64)
_EXTENDED_BYTES[[WRITE_FIRST, WRITE_ONLY, READ_REQUEST]] = 16
_EXTENDED_BYTES[WRITE_ONLY_IMM] = 20
_EXTENDED_BYTES[[SEND_LAST_IMM, SEND_ONLY_IMM, WRITE_LAST_IMM, READ_FIRST, READ_LAST, READ_ONLY, ACK]] = 4
_EXTENDED_BYTES[[SEND_LAST_INVALIDATE, SEND_ONLY_INVALIDATE]] = 4
_EXTENDED_BYTES[ATOMIC_ACK] = 12
_EXTENDED_BYTES[[COMPARE_SWAP, FETCH_ADD]] = 28

KINDS = ("counted", "fragment", "malformed", "uc", "rd", "ud", "xrc", "reserved")
_COUNTED, _FRAGMENTED, _MALFORMED, _RESERVED = 0, 1, 2, 7
# The kind of each opcode, by its upper three bits: RC, UC, RD, UD, CNP, XRC and two without a meaning.
_KIND = np.repeat(np.array([_COUNTED, 3, 4, 5, _RESERVED, 6, _RESERVED, _RESERVED]), 32)
_KIND[SEND_ONLY_INVALIDATE + 1 : 32] = _RESERVED
_KIND[_RESERVED_21] = _RESERVED
_KIND[CNP] = _COUNTED

_BIG16 = np.dtype(">u2")
_TYPE = np.dtype([("ethertype", _BIG16)])
_WORD = np.dtype([("number", ">u4")])
_IPV4 = np.dtype(
    [
        ("version_words", "u1"),
        ("tos", "u1"),
        ("total", _BIG16),
        ("id", _BIG16),
        ("fragment", _BIG16),
        ("ttl", "u1"),
        ("protocol", "u1"),
        ("checksum", _BIG16),
        ("source", ">u4"),
        ("target", ">u4"),
    ]
)
_IPV6 = np.dtype(
    [
        ("version_class_flow", ">u4"),
        ("payload", _BIG16),
        ("next", "u1"),
        ("hops", "u1"),
        ("addresses", ">u8", (4,)),
    ]
)
_EXTENSION = np.dtype([("next", "u1"), ("length", "u1"), ("fragment", _BIG16)])
_UDP_BTH = np.dtype(
    [
        ("source_port", _BIG16),
        ("target_port", _BIG16),
        ("length", _BIG16),
        ("checksum", _BIG16),
        ("opcode", "u1"),
        ("flags", "u1"),  # solicited 1, migration 1, pad 2, version 4
        ("pkey", _BIG16),
        ("qpn", ">u4"),
        ("psn", ">u4"),
        ("words", ">u4", (4,)),  # the first of the extended headers
    ]
)
_UDP_BYTES, _BTH_END = 8, 20


@dataclass(frozen=True)
class Packets:
    """Counted packets in the order of the capture, as columns of one length, i64 unless said otherwise.

    `addresses` (n x 4 u8): source and target, each as two halves of an IPv6 address, IPv4 as ::ffff:a.b.c.d. `qpn` and
    `psn` are those in the BTH, `payload` in bytes, `direct` the length in the RETH of an RDMA WRITE only and else 0,
    `syndrome` that in the AETH of an acknowledge and else 0. `place`: where in the network it was captured.
    """

    t_ns: I64Array
    place: I64Array
    addresses: NDArray[np.uint64]
    source_port: I64Array
    qpn: I64Array
    psn: I64Array
    opcode: I64Array
    payload: I64Array
    direct: I64Array
    syndrome: I64Array

    def __len__(self) -> int:
        return len(self.t_ns)

    def where(self, chosen: BoolArray) -> Packets:
        """The chosen ones, in the same order."""
        return Packets(*(getattr(self, field.name)[chosen] for field in fields(self)))


class FrameDecoder:
    """Decodes the blocks of captures, and keeps account of them.

    `totals`: frames by kind (KINDS, "other", or "link type N", which cannot be read). `opcodes` (256 i64): frames for
    the RoCE port whose BTH was captured, by opcode.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter(dict.fromkeys((*KINDS, "other"), 0))
        self.opcodes = np.zeros(256, np.int64)
        self._clocks = MirrorClocks()

    def decode(self, frames: Frames) -> Packets:
        """The packets of `frames` that are counted, in their order."""
        frames = _by_interface(frames)
        network = _network(frames)
        tunnels = np.flatnonzero(network.protocol == GRE)
        if len(tunnels):
            tunnels, frames = unwrap(frames, tunnels, network, self._clocks)
            network.replace(tunnels, _network(frames.where(tunnels)))
        self._count_link_types(frames)
        udp_at = network.at
        end = frames.start + frames.captured
        is_udp = (network.protocol == _UDP) & (udp_at + _UDP_BYTES <= end)
        header = load(frames.buffer, _UDP_BTH, np.where(is_udp, udp_at, 0))
        is_roce = is_udp & (header["target_port"] == ROCE_UDP_PORT)
        if not is_roce.all():
            frames, network, header = frames.where(is_roce), network.where(is_roce), header[is_roce]
            udp_at, end = udp_at[is_roce], end[is_roce]

        opcode, length = header["opcode"].astype(np.int64), header["length"].astype(np.int64)
        captured = end - udp_at
        has_bth = captured >= _BTH_END
        overhead = (
            _BTH_END + 4 + np.where(opcode == CNP, 0, _EXTENDED_BYTES[opcode] + (header["flags"] >> 4 & 3))
        )
        is_ack, is_direct = opcode == ACK, opcode == WRITE_ONLY
        kind = _KIND[opcode]
        needed = _BTH_END + np.where(is_ack, 4, 0) + np.where(is_direct, 16, 0)
        kind[(kind == _COUNTED) & ((length < overhead) | (captured < needed))] = _MALFORMED
        kind[~has_bth | (length < _BTH_END + 4) | (length > network.bytes)] = _MALFORMED
        kind[network.is_fragment] = _FRAGMENTED
        self.totals["other"] += int((~is_roce).sum())
        for number, count in enumerate(np.bincount(kind, minlength=len(KINDS)).tolist()):
            self.totals[KINDS[number]] += count
        self.opcodes += np.bincount(opcode[has_bth & ~network.is_fragment], minlength=256)
        packets = Packets(
            frames.t_ns,
            frames.interface,
            network.addresses,
            header["source_port"].astype(np.int64),
            header["qpn"].astype(np.int64) & 0xFFFFFF,
            header["psn"].astype(np.int64) & 0xFFFFFF,
            opcode,
            length - overhead,
            np.where(is_direct, header["words"][:, 3], 0).astype(np.int64),
            np.where(is_ack, header["words"][:, 0] >> 24, 0).astype(np.int64),
        )
        counted = kind == _COUNTED
        return packets if counted.all() else packets.where(counted)

    def _count_link_types(self, frames: Frames) -> None:
        for number in np.unique(frames.link_type).tolist():
            if number not in LINK_TYPES:
                count = int((frames.link_type == number).sum())
                self.totals[f"link type {number}"] += count
                self.totals["other"] -= count


@dataclass(frozen=True)
class Network:
    """What follows the IP headers of frames, as columns of one length; `protocol` -1: this frame has no such headers.

    `at` and `bytes` (i64): where in the buffer the payload begins, and how long IP says it is. `is_fragment` (bool):
    the first of several. `addresses` as in Packets.
    """

    protocol: I64Array
    at: I64Array
    bytes: I64Array
    is_fragment: BoolArray
    addresses: NDArray[np.uint64]

    def where(self, chosen: BoolArray) -> Network:
        return Network(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def replace(self, rows: I64Array, others: Network) -> None:
        """Puts `others`, one for each of `rows`, in their place."""
        for field in fields(self):
            getattr(self, field.name)[rows] = getattr(others, field.name)


def _by_interface(frames: Frames) -> Frames:
    """`frames` with the interfaces that cooked headers name, of a capture on all interfaces."""
    cooked = frames.link_type == _COOKED_2
    if not cooked.any():
        return frames
    at = np.where(cooked, frames.start + _COOKED_2_INTERFACE, 0)
    number = load(frames.buffer, _WORD, at)["number"].astype(np.int64) & 0xFFF
    return replace(frames, interface=np.where(cooked, number, frames.interface))


def _network(frames: Frames) -> Network:
    count = len(frames)
    at, end = frames.start.copy(), frames.start + frames.captured
    type_at = np.full(count, -1)
    for number, (_, type_offset, offset) in LINK_TYPES.items():
        mine = frames.link_type == number
        type_at[mine] = frames.start[mine] + type_offset
        at[mine] += offset
    ethertype = _ethertype(frames.buffer, type_at, end)
    for _ in range(_MAX_VLAN_TAGS):
        tagged = (ethertype == 0x8100) | (ethertype == 0x88A8)
        if not tagged.any():
            break
        type_at[tagged] = at[tagged] + 2
        at[tagged] += 4
        ethertype = _ethertype(frames.buffer, type_at, end)
    network = Network(
        np.full(count, -1),
        at,
        np.zeros(count, np.int64),
        np.zeros(count, np.bool_),
        np.zeros((count, 4), np.uint64),
    )
    _ipv4(frames.buffer, network, (ethertype == 0x0800) & (at + _IPV4.itemsize <= end))
    _ipv6(frames.buffer, network, np.flatnonzero((ethertype == 0x86DD) & (at + _IPV6.itemsize <= end)), end)
    return network


def _ethertype(buffer: U8Array, at: I64Array, end: I64Array) -> I64Array:
    """The EtherTypes at `at`, -1 where the frame ends before it or `at` is -1."""
    inside = (at >= 0) & (at + 2 <= end)
    return np.where(inside, load(buffer, _TYPE, np.where(inside, at, 0))["ethertype"], -1)


def _ipv4(buffer: U8Array, network: Network, present: BoolArray) -> None:
    """Fills in the rows of `network`, whose `at` is that of the IP header, that are IPv4."""
    ip = load(buffer, _IPV4, np.where(present, network.at, 0))
    header_bytes = (ip["version_words"] & 15).astype(np.int64) * 4
    fragment = ip["fragment"]
    sound = (
        present
        & (ip["version_words"] >> 4 == 4)
        & (header_bytes >= _IPV4.itemsize)
        & (fragment & 0x1FFF == 0)
    )
    network.protocol[sound] = ip["protocol"][sound]
    network.bytes[sound] = (ip["total"] - header_bytes)[sound]
    network.is_fragment[sound] = (fragment & 0x2000 != 0)[sound]
    for half, name in ((1, "source"), (3, "target")):
        network.addresses[sound, half] = ip[name][sound].astype(np.uint64) | np.uint64(0xFFFF << 32)
    network.at[sound] += header_bytes[sound]


def _ipv6(buffer: U8Array, network: Network, rows: I64Array, end: I64Array) -> None:
    """The same for the `rows` that are IPv6."""
    if not len(rows):
        return
    ip = load(buffer, _IPV6, network.at[rows])
    version_6 = ip["version_class_flow"] >> 28 == 6
    rows, ip = rows[version_6], ip[version_6]
    following, at = ip["next"].astype(np.int64), network.at[rows] + _IPV6.itemsize
    left = ip["payload"].astype(np.int64)
    is_fragment = np.zeros(len(rows), np.bool_)
    for _ in range(_MAX_EXTENSIONS):
        extended = np.isin(following, (_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _OPTIONS))
        if not extended.any():
            break
        present = extended & (at + _EXTENSION.itemsize <= end[rows])
        header = load(buffer, _EXTENSION, np.where(present, at, 0))
        size = (header["length"].astype(np.int64) + 1) * 8
        size[following == _AUTHENTICATION] -= (size[following == _AUTHENTICATION] - 8) // 2
        size[following == _FRAGMENT] = 8
        is_fragment |= present & (following == _FRAGMENT) & (header["fragment"] & 1 == 1)
        is_later = (following == _FRAGMENT) & (header["fragment"] & 0xFFF8 != 0)
        following = np.where(present & ~is_later, header["next"], np.where(extended, -1, following))
        at, left = np.where(present, at + size, at), np.where(present, left - size, left)
    network.protocol[rows], network.at[rows], network.bytes[rows] = following, at, left
    network.is_fragment[rows] = is_fragment
    network.addresses[rows] = ip["addresses"]
