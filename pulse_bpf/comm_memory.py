"""What a communicator in a running process says of itself, read from /proc/PID/mem; nothing is ever written.

The process runs on, and may free, change or unmap what is looked at, or end. So every number is checked against the
others, and a communicator that does not fit its layout in every respect says nothing.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import polars as pl

from pulse_bpf.probes.communicators import is_identity
from pulse_bpf.probes.layouts import Layout

# comm.h: NCCL_MAGIC, at both ends of a live communicator since 2.21.
_MAGIC = 0x0280028002800280
_MOST_CHANNELS = 64
_MOST_TREE_CHILDREN = 3
# Past any address of a process on x86-64 and arm64, and what a file offset can hold.
_END_OF_ADDRESSES = 1 << 56
_IDENTITY = np.dtype([("comm_hash", "<u8"), ("rank", "<i4"), ("nranks", "<i4"), ("gpu", "<i4")])


class CommIdentity(NamedTuple):
    """Who a communicator is; the fields of probes.communicators.IDENTITY."""

    comm_hash: int
    rank: int
    nranks: int
    gpu: int


@dataclass(frozen=True)
class Channel:
    """The neighbours of one rank in one channel, as ranks; `tree_up` is None at the root of the tree."""

    channel: int
    ring_prev: int
    ring_next: int
    tree_up: int | None
    tree_down: tuple[int, ...]


@dataclass(frozen=True)
class CommPlace:
    """Where one rank stands: its node, its place on that node, and its neighbours in each channel."""

    node_index: int
    n_nodes: int
    local_rank: int
    local_ranks: int
    channels: tuple[Channel, ...]


class _Misfit(Exception):
    """What is in memory is not, or not yet, what the layout says."""


def read_pointer(memory: BinaryIO, address: int) -> int | None:
    """The 64-bit pointer at `address`; None when it cannot be read or is null.

    `memory` is /proc/PID/mem, opened unbuffered for reading. Nothing is raised for what a process does or holds.
    """
    try:
        (pointer,) = struct.unpack("<Q", _read(memory, address, 8))
    except _Misfit:
        return None
    return int(pointer) or None


def read_identity(memory: BinaryIO, comm_ptr: int, rank_at: int) -> CommIdentity | None:
    """Who the communicator at `comm_ptr` is, its rank `rank_at` bytes in; None when that is unreadable or cannot be.

    What can be an identity is what probes.communicators.is_identity takes for one.
    """
    try:
        record = np.frombuffer(_read(memory, comm_ptr + rank_at - 8, _IDENTITY.itemsize), _IDENTITY)
    except _Misfit:
        return None
    sound = pl.DataFrame({name: record[name] for name in CommIdentity._fields}).filter(is_identity())
    return CommIdentity(*sound.row(0)) if sound.height else None


def read_place(memory: BinaryIO, comm_ptr: int, layout: Layout, identity: CommIdentity) -> CommPlace | str:
    """Where the communicator at `comm_ptr`, known to be `identity`, stands; else why that cannot be said.

    Assumes nothing of the layout that the memory does not confirm: the identity is there before and after, the magic
    numbers are at both ends, node and local rank lie within their numbers and the table of nodes agrees, each channel
    carries its own number, and its ring begins at this rank with `next` and ends with `prev`. A communicator that is
    still being set up does not fit, and can be tried again later.
    """
    try:
        _check_identity(memory, comm_ptr, layout, identity)
        _check_ends(memory, comm_ptr, layout)
        node, n_nodes, local_rank, local_ranks = _node(memory, comm_ptr, layout, identity)
        channels = _channels(memory, comm_ptr, layout, identity)
        _check_identity(memory, comm_ptr, layout, identity)
    except _Misfit as misfit:
        return str(misfit)
    return CommPlace(node, n_nodes, local_rank, local_ranks, channels)


def _check_identity(memory: BinaryIO, comm_ptr: int, layout: Layout, identity: CommIdentity) -> None:
    if read_identity(memory, comm_ptr, layout.rank_at) != identity:
        raise _Misfit("another communicator, or none, is at its address")


def _check_ends(memory: BinaryIO, comm_ptr: int, layout: Layout) -> None:
    """A release whose size or fields differ does not have its magic numbers where the layout says."""
    if not layout.has_magic:
        return
    for at in (0, layout.comm_bytes - 8):
        if read_pointer(memory, comm_ptr + at) != _MAGIC:
            raise _Misfit(f"it has no magic number at {at:#x}")


def _node(
    memory: BinaryIO, comm_ptr: int, layout: Layout, identity: CommIdentity
) -> tuple[int, int, int, int]:
    node, n_nodes, local_rank, local_ranks = _integers(memory, comm_ptr + layout.node_at, 4)
    if not (0 <= node < n_nodes <= identity.nranks and 0 <= local_rank < local_ranks <= identity.nranks):
        raise _Misfit(
            f"node {node} of {n_nodes}, rank {local_rank} of {local_ranks} on it, of {identity.nranks} ranks"
        )
    nodes = read_pointer(memory, comm_ptr + layout.rank_to_node_at)
    if nodes is None:
        raise _Misfit("its nodes are not set up yet")
    (in_table,) = _integers(memory, nodes + 4 * identity.rank, 1)
    if in_table != node:
        raise _Misfit(f"node {node} is {in_table} in its table of nodes")
    return node, n_nodes, local_rank, local_ranks


def _channels(memory: BinaryIO, comm_ptr: int, layout: Layout, identity: CommIdentity) -> tuple[Channel, ...]:
    (count,) = _integers(memory, comm_ptr + layout.nchannels_at, 1)
    if not 1 <= count <= _MOST_CHANNELS:
        raise _Misfit(f"{count} channels")
    size = layout.channel_bytes
    data = _read(memory, comm_ptr + layout.channels_at, count * size)
    return tuple(
        _channel(memory, data[number * size : (number + 1) * size], number, layout, identity)
        for number in range(count)
    )


def _channel(memory: BinaryIO, data: bytes, number: int, layout: Layout, identity: CommIdentity) -> Channel:
    (channel_id,) = struct.unpack_from("<i", data, layout.channel_id_at)
    prev, next_, ring = struct.unpack_from("<iiQ", data, layout.ring_at)
    _, up, *down = struct.unpack_from(f"<ii{_MOST_TREE_CHILDREN}i", data, layout.tree_at)
    if channel_id != number or not ring:
        raise _Misfit(f"channel {number} is not set up yet")
    last = identity.nranks - 1
    beginning = _integers(memory, ring, min(2, identity.nranks))
    (end,) = _integers(memory, ring + 4 * last, 1)
    if beginning[0] != identity.rank or (prev, next_) != (end, beginning[-1]):
        raise _Misfit(f"the ring of channel {number} does not agree with its neighbours")
    in_tree = [peer for peer in (up, *down) if peer != -1]
    if not all(0 <= peer <= last for peer in (prev, next_, *in_tree)):
        raise _Misfit(f"channel {number} has neighbours that are no ranks")
    if len({identity.rank, *in_tree}) != 1 + len(in_tree):
        raise _Misfit(f"the tree of channel {number} has one rank twice")
    children = tuple(rank for rank in down if rank != -1)
    return Channel(number, prev, next_, None if up == -1 else up, children)


def _integers(memory: BinaryIO, address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}i", _read(memory, address, 4 * count))


def _read(memory: BinaryIO, address: int, size: int) -> bytes:
    if not 0 < address < _END_OF_ADDRESSES:
        raise _Misfit(f"{address:#x} is no address")
    try:
        data = os.pread(memory.fileno(), size, address)
    except OSError as error:
        raise _Misfit(f"its memory at {address:#x} cannot be read: {error.strerror}") from error
    if len(data) != size:
        raise _Misfit(f"its memory at {address:#x} cannot be read: the process has ended or unmapped it")
    return data
