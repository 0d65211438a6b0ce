"""What the memory of recorded processes tells of their communicators, beyond what their calls do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from pulse_bpf.comm_memory import CommIdentity, CommPlace, read_identity, read_place, read_pointer
from pulse_bpf.libraries import Library
from pulse_bpf.probes.communicators import IDENTITY
from pulse_bpf.schema import CHANNELS
from pulse_bpf.targets import PROC

# A communicator that a call made can be found by then, or the caller's variable holds something else by now.
_FOLLOWED_FOR_NS = 600 * 1_000_000_000
# A library may still be writing what its caller gets.
_SETTLED_NS = 50_000_000
# Attempts at reading where a communicator stands, one a read: the first ones find it being set up.
_MOST_ATTEMPTS = 100

MADE = pl.Schema(
    {
        "node": pl.String,
        "pid": pl.Int64,
        "comm_ptr": pl.UInt64,
        "comm_hash": pl.UInt64,
        "rank": pl.Int32,
        "nranks": pl.Int32,
        "gpu": pl.Int32,
        "file": pl.UInt32,
        "first_seen_ns": pl.Int64,
        "parent_comm_id": pl.String,
    }
)


# One communicator: process, address, and when it was first seen, as an address is used again.
_Key = tuple[int, int, int]


@dataclass(frozen=True)
class _Creation:
    """A place where a call leaves a communicator for its caller."""

    node: str
    pid: int
    file: int
    address: int
    parent_comm_id: str | None
    nranks: int | None
    parent_nranks: int | None
    parent_gpu: int | None
    t_ns: int

    def may_have_made(self, identity: CommIdentity) -> bool:
        """Whether a communicator can be what the call left; one made from another has its GPU and not more ranks."""
        if self.nranks is not None:
            return identity.nranks == self.nranks
        if self.parent_nranks is None:
            return True
        return identity.gpu == self.parent_gpu and identity.nranks <= self.parent_nranks


class CommReader:
    """Reads communicators where their calls say they are; `libraries` has those of the processes, by number.

    `proc` is the root of the process filesystem, another directory in tests. What cannot be read is tried again later;
    a process that has ended is given up.
    """

    def __init__(self, libraries: Mapping[int, Library], proc: Path = PROC) -> None:
        self._libraries = libraries
        self._proc = proc
        self._creations: list[_Creation] = []
        self._places: dict[_Key, CommPlace] = {}
        self._attempts: dict[_Key, int] = {}

    def made(self, creations: pl.DataFrame, now_ns: int) -> pl.DataFrame:
        """The communicators found since the last call, in MADE, where calls in decode.CREATIONS left them.

        `now_ns` is wall clock. Assumes that the caller's variable still holds what the call left in it: else the
        communicator shows at its first operator, without its parent.
        """
        for row in creations.iter_rows(named=True):
            places = range(row["address"], row["address"] + 8 * min(row.pop("count"), 1024), 8)
            # What an earlier call left there, if it was not read yet, is gone.
            self._creations = [
                earlier
                for earlier in self._creations
                if earlier.pid != row["pid"] or earlier.address not in places
            ]
            self._creations += [_Creation(**{**row, "address": address}) for address in places]
        found = []
        waiting = []
        for creation in self._creations:
            if now_ns - creation.t_ns < _SETTLED_NS:
                waiting.append(creation)
                continue
            with self._memory(creation.pid) as memory:
                made = self._follow(memory, creation) if memory else None
            if made:
                found.append(made)
            elif memory and now_ns - creation.t_ns < _FOLLOWED_FOR_NS:
                waiting.append(creation)
        self._creations = waiting
        return pl.DataFrame(found, MADE, orient="row")

    def look(self, comms: pl.DataFrame) -> None:
        """Reads where the communicators `comms` (Communicators.frame) stand, those of which that is not known yet.

        A release whose layout is not known has no place to read it from.
        """
        for comm in comms.filter(pl.col("gone_ns").is_null()).iter_rows(named=True):
            if _key(comm) not in self._places:
                self._place(comm)

    def fits(self, ops: pl.DataFrame) -> pl.Series:
        """Of each row of `ops`, whether a communicator of that process and address was found to fit its layout."""
        known = pl.DataFrame(
            [key[:2] for key in self._places], {"pid": pl.Int64, "comm_ptr": pl.UInt64}, orient="row"
        )
        return ops.select(pl.struct("pid", "comm_ptr").is_in(known.to_struct().implode()))["pid"]

    def placed(self, comms: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """`comms` (Communicators.frame) with local_rank and node_index, and rows of `channels`, as far as known."""
        places = [self._places.get(_key(comm)) for comm in comms.iter_rows(named=True)]
        columns = {
            "local_rank": pl.Series([place and place.local_rank for place in places], dtype=pl.Int32),
            "node_index": pl.Series([place and place.node_index for place in places], dtype=pl.Int32),
        }
        channels = [
            (
                comm_id,
                rank,
                channel.channel,
                channel.ring_prev,
                channel.ring_next,
                channel.tree_up,
                channel.tree_down,
            )
            for place, comm_id, rank in zip(places, comms["comm_id"], comms["rank"], strict=True)
            if place
            for channel in place.channels
        ]
        return comms.with_columns(**columns), pl.DataFrame(channels, CHANNELS, orient="row")

    def _follow(self, memory: BinaryIO, creation: _Creation) -> tuple[object, ...] | None:
        library = self._libraries.get(creation.file)
        if library is None:  # it was let go meanwhile
            return None
        pointer = read_pointer(memory, creation.address)
        identity = read_identity(memory, pointer, library.rank_at) if pointer and library.rank_at else None
        if not identity or not creation.may_have_made(identity):
            return None
        origin = (creation.file, creation.t_ns, creation.parent_comm_id)
        return (creation.node, creation.pid, pointer, *identity, *origin)

    def _place(self, comm: Mapping[str, Any]) -> None:
        key = _key(comm)
        library = self._libraries.get(comm["file"])
        layout = library.layout if library else None
        attempts = self._attempts.get(key, 0)
        if not layout or attempts >= _MOST_ATTEMPTS:
            return
        self._attempts[key] = attempts + 1
        identity = CommIdentity(*(comm[name] for name in IDENTITY))
        with self._memory(comm["pid"]) as memory:
            place = read_place(memory, comm["comm_ptr"], layout, identity) if memory else ""
        if isinstance(place, CommPlace):
            self._places[key] = place

    @contextmanager
    def _memory(self, pid: int) -> Iterator[BinaryIO | None]:
        try:
            memory = (self._proc / str(pid) / "mem").open("rb", buffering=0)
        except OSError:
            yield None
            return
        with memory:
            yield memory


def _key(comm: Mapping[str, Any]) -> _Key:
    return comm["pid"], comm["comm_ptr"], comm["first_seen_ns"]
