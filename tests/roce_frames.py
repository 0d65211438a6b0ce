"""RoCEv2 frames for tests, and a plain model of what a meter must count of them."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from dataclasses import dataclass

# Opcode: bytes of the headers between BTH and payload (InfiniBand specification, table 38).
EXTENDED_BYTES = {
    "SEND_ONLY": (4, 0),
    "WRITE_FIRST": (6, 16),
    "WRITE_MIDDLE": (7, 0),
    "WRITE_LAST": (8, 0),
    "WRITE_LAST_IMM": (9, 4),
    "WRITE_ONLY": (10, 16),
    "WRITE_ONLY_IMM": (11, 20),
    "READ_REQUEST": (12, 16),
    "READ_ONLY": (16, 4),
    "ACK": (17, 4),
    "CNP": (0x81, 16),
    "UD_SEND_ONLY": (0x64, 8),
}
ACK, RNR, NAK = 0x1F, 0x20, 0x60  # AETH syndromes


@dataclass(frozen=True)
class Packet:
    """One packet to queue pair `qpn`; `payload` counts neither padding nor checksum."""

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

    def frame(self) -> bytes:
        """The Ethernet frame, without valid checksums: nothing on a veth pair looks at them."""
        opcode, extended = EXTENDED_BYTES[self.kind]
        pad = -self.payload % 4
        header = bytearray(extended)
        if extended >= 16 and self.kind != "CNP":
            struct.pack_into(">I", header, 12, self.payload if self.direct is None else self.direct)
        elif self.kind == "ACK":
            struct.pack_into(">I", header, 0, self.syndrome << 24)
        bth = struct.pack(">BBHII", opcode, pad << 4, 0xFFFF, self.qpn, self.psn)
        body = bth + bytes(header) + bytes(self.payload + pad + 4)
        udp = struct.pack(">HHHH", 50000, 4791, 8 + len(body), 0)
        ip = struct.pack(
            ">BBHHHBBH4s4s",
            0x45,
            0,
            28 + len(body),
            1,
            self.fragment,
            64,
            17,
            0,
            socket.inet_aton(self.source),
            socket.inet_aton(self.target),
        )
        ethernet = bytes.fromhex("020000000002 020000000001") + b"\x81\x00\x00\x05" * self.vlans + b"\x08\x00"
        return ethernet + ip + udp + body


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
            is_control = packet.kind == "WRITE_ONLY" and packet.payload <= 512
            counted["ctl_packets"] += is_control
            if not is_control:
                counted["bytes"] += packet.payload
                counted["retx_bytes"] += packet.payload if number in seen else 0
            seen.add(number)
    return counted
