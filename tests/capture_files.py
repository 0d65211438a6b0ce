"""Packet captures for tests, written from their specifications: pcap, pcapng, and frames that a switch mirrors."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

ETHERNET, COOKED, COOKED_2, ERF = 1, 113, 276, 197
_PACKET, _INTERFACE, _STATISTICS, _SECTION = 6, 1, 5, 0x0A0D0D0A


@dataclass(frozen=True)
class Frame:
    """One captured frame; of `original` bytes on the wire (None: all of them are in the file)."""

    t_ns: int
    data: bytes
    original: int | None = None
    interface: int = 0

    @property
    def wire_bytes(self) -> int:
        return len(self.data) if self.original is None else self.original


def pcap(
    frames: Sequence[Frame], link_type: int = ETHERNET, nanoseconds: bool = True, order: str = "<"
) -> bytes:
    """A pcap file."""
    unit_ns = 1 if nanoseconds else 1000
    magic = 0xA1B23C4D if nanoseconds else 0xA1B2C3D4
    parts = [struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 262144, link_type)]
    for frame in frames:
        seconds, rest_ns = divmod(frame.t_ns, 10**9)
        sizes = len(frame.data), frame.wire_bytes
        parts += [struct.pack(order + "IIII", seconds, rest_ns // unit_ns, *sizes), frame.data]
    return b"".join(parts)


@dataclass(frozen=True)
class Interface:
    """An interface of a pcapng file; `resolution` as if_tsresol codes it, None for the default of microseconds."""

    link_type: int = ETHERNET
    resolution: int | None = None
    offset_s: int = 0

    @property
    def per_s(self) -> int:
        code = 6 if self.resolution is None else self.resolution
        return 2 ** (code & 0x7F) if code & 0x80 else 10**code


@dataclass
class Pcapng:
    """One section of a pcapng file, block by block."""

    interfaces: Sequence[Interface] = (Interface(),)
    order: str = "<"
    parts: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block(_SECTION, struct.pack(self.order + "IHHq", 0x1A2B3C4D, 1, 0, -1) + self.option(4, b"test"))
        for interface in self.interfaces:
            options = b""
            if interface.resolution is not None:
                options += self.option(9, bytes([interface.resolution]))
            if interface.offset_s:
                options += self.option(14, struct.pack(self.order + "q", interface.offset_s))
            end = struct.pack(self.order + "HH", 0, 0) if options else b""
            fixed = struct.pack(self.order + "HHI", interface.link_type, 0, 0)
            self.block(_INTERFACE, fixed + options + end)

    def block(self, kind: int, body: bytes) -> Pcapng:
        body += bytes(-len(body) % 4)
        length = len(body) + 12
        head, tail = struct.pack(self.order + "II", kind, length), struct.pack(self.order + "I", length)
        self.parts.append(head + body + tail)
        return self

    def option(self, code: int, value: bytes) -> bytes:
        return struct.pack(self.order + "HH", code, len(value)) + value + bytes(-len(value) % 4)

    def packet(self, frame: Frame, options: bytes = b"") -> Pcapng:
        interface = (
            self.interfaces[frame.interface] if frame.interface < len(self.interfaces) else Interface()
        )
        stamp = (frame.t_ns - interface.offset_s * 10**9) * interface.per_s // 10**9
        sizes = len(frame.data), frame.wire_bytes
        head = struct.pack(self.order + "IIIII", frame.interface, stamp >> 32, stamp & 0xFFFFFFFF, *sizes)
        return self.block(_PACKET, head + frame.data + bytes(-len(frame.data) % 4) + options)

    def statistics(self, interface: int, dropped: int) -> Pcapng:
        body = struct.pack(self.order + "III", interface, 0, 0)
        return self.block(_STATISTICS, body + self.option(5, struct.pack(self.order + "Q", dropped)))

    def bytes(self) -> bytes:
        return b"".join(self.parts)


def cooked(frame: bytes) -> bytes:
    """An Ethernet frame as LINKTYPE_LINUX_SLL has it."""
    return struct.pack(">HHH8s", 0, 1, 6, frame[6:12]) + frame[12:]


def cooked_2(frame: bytes, interface: int = 3) -> bytes:
    """An Ethernet frame as LINKTYPE_LINUX_SLL2 has it."""
    return frame[12:14] + struct.pack(">HIHBB8s", 0, interface, 1, 0, 6, frame[6:12]) + frame[14:]


def erspan_1(frame: bytes) -> bytes:
    return _mirrored(struct.pack(">HH", 0, 0x88BE) + frame)


def erspan_2(frame: bytes, session: int = 7) -> bytes:
    header = struct.pack(">HHI", 1 << 12 | 5, session, 0)
    return _mirrored(struct.pack(">HHI", 0x1000, 0x88BE, 1) + header + frame)


def erspan_3(
    frame: bytes,
    stamp: int,
    granularity: int,
    platform: tuple[int, int] | None = None,
    switch: str = "10.9.9.9",
) -> bytes:
    """Type III with a time stamp; `platform` is the id and the last word of the platform's header."""
    flags = granularity << 1 | (platform is not None)
    header = struct.pack(">HHIHH", 2 << 12 | 5, 7, stamp, 0, flags)
    if platform:
        header += struct.pack(">II", platform[0] << 26, platform[1])
    return _mirrored(struct.pack(">HHI", 0x1000, 0x22EB, 1) + header + frame, switch)


def _mirrored(gre: bytes, switch: str = "10.9.9.9") -> bytes:
    source, target = ipaddress.IPv4Address(switch).packed, ipaddress.IPv4Address("10.9.9.1").packed
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(gre), 1, 0, 64, 47, 0, source, target)
    return bytes.fromhex("020000000002020000000001 0800".replace(" ", "")) + ip + gre
