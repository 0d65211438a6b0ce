"""Packet captures: pcap and pcapng files, read front to back in blocks, as columns of frames.

Layouts: the IETF drafts draft-ietf-opsawg-pcap and -pcapng. Where a record begins is known only from the one before.
Instead of stepping from each to the next, all that could be the head of a record in a block is found at once; steps are
needed only where the next head is not where such a record ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.errors import DataError, HostError

I64Array = NDArray[np.int64]
U8Array = NDArray[np.uint8]

# A file is looked at in blocks that grow from the first to the second size.
FIRST_BLOCK_BYTES = 64 << 10
BLOCK_BYTES = 4 << 20
# Zeros behind every block, so that headers can be loaded at a frame's end without a check for each.
SLACK_BYTES = 512
# libpcap's own limit is 256 KiB: what is longer is damage.
MAX_RECORD_BYTES = 1 << 20
MAX_INTERFACES = 4096
_LATEST_S = 9_200_000_000  # in nanoseconds it still fits 63 bits

# The first four bytes: byte order, and nanoseconds of the smaller unit of time.
_PCAP_MAGICS = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
_PCAP_HEADER_BYTES = 24
_SECTION_MAGIC = b"\x0a\x0d\x0d\x0a"
_SECTION, _INTERFACE, _SIMPLE_PACKET, _STATISTICS, _PACKET = 0x0A0D0D0A, 1, 3, 5, 6
_BYTE_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
_PACKET_HEAD_BYTES, _PACKET_FRAME = 32, 28
_TIME_RESOLUTION, _TIME_OFFSET, _DROPPED_BY_INTERFACE, _DROPPED_BY_SYSTEM = 9, 14, 5, 7


@dataclass(frozen=True)
class Frames:
    """Frames of one block in the order of the file, as columns of one length.

    Frame i has its first captured byte at buffer[start[i]]; `buffer` (u1) ends in SLACK_BYTES zeros. All others i64:
    `captured` and `original` bytes of it in the file and on the wire, `t_ns` wall clock of the capturing machine,
    `interface` of the capture, `link_type` what the frame begins with (LINKTYPE_*).
    """

    buffer: U8Array
    start: I64Array
    captured: I64Array
    original: I64Array
    t_ns: I64Array
    interface: I64Array
    link_type: I64Array

    def __len__(self) -> int:
        return len(self.start)

    @property
    def columns(self) -> tuple[I64Array, ...]:
        return self.start, self.captured, self.original, self.t_ns, self.interface, self.link_type

    def where(self, chosen: NDArray[np.bool_] | I64Array) -> Frames:
        """The chosen ones, by number or by a flag for each."""
        return Frames(self.buffer, *(column[chosen] for column in self.columns))


class Capture:
    """One capture file; `blocks` yields all frames that can be read.

    After that `damage` says what is wrong with the rest of the file, if anything; `skipped` counts records that are no
    usable frame by reason; `dropped` is what the capturing machine itself says it lost (pcapng only).
    Memory: some times BLOCK_BYTES, whatever the file. DataError when it is no capture; HostError when it is unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        try:
            self._file = path.open("rb")
            head = self._file.read(_PCAP_HEADER_BYTES)
        except OSError as error:
            raise _unreadable(path, error) from error
        if head[:4] in _PCAP_MAGICS and len(head) == _PCAP_HEADER_BYTES:
            self._format: _Pcap | _Pcapng = _Pcap(head)
        elif head[:4] == _SECTION_MAGIC and head[8:12] in _BYTE_ORDERS:
            self._format = _Pcapng()
        else:
            self._file.close()
            compressed = head[:2] == b"\x1f\x8b" or head[:4] == b"\x28\xb5\x2f\xfd"
            why = "it is compressed" if compressed else "it begins with neither one's magic number"
            raise DataError(
                f"{path} is neither pcap nor pcapng", why, "Unpack it first" if compressed else ""
            )

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def skipped(self) -> Counter[str]:
        return self._format.skipped

    @property
    def dropped(self) -> int:
        return self._format.dropped

    def blocks(self) -> Iterator[Frames]:
        """The frames in the order of the file, those of one block at a time, each time from the beginning."""
        self.damage = None
        self._format.restart()
        position, size = self._format.first_byte, FIRST_BLOCK_BYTES
        while True:
            block, end = self._load(position, size)
            at_end = end < size
            try:
                starts, used, section_ended = _walk(self._format, block, end)
            except _Damage as damage:
                starts, used, section_ended = damage.starts, damage.used, False
                self.damage = f"{self.path} is damaged from byte {position + used} on: {damage.why}"
            if len(starts):
                yield self._format.frames(block, starts)
            position += used
            if self.damage:
                return
            # Small again after a section: many short ones must not cost a large block each.
            size = FIRST_BLOCK_BYTES if section_ended else min(2 * size, BLOCK_BYTES)
            if at_end and not section_ended:
                if used != end:
                    self.damage = f"{self.path} is cut off within the record at byte {position}"
                return

    def _load(self, position: int, size: int) -> tuple[U8Array, int]:
        """The bytes from `position`, with zeros behind them, and how many they are: fewer only at the end."""
        block = np.empty(size + SLACK_BYTES, np.uint8)
        try:
            self._file.seek(position)
            end = self._file.readinto(block[:size].data)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        block[end : end + SLACK_BYTES] = 0
        return block, end


class _Damage(Exception):
    """From here on the file makes no sense; `starts` and `used` as _walk returns them."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.starts, self.used = np.zeros(0, np.int64), 0


class _Pcap:
    """Records of the older format: each has seconds, a fraction, captured and original length, all u32."""

    first_byte = _PCAP_HEADER_BYTES

    def __init__(self, header: bytes) -> None:
        self.skipped: Counter[str] = Counter()
        self.dropped = 0
        order, self._unit_ns = _PCAP_MAGICS[header[:4]]
        self._little = order == "<"
        self._link_type = int.from_bytes(header[20:24], "little" if self._little else "big") & 0xFFFF
        names = ("seconds", "fraction", "captured", "original")
        self._head = np.dtype([(name, order + "u4") for name in names])

    def restart(self) -> None:
        self.skipped.clear()

    def heads(self, block: U8Array, end: int) -> tuple[I64Array, I64Array]:
        """Where complete records can begin and where each ends: the seconds within 18 hours of the first one's."""
        if end < self._head.itemsize:
            return _NOTHING, _NOTHING
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
        sound = (head["captured"] <= head["original"]) & (ends <= end) & self._fits(head)
        return starts[sound], ends[sound]

    def step(self, block: U8Array, at: int, end: int) -> tuple[int | None, bool]:
        """Where the record at `at` ends, None when not in this block; and that it is a frame. _Damage if it is none."""
        if at + self._head.itemsize > end:
            return None, False
        head = load(block, self._head, np.array([at]))
        if not self._fits(head)[0]:
            raise _Damage("a record there has an impossible length or time")
        ends = at + self._head.itemsize + int(head["captured"][0])
        return (ends if ends <= end else None), True

    def frames(self, block: U8Array, starts: I64Array) -> Frames:
        head = load(block, self._head, starts)
        seconds, fraction, captured, original = (
            head[name].astype(np.int64) for name in self._head.names or ()
        )
        constant = np.zeros(len(starts), np.int64)
        t_ns = seconds * 1_000_000_000 + fraction * self._unit_ns
        start = starts + self._head.itemsize
        link_type = constant + self._link_type
        return Frames(block, start, captured, np.maximum(original, captured), t_ns, constant, link_type)

    def _fits(self, head: NDArray[np.void]) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = head["captured"] <= MAX_RECORD_BYTES
        return fits & (head["fraction"] < 1_000_000_000 // self._unit_ns)


class _Pcapng:
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
        if block[:4].tobytes() == _SECTION_MAGIC and end >= 12:
            self._begin_section(_BYTE_ORDERS.get(block[8:12].tobytes(), "<"))
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

        _Damage when its lengths make no sense; _SectionEnd where another section begins.
        """
        if at + 12 > end:
            return None, False
        if block[at : at + 4].tobytes() == _SECTION_MAGIC and at:
            raise _SectionEnd
        kind, length = (int(word) for word in block[at : at + 8].view(self._word))
        if length % 4 or length < 12 or (kind == _SECTION and not self._section_known(block)):
            raise _Damage("a block there has an impossible length or begins no section")
        if kind in (_PACKET, _INTERFACE, _STATISTICS):
            if length > MAX_RECORD_BYTES:
                raise _Damage(f"a block there is said to have {length} bytes")
            if at + length > end:
                return None, False
            if int(block[at + length - 4 : at + length].view(self._word)[0]) != length:
                raise _Damage("a block there has two lengths")
            body = block[at + 8 : at + length - 4]
            if kind == _PACKET:
                self.skipped["malformed packet block"] += 1
            elif kind == _INTERFACE:
                self._add_interface(body)
            else:
                self._count_drops(body)
        elif kind == _SIMPLE_PACKET:
            self.skipped["packet block without a time"] += 1
        elif kind == 2:
            self.skipped["packet block of the obsolete kind"] += 1
        return at + length, False

    def frames(self, block: U8Array, starts: I64Array) -> Frames:
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
        return block[8:12].tobytes() in _BYTE_ORDERS

    def _add_interface(self, body: U8Array) -> None:
        """One interface more: its link type, time resolution (as if_tsresol codes it) and offset."""
        resolution, offset_s = 6, 0
        for code, value in self._options(body[8:]):
            if code == _TIME_RESOLUTION and len(value) == 1:
                resolution = value[0]
            elif code == _TIME_OFFSET and len(value) == 8:
                offset_s = int.from_bytes(value, "little" if self._order == "<" else "big", signed=True)
        if len(body) < 8 or len(self._interfaces) == MAX_INTERFACES:
            raise _Damage("an interface there is not described, or is one of too many")
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


class _SectionEnd(Exception):
    """A pcapng section begins here: what came before is to be understood by the one before."""


_NOTHING = np.zeros(0, np.int64)


def load(buffer: U8Array, dtype: np.dtype[np.void], at: I64Array) -> NDArray[np.void]:
    """The records of `dtype` that lie at the byte offsets `at`, as an array of their own."""
    raw = np.dtype((np.void, dtype.itemsize))
    everywhere = np.ndarray((len(buffer) - dtype.itemsize + 1,), raw, buffer, strides=(1,))
    loaded: NDArray[np.void] = everywhere[at].view(dtype)
    return loaded


def _walk(records: _Pcap | _Pcapng, block: U8Array, end: int) -> tuple[I64Array, int, bool]:
    """Where the frames' records begin, how many bytes are done with, and whether another section begins there.

    The block begins with a record. _Damage, with what came before it, where nothing sensible follows.
    """
    heads, ends = records.heads(block, end)
    # A record that looks like a head is none unless one ends where it begins: found for whole runs at once.
    breaks = np.append(np.flatnonzero(ends[:-1] != heads[1:]), len(heads) - 1).tolist()
    runs: list[I64Array] = []
    at = 0
    try:
        while at < end:
            first = int(heads.searchsorted(at))
            if first < len(heads) and heads[first] == at:
                last = breaks[bisect_left(breaks, first)]
                runs.append(heads[first : last + 1])
                at = int(ends[last])
                continue
            after, is_frame = records.step(block, at, end)
            if after is None:
                break
            if is_frame:
                runs.append(np.array([at]))
            at = after
    except _SectionEnd:
        return _joined(runs), at, True
    except _Damage as damage:
        damage.starts, damage.used = _joined(runs), at
        raise
    return _joined(runs), at, False


def _joined(runs: list[I64Array]) -> I64Array:
    return np.concatenate(runs) if runs else _NOTHING


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


def _unreadable(path: Path, error: OSError) -> HostError:
    return HostError(f"cannot read {path}", error.strerror or str(error))
