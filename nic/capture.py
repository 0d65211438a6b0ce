"""Packet captures: pcap and pcapng files, read front to back in blocks, as columns of frames.

Layouts: the IETF drafts draft-ietf-opsawg-pcap and -pcapng. Where a record begins is known only from the one before.
Instead of stepping from each to the next, all that could be the head of a record in a block is found at once; steps are
needed only where the next head is not where such a record ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from pulse_bpf.errors import DataError, HostError
from pulse_bpf.nic import pcap, pcapng
from pulse_bpf.nic.captured import SLACK_BYTES, Damage, Frames, I64Array, SectionEnd, U8Array

# A file is looked at in blocks that grow from the first to the second size, unless they hold many frames already.
FIRST_BLOCK_BYTES = 64 << 10
BLOCK_BYTES = 16 << 20
MANY_FRAMES = 1 << 15


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
            head = self._file.read(pcap.HEADER_BYTES)
        except OSError as error:
            raise _unreadable(path, error) from error
        if head[:4] in pcap.MAGICS and len(head) == pcap.HEADER_BYTES:
            self._format: pcap.Pcap | pcapng.Pcapng = pcap.Pcap(head)
        elif head[:4] == pcapng.MAGIC and head[8:12] in pcapng.BYTE_ORDERS:
            self._format = pcapng.Pcapng()
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
            starts, used, stopped = _walk(self._format, block, end)
            if isinstance(stopped, Damage):
                self.damage = f"{self.path} is damaged from byte {position + used} on: {stopped}"
            if len(starts):
                yield self._format.frames(block, starts)
            position += used
            if self.damage:
                return
            # Small again after a section: many short ones must not cost a large block each.
            if isinstance(stopped, SectionEnd):
                size = FIRST_BLOCK_BYTES
            elif len(starts) < MANY_FRAMES:
                size = min(2 * size, BLOCK_BYTES)
            if at_end and not isinstance(stopped, SectionEnd):
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


def _walk(
    records: pcap.Pcap | pcapng.Pcapng, block: U8Array, end: int
) -> tuple[I64Array, int, Damage | SectionEnd | None]:
    """Where the frames' records begin, how many bytes are done with, and what stopped it but the end of the block.

    The block begins with a record.
    """
    heads, ends = records.heads(block, end)
    # A record that looks like a head is none unless one ends where it begins: found for whole runs at once.
    breaks = np.append(np.flatnonzero(ends[:-1] != heads[1:]), len(heads) - 1).tolist()
    runs: list[I64Array] = []
    stepped: list[int] = []
    stopped: Damage | SectionEnd | None = None
    at = 0
    try:
        while at < end:
            first = int(heads.searchsorted(at)) if len(heads) else 0
            if first < len(heads) and heads[first] == at:
                last = breaks[bisect_left(breaks, first)]
                runs += [np.array(stepped, np.int64), heads[first : last + 1]]
                stepped = []
                at = int(ends[last])
                continue
            after, is_frame = records.step(block, at, end)
            if after is None:
                break
            if is_frame:
                stepped.append(at)
            at = after
    except (Damage, SectionEnd) as reason:
        stopped = reason
    return np.concatenate([*runs, np.array(stepped, np.int64)]), at, stopped


def _unreadable(path: Path, error: OSError) -> HostError:
    return HostError(f"cannot read {path}", error.strerror or str(error))
