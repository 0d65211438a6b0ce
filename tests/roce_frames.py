"""RoCEv2 frames for tests, and a slow reference of what a meter must count of any frames."""

from __future__ import annotations

import ipaddress
import random
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# Opcode: bytes of the headers between BTH and payload (InfiniBand specification, tables 38 and 39).
EXTENDED_BYTES = {
    "SEND_FIRST": (0, 0),
    "SEND_MIDDLE": (1, 0),
    "SEND_LAST": (2, 0),
    "SEND_LAST_IMM": (3, 4),
    "SEND_ONLY": (4, 0),
    "SEND_ONLY_IMM": (5, 4),
    "WRITE_FIRST": (6, 16),
    "WRITE_MIDDLE": (7, 0),
    "WRITE_LAST": (8, 0),
    "WRITE_LAST_IMM": (9, 4),
    "WRITE_ONLY": (10, 16),
    "WRITE_ONLY_IMM": (11, 20),
    "READ_REQUEST": (12, 16),
    "READ_FIRST": (13, 4),
    "READ_MIDDLE": (14, 0),
    "READ_LAST": (15, 4),
    "READ_ONLY": (16, 4),
    "ACK": (17, 4),
    "ATOMIC_ACK": (18, 12),
    "COMPARE_SWAP": (19, 28),
    "FETCH_ADD": (20, 28),
    "SEND_LAST_INVALIDATE": (22, 4),
    "SEND_ONLY_INVALIDATE": (23, 4),
    "CNP": (0x81, 16),
    # Not counted in bins.
    "RESERVED_21": (21, 0),
    "RESERVED_24": (24, 0),
    "UC_SEND_ONLY": (0x24, 0),
    "RD_SEND_ONLY": (0x44, 12),
    "UD_SEND_ONLY": (0x64, 8),
    "XRC_SEND_ONLY": (0xA4, 4),
    "VENDOR": (0xC0, 0),
}
BY_OPCODE = {opcode: (kind, extended) for kind, (opcode, extended) in EXTENDED_BYTES.items()}
ACK, RNR, NAK = 0x1F, 0x20, 0x60  # AETH syndromes
# IPv6 extension headers: hop-by-hop options, routing, fragment, authentication, destination options.
HOPS, ROUTING, FRAGMENT, AUTHENTICATION, OPTIONS = 0, 43, 44, 51, 60
ROCE_UDP_PORT = 4791
CTS_MAX_BYTES = 512


@dataclass(frozen=True)
class Packet:
    """One packet to queue pair `qpn` between two IPv4 or two IPv6 addresses.

    `payload` counts neither padding nor checksum. `fragment` is the field of the IPv4 header, or that of an IPv6
    fragment header. `options` are words of IPv4 options; `extensions` are IPv6 extension headers.
    """

    kind: str
    source: str
    target: str
    qpn: int
    psn: int = 0
    payload: int = 0
    direct: int | None = None  # length in the RETH; by default that of the payload
    syndrome: int = ACK
    vlans: int = 0
    fragment: int = 0
    options: int = 0
    extensions: tuple[int, ...] = ()

    def frame(self) -> bytes:
        """The Ethernet frame, without valid checksums: nothing on a veth pair looks at them."""
        opcode, extended = EXTENDED_BYTES[self.kind]
        pad = -self.payload % 4
        header = bytearray(extended)
        if (self.kind.startswith("WRITE") and extended >= 16) or self.kind == "READ_REQUEST":
            struct.pack_into(">I", header, 12, self.payload if self.direct is None else self.direct)
        elif self.kind == "ACK":
            struct.pack_into(">I", header, 0, self.syndrome << 24)
        bth = struct.pack(">BBHII", opcode, pad << 4, 0xFFFF, self.qpn, self.psn)
        body = bth + bytes(header) + bytes(self.payload + pad + 4)
        udp = struct.pack(">HHHH", 50000, ROCE_UDP_PORT, 8 + len(body), 0)
        ethernet = bytes.fromhex("020000000002 020000000001") + b"\x88\xa8\x00\x05" * (self.vlans // 2)
        ethernet += b"\x81\x00\x00\x05" * (self.vlans - self.vlans // 2)
        return ethernet + self._ip(udp + body)

    def _ip(self, datagram: bytes) -> bytes:
        source, target = (ipaddress.ip_address(address).packed for address in (self.source, self.target))
        if len(source) == 4:
            words = 5 + self.options
            total = words * 4 + len(datagram)
            fixed = (0x40 + words, 0, total, 1, self.fragment, 64, 17, 0, source, target)
            header = struct.pack(">BBHHHBBH4s4s", *fixed)
            return b"\x08\x00" + header + bytes(4 * self.options) + datagram
        chain = [*self.extensions, 17]
        for own, following in zip(reversed(chain[:-1]), reversed(chain), strict=False):
            # Of 8 bytes, which the length calls 0; an authentication header of 12, which it calls 1.
            rest = {FRAGMENT: struct.pack(">BHI", 0, self.fragment, 7), AUTHENTICATION: b"\1" + bytes(10)}
            datagram = bytes([following]) + rest.get(own, bytes(7)) + datagram
        fixed6 = (6 << 28, len(datagram), chain[0], 64, source, target)
        return b"\x86\xdd" + struct.pack(">IHBB16s16s", *fixed6) + datagram


def mutated(seed: int, many: int, min_bytes: int) -> Iterator[bytes]:
    """Valid frames of any kind, some with bytes of their headers changed, cut to no less than `min_bytes`, or with some
    bytes repeated."""
    rng = random.Random(seed)
    kinds = list(EXTENDED_BYTES)
    for _ in range(many):
        addresses, form = rng.choice(
            [
                (("10.1.0.1", "10.1.0.2"), {"options": rng.choice((0, 0, 2))}),
                (("2001:db8::1", "fe80::2"), {"extensions": rng.choice(((), (), (HOPS, FRAGMENT, OPTIONS)))}),
            ]
        )
        packet = Packet(
            rng.choice(kinds),
            *addresses,
            qpn=rng.randrange(4),
            psn=rng.randrange(200),
            payload=rng.randrange(0, 600),
            vlans=rng.choice((0, 0, 1, 2)),
            **form,  # type: ignore[arg-type]
        )
        frame = bytearray(packet.frame())
        for _ in range(rng.randrange(4)):
            frame[rng.randrange(12, min(len(frame), 110))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        if rng.random() < 0.1:
            at = rng.randrange(12, len(frame))
            frame[at:at] = frame[at : at + rng.randrange(40)]
        if rng.random() < 0.1:
            del frame[rng.randrange(min_bytes, len(frame)) :]
        yield bytes(frame)


def count(packets: list[Packet]) -> Counter[str]:
    """What must be counted of the packets of one flow, in the order they were sent. PSNs do not wrap here."""
    counted: Counter[str] = Counter()
    seen: set[tuple[bool, int]] = set()
    for packet in packets:
        counted["packets"] += 1
        if packet.kind == "CNP":
            counted["cnp"] += 1
        elif packet.kind == "ACK":
            counted["ack_packets"] += 1
            counted["nak"] += packet.syndrome == NAK
            counted["rnr"] += packet.syndrome == RNR
        else:
            number = (packet.kind == "READ_ONLY", packet.psn)  # answers count in the peer's space
            is_control = packet.kind == "WRITE_ONLY" and packet.payload <= CTS_MAX_BYTES
            counted["ctl_packets"] += is_control
            if not is_control:
                counted["bytes"] += packet.payload
                counted["retx_bytes"] += packet.payload if number in seen else 0
            seen.add(number)
    return counted


class _Bytes:
    """A frame that raises IndexError where a read leaves it."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame

    def number(self, offset: int, size: int) -> int:
        return int.from_bytes(self.bytes(offset, size), "big")

    def bytes(self, offset: int, size: int) -> bytes:
        if offset + size > len(self._frame):
            raise IndexError
        return self._frame[offset : offset + size]


@dataclass
class _Datagram:
    source: str
    target: str
    offset: int
    bytes: int
    is_fragment: bool


@dataclass
class Reference:
    """Decodes frames one at a time, as slowly and plainly as can be, and counts them.

    `flows`: (source GID, target GID, QPN) to counts named as in the meter's bins. `totals`: packets for the RoCE port
    by "counted", "fragment", "malformed", or the transport or "reserved" when it is a kind that is not counted.
    Other frames are in neither. What is needed of a frame is its headers: how much of the payload is there
    does not matter, the length in the UDP header does, and that it fits into what IP says.
    """

    flows: dict[tuple[str, str, int], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    totals: Counter[str] = field(default_factory=Counter)
    _seen: dict[tuple[object, ...], set[int]] = field(default_factory=lambda: defaultdict(set))

    def add(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            try:
                found = _datagram(_Bytes(frame))
                if found is None or _Bytes(frame).number(found.offset, 8) >> 32 & 0xFFFF != ROCE_UDP_PORT:
                    continue
            except IndexError:
                continue
            try:
                self.totals[self._count(_Bytes(frame), found)] += 1
            except IndexError:
                self.totals["malformed"] += 1

    def _count(self, frame: _Bytes, udp: _Datagram) -> str:
        if udp.is_fragment:
            return "fragment"
        length = frame.number(udp.offset + 4, 2)
        bth = frame.number(udp.offset + 8, 12)
        opcode, pad, qpn, psn = bth >> 88, bth >> 84 & 3, bth >> 32 & 0xFFFFFF, bth & 0xFFFFFF
        if length > udp.bytes or length < 8 + 12 + 4:
            return "malformed"
        kind, extended = BY_OPCODE.get(opcode, ("", 0))
        transports = {0: "rc", 1: "uc", 2: "rd", 3: "ud", 4: "cnp", 5: "xrc", 6: "reserved", 7: "reserved"}
        transport = transports[opcode >> 5]
        if transport in ("uc", "rd", "ud", "xrc", "reserved"):
            return transport
        if kind in ("", "RESERVED_21", "RESERVED_24"):
            return "reserved"
        payload = length - 8 - 12 - extended - pad - 4
        if payload < 0 and kind != "CNP":
            return "malformed"
        after = udp.offset + 20
        syndrome = frame.number(after, 4) >> 24 if kind == "ACK" else 0
        direct = frame.number(after + 12, 4) if kind == "WRITE_ONLY" else 0

        counts = self.flows[udp.source, udp.target, qpn]
        counts["packets"] += 1
        if kind == "CNP":
            counts["cnps"] += 1
        elif kind in ("ACK", "ATOMIC_ACK"):
            counts["ack_packets"] += 1
            counts["rnrs"] += syndrome >> 5 & 3 == 1
            counts["naks"] += syndrome >> 5 & 3 == 3
        else:
            answers = kind.startswith("READ") and kind != "READ_REQUEST"
            repeated = self._is_repeat((udp.source, udp.target, qpn, answers), psn)
            if kind == "WRITE_ONLY" and direct <= CTS_MAX_BYTES:
                counts["ctl_packets"] += 1
            else:
                counts["bytes"] += payload
                counts["retx_bytes"] += payload * repeated
        return "counted"

    def _is_repeat(self, space: tuple[object, ...], psn: int) -> bool:
        """Whether this PSN was seen. Blocks of 64 PSNs share 32 places: where a place holds a block at most 1,024
        blocks ahead, this one is older than what is remembered, so a repeat; else it takes the place."""
        block = psn // 64
        place = (*space, block % 32)
        held = {number // 64 for number in self._seen[place]}
        if held and held != {block}:
            if (held.pop() - block) % 2**18 <= 1024:
                return True
            self._seen[place].clear()
        repeated = psn in self._seen[place]
        self._seen[place].add(psn)
        return repeated


def _datagram(frame: _Bytes) -> _Datagram | None:
    """The UDP datagram in a frame, None when there is none; IndexError when the frame ends before it."""
    offset = 12
    tags = 0
    while (ethertype := frame.number(offset, 2)) in (0x8100, 0x88A8) and tags < 2:
        offset, tags = offset + 4, tags + 1
    offset += 2
    if ethertype == 0x0800:
        header = frame.bytes(offset, 20)
        version, words = header[0] >> 4, header[0] & 15
        total, fragment = frame.number(offset + 2, 2), frame.number(offset + 6, 2)
        if version != 4 or words < 5 or header[9] != 17 or fragment & 0x1FFF:
            return None
        source, target = (f"::ffff:{ipaddress.IPv4Address(header[at : at + 4])}" for at in (12, 16))
        return _Datagram(source, target, offset + words * 4, total - words * 4, bool(fragment & 0x2000))
    if ethertype != 0x86DD:
        return None
    header = frame.bytes(offset, 40)
    if header[0] >> 4 != 6:
        return None
    left, following, is_fragment = frame.number(offset + 4, 2), header[6], False
    source, target = (_gid(header[at : at + 16]) for at in (8, 24))
    offset += 40
    for _ in range(6):
        if following not in (HOPS, ROUTING, FRAGMENT, AUTHENTICATION, OPTIONS):
            break
        extension = frame.bytes(offset, 4)
        size = (extension[1] + 1) * 8
        if following == FRAGMENT:
            size = 8
            if frame.number(offset + 2, 2) & 0xFFF8:
                return None
            is_fragment = is_fragment or bool(extension[3] & 1)
        elif following == AUTHENTICATION:
            size = (extension[1] + 2) * 4
        following, offset, left = extension[0], offset + size, left - size
    return _Datagram(source, target, offset, left, is_fragment) if following == 17 else None


def _gid(packed: bytes) -> str:
    address = ipaddress.IPv6Address(packed)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)
