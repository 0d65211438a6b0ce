"""Bulk reading of a BPF ring buffer: whole batches of equal records, no callback per event."""

from __future__ import annotations

import mmap
import threading

import numpy as np
from numpy.typing import NDArray

# bpf.h: the record header is u32 length with two flags, then u32 page offset.
_HEADER_BYTES = 8
_BUSY = np.uint32(1 << 31)
_DISCARDED = np.uint32(1 << 30)
_LENGTH_MASK = np.uint32((1 << 30) - 1)


class Ring:
    """The consumer of a BPF_MAP_TYPE_RINGBUF whose records all have the size of `dtype`.

    Layout (kernel documentation, "BPF ring buffer"): one page with the consumer's position, one with the
    producer's, then the data, mapped twice in a row so that a record crossing the end reads as one piece.
    OSError when the map cannot be mapped.
    """

    def __init__(self, map_fd: int, size_bytes: int, dtype: np.dtype[np.void]) -> None:
        page = mmap.PAGESIZE
        self._consumer_page = mmap.mmap(map_fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._producer_pages = mmap.mmap(
            map_fd, page + 2 * size_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._consumer = np.frombuffer(self._consumer_page, np.uint64, 1)
        self._producer = np.frombuffer(self._producer_pages, np.uint64, 1)
        self._data = np.frombuffer(self._producer_pages, np.uint8, 2 * size_bytes, page)
        self._size_bytes = size_bytes
        self._dtype = dtype
        padded = (_HEADER_BYTES + dtype.itemsize + 7) // 8 * 8
        self._record = np.dtype(
            {
                "names": ["header", "event"],
                "formats": [np.uint32, dtype],
                "offsets": [0, _HEADER_BYTES],
                "itemsize": padded,
            }
        )
        # Nobody else takes it. That one step releases it and the next takes it again is the only memory barrier Python
        # has: on arm64 a record might else be read from before its header said it was finished, or given back to the
        # producer while it is still being read. x86 keeps these orders by itself.
        self._barrier = threading.Lock()

    def read(self) -> NDArray[np.void]:
        """The records finished since the last call, in the order they were reserved; empty after close().

        A record that is still being written ends the batch: it and those behind it come with a later call.
        """
        if not len(self._data):
            return np.empty(0, self._dtype)
        with self._barrier:
            start, end = int(self._consumer[0]), int(self._producer[0])
        count = (end - start) // self._record.itemsize
        records = np.frombuffer(self._data.data, self._record, count, start % self._size_bytes)
        with self._barrier:
            headers = records["header"].copy()
        busy = np.flatnonzero(headers & _BUSY)
        if len(busy):
            headers = headers[: busy[0]]
        lengths = headers & _LENGTH_MASK
        if len(lengths) and (lengths != self._dtype.itemsize).any():
            raise ValueError(
                f"ring buffer holds records of {set(lengths.tolist())} bytes, not of {self._dtype}"
            )
        with self._barrier:
            events: NDArray[np.void] = records["event"][: len(headers)][(headers & _DISCARDED) == 0].copy()
        with self._barrier:
            self._consumer[0] = start + len(headers) * self._record.itemsize
        return events

    def close(self) -> None:
        """Unmaps the buffer; may be called more than once."""
        self._data = np.empty(0, np.uint8)
        self._consumer = self._producer = np.empty(0, np.uint64)
        self._consumer_page.close()
        self._producer_pages.close()
