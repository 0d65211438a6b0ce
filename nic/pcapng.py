"""The blocks of pcapng files. Layout: draft-ietf-opsawg-pcapng."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.nic.captured import (
    MAX_INTERFACES,
    MAX_RECORD_BYTES,
    Damage,
    Frames,
    I64Array,
    SectionEnd,
    U8Array,
    load,
)

MAGIC = b"\x0a\x0d\x0d\x0a"
BYTE_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
_SECTION, _INTERFACE, _SIMPLE_PACKET, _STATISTICS, _PACKET = 0x0A0D0D0A, 1, 3, 5, 6
_OBSOLETE_PACKET = 2
_PACKET_HEAD_BYTES, _PACKET_FRAME = 32, 28
_TIME_RESOLUTION, _TIME_OFFSET, _DROPPED_BY_INTERFACE, _DROPPED_BY_SYSTEM = 9, 14, 5, 7
_LATEST_S = 9_200_000_000  # in nanoseconds it still fits 63 bits


class Pcapng:
    """Blocks of the newer format: each has its type first and its length at both ends; sections of one byte order."""

    first_byte = 0

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        self.skipped.clear()
        self._dropped_before = 0
        self._dropped: dict[int, int] = {}
        self._begin_section("<")

    @property
    def dropped(self) -> int:
        return self._dropped_before + sum(self._dropped.values())

    def heads(self, block: U8Array, end: int) -> tuple[I64Array, I64Array]:
        """Where whole enhanced packet blocks of sound lengths can begin, and where each ends."""
        if block[:4].tobytes() == MAGIC and end >= 12:
            self._begin_section(BYTE_ORDERS.get(block[8:12].tobytes(), "<"))
        words = block[: end // 4 * 4].view(self._word)
        at = np.flatnonzero(words == _PACKET)
        at = at[at <= len(words) - _PACKET_HEAD_BYTES // 4]
        length, captured = words[at + 1].astype(np.int64), words[at + 5].astype(np.int64)
        sound = (length % 4 == 0) & (length >= _PACKET_HEAD_BYTES) & (captured <= length - _PACKET_HEAD_BYTES)
        sound &= (length <= MAX_RECORD_BYTES) & (4 * at + length <= end)
        at, length = at[sound], length[sound]
        closed = words[at + length // 4 - 1] == length
        return 4 * at[closed], (4 * at + length)[closed]

    def step(self, block: U8Array, at: int, end: int) -> tuple[int | None, bool]:
        """Takes the block at `at`: where it ends, None when it must be seen whole and is not. It is no frame.

        Damage when its lengths make no sense; SectionEnd where another section begins.
        """
        if at + 12 > end:
            return None, False
        if block[at : at + 4].tobytes() == MAGIC and at:
            raise SectionEnd
        kind, length = (int(word) for word in block[at : at + 8].view(self._word))
        if length % 4 or length < 12 or (kind == _SECTION and not self._section_known(block)):
            raise Damage("a block there has an impossible length or begins no section")
        if kind in (_PACKET, _INTERFACE, _STATISTICS):
            if length > MAX_RECORD_BYTES:
                raise Damage(f"a block there is said to have {length} bytes")
            if at + length > end:
                return None, False
            if int(block[at + length - 4 : at + length].view(self._word)[0]) != length:
                raise Damage("a block there has two lengths")
            body = block[at + 8 : at + length - 4]
            if kind == _PACKET:
                self.skipped["malformed packet block"] += 1
            elif kind == _INTERFACE:
                self._add_interface(body)
            else:
                self._count_drops(body)
        elif kind == _SIMPLE_PACKET:
            self.skipped["packet block without a time"] += 1
        elif kind == _OBSOLETE_PACKET:
            self.skipped["packet block of the obsolete kind"] += 1
        return at + length, False

    def frames(self, block: U8Array, starts: I64Array) -> Frames:
        """The frames of the packet blocks at `starts`, those with an interface and a possible time."""
        head = load(block, self._head, starts)
        interface = head["interface"].astype(np.int64)
        stamp = head["high"].astype(np.uint64) << np.uint64(32) | head["low"].astype(np.uint64)
        t_ns, link_type = np.full(len(starts), -1, np.int64), np.zeros(len(starts), np.int64)
        known = interface < len(self._interfaces)
        for number in np.unique(interface[known]):
            link, resolution, offset_s = self._interfaces[number]
            mine = interface == number
            t_ns[mine] = _nanoseconds(stamp[mine], resolution, offset_s)
            link_type[mine] = link
        self._skip("packet of an interface without a description", ~known)
        self._skip("packet of an impossible time", known & (t_ns < 0))
        captured, original = head["captured"].astype(np.int64), head["original"].astype(np.int64)
        start = starts + _PACKET_FRAME
        frames = Frames(block, start, captured, np.maximum(original, captured), t_ns, interface, link_type)
        return frames if (t_ns >= 0).all() else frames.where(t_ns >= 0)

    def _skip(self, reason: str, packets: NDArray[np.bool_]) -> None:
        if packets.any():
            self.skipped[reason] += int(packets.sum())

    def _begin_section(self, order: str) -> None:
        self._order = order
        self._word = np.dtype(order + "u4")
        names = ("type", "length", "interface", "high", "low", "captured", "original")
        self._head = np.dtype([(name, self._word) for name in names])
        self._interfaces: list[tuple[int, int, int]] = []
        self._dropped_before, self._dropped = self.dropped, {}

    def _section_known(self, block: U8Array) -> bool:
        return block[8:12].tobytes() in BYTE_ORDERS

    def _add_interface(self, body: U8Array) -> None:
        """One interface more: its link type, time resolution (as if_tsresol codes it) and offset."""
        resolution, offset_s = 6, 0
        for code, value in self._options(body[8:]):
            if code == _TIME_RESOLUTION and len(value) == 1:
                resolution = value[0]
            elif code == _TIME_OFFSET and len(value) == 8:
                offset_s = int.from_bytes(value, "little" if self._order == "<" else "big", signed=True)
        if len(body) < 8 or len(self._interfaces) == MAX_INTERFACES:
            raise Damage("an interface there is not described, or is one of too many")
        self._interfaces.append((int(body[:2].view(self._order + "u2")[0]), resolution, offset_s))

    def _count_drops(self, body: U8Array) -> None:
        """Statistics of an interface are totals since it began: the latest counts."""
        dropped = [
            int.from_bytes(value, "little" if self._order == "<" else "big")
            for code, value in self._options(body[12:])
            if code in (_DROPPED_BY_INTERFACE, _DROPPED_BY_SYSTEM) and len(value) == 8
        ]
        if len(body) >= 12 and dropped:
            number = int(body[:4].view(self._word)[0])
            if number < len(self._interfaces):
                self._dropped[number] = sum(dropped)

    def _options(self, data: U8Array) -> Iterator[tuple[int, bytes]]:
        raw, order, at = data.tobytes(), "little" if self._order == "<" else "big", 0
        while at + 4 <= len(raw):
            code = int.from_bytes(raw[at : at + 2], order)  # type: ignore[arg-type]
            length = int.from_bytes(raw[at + 2 : at + 4], order)  # type: ignore[arg-type]
            if code == 0 or at + 4 + length > len(raw):
                return
            yield code, raw[at + 4 : at + 4 + length]
            at += 4 + (length + 3) // 4 * 4


def _nanoseconds(stamp: NDArray[np.uint64], resolution: int, offset_s: int) -> I64Array:
    """Stamps in units of 10^-n s, or 2^-n s where bit 7 of `resolution` is set, as wall time; -1 when impossible."""
    n = resolution & 0x7F
    if n > (63 if resolution & 0x80 else 19) or abs(offset_s) > _LATEST_S:
        return np.full(len(stamp), -1, np.int64)
    per_s = np.uint64(1 << n if resolution & 0x80 else 10**n)
    seconds, part = np.divmod(stamp, per_s)
    if resolution & 0x80:
        part_ns = (part >> np.uint64(max(n - 32, 0))) * np.uint64(10**9) >> np.uint64(min(n, 32))
    elif n > 9:
        part_ns = part // np.uint64(10 ** (n - 9))
    else:
        part_ns = part * np.uint64(10 ** (9 - n))
    seconds = np.minimum(seconds, np.uint64(4 * _LATEST_S)).astype(np.int64) + offset_s
    possible = (seconds >= 0) & (seconds < _LATEST_S)
    return np.where(possible, seconds * 10**9 + part_ns.astype(np.int64), -1)
