"""The records of pcap files. Layout: draft-ietf-opsawg-pcap."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np

from pulse_bpf.nic.captured import MAX_RECORD_BYTES, NOTHING, Damage, Frames, I64Array, U8Array, load

# The first four bytes of a file: byte order, and nanoseconds of the smaller unit of time.
MAGICS = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
HEADER_BYTES = 24
# Of records longer than this on average, stepping from each to the next is faster than looking at every byte.
LONG_RECORD_BYTES = 600


class Pcap:
    """Records of the older format: each has seconds, a fraction, captured and original length, all u32."""

    first_byte = HEADER_BYTES

    def __init__(self, header: bytes) -> None:
        self.skipped: Counter[str] = Counter()
        self.dropped = 0
        order, self._unit_ns = MAGICS[header[:4]]
        self._little = order == "<"
        self._link_type = int.from_bytes(header[20:24], "little" if self._little else "big") & 0xFFFF
        self._record = struct.Struct(order + "4I")
        names = ("seconds", "fraction", "captured", "original")
        self._head = np.dtype([(name, order + "u4") for name in names])
        self._fractions = 1_000_000_000 // self._unit_ns
        self._are_long = False

    def restart(self) -> None:
        self._are_long = False

    def heads(self, block: U8Array, end: int) -> tuple[I64Array, I64Array]:
        """Where complete records can begin and where each ends: the seconds within 18 hours of the first one's.

        None are looked for where records are long.
        """
        if end < self._head.itemsize or self._are_long:
            return NOTHING, NOTHING
        high, top = (2, 3) if self._little else (0, 1)  # the upper bytes of a u32, and of one below 2^24
        last = end - self._head.itemsize + 1
        zero = top if self._little else 0
        length = 8 + (0 if self._little else 2)
        # Few bytes are compared so that long frames cost little; what is left is then looked at in full.
        possible = block[high : high + last] == block[high]
        for offset, value in ((top, block[top]), (8 + zero, 0), (12 + zero, 0)):
            possible &= block[offset : offset + last] == value
        possible &= (block[length : length + last] | block[length + 1 : length + 1 + last]) != 0
        starts = np.flatnonzero(possible)
        head = load(block, self._head, starts)
        ends = starts + self._head.itemsize + head["captured"]
        sound = (head["captured"] <= head["original"]) & (head["captured"] <= MAX_RECORD_BYTES)
        sound &= (head["fraction"] < self._fractions) & (ends <= end)
        return starts[sound], ends[sound]

    def step(self, block: U8Array, at: int, end: int) -> tuple[int | None, bool]:
        """Where the record at `at` ends, None when not in this block; and that it is a frame. Damage if it is none."""
        if at + self._record.size > end:
            return None, False
        _, fraction, captured, _ = self._record.unpack_from(block.data, at)
        if captured > MAX_RECORD_BYTES or fraction >= self._fractions:
            raise Damage("a record there has an impossible length or time")
        ends = at + self._record.size + captured
        return (ends if ends <= end else None), True

    def frames(self, block: U8Array, starts: I64Array) -> Frames:
        """The frames of the records that begin at `starts`, at least one."""
        self._are_long = starts[-1] - starts[0] > LONG_RECORD_BYTES * len(starts)
        head = load(block, self._head, starts)
        seconds, fraction, captured, original = (
            head[name].astype(np.int64) for name in self._head.names or ()
        )
        constant = np.zeros(len(starts), np.int64)
        t_ns = seconds * 1_000_000_000 + fraction * self._unit_ns
        start = starts + self._head.itemsize
        link_type = constant + self._link_type
        return Frames(block, start, captured, np.maximum(original, captured), t_ns, constant, link_type)
