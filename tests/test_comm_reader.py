"""Following the variable that a creating call leaves its communicator in; the memory is a file laid out by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import polars as pl
import pytest

from pulse_bpf.comm_reader import CommReader
from pulse_bpf.libraries import Library
from pulse_bpf.probes.decode import CREATIONS

RANK_AT = 0x40
VARIABLE, ONE, OTHER = 0x1000, 0x2000, 0x3000
SECOND_NS = 1_000_000_000


class Memory:
    """The memory of process 7, below a made process filesystem."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._path = root / "7/mem"
        self._path.parent.mkdir()
        self._path.write_bytes(bytes(0x4000))

    def write(self, address: int, data: bytes) -> None:
        with self._path.open("r+b") as memory:
            memory.seek(address)
            memory.write(data)

    def point(self, address: int, to: int) -> None:
        self.write(address, struct.pack("<Q", to))

    def communicator(
        self, address: int, comm_hash: int, rank: int = 1, nranks: int = 4, gpu: int = 2
    ) -> None:
        self.write(address + RANK_AT - 8, struct.pack("<Qiii", comm_hash, rank, nranks, gpu))


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    made = Memory(tmp_path)
    made.communicator(ONE, 0xA)
    made.communicator(OTHER, 0xB)
    made.point(VARIABLE, ONE)
    return made


@pytest.fixture
def reader(memory: Memory) -> CommReader:
    library = Library("nccl", None, "2.99.0", RANK_AT, None, {}, {}, None, None, ())
    return CommReader({0: library}, memory.root)


def creation(**fields: object) -> pl.DataFrame:
    row = dict.fromkeys(CREATIONS) | {
        "node": "n",
        "pid": 7,
        "file": 0,
        "address": VARIABLE,
        "count": 1,
        "t_ns": 0,
    }
    return pl.DataFrame([row | fields], CREATIONS)


NONE = pl.DataFrame(schema=CREATIONS)


def test_a_communicator_is_found_where_the_call_left_it(memory: Memory, reader: CommReader) -> None:
    (row,) = reader.made(creation(parent_comm_id="p"), SECOND_NS).to_dicts()
    assert (row["comm_ptr"], row["comm_hash"], row["rank"], row["nranks"]) == (ONE, 0xA, 1, 4)
    assert (row["parent_comm_id"], row["first_seen_ns"]) == ("p", 0)
    assert reader.made(NONE, 2 * SECOND_NS).is_empty()


def test_one_that_is_not_ready_is_found_later(memory: Memory, reader: CommReader) -> None:
    memory.point(VARIABLE, 0)
    assert reader.made(creation(), SECOND_NS).is_empty()
    memory.point(VARIABLE, ONE)
    memory.communicator(ONE, 0)
    assert reader.made(NONE, 2 * SECOND_NS).is_empty()
    memory.communicator(ONE, 0xA)
    assert reader.made(NONE, 3 * SECOND_NS)["comm_hash"].to_list() == [0xA]


def test_all_of_a_list_are_found(memory: Memory, reader: CommReader) -> None:
    memory.point(VARIABLE + 8, OTHER)
    found = reader.made(creation(count=2, nranks=4), SECOND_NS)
    assert found["comm_ptr"].to_list() == [ONE, OTHER]


def test_of_two_calls_with_one_variable_the_earlier_is_unknown(memory: Memory, reader: CommReader) -> None:
    memory.point(VARIABLE, OTHER)
    both = pl.concat([creation(parent_comm_id="first"), creation(parent_comm_id="second", t_ns=5)])
    found = reader.made(both, SECOND_NS)
    assert found.select("comm_ptr", "parent_comm_id", "first_seen_ns").rows() == [(OTHER, "second", 5)]


@pytest.mark.parametrize(
    "what", [{"nranks": 8}, {"parent_nranks": 3, "parent_gpu": 2}, {"parent_nranks": 8, "parent_gpu": 0}]
)
def test_what_the_call_cannot_have_made_is_not_taken_for_it(
    what: dict[str, int], memory: Memory, reader: CommReader
) -> None:
    assert reader.made(creation(**what), SECOND_NS).is_empty()
    memory.communicator(ONE, 0xA, nranks=what.get("nranks", 3), gpu=what.get("parent_gpu", 2))
    assert reader.made(NONE, 2 * SECOND_NS).height == 1


def test_a_process_that_ended_is_given_up(memory: Memory, reader: CommReader) -> None:
    (memory.root / "7/mem").unlink()
    assert reader.made(creation(), SECOND_NS).is_empty()
    (memory.root / "7/mem").write_bytes(bytes(0x4000))
    memory.communicator(ONE, 0xA)
    memory.point(VARIABLE, ONE)
    assert reader.made(NONE, 2 * SECOND_NS).is_empty()
