"""The probes behind `op_details`, recorded only if asked for: they are hit for each channel of an operator."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.attach import Program
from pulse_bpf.libraries import Library
from pulse_bpf.probes import BPF_DIRECTORY
from pulse_bpf.probes.detail import Details
from pulse_bpf.probes.events import PROXY_EVENT, PROXY_RING_BYTES
from pulse_bpf.probes.layouts import Layout
from pulse_bpf.ring import Ring
from pulse_bpf.targets import MappedFile


class DetailProbes:
    """A probe on each NCCL that shows what it gives its proxy, in the processes that are let through.

    Nothing is compiled or attached before attach().
    """

    def __init__(self, wall_offset_ns: int) -> None:
        self._program: Program | None = None
        self._ring: Ring | None = None
        self._drained: list[NDArray[np.void]] = []
        self._layouts: dict[int, Layout] = {}
        self._links: dict[int, tuple[int, ...]] = {}
        self._details = Details(self._layouts, wall_offset_ns)

    @property
    def undecided(self) -> int:
        """Records that could not be tied to one operator."""
        return self._details.undecided

    @property
    def lost(self) -> int:
        """Records dropped because the ring was full or the process's memory was not there, or not understood."""
        dropped = self._program.percpu_sum("dropped", 0) if self._program else 0
        return dropped + self._details.malformed

    def attach(self, file: MappedFile, number: int, library: Library) -> None:
        """Probes `file`, which is file `number` of the recording, if it shows detail; HostError as attach_uprobes."""
        if not library.detail or not library.layout:
            return
        if self._program is None:
            self._program = Program(BPF_DIRECTORY / "proxy.c", {"RING_BYTES": PROXY_RING_BYTES})
            self._ring = self._program.ring("events", PROXY_EVENT)
        offset, cookie = library.detail
        attachment = self._program.attach_uprobes(file.opened_by, {offset: cookie}, "on_entry")
        if not attachment.refused:
            self._layouts[number] = library.layout
            self._links[number] = attachment.links

    def detach(self, number: int) -> None:
        """Takes the probe off file `number`."""
        if self._program:
            self._program.detach(self._links.pop(number, ()))

    def release(self, number: int) -> None:
        """Forgets file `number`, of which everything was read: the number may come back as another file's."""
        self._layouts.pop(number, None)

    def shows(self, number: int) -> bool:
        """Whether file `number` shows detail."""
        return number in self._layouts

    def let_through(self, key: bytes) -> None:
        """Records the process and file of `key`, as the map `watched` in probe.h has it."""
        if self._program:
            self._program.set_hash("watched", key, b"\1")

    def let_go(self, key: bytes) -> None:
        """Ignores the process and file of `key`."""
        if self._program:
            self._program.delete_hash("watched", key)

    def end_process(self, pid: int) -> None:
        """Forgets the operators of process `pid`, which ended."""
        self._details.end_process(pid)

    def drain(self) -> None:
        """Empties the ring buffer. To be called before that of the calls is emptied: a record comes after its call."""
        if self._ring:
            self._drained.append(self._ring.read())

    def read(self, ops: pl.DataFrame, events: NDArray[np.void], until_ns: int) -> pl.DataFrame:
        """Rows of `op_details` for what was drained before `until_ns` (CLOCK_MONOTONIC); `ops`, `events` as Details."""
        saves = np.concatenate([np.empty(0, PROXY_EVENT), *self._drained])
        due = saves["mono_ns"] < until_ns
        self._drained = [saves[~due]]
        return self._details.rows(saves[due], ops, events)

    def close(self) -> None:
        """Takes every probe off."""
        if self._program:
            self._program.close()
            self._program = self._ring = None
