"""The ring buffer's reader on memory laid out like the kernel's, for any order of finishing and wrapping."""

from __future__ import annotations

import mmap
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_bpf.ring import Ring

PAGE = mmap.PAGESIZE
SIZE = PAGE
EVENT: np.dtype[np.void] = np.dtype([("number", "<u8"), ("other", "<u4")])
STRIDE = 8 + 16  # header, then 12 bytes rounded up
BUSY, DISCARDED = 1 << 31, 1 << 30


class FakeRing:
    """A file with the consumer's page, the producer's, and the data twice, as the kernel maps a ring buffer."""

    def __init__(self, position: int = 0) -> None:
        self._fd = os.memfd_create("ring")
        os.ftruncate(self._fd, 2 * PAGE + 2 * SIZE)
        self._produced = position
        self._write(0, struct.pack("<Q", position))
        self._write(PAGE, struct.pack("<Q", position))
        self.reader = Ring(self._fd, SIZE, EVENT)

    def produce(self, number: int, flags: int = 0, length: int = EVENT.itemsize) -> int:
        """Appends a record; where it is, for `finish`."""
        at = self._produced
        self._store(at, struct.pack("<IIQI", length | flags, 0, number, 7))
        self._produced += STRIDE
        self._write(PAGE, struct.pack("<Q", self._produced))
        return at

    def finish(self, at: int) -> None:
        self._store(at, struct.pack("<I", EVENT.itemsize))

    def consumed(self) -> int:
        (position,) = struct.unpack("<Q", os.pread(self._fd, 8, 0))
        return int(position)

    def close(self) -> None:
        self.reader.close()
        os.close(self._fd)

    def _store(self, at: int, data: bytes) -> None:
        for index, byte in enumerate(data):
            for copy in (0, SIZE):
                self._write(2 * PAGE + (at + index) % SIZE + copy, bytes([byte]))

    def _write(self, at: int, data: bytes) -> None:
        os.pwrite(self._fd, data, at)


@settings(max_examples=50)
@given(
    start=st.sampled_from([0, 8, SIZE - 8, SIZE - 16, (1 << 40) + 24]),
    batches=st.lists(st.lists(st.sampled_from([0, DISCARDED]), max_size=12), max_size=40),
)
def test_every_record_is_read_once_and_in_order(start: int, batches: list[list[int]]) -> None:
    ring = FakeRing(start)
    number, expected, got = 0, [], []
    for batch in batches:
        for flags in batch:
            ring.produce(number, flags)
            expected += [number] if not flags else []
            number += 1
        events = ring.reader.read()
        assert (events["other"] == 7).all()
        got += events["number"].tolist()
    assert got == expected
    assert ring.consumed() == start + number * STRIDE
    ring.close()


def test_a_record_being_written_holds_back_those_behind_it() -> None:
    ring = FakeRing()
    ring.produce(1)
    unfinished = ring.produce(2, BUSY)
    ring.produce(3)
    assert ring.reader.read()["number"].tolist() == [1]
    assert ring.consumed() == STRIDE
    assert ring.reader.read()["number"].tolist() == []
    ring.finish(unfinished)
    assert ring.reader.read()["number"].tolist() == [2, 3]
    ring.close()


def test_what_was_read_outlives_the_ring() -> None:
    ring = FakeRing()
    ring.produce(1)
    events = ring.reader.read()
    ring.close()
    ring.reader.close()
    assert events["number"].tolist() == [1]
    assert len(ring.reader.read()) == 0


def test_records_of_another_size_are_a_fault_of_the_program() -> None:
    ring = FakeRing()
    ring.produce(1, length=EVENT.itemsize + 1)
    with pytest.raises(ValueError, match="records of"):
        ring.reader.read()
    ring.close()
