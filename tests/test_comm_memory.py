"""Reading communicators in the memory of a running process, as each release lays them out."""

from __future__ import annotations

import io
import os
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import TARGETS, Target, running

from pulse_bpf.comm_memory import Channel, CommIdentity, CommPlace, read_identity, read_place, read_pointer
from pulse_bpf.probes.layouts import RELEASES, Layout

PAGE = 4096
MAGIC = 0x0280028002800280
# Rank 5 of 8 on two nodes of four; the second channel's tree has its root here.
IDENTITY = CommIdentity(comm_hash=0xFEEDC0DEFEEDC0DE, rank=5, nranks=8, gpu=1)
RINGS = ([5, 6, 7, 0, 1, 2, 3, 4], [5, 4, 7, 6, 1, 0, 3, 2])
TREES = ((4, 6, 1, -1), (-1, 4, -1, -1))
PLACE = CommPlace(
    node_index=1,
    n_nodes=2,
    local_rank=1,
    local_ranks=4,
    channels=(Channel(0, 4, 6, 4, (6, 1)), Channel(1, 2, 4, None, (4,))),
)

Pieces = dict[int, bytes]
each_release = pytest.mark.parametrize("release", RELEASES)


def pieces(layout: Layout, base: int) -> Pieces:
    """The bytes of a communicator at address `base`, by offset, with its tables behind it."""
    nodes, *rings = (layout.comm_bytes + 64 * index for index in range(3))
    laid: Pieces = {
        layout.rank_at - 8: struct.pack("<Qiii", *IDENTITY),
        layout.node_at: struct.pack(
            "<4i", PLACE.node_index, PLACE.n_nodes, PLACE.local_rank, PLACE.local_ranks
        ),
        layout.rank_to_node_at: struct.pack("<Q", base + nodes),
        nodes: struct.pack("<8i", *[0] * 4, *[1] * 4),
        layout.nchannels_at: struct.pack("<i", len(RINGS)),
    }
    if layout.has_magic:
        laid |= dict.fromkeys((0, layout.comm_bytes - 8), struct.pack("<Q", MAGIC))
    for number, (at, ring, tree) in enumerate(zip(rings, RINGS, TREES, strict=True)):
        channel = layout.channels_at + number * layout.channel_bytes
        laid[at] = struct.pack("<8i", *ring)
        laid[channel + layout.ring_at] = struct.pack("<iiQ", ring[-1], ring[1], base + at)
        laid[channel + layout.tree_at] = struct.pack("<5i", 2, *tree)
        laid[channel + layout.channel_id_at] = struct.pack("<i", number)
    return laid


class Held:
    """A process that holds what it is told to, and its memory as Pulse sees it."""

    def __init__(self, target: Target, memory: BinaryIO) -> None:
        self.target = target
        self.memory = memory

    def communicator(self, layout: Layout) -> int:
        """Lays out a sound communicator; its address."""
        base = int(self.target.act(f"map {layout.comm_bytes + 4 * PAGE}"))
        self.write(pieces(layout, base))
        return base

    def write(self, laid: Pieces) -> None:
        words = [f"{offset} {content.hex()}" for offset, content in laid.items()]
        assert self.target.act(" ".join(["write", *words])) == "done"


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with (
        running([sys.executable, TARGETS / "memory_holder.py"]) as target,
        open(f"/proc/{target.pid}/mem", "rb", buffering=0) as memory,
    ):
        yield Held(target, memory)


@each_release
def test_a_communicator_of_each_release_is_read(held: Held, release: str) -> None:
    layout = RELEASES[release]
    address = held.communicator(layout)
    assert read_identity(held.memory, address, layout.rank_at) == IDENTITY
    assert read_place(held.memory, address, layout, IDENTITY) == PLACE


def number(offset: Callable[[Layout], int], value: int, format: str = "<i") -> Callable[[Layout], Pieces]:
    """Another number at an offset of the layout."""
    return lambda layout: {offset(layout): struct.pack(format, value)}


def in_channel(field: str, past: int, value: int, format: str = "<i") -> Callable[[Layout], Pieces]:
    """Another number in the second channel."""
    return number(
        lambda layout: layout.channels_at + layout.channel_bytes + getattr(layout, field) + past,
        value,
        format,
    )


# Each takes exactly one thing away from a sound communicator.
MISFITS: dict[str, tuple[Callable[[Layout], Pieces], str]] = {
    "other hash": (number(lambda layout: layout.rank_at - 8, 7, "<Q"), "another communicator"),
    "other rank": (number(lambda layout: layout.rank_at, 4), "another communicator"),
    "freed and zeroed": (number(lambda layout: layout.rank_at, 0, "<Q"), "another communicator"),
    "no magic in front": (number(lambda layout: 0, 0, "<Q"), "no magic number at 0x0"),
    "no magic behind": (number(lambda layout: layout.comm_bytes - 8, 0, "<Q"), "no magic number"),
    "node below 0": (number(lambda layout: layout.node_at, -1), "node -1 of 2"),
    "node beyond the last": (number(lambda layout: layout.node_at, 2), "node 2 of 2"),
    "more nodes than ranks": (number(lambda layout: layout.node_at + 4, 9), "node 1 of 9"),
    "local rank below 0": (number(lambda layout: layout.node_at + 8, -1), "rank -1 of 4"),
    "local rank beyond the last": (number(lambda layout: layout.node_at + 8, 4), "rank 4 of 4"),
    "more local ranks than ranks": (number(lambda layout: layout.node_at + 12, 9), "rank 1 of 9"),
    "nodes not known yet": (number(lambda layout: layout.rank_to_node_at, 0, "<Q"), "not set up yet"),
    "nodes elsewhere": (number(lambda layout: layout.rank_to_node_at, 0x1000, "<Q"), "cannot be read"),
    "other node in the table": (number(lambda layout: layout.comm_bytes + 20, 0), "is 0 in its table"),
    "no channels": (number(lambda layout: layout.nchannels_at, 0), "0 channels"),
    "too many channels": (number(lambda layout: layout.nchannels_at, 65), "65 channels"),
    "channel not set up yet": (in_channel("channel_id_at", 0, -1), "channel 1 is not set up yet"),
    "channel with another's number": (in_channel("channel_id_at", 0, 0), "channel 1 is not set up yet"),
    "ring not known yet": (in_channel("ring_at", 8, 0, "<Q"), "channel 1 is not set up yet"),
    "ring at no address": (in_channel("ring_at", 8, 1 << 63, "<Q"), "is no address"),
    "ring of another rank": (number(lambda layout: layout.comm_bytes + 128, 3), "ring of channel 1"),
    "other previous rank": (in_channel("ring_at", 0, 3), "ring of channel 1"),
    "other next rank": (in_channel("ring_at", 4, 3), "ring of channel 1"),
    "parent that is no rank": (in_channel("tree_at", 4, 8), "no ranks"),
    "parent below none": (in_channel("tree_at", 4, -2), "no ranks"),
    "child that is no rank": (in_channel("tree_at", 16, 8), "no ranks"),
    "own parent": (in_channel("tree_at", 4, 5), "one rank twice"),
    "child twice": (in_channel("tree_at", 12, 4), "one rank twice"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_in_one_respect_says_nothing(held: Held, what: str) -> None:
    layout = RELEASES["2.27.5"]
    change, reason = MISFITS[what]
    address = held.communicator(layout)
    held.write(change(layout))
    found = read_place(held.memory, address, layout, IDENTITY)
    assert isinstance(found, str)
    assert reason in found


def test_a_ring_that_agrees_on_neighbours_that_are_no_ranks(held: Held) -> None:
    layout = RELEASES["2.30.4"]
    address = held.communicator(layout)
    held.write({layout.comm_bytes + 64: struct.pack("<8i", 5, 8, 7, 0, 1, 2, 3, 4)})
    held.write({layout.channels_at + layout.ring_at + 4: struct.pack("<i", 8)})
    assert read_place(held.memory, address, layout, IDENTITY) == "channel 0 has neighbours that are no ranks"


def test_another_releases_layout_does_not_fit(held: Held) -> None:
    address = held.communicator(RELEASES["2.27.5"])
    # Same place of the rank: only what lies behind differs.
    other = replace(RELEASES["2.28.9"], rank_at=RELEASES["2.27.5"].rank_at)
    assert isinstance(read_place(held.memory, address, other, IDENTITY), str)


def test_a_single_rank_is_its_own_neighbour(held: Held) -> None:
    layout = RELEASES["2.30.4"]
    alone = CommIdentity(comm_hash=1, rank=0, nranks=1, gpu=0)
    base = held.communicator(layout)
    channel = layout.channels_at
    held.write(
        {
            layout.rank_at - 8: struct.pack("<Qiii", *alone),
            layout.node_at: struct.pack("<4i", 0, 1, 0, 1),
            layout.nchannels_at: struct.pack("<i", 1),
            channel + layout.ring_at: struct.pack("<iiQ", 0, 0, base + layout.comm_bytes),
            channel + layout.tree_at: struct.pack("<5i", 0, -1, -1, -1, -1),
        }
    )
    place = CommPlace(0, 1, 0, 1, (Channel(0, 0, 0, None, ()),))
    assert read_place(held.memory, base, layout, alone) == place


@pytest.mark.parametrize(
    "identity",
    [(0, 0, 8, 0), (1, -1, 8, 0), (1, 8, 8, 0), (1, 0, (1 << 20) + 1, 0), (1, 0, 8, -1), (1, 0, 8, 64)],
    ids=[
        "no hash",
        "rank below 0",
        "rank beyond the last",
        "too many ranks",
        "gpu below 0",
        "gpu beyond any",
    ],
)
def test_what_cannot_be_an_identity_is_none(held: Held, identity: tuple[int, int, int, int]) -> None:
    layout = RELEASES["2.18.1"]
    address = held.communicator(layout)
    held.write({layout.rank_at - 8: struct.pack("<Qiii", *identity)})
    assert read_identity(held.memory, address, layout.rank_at) is None


def test_a_communicator_is_found_where_its_creator_left_it(held: Held) -> None:
    layout = RELEASES["2.32.3"]
    base = held.communicator(layout)
    variable = layout.comm_bytes + 3 * PAGE
    assert read_pointer(held.memory, base + variable) is None
    held.write({variable: struct.pack("<Q", base)})
    pointer = read_pointer(held.memory, base + variable)
    assert pointer == base
    assert read_identity(held.memory, pointer, layout.rank_at) == IDENTITY


def test_memory_that_is_gone_is_told(held: Held) -> None:
    layout = RELEASES["2.27.5"]
    address = held.communicator(layout)
    last_page = layout.comm_bytes // PAGE * PAGE
    held.target.act(f"unmap {last_page} {4 * PAGE}")
    found = read_place(held.memory, address, layout, IDENTITY)
    assert isinstance(found, str)
    held.target.act(f"unmap 0 {last_page}")
    assert read_identity(held.memory, address, layout.rank_at) is None
    assert read_pointer(held.memory, address) is None


@pytest.mark.parametrize("address", [0, -8, 1 << 47, 1 << 63, (1 << 64) - 8, 1 << 70])
def test_what_is_no_address_is_not_read(held: Held, address: int) -> None:
    layout = RELEASES["2.27.5"]
    assert read_pointer(held.memory, address) is None
    assert read_identity(held.memory, address, layout.rank_at) is None
    assert isinstance(read_place(held.memory, address, layout, IDENTITY), str)


def test_a_process_that_ended_is_told() -> None:
    layout = RELEASES["2.27.5"]
    with (
        running([sys.executable, TARGETS / "memory_holder.py"]) as target,
        open(f"/proc/{target.pid}/mem", "rb", buffering=0) as memory,
    ):
        address = Held(target, memory).communicator(layout)
        assert read_place(memory, address, layout, IDENTITY) == PLACE
        target.end()
        assert read_pointer(memory, address) is None
        assert read_identity(memory, address, layout.rank_at) is None
        found = read_place(memory, address, layout, IDENTITY)
    assert found == "another communicator, or none, is at its address"


class FreedAfter(io.FileIO):
    """Memory in which the communicator is freed once it has been read `reads` times."""

    def __init__(self, path: Path, layout: Layout, reads: int) -> None:
        super().__init__(path, "r+")
        self._rank_at = PAGE + layout.rank_at
        self._left = reads

    def fileno(self) -> int:
        if self._left == 0:
            os.pwrite(super().fileno(), bytes(8), self._rank_at)
        self._left -= 1
        return super().fileno()


def test_a_communicator_that_is_freed_while_it_is_read(tmp_path: Path) -> None:
    layout = RELEASES["2.18.1"]
    path = tmp_path / "memory"
    for reads in range(1, 20):
        path.write_bytes(image(layout))
        with FreedAfter(path, layout, reads) as memory:
            found = read_place(memory, PAGE, layout, IDENTITY)
        if found == PLACE:
            break
        assert found == "another communicator, or none, is at its address"
    assert reads > 5


def image(layout: Layout) -> bytes:
    """Memory with a sound communicator at PAGE."""
    memory = bytearray(PAGE + layout.comm_bytes + PAGE)
    for at, content in pieces(layout, PAGE).items():
        memory[PAGE + at : PAGE + at + len(content)] = content
    return bytes(memory)


def images() -> st.SearchStrategy[bytes]:
    """The same with some of its numbers replaced, and cut off somewhere."""
    layout = RELEASES["2.18.1"]
    sound = image(layout)
    bits = st.integers(0, (1 << 32) - 1) | st.sampled_from([0, 1, 5, 7, 8, PAGE, (1 << 32) - 1])
    places = st.sampled_from(
        sorted(
            at + step for at, content in pieces(layout, PAGE).items() for step in range(0, len(content), 4)
        )
    )

    def build(changes: list[tuple[int, int]], length: int) -> bytes:
        changed = bytearray(sound)
        for at, value in changes:
            struct.pack_into("<I", changed, PAGE + at, value)
        return bytes(changed[:length])

    changes = st.lists(st.tuples(places, bits), max_size=4)
    return st.builds(build, changes, st.just(len(sound)) | st.integers(0, len(sound)))


@given(content=images())
def test_any_memory_is_read_or_refused(tmp_path_factory: Any, content: bytes) -> None:
    layout = RELEASES["2.18.1"]
    path: Path = tmp_path_factory.getbasetemp() / "memory"
    path.write_bytes(content)
    with path.open("rb", buffering=0) as memory:
        identity = read_identity(memory, PAGE, layout.rank_at)
        found = read_place(memory, PAGE, layout, identity or IDENTITY)
    if isinstance(found, str):
        assert found
        return
    assert identity is not None
    assert 0 <= found.node_index < found.n_nodes <= identity.nranks
    assert 0 <= found.local_rank < found.local_ranks <= identity.nranks
    assert [channel.channel for channel in found.channels] == list(range(len(found.channels)))
    for channel in found.channels:
        tree = [*channel.tree_down, *([] if channel.tree_up is None else [channel.tree_up])]
        ranks = [channel.ring_prev, channel.ring_next, *tree]
        assert all(0 <= rank < identity.nranks for rank in ranks)
        assert identity.rank not in tree
